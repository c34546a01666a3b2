"""Where a job's numbers are to go."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetricsSettings:
    """One or more flags for each sink; None: not wanted.

    jsonl: a file of JSON lines. textfile: a file for the textfile collector of Prometheus' node_exporter. port: on
    localhost, where the same is served. tensorboard, wandb: the writers that Megatron-LM has opened.
    """

    jsonl: str | None = None
    textfile: str | None = None
    port: int | None = None
    tensorboard: Any = None
    wandb: Any = None


OWN_FLAGS = {
    "jsonl": ("--metrics-jsonl", str, "FILE", "append one JSON object per iteration here"),
    "textfile": ("--metrics-textfile", str, "FILE", "keep the newest numbers here for Prometheus' node_exporter"),
    "port": ("--metrics-port", int, "PORT", "serve the newest numbers for Prometheus on this port of localhost"),
}
"""Those that Megatron-LM does not have: flag, type, metavar, help."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """For Megatron-LM's parser, which has the flags of TensorBoard and W&B already."""
    for name, kind, metavar, text in OWN_FLAGS.values():
        parser.add_argument(name, type=kind, metavar=metavar, help=text)


def from_flags(flags: Any, *, tensorboard: Any, wandb: Any) -> MetricsSettings:
    """The settings that flags give.

    Args:
        flags: An object that has the flags as attributes.
        tensorboard: The writer of TensorBoard that is open, or None.
        wandb: The writer of W&B that is open, or None.
    """
    own = {name: getattr(flags, flag.removeprefix("--").replace("-", "_")) for name, (flag, *_) in OWN_FLAGS.items()}
    return MetricsSettings(**own, tensorboard=tensorboard, wandb=wandb)
