"""`pretrain_gpt_moe.py` where an injected fault stops the rank, which does not end by itself: a hang.

With STOPS=RANK@START that rank stops in the first iteration after that restart as well, and with STOPS_BUILDING in the
same way before it, as it builds its model.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime.faults import FaultInjector, Phase


def stop() -> None:
    """What a driver in an endless wait looks like from outside: no thread of the process runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def is_here(name: str) -> bool:
    """Whether a variable names this rank in this start."""
    return os.environ.get(name) == f"{os.environ['RANK']}@{os.environ['TORCHELASTIC_RESTART_COUNT']}"


def built(
    *arguments: object, build: Callable[..., object] = pretrain_gpt_moe.model_provider, **named: object
) -> object:
    """The model."""
    if is_here("STOPS_BUILDING"):
        stop()
    return build(*arguments, **named)


def reached(injector: FaultInjector, iteration: int, phase: Phase, done: object = FaultInjector.reached) -> None:
    """That of the injector, which every iteration begins with."""
    if is_here("STOPS"):
        stop()
    assert callable(done)
    done(injector, iteration, phase)


if __name__ == "__main__":
    pretrain_gpt_moe.model_provider = built
    FaultInjector.__init__.__defaults__ = (stop,)
    FaultInjector.reached = reached  # type: ignore[method-assign]
    pretrain_gpt_moe.command()
