"""A report as Markdown, for a file in a repository."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .report import Report, Table, Unit, shown


def as_markdown(report: Report, made_by: str) -> str:
    """The report with its facts as a list, its tables, and its notes as paragraphs.

    Args:
        report: The report.
        made_by: The command that makes the page, for its first line.
    """
    lines = [f"# {report.title}", "", f"Made by `{made_by}`. Written again by each run.", ""]
    lines += [f"- {fact.name}: {shown(fact.value, fact.unit)}" for fact in report.facts]
    lines += [""] if report.facts else []
    for table in report.tables:
        lines += [f"## {table.title}", "", *_table(table), ""]
    for note in report.notes:
        lines += [note, ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(table: Table) -> list[str]:
    units = [unit for _, unit in table.columns]
    head = _row(name for name, _ in table.columns)
    ruler = _row("---" if unit == "text" else "---:" for unit in units)
    return [head, ruler, *(_row(map(_cell, row, units)) for row in table.rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any, unit: Unit) -> str:
    return shown(value, unit).replace("|", "\\|")
