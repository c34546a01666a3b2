"""Pieces of HTML. What comes from a file is escaped here, and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["duration", "escape", "figures", "nbytes", "share", "short", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table as HTML; the first cell of a row is its heading, and columns of numbers are aligned as such.

    Args:
        head: Names of the columns, escaped here.
        rows: Texts of each row, one for each column, escaped here.
        caption: Caption of the table, escaped here; empty: none.
    """
    found = [*rows]
    numeric = [bool(found) and all(_IS_NUMBER.match(row[at]) for row in found) for at in range(len(head))]
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col"{_kind(numeric[at])}>{escape(name)}</th>' for at, name in enumerate(head))
    body = "".join(f"<tr>{_cells(row, numeric)}</tr>" for row in found)
    return f'<div class="scroll"><table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


_IS_NUMBER = re.compile(r"-?\d|-$")


def _cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    first, *others = row
    rest = "".join(f"<td{_kind(numeric[at])}>{escape(text)}</td>" for at, text in enumerate(others, start=1))
    return f'<th scope="row"{_kind(numeric[0])}>{escape(first)}</th>{rest}'


def _kind(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def figures(values: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: name, value, and what to know of it."""
    found = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in values
    )
    return f'<dl class="figures">{found}</dl>'


def duration(seconds: float) -> str:
    """As a person says it: 3.1 ms, 42.0 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if math.isnan(seconds):
        return "-"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    return f"{whole} s"


def share(value: float) -> str:
    """A share as percent."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def nbytes(value: float) -> str:
    """GB is 1e9 bytes."""
    return "-" if math.isnan(value) else f"{short(value)}B"


def short(value: float) -> str:
    """A number with k, M, G, T, P behind it; small ones as they are."""
    if math.isnan(value):
        return "-"
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {unit}"
    return f"{value:.4g} " if value % 1 else f"{value:.0f} "
