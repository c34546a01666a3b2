"""Graphs of whole iterations that core captured are released, and captured again; skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_place import DEVICE, needs_cuda
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import full_cuda_graph
from megatron.core.dist_checkpointing.moe.in_place.process_groups import release
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

pytestmark = needs_cuda("captures of whole iterations")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    release([])
    dist.destroy_process_group()


def test_iterations_are_captured_again_over_the_same_weights_and_their_memory_goes_back() -> None:
    weights, runs = torch.zeros(1 << 20, device=DEVICE), []

    def passes(*, data_iterator: Any, **_: Any) -> list[torch.Tensor]:
        runs.append(torch.cuda.is_current_stream_capturing())
        weights.add_(next(data_iterator[0])["tokens"].float().mean())
        return [weights.sum()]

    def attempt() -> None:
        runs.clear()
        wrapped = FullCudaGraphWrapper(passes)
        for _ in range(4):
            read = iter([{"tokens": torch.ones(8, device=DEVICE)}])
            wrapped(model=[None], data_iterator=read, num_microbatches=1, seq_length=8, forward_only=False)
        torch.cuda.synchronize()
        assert runs == [False, True]

    attempt()
    assert weights[0].item() == 4, "an eager iteration, and three replays"
    held = torch.cuda.memory_reserved()
    release([])
    assert torch.cuda.memory_reserved() <= held
    attempt()
    assert weights[0].item() == 8
