"""Changes in workers that load and save checkpoints with some of the experts."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

NAN = float("nan")


@contextlib.contextmanager
def poisoned_before_load() -> Iterator[None]:
    """Whatever loading does not restore is garbage: a fresh initialization might happen to be right."""
    from megatron.core.dist_checkpointing.moe.stock.dense import StockSaves

    original = StockSaves.load

    def poison_and_load(self: StockSaves, call: Any) -> Any:
        _poison(call["ddp_model"], call["optimizer"])
        return original(self, call)

    with mock.patch.object(StockSaves, "load", poison_and_load):
        yield


@torch.no_grad()
def _poison(chunks: Any, optimizer: Any) -> None:
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import torch_adams

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(NAN)
    for inner in torch_adams(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(NAN)
                for name, tensor in inner.state[parameter].items():
                    tensor.fill_(77.0 if name == "step" else NAN)


@contextlib.contextmanager
def full_disk(iteration: int) -> Iterator[None]:
    """There is no room for what makes the checkpoint of `iteration` a whole one."""
    from megatron.core.dist_checkpointing.moe.dense_saves import saving

    original = saving.seal

    def seal(folder: Path, *given: Any) -> None:
        if f"iter_{iteration:07d}" in folder.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        original(folder, *given)

    with mock.patch.object(saving, "seal", seal):
        yield
