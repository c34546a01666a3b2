"""What commands and reproductions report: values, and how a terminal, JSON or Markdown shows them.

Imports nothing of the commands, the simulator or the engine.
"""

from .report import Columns, Fact, Report, Table, Unit, printable, show, shown, table

__all__ = ["Columns", "Fact", "Report", "Table", "Unit", "printable", "show", "shown", "table"]
