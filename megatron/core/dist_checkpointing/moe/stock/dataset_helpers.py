"""What the wheels of Megatron-Core lack that its training loop wants."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets import utils

from ..replay.patches import replaced


@contextlib.contextmanager
def shipped_helpers() -> Iterator[None]:
    """Take the compiled helpers of datasets as they are, in this block, where they cannot be compiled.

    The loop runs `make` for them, but no wheel has the Makefile: the first rank would end there. The wheel has what
    would be made. Nothing changes where the sources are complete.
    """
    complete = (Path(utils.__file__).parent / "Makefile").exists()
    if complete or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(utils, compile_helpers=lambda: None):
        yield
