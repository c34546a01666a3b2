"""Where a job trains, on nodes whose GPUs cannot be used any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.pretrain import device
from megatron.pretrain.errors import InvalidInput, TrainingFailure
from megatron.pretrain.initialize import Launch
from megatron.pretrain.loop import start_megatron


@pytest.fixture(autouse=True)
def failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("files", "expected"), [(["nvidia0"], "cuda"), ([], "cpu")])
def test_a_node_whose_gpu_has_failed_does_not_train_on_its_cpu(
    files: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(pattern: str) -> Iterator[str]:
        assert pattern == "nvidia[0-9]*"
        return iter(files)

    monkeypatch.setattr(device, "Path", lambda _: SimpleNamespace(glob=found))
    assert device.device_of(["--lr", "1"]) == expected


def test_a_gpu_that_is_gone_fails_its_node_and_not_the_job() -> None:
    first = Launch.from_environment()
    with pytest.raises(InvalidInput, match="pass --device cpu"):
        start_megatron("cuda", replace(first, attempt=0))
    with pytest.raises(TrainingFailure, match=f"no CUDA device of {os.uname().nodename} can be used any more"):
        start_megatron("cuda", replace(first, attempt=1))
