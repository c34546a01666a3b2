"""What a reproduction of a paper's table or figure hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ckpt.report import Report


@dataclass(frozen=True)
class PaperResult:
    """A table or figure of a paper, recomputed.

    report: for a person, with the published figures beside ours. data: the same as plain numbers and texts, with units
    in the keys. plot: draws it into the file named (its suffix says the format); None where there is nothing to draw.
    """

    report: Report
    data: dict[str, Any]
    plot: Callable[[Path], None] | None = None
