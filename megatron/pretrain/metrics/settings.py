"""Where a job's numbers are to go."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class MetricsSettings:
    """One or more flags for each sink; None: not wanted.

    jsonl: a file of JSON lines. textfile: a file for the textfile collector of Prometheus' node_exporter. port: on
    localhost, where the same is served. tensorboard, wandb: writers that are open already, as the loop of Megatron-LM
    has them; else those of `tensorboard_dir` and of `wandb_project` are opened.
    """

    jsonl: str | None = None
    textfile: str | None = None
    port: int | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    tensorboard: Any = None
    wandb: Any = None


OWN_FLAGS = {
    "jsonl": ("--metrics-jsonl", str, "FILE", "append one JSON object per iteration here"),
    "textfile": ("--metrics-textfile", str, "FILE", "keep the newest numbers here for Prometheus' node_exporter"),
    "port": ("--metrics-port", int, "PORT", "serve the newest numbers for Prometheus on this port of localhost"),
}
"""Those that no loop of Megatron has: flag, type, metavar, help."""


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """For a parser that has the flags of TensorBoard and W&B already."""
    for name, kind, metavar, text in OWN_FLAGS.values():
        parser.add_argument(name, type=kind, metavar=metavar, help=text)


def from_flags(flags: Any, **more: Any) -> MetricsSettings:
    """The settings in an object that has the flags as attributes; `more` wins."""
    own = {name: getattr(flags, flag.removeprefix("--").replace("-", "_")) for name, (flag, *_) in OWN_FLAGS.items()}
    others = {field.name for field in fields(MetricsSettings)} - own.keys() - more.keys()
    return MetricsSettings(**own, **{name: getattr(flags, name, None) for name in others}, **more)
