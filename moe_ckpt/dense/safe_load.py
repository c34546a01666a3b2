"""Loads `torch.save` data with an explicit list of the Python names it may contain."""

from __future__ import annotations

import re
import signal
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib import NumpyVersion

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.megatron_core import is_skipped, load_megatron_core

_PLAIN = (SimpleNamespace, PosixPath, Namespace, BytesIO, signal.Signals)
"""What most checkpoints name besides tensors and numpy: nothing of Megatron-Core, which takes seconds to import."""
_REFUSED_GLOBAL = re.compile(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)")


def load_torch_bytes(data: bytes, what: str) -> Any:
    """Returns the object that `torch.save` wrote, its tensors on the CPU.

    Raises UnreadableCheckpoint when the bytes are damaged or need a Python name that is not on the list; nothing from
    the data is ever called or imported.

    Args:
        data: Bytes that `torch.save` wrote.
        what: Name of the data in errors.
    """
    try:
        return _loaded(data)
    except Exception as error:
        refused = _REFUSED_GLOBAL.search(str(error))
        if refused is not None:
            raise UnreadableCheckpoint(
                f"{what} holds an object of {refused.group(1)}, which is not on the list of safe names; "
                "nothing of it was run: if you trust this checkpoint, save it again without that object"
            ) from error
        reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
        raise UnreadableCheckpoint(f"{what} is damaged ({reason}); take another iteration") from error


def _loaded(data: bytes) -> Any:
    if is_skipped():
        try:
            return _load_with(_PLAIN, data)
        except Exception as error:
            if _REFUSED_GLOBAL.search(str(error)) is None:
                raise
            load_megatron_core()
    from megatron.core.rerun_state_machine import Call, Caller
    from megatron.core.safe_globals import SAFE_GLOBALS

    # Two plain tuples, by which a checkpoint says which of an iteration's results core did not trust.
    return _load_with((*SAFE_GLOBALS, Call, Caller), data)


def _load_with(names: Sequence[Any], data: bytes) -> Any:
    with _safe_names(names):
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)


@contextmanager
def _safe_names(names: Sequence[Any]) -> Iterator[None]:
    # safe_globals() removes on exit whatever it was given, even names that were registered before it (Megatron-Core
    # registers its own when imported): hand it only the missing ones.
    known = torch.serialization.get_safe_globals()
    # Stock has a signal among its arguments, and some releases of Python 3.11 write one by its own name.
    signals = [(member, f"signal.{member.name}") for member in signal.Signals]
    missing = [name for name in [*names, *signals, *_numpy_names()] if name not in known]
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
