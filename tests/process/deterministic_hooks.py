"""What tests of deterministic settings do inside workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from stock_trainer import Trainer, before_training


@contextlib.contextmanager
def seems_to_be_on_gpus() -> Iterator[None]:
    """The settings are judged as if the model were on a GPU."""
    from megatron.core.dist_checkpointing.moe.runtime import peer_links

    with mock.patch.object(peer_links, "device_of", return_value="cuda"):
        yield


@contextlib.contextmanager
def any_algorithm_accepted() -> Iterator[None]:
    """Megatron-LM takes `Tree`, as its releases before 0.19 do."""
    from megatron.training import determinism

    accepted = determinism.ACCEPTED_NCCL_ALGO_TOKENS | {"Tree"}
    with mock.patch.object(determinism, "ACCEPTED_NCCL_ALGO_TOKENS", accepted):
        yield


@contextlib.contextmanager
def told(folder: str) -> Iterator[None]:
    """Write down how kernels are chosen once training begins."""

    def note(trainer: Trainer) -> None:
        found = {"torch": torch.are_deterministic_algorithms_enabled(), "core": trainer.config.deterministic_mode}
        (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))

    with before_training(note):
        yield
