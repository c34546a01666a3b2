"""The table of the papers' tables and figures, `figures.toml`: `python -m reproduce NAME` recomputes one of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    name: of the module here that has `figure() -> Figure`. what: is shown. title: of the page. tables: title and
    columns of each, of which the module gives the rows. notes: below them; the module gives what is in braces.
    paper: as it is cited; empty for evaluations of this project's own. grid, size: rows and columns of axes, inches.
    """

    name: str
    what: str
    title: str
    tables: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    paper: str = ""
    grid: tuple[int, int] = (1, 1)
    size: tuple[float, float] = (7, 4.5)

    @property
    def page(self) -> Path:
        """In docs/results, with its data and picture beside it; modules of MoEvement have no prefix."""
        prefix = "moevement-" if self.paper.startswith("MoEvement") else ""
        return RESULTS / f"{prefix}{self.name.replace('_', '-')}.md"


def _read(path: Path) -> Mapping[str, Entry]:
    rows = tomllib.loads(path.read_text("utf-8"))
    return {name: Entry(name, **row) for name, row in rows.items()}


FIGURES = _read(Path(__file__).with_name("figures.toml"))
"""By name."""
