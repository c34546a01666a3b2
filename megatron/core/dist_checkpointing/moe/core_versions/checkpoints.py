"""Core's `torch_dist` strategies: from 0.17 on they are other classes, and from 0.19 on there is no `common.pt`."""

from __future__ import annotations

import contextlib
import inspect
import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import filesystem_async

_QUEUE = (
    "get_write_results_queue" if hasattr(filesystem_async, "get_write_results_queue") else "_get_write_results_queue"
)
_BASE = getattr(common_strategies, "TorchCommonLoadStrategy", object)


def async_options(save: Callable[..., Any]) -> dict[str, Any]:
    """What to give to `async_save` of a strategy so that core plans and writes itself.

    From 0.17 on the default is nvidia-resiliency-ext, which may not be installed.
    """
    return {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(save).parameters else {}


@contextlib.contextmanager
def no_results_queue() -> Iterator[None]:
    """Keep core from starting a manager process for a results queue that its writer then is not asked for.

    Starting one imports torch anew on every rank, which takes longer than many a save.
    """
    with _results_queue(lambda *unused: None):
        yield


@contextlib.contextmanager
def results_in_process(is_async: Callable[[], bool]) -> Iterator[None]:
    """Keep core from starting a manager process for the results of a save that this process writes itself.

    Starting one imports torch anew on every rank, at the first save after each start.

    Args:
        is_async: Whether other processes write, whose results come through that manager.
    """
    original = getattr(filesystem_async, _QUEUE)
    results: queue.Queue[Any] = queue.Queue()
    with _results_queue(lambda *given: original(*given) if is_async() else results):
        yield


@contextlib.contextmanager
def _results_queue(make: Callable[..., Any]) -> Iterator[None]:
    """A block in which core's writer takes its results queue from `make`."""
    original = getattr(filesystem_async, _QUEUE)
    setattr(filesystem_async, _QUEUE, make)
    try:
        yield
    finally:
        setattr(filesystem_async, _QUEUE, original)


def load_with_common(
    wanted: dict[str, Any], folder: Path, strategy: Any, common: Callable[[], Mapping[str, Any]] | None
) -> dict[str, Any]:
    """`dist_checkpointing.load`, whichever release wrote the checkpoint and whichever is installed.

    Args:
        wanted: The sharded state dict.
        folder: Of the checkpoint.
        strategy: Loads the shards.
        common: Reads the common state, where it is not in a `common.pt`; None where it is.

    Raises:
        What core's `load` raises.
    """
    if common is None:
        return dict(dist_checkpointing.load(wanted, str(folder), strategy))
    if _BASE is not object:  # 0.16: a strategy of its own reads the common state
        return dict(dist_checkpointing.load(wanted, str(folder), strategy, _reading(common)))
    if "common_strategy" not in inspect.signature(serialization.load).parameters:  # from 0.19 on core looks itself
        return dict(dist_checkpointing.load(wanted, str(folder), strategy))
    original = serialization.load_common
    serialization.load_common = lambda *unused: dict(common())
    try:
        return dict(dist_checkpointing.load(wanted, str(folder), strategy))
    finally:
        serialization.load_common = original


def _reading(common: Callable[[], Mapping[str, Any]]) -> Any:
    class CommonAmongShards(_BASE):  # type: ignore[misc, valid-type]
        def load_common(self, *unused: Any) -> dict[str, Any]:
            return dict(common())

    return CommonAmongShards()
