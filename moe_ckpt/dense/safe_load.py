"""Loads `torch.save` data with an explicit list of the Python names it may contain."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.lib import NumpyVersion

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.safe_globals import SAFE_GLOBALS

_REFUSED_GLOBAL = re.compile(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)")


def load_torch_bytes(data: bytes, what: str) -> Any:
    """Returns the object that `torch.save` wrote into `data`, its tensors on the CPU.

    `what` names the data in messages. Raises UnreadableCheckpoint when the bytes are damaged or need a Python name that
    is not on the list; nothing from the data is ever called or imported.
    """
    try:
        with _safe_names():
            return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _REFUSED_GLOBAL.search(str(error))
        if refused is not None:
            raise UnreadableCheckpoint(
                f"{what} holds an object of {refused.group(1)}, which is not on the list of safe names; "
                "nothing of it was run: if you trust this checkpoint, save it again without that object"
            ) from error
        reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
        raise UnreadableCheckpoint(f"{what} is damaged ({reason}); take another iteration") from error


@contextmanager
def _safe_names() -> Iterator[None]:
    # safe_globals() removes on exit whatever it was given, even names that were registered before it (Megatron-Core
    # registers its own when imported): hand it only the missing ones.
    known = torch.serialization.get_safe_globals()
    # Stock has a signal among its arguments, and some releases of Python 3.11 write one by its own name.
    signals = [(member, f"signal.{member.name}") for member in signal.Signals]
    missing = [name for name in [*SAFE_GLOBALS, *signals, *_numpy_names()] if name not in known]
    with torch.serialization.safe_globals(missing):
        yield


def _numpy_names() -> list[Any]:
    core = np._core if NumpyVersion(np.__version__) >= "2.0.0" else np.core  # type: ignore[attr-defined]
    names: list[Any] = [np.ndarray, np.dtype]
    for function in (core.multiarray._reconstruct, core.multiarray.scalar):
        # The module was renamed in numpy 2: checkpoints of either side are read on either side.
        names += [(function, f"{package}.multiarray.{function.__name__}") for package in ("numpy.core", "numpy._core")]
    # Object arrays are left out: they hold arbitrary pickles.
    plain = (kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and kind is not np.dtypes.ObjectDType)
    return names + [kind for kind in plain if issubclass(kind, np.dtype)]
