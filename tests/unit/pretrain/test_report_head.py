"""What the head of a report says of a job."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from megatron.pretrain import loop

ARGS = SimpleNamespace(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    context_parallel_size=1,
    expert_model_parallel_size=2,
    data_parallel_size=2,
    num_layers=4,
    hidden_size=64,
    num_experts=8,
    moe_router_topk=2,
    global_batch_size=8,
    seq_length=64,
)


def test_a_checkout_that_is_not_installed_trains_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "megatron-moe-ckpt":
            raise PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(loop, "version", version)
    head = loop.in_words(ARGS)
    assert head["software"] == "megatron-moe-ckpt (not installed), megatron-core 1.2, torch 1.2"
    assert head["layout"] == "PP 2 x EP 2 x DP 2"
