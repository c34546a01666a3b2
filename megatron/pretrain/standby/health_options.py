"""The flags of launchers, and what one watches for as they say; imports nothing of Megatron-Core, as launchers must."""

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
    def add_flags(cls, parser: argparse._ActionsContainer) -> None:
        """The flags of these options."""
        parser.add_argument(
            "--moe-ckpt-strikes", type=_strikes, default=(0, 0.0), metavar="N/TIME", dest="strikes",
            help="exclude a node after N failures of its own ranks within TIME, such as 3/10m (default: never)",
        )  # fmt: skip
        parser.add_argument(
            "--moe-ckpt-health-check", default="", metavar="CMD", dest="health_check",
            help="shell command to run on a node before each start of its ranks; a non-zero exit excludes the node",
        )  # fmt: skip
        parser.add_argument(
            "--moe-ckpt-health-timeout", type=_seconds, default=60.0, metavar="S", dest="health_timeout",
            help="timeout of the health check in seconds (default: 60)",
        )  # fmt: skip
        parser.add_argument(
            "--moe-ckpt-hang-timeout", type=_seconds, default=0.0, metavar="S", dest="hang_timeout",
            help="seconds without a finished iteration after which stacks are printed and hung ranks killed, so that"
            " the job recovers; set it above the longest iteration, evaluation and save together (default: never)",
        )  # fmt: skip

    @classmethod
    def of(cls, options: argparse.Namespace) -> HealthOptions:
        """What these flags were given."""
        strikes, within_s = options.strikes
        return cls(strikes, within_s, options.health_check, options.health_timeout, options.hang_timeout)

    def arguments(self) -> list[str]:
        """As flags, for another launcher."""
        found = [] if not self.strikes else ["--moe-ckpt-strikes", f"{self.strikes}/{self.within_s}s"]
        found += ["--moe-ckpt-health-check", self.health_check] if self.health_check else []
        found += ["--moe-ckpt-health-timeout", str(self.health_s)]
        return found + (["--moe-ckpt-hang-timeout", str(self.hang_s)] if self.hang_s else [])


def add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    """All flags that a launcher has beside those of torchrun, as a group."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--moe-ckpt-standbys",
        type=int,
        default=0,
        metavar="N",
        help="hot standby processes per node: a standby replaces a failed rank while surviving ranks keep running"
        " (0: plain torchrun)",
    )
    HealthOptions.add_flags(group)


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
