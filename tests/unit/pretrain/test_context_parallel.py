"""Ranks of context parallelism compute the stretches of a sequence that attention in core expects of them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.pretrain.testing import cpu_device
from pretrain_gpt_moe import BATCH, on_this_context_rank


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_what_core_would_give_it(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {name: torch.arange(32).view(2, 16) for name in BATCH if name != "attention_mask"}
    batch["attention_mask"] = torch.arange(512).view(2, 1, 16, 16)
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: ranks)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda _, rank=rank: rank)
        options = {"is_hybrid_cp": False, "cp_group": SimpleNamespace()}
        known = inspect.signature(get_batch_on_this_cp_rank).parameters
        with cpu_device.installed():
            expected = get_batch_on_this_cp_rank(
                dict(batch), **{name: value for name, value in options.items() if name in known}
            )
        own = on_this_context_rank(batch | {"labels": None})
        assert own.pop("labels") is None
        assert all(torch.equal(own[name], expected[name]) for name in own)
