"""What MoEvement's tables and text say, as they stand in published.json; None where a figure is not at hand."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def published() -> dict[str, Any]:
    """All figures, by table or figure. Bytes and seconds are named so; shares are fractions."""
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures
