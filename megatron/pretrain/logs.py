"""What the driver says and where: rank 0 speaks for all, other ranks only of trouble of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from megatron.pretrain.initialize import Launch


def configure_logging(launch: Launch) -> None:
    """Send the driver's log lines to standard output, warnings and errors to standard error.

    Rank 0 speaks for what all ranks do, the last rank for the loss, which it alone knows; others only when they fail.
    """
    driver, subsystem = (
        logging.getLogger("megatron.pretrain"),
        logging.getLogger("megatron.core.dist_checkpointing.moe"),
    )
    driver.setLevel(logging.INFO if launch.rank == 0 else logging.CRITICAL)
    # What a rank lost of its protection only that rank knows.
    subsystem.setLevel(logging.INFO if launch.rank == 0 else logging.ERROR)
    is_last = launch.rank == launch.world_size - 1
    logging.getLogger("megatron.pretrain.metrics").setLevel(logging.INFO if is_last else logging.CRITICAL)
    # Core announces at warning level that a machine nobody asked for is disabled.
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    for ours in (driver, subsystem):
        ours.propagate = False
        ours.handlers.clear()
        ours.addHandler(_handler(sys.stdout, lambda level: level < logging.WARNING, "[moe-ckpt] %(message)s"))
        ours.addHandler(
            _handler(sys.stderr, lambda level: level >= logging.WARNING, "[moe-ckpt] %(levelname)s: %(message)s")
        )


def _handler(stream: TextIO, wanted: Callable[[int], bool], form: str) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: wanted(record.levelno))
    handler.setFormatter(logging.Formatter(form))
    return handler
