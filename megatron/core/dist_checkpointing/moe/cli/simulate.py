"""`moe-ckpt simulate`: what training would get of each checkpoint system, and the papers' results recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from moe_ckpt.report import show
from moe_ckpt.report.markdown import as_markdown

from ..errors import UsageError
from ..simulate.ettr.papers import PAPERS, Paper, result
from ..simulate.ettr.papers.result import PaperResult
from .simulate_run import run

OUT_HELP = "Write the result to a file: a table in Markdown (.md) or all figures as JSON (.json). Repeatable."


@click.group()
def simulate() -> None:
    """Predict overhead, recovery and ETTR of each checkpoint system, before a run: no GPU, no torch, no job needed.

    `run` takes any model and cluster; the other commands recompute tables and figures of the papers, with published
    numbers beside ours.

    \b
    $ moe-ckpt simulate run --model DeepSeek-MoE --pp 12 --ep 8 --mtbf 30m --mtbf 10m
    $ moe-ckpt simulate table3 --out table3.md --plot table3.png
    """


def paper_command(name: str, paper: Paper) -> click.Command:
    """The command that recomputes one table or figure."""

    def command(as_json: bool, rows: int, out: tuple[Path, ...], plot: Path | None) -> None:
        found = result(name)
        for path in out:
            write(path, found, name, plot)
        if plot is not None:
            draw(found, plot)
        if as_json:
            click.echo(json.dumps(found.data, indent=2))
        else:
            show(found.report, False, rows or None)

    for option in (
        click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf."),
        click.option("--out", type=click.Path(path_type=Path), metavar="FILE", multiple=True, help=OUT_HELP),
        click.option("--rows", default=0, type=click.IntRange(0), help="Rows of a table to print; 0 prints all."),
        click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON, plain numbers."),
    ):
        command = option(command)
    return click.command(name=name, help=paper.what, short_help=paper.what)(command)


def draw(found: PaperResult, path: Path) -> None:
    """Draw a result into a file. Raises UsageError where there is nothing to draw."""
    if found.plot is None:
        raise UsageError(f"--plot {path}: {found.report.title} has no plot; use --out")
    found.plot(path)


def write(path: Path, found: PaperResult, name: str, plot: Path | None) -> None:
    """Write a result as its suffix says. Raises UsageError for other suffixes and files that cannot be written."""
    text = _text(path, found, name, plot)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror or error}") from error


def _text(path: Path, found: PaperResult, name: str, plot: Path | None) -> str:
    if path.suffix == ".json":
        return json.dumps(found.data, indent=1) + "\n"
    if path.suffix != ".md":
        raise UsageError(f"--out {path}: give a file that ends in .md or .json")
    picture = f"\n![{found.report.title}]({plot.name})\n" if plot is not None else ""
    return as_markdown(found.report, f"moe-ckpt simulate {name}") + picture


simulate.add_command(run)
for _name, _paper in PAPERS.items():
    simulate.add_command(paper_command(_name, _paper))
