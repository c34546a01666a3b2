"""What options and arguments take: times and rates with their units, and places."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_GB_PER_S = {"": 1.0, "MB/s": 1e-3, "GB/s": 1.0, "Gb/s": 1 / 8, "Gbps": 1 / 8, "Gbit/s": 1 / 8, "TB/s": 1e3}
_NUMBER = r"(\d{1,9}(?:\.\d{1,20})?) ?"


def require_place(place: Path) -> None:
    """Raises UsageError where nothing has this name."""
    if not os.path.lexists(place):
        raise UsageError(f"{place} does not exist; check the path")


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a number with ms, s, m, h or d behind it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As `click.ParamType.convert`, to seconds; a number that was converted before passes."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(_NUMBER + "(ms|[smhd]?)", str(value).lower(), re.ASCII)
        seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
        if not seconds:
            self.fail(f"{value} must be a time above 0 with its unit: 30s, 10m or 12h", param, ctx)
        return seconds


class HoursType(Duration):
    """As a duration, but a bare number is hours, as `--hours` says."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As `click.ParamType.convert`, to seconds."""
        bare = isinstance(value, int) or (isinstance(value, str) and value.replace(".", "", 1).isdigit())
        return super().convert(f"{value}h" if bare else value, param, ctx)


class Rate(click.ParamType):  # type: ignore[type-arg]
    """GB/s (1e9 bytes), or a number with its unit, in bytes or in bits."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As `click.ParamType.convert`, to GB/s; a number that was converted before passes."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(_NUMBER + "([A-Za-z/]*)", str(value), re.ASCII)
        rate = float(found[1]) * _UNITS_GB_PER_S.get(found[2], 0.0) if found else 0.0
        if not rate:
            self.fail(f"{value} must be a rate above 0: 25 or 25GB/s in bytes, 200Gb/s in bits", param, ctx)
        return rate
