"""What the launcher of a node watches for, as flags say it; imports nothing of Megatron-Core, as launchers must."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_STRIKES = re.compile(r"([1-9]\d{0,5})/(\d+(?:\.\d+)?)([smh]?)")


@dataclass(frozen=True)
class HealthOptions:
    """What the launcher of a node watches for.

    strikes: failures of the node's own ranks within `within_s` seconds after which it leaves; 0: never. health_check:
    command of a shell that has to end well before ranks are started; empty: none. health_s: how long it may take.
    hang_s: seconds without progress after which ranks count as hung; 0: never.
    """

    strikes: int = 0
    within_s: float = 0.0
    health_check: str = ""
    health_s: float = 60.0
    hang_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.strikes or self.health_check or self.hang_s)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser, prefix: str = "") -> None:
        """The flags of these options, each with a prefix.

        Args:
            parser: Gets the flags.
            prefix: What their names begin with.
        """
        parser.add_argument(
            f"--{prefix}strikes", type=_strikes, default=(0, 0.0), metavar="N/TIME", dest="strikes",
            help="exclude a node after N failures of its own ranks within TIME, such as 3/10m (default: never)",
        )  # fmt: skip
        parser.add_argument(
            f"--{prefix}health-check", default="", metavar="CMD", dest="health_check",
            help="shell command to run on a node before each start of its ranks; a non-zero exit excludes the node",
        )  # fmt: skip
        parser.add_argument(
            f"--{prefix}health-timeout", type=_seconds, default=60.0, metavar="S", dest="health_timeout",
            help="timeout of the health check in seconds (default: 60)",
        )  # fmt: skip
        parser.add_argument(
            f"--{prefix}hang-timeout", type=_seconds, default=0.0, metavar="S", dest="hang_timeout",
            help="seconds without a finished iteration after which stacks are printed and hung ranks killed, so that"
            " the job recovers; set it above the longest iteration, evaluation and save together (default: never)",
        )  # fmt: skip

    @classmethod
    def of(cls, options: argparse.Namespace) -> HealthOptions:
        """What these flags were given."""
        strikes, within_s = options.strikes
        return cls(strikes, within_s, options.health_check, options.health_timeout, options.hang_timeout)

    def arguments(self) -> list[str]:
        """As flags without a prefix, for another launcher."""
        found = [] if not self.strikes else ["--strikes", f"{self.strikes}/{self.within_s}s"]
        found += ["--health-check", self.health_check] if self.health_check else []
        found += ["--health-timeout", str(self.health_s)]
        return found + (["--hang-timeout", str(self.hang_s)] if self.hang_s else [])


def _strikes(text: str) -> tuple[int, float]:
    if not text:
        return 0, 0.0
    found = _STRIKES.fullmatch(text)
    within_s = float(found[2]) * _UNITS[found[3]] if found else 0.0
    if found is None or not within_s:
        raise argparse.ArgumentTypeError(f"{text!r}: give failures and a time, such as 3/10m, 2/90s or 5/1h")
    return int(found[1]), within_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
