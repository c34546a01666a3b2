"""What tests of deterministic settings do inside workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def seems_to_be_on_gpus() -> Iterator[None]:
    """The settings are judged as if the model were on a GPU."""
    from megatron.core.dist_checkpointing.moe.runtime import device_settings

    with mock.patch.object(device_settings, "device_of", return_value="cuda"):
        yield


@contextlib.contextmanager
def told(folder: str) -> Iterator[None]:
    """Write down how kernels are chosen once training begins."""
    from megatron.pretrain.loop import Trainer

    run = Trainer.run

    def noting(self: Any) -> None:
        found = {"torch": torch.are_deterministic_algorithms_enabled(), "core": self._transformer.deterministic_mode}
        (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
        run(self)

    with mock.patch.object(Trainer, "run", noting):
        yield
