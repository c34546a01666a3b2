"""A table or figure of a paper as a value, and what all of them share: published numbers, formats, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.report import Fact, Report, table
from moe_ckpt.report.markdown import as_markdown

from .figures import FIGURES, RESULTS

COLOURS = {"checkfreq": "tab:blue", "gemini": "tab:orange", "moc": "tab:red", "moevement": "tab:green"}
NAMES = {"checkfreq": "CheckFreq", "gemini": "Gemini", "moc": "MoC", "moevement": "MoEvement"}
_OF_NAME = {NAMES[system]: colour for system, colour in COLOURS.items()}
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SUFFIXES = (".png", ".svg", ".pdf")


Rows = Iterable[tuple[Any, ...]]
"""Of a table, its cells in the order of its columns."""


@dataclass(frozen=True)
class Figure:
    """A table or figure of a paper, recomputed, with the published numbers beside ours.

    Args:
        name: Of its row in `figures.toml`.
        data: All of it as plain numbers and texts, with units in the keys: what `--out FILE.json` writes.
        rows: Of each table of the row, for a person.
        draw: Draws it on the axes of the row's grid.
        facts: What stands above the tables.
        values: What stands in braces in the row's notes.
    """

    name: str
    data: dict[str, Any]
    rows: tuple[Rows, ...]
    draw: Callable[[list[Any]], None]
    facts: tuple[Fact, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Figure:
        """Compute that of a row. Raises UsageError where the runs that it is made of are not there."""
        found: Figure = import_module(f"reproduce.{name}").figure()
        return found

    @property
    def report(self) -> Report:
        """For a person."""
        row = FIGURES[self.name]
        tables = tuple(table(*head, found) for head, found in zip(row.tables, self.rows, strict=True))
        return Report(row.title, self.facts, tables, tuple(note.format(**self.values) for note in row.notes))

    def markdown(self, made_by: str, picture: Path | None = None, data: Path | None = None) -> str:
        """The page, with links to its `picture` and `data` beside it."""
        links = [f"![{FIGURES[self.name].title}]({picture.name})"] if picture else []
        links += [f"All numbers: [{data.name}]({data.name})."] if data else []
        return as_markdown(self.report, made_by) + "".join(f"\n{link}\n" for link in links)

    def write(self, path: Path, made_by: str, picture: Path | None = None, data: Path | None = None) -> None:
        """Write it as the suffix says, `.json` or `.md`, the latter with links to its `picture` and `data`.

        Raises:
            UsageError: For files that cannot be written.
        """
        as_json = path.suffix == ".json"
        text = json.dumps(self.data, indent=1) + "\n" if as_json else self.markdown(made_by, picture, data)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {path} cannot be written: {error.strerror or error}") from error

    def plot(self, path: Path) -> None:
        """Draw it into a file.

        Raises:
            UsageError: Without matplotlib, and for files that cannot be written.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure as Canvas
        except ImportError:
            raise UsageError("--plot needs matplotlib: pip install 'megatron-moe-ckpt[reproduce]'") from None
        row = FIGURES[self.name]
        canvas = Canvas(figsize=row.size, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = list(canvas.subplots(*row.grid, squeeze=False).flat)
        self.draw(axes)
        # Bars fill their axes: what they stand for is said once, below all of them.
        found = [axis.get_legend_handles_labels() for axis in axes if axis.get_legend() is None]
        named = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
        if len(named) > 1:
            canvas.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(len(named), 4))
        try:
            canvas.savefig(path, dpi=120)
        except OSError as error:
            raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from error


def check_targets(out: Iterable[Path], plot: Path | None) -> None:
    """Refuse, before anything is computed, what could not be written at the end.

    Raises:
        UsageError: For suffixes that stand for nothing, and files in folders that are not there.
    """
    named = [("--out", path, (".md", ".json")) for path in out] + ([("--plot", plot, SUFFIXES)] if plot else [])
    for flag, path, suffixes in named:
        if path.suffix.lower() not in suffixes:
            raise UsageError(f"{flag} {path}: give a file that ends in {', '.join(suffixes)}")
        if not path.parent.is_dir():
            raise UsageError(f"{flag} {path} cannot be written: there is no folder {path.parent}")


@cache
def published(paper: str = "moevement") -> Any:
    """What tables and text of a paper (moevement, moc, moetion) say; None where a figure was not at hand."""
    return json.loads((Path(__file__).parent / "published" / f"{paper}.json").read_text("utf-8"))


def measured(name: str, command: str, folder: Path | None = None) -> dict[str, Any]:
    """What a real run left in docs/results, or in another `folder`.

    Raises:
        UsageError: Where it is not there, with the command that makes it.
    """
    path = (folder or RESULTS) / name
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path.name} is not in {path.parent.name}: `{command}` makes it, from real runs") from None
    return found


def lines(axis: Any, at: Sequence[Any], series: Mapping[str, Sequence[float]], **settings: Any) -> None:
    """Draw curves over the same places, by what the legend calls them; settings: of the axis."""
    for label, values in series.items():
        axis.plot(at, values, color=_OF_NAME.get(label), marker="." if len(at) > 12 else "o", label=label)
    axis.set(**settings)
    if len(series) > 1:
        axis.legend()


def bars(axis: Any, names: Sequence[str], series: Mapping[str, Sequence[float]], **settings: Any) -> None:
    """Draw groups of bars, one group for each name and in it one bar of each series; settings: of the axis."""
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        at = [place + shift for place in range(len(names))]
        axis.bar(at, values, width, color=_OF_NAME.get(label), label=label)
    axis.set_xticks(range(len(names)), [fill(name, max(8, 66 // len(names))) for name in names])
    axis.set(**settings)


def decimals(value: float | None) -> str:
    """An ETTR as the papers print it."""
    return "-" if value is None else f"{value:.3f}"


def minutes(mtbf_s: int) -> str:
    """A mean time between failures in minutes."""
    return f"{mtbf_s // 60} min"


@dataclass(frozen=True)
class EttrAgreement:
    """Differences, ours less the published, of `cells` that are published; `within` of them are within `tolerance`."""

    cells: int
    within: int
    tolerance: float
    mean_absolute: float
    largest: float

    @classmethod
    def of(cls, differences: Iterable[float | None], tolerance: float) -> EttrAgreement:
        """That of all cells that are published; None stands for one that is not."""
        # Rounded as published: a difference of 0.010 in three decimals is not more than 0.010.
        known = [abs(round(difference, 4)) for difference in differences if difference is not None]
        within = sum(difference <= tolerance for difference in known)
        return cls(len(known), within, tolerance, sum(known) / len(known) if known else 0.0, max(known, default=0.0))

    @property
    def share(self) -> float:
        """Share of the cells that are within."""
        return self.within / self.cells if self.cells else 1.0

    @property
    def sentence(self) -> str:
        """For a person."""
        return (
            f"{self.within} of {self.cells} published cells within {self.tolerance:g}; off by"
            f" {self.mean_absolute:.3f} on average, {self.largest:.3f} at most"
        )
