"""Experts that owe tokens exceed their capacity, in core's own routers; all others are as ever."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions import Additions
from megatron.core.dist_checkpointing.moe.extensions.capacity_boost import BoostedCapacity
from megatron.core.dist_checkpointing.moe.extensions.capacity_boost.capacity import RouterCapacity
from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import drops_tokens
from megatron.core.dist_checkpointing.moe.types import expert
from megatron.core.transformer.moe import router as routing
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.paged_stash import PagedStashRunner
from megatron.core.transformer.moe.router import TopKRouter

TOKENS, EXPERTS, TOPK, FACTOR = 64, 4, 2, 1.0
BASE = get_capacity(TOKENS * TOPK, EXPERTS, FACTOR)


class Router(TopKRouter):
    """Drops as core's does, of what it is given to route."""

    def __init__(self, layer: int, factor: float | None = FACTOR, padded: bool = False, policy: str = "probs") -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.layer_number, self.policy = torch.zeros(1), layer + 1, policy
        self.config = SimpleNamespace(
            num_moe_experts=EXPERTS, moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=padded
        )

    def forward(self, probabilities: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"capacity_factor": FACTOR, "drop_policy": self.policy, "pad_to_capacity": False}
        return routing.apply_router_token_dropping(probabilities, chosen, router_topk=TOPK, **options)


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts 0 and 1 are asked for more than their capacity, the others for less."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=source) + torch.tensor([0.6, 0.4, 0.0, 0.0])
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(TOPK, dim=1).indices, True)
    return torch.softmax(scores, dim=1) * chosen, chosen


def taken(router: Router) -> list[int]:
    return router(*routed())[1].sum(dim=0).tolist()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_an_expert_that_owes_takes_a_tenth_more_and_others_as_many_as_before(policy: str) -> None:
    router = Router(3, policy=policy)
    before = taken(router)
    assert before[0] == before[1] == BASE
    boost = RouterCapacity([torch.nn.Sequential(router)], 10)
    boost.owe({expert(3, 0): 1000})
    more = -(-BASE // 10)
    assert taken(router) == [BASE + more, *before[1:]]
    assert boost.take()() == {3: (more, 0, 0, 0)}
    assert boost.take()() == {3: (0, 0, 0, 0)}
    boost.owe({expert(3, 0): 2})
    assert taken(router) == [BASE + 2, *before[1:]], "no more than it owes"
    boost.owe({})
    assert taken(router) == before


def test_the_tokens_beyond_the_capacity_are_the_most_probable_of_those_that_were_dropped() -> None:
    router, (probabilities, chosen) = Router(0), routed()
    _, before = router(probabilities, chosen)
    boost = RouterCapacity([router], 10)
    boost.owe({expert(0, 0): 1000})
    kept, after = router(probabilities, chosen)
    boost.close()
    new, still_dropped = after & ~before, chosen & ~after
    assert new[:, 0].any()
    assert not (before & ~after).any()
    assert probabilities[new[:, 0], 0].min() >= probabilities[still_dropped[:, 0], 0].max()
    assert torch.equal(kept, probabilities * after)


def test_other_layers_evaluations_and_routers_after_it_are_left_alone() -> None:
    upstream = routing.apply_router_token_dropping
    owing, other = Router(1), Router(2)
    before = taken(owing)
    boost = RouterCapacity([owing, other], 10)
    boost.owe({expert(1, 0): 1000})
    assert taken(other) == before
    assert taken(owing.eval()) == before
    with torch.no_grad():
        assert taken(owing.train())[0] > before[0], "the first pass of recomputed activations drops as the second"
    assert boost.take()() == {1: (0, 0, 0, 0), 2: (0, 0, 0, 0)}, "but only one of the two counts"
    boost.close()
    assert routing.apply_router_token_dropping is upstream
    assert taken(owing) == before


def test_what_passes_that_run_twice_took_beyond_the_capacity_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Callable[..., None] = lambda _, is_training=True: None  # noqa: E731
    monkeypatch.setattr(PagedStashRunner, "prepare_for_rerun", stub)
    router, added, held = Router(3), Additions(), ExitStack()
    settings = SimpleNamespace(capacity_boost=10)
    strategy = SimpleNamespace(makes_up=True, deferred_tokens={expert(3, 0): 1000})
    training = SimpleNamespace(chunks=[router])
    boost = BoostedCapacity(SimpleNamespace(config=settings, strategy=strategy, training=training, held=held))
    boost.protects(added)
    taken(router)
    PagedStashRunner.prepare_for_rerun(SimpleNamespace())  # for an overflow
    taken(router)
    assert added.beyond is not None and added.beyond()() == {3: (-(-BASE // 10), 0, 0, 0)}
    for _ in range(2):  # core validates a result
        boost.passes()
        taken(router)
    assert added.beyond()() == {3: (-(-BASE // 10), 0, 0, 0)}
    held.close()
    assert vars(PagedStashRunner)["prepare_for_rerun"] is stub


def test_nothing_is_dropped_that_a_boost_could_take_without_a_capacity_or_with_padding() -> None:
    assert drops_tokens([Router(0)])
    assert not drops_tokens([Router(0, factor=None)])
    assert not drops_tokens([Router(0, padded=True)])


def test_captured_routers_whose_capacity_stays_are_refused() -> None:
    router = Router(0)
    router.config.cuda_graph_impl = "local"  # of whole layers
    with pytest.raises(UsageError, match="a captured router keeps its capacity: use --moe-ckpt-capacity-boost 0"):
        RouterCapacity([router], 10)


def test_core_drops_by_the_name_and_with_the_arguments_that_are_replaced() -> None:
    assert list(inspect.signature(routing.apply_router_token_dropping).parameters) == [
        "routing_probs", "routing_map", "router_topk", "capacity_factor", "drop_policy", "pad_to_capacity",
    ]  # fmt: skip
    assert "apply_router_token_dropping(" in inspect.getsource(TopKRouter)
