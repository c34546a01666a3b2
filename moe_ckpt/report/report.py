"""What a command found, as facts and tables: for a person in a terminal, or as JSON with plain numbers."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import click

Unit = Literal["text", "count", "bytes", "seconds", "share", "number"]
Columns = tuple[tuple[str, Unit], ...]
WIDE = 500
"""Columns of a line where output goes to no terminal."""
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Fact:
    """One named figure. Its JSON key is the name with underscores, and the unit where it has one."""

    name: str
    value: Any
    unit: Unit = "text"

    @property
    def key(self) -> str:
        """Name of the figure in JSON."""
        suffix = {"bytes": "_bytes", "seconds": "_s"}.get(self.unit, "")
        return self.name.lower().replace(" ", "_").replace("-", "_") + suffix


@dataclass(frozen=True)
class Table:
    """Rows of figures; each column is a name and a unit."""

    title: str
    columns: Columns
    rows: tuple[tuple[Any, ...], ...]

    def as_data(self) -> list[dict[str, Any]]:
        """One object per row."""
        keys = [Fact(name, None, unit).key for name, unit in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


def table(title: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> Table:
    """A table of columns that are given as one text.

    Args:
        title: Title of the table.
        columns: Names with ` | ` between them, each followed by `:unit` where its values are no texts.
        rows: Values of each row, one for each column.
    """
    names = (column.partition(":") for column in columns.split(" | "))
    return Table(title, tuple((name, cast("Unit", unit or "text")) for name, _, unit in names), tuple(rows))


@dataclass(frozen=True)
class Report:
    """All that a command has to say: facts, then tables, then sentences."""

    title: str
    facts: tuple[Fact, ...]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain numbers and texts, for `--json`."""
        data: dict[str, Any] = {"title": self.title} | {fact.key: fact.value for fact in self.facts}
        data |= {Fact(table.title, None).key: table.as_data() for table in self.tables}
        return data | ({"notes": list(self.notes)} if self.notes else {})


def show(report: Report, as_json: bool, rows: int | None = None) -> None:
    """Print a report.

    Args:
        report: The report.
        as_json: Whether to print it as JSON, which has all rows.
        rows: Most rows of a table for a person, who reads how many are left out; None: all.
    """
    if as_json:
        click.echo(json.dumps(_finite(report.as_data()), indent=2, allow_nan=False))
        return
    from rich.console import Console

    # A file or a pipe has no edge at which lines would have to be broken.
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else WIDE)
    console.print(printable(report.title), style="bold", markup=False)
    width = max((len(fact.name) for fact in report.facts), default=0)
    for fact in report.facts:
        console.print(f"  {fact.name:<{width}}  {shown(fact.value, fact.unit)}", markup=False)
    for table in report.tables:
        if not table.rows:
            continue
        console.print()
        console.print(_drawn(table, rows))
        if rows is not None and len(table.rows) > rows:
            console.print(f"  ... and {len(table.rows) - rows} more rows; --rows 0 or --json shows all", markup=False)
    for note in report.notes:
        console.print()
        console.print(printable(note), markup=False)


def printable(text: str) -> str:
    """A text without characters that a terminal would obey, or cannot show: files may say anything.

    Args:
        text: The text; tabs and ends of lines stay.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: None instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def shown(value: Any, unit: Unit) -> str:
    """A figure as a person reads it. GB is 1e9 bytes.

    Args:
        value: The figure in plain units, such as seconds or bytes; None is shown as `-`.
        unit: How to write it.
    """
    if value is None:
        return "-"
    if unit == "bytes":
        return _scaled(value)
    if unit == "number":
        return f"{value:.6g}"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "seconds":
        return _lasting(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "count":
        return f"{value:,}"
    return printable(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _lasting(seconds: float) -> str:
    """A time in the largest unit of which there are two."""
    for unit, lasts in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * lasts and abs(seconds) >= 1000:
            return f"{seconds / lasts:,.3g} {unit}"
    return f"{seconds:.3g} s"


def _scaled(count: int) -> str:
    size, units = float(count), iter(("B", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while abs(size) >= 1000 and unit != "PB":
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"


def _drawn(table: Table, rows: int | None) -> Any:
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, unit in table.columns:
        drawn.add_column(name, justify="left" if unit == "text" else "right", overflow="fold")
    for row in _limited(table.rows, rows):
        drawn.add_row(*(Text(shown(value, unit)) for value, (_, unit) in zip(row, table.columns, strict=True)))
    return drawn


def _limited(rows: tuple[tuple[Any, ...], ...], limit: int | None) -> Iterable[tuple[Any, ...]]:
    return rows if limit is None else rows[:limit]
