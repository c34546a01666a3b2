"""What routers of this rank send to each expert: whole tokens, or gating probabilities in whole units."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter
from megatron.core.dist_checkpointing.moe.strategies import GATE_UNIT
from megatron.core.transformer.moe.router import TopKRouter

PROBABILITIES = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.0, 0.5], [0.1, 0.9, 0.0]])


class Router(TopKRouter):
    """Gives the probabilities that it is called with."""

    def __init__(self, score_function: str = "softmax") -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.weight = 5, torch.zeros(1)
        self.config = SimpleNamespace(num_moe_experts=3, moe_router_score_function=score_function)

    def forward(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing(probabilities)

    def routing(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return probabilities, probabilities > 0


def test_a_token_counts_once_for_each_of_its_experts() -> None:
    router = Router()
    counter = TokenCounter([router])
    router(PROBABILITIES)
    assert counter.take()() == {4: (3, 2, 1)}
    assert counter.take()() == {4: (0, 0, 0)}


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_gating_probabilities_are_summed_over_all_tokens_and_experts_in_any_order(function: str) -> None:
    router = Router(function)
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    router(PROBABILITIES)
    once = counter.take()()
    scores = PROBABILITIES.double()
    gates = scores.softmax(1) if function == "softmax" else scores.sigmoid() / scores.sigmoid().sum(1, keepdim=True)
    assert once == {4: tuple(sum(round(float(gate) / GATE_UNIT) for gate in column) for column in gates.T)}
    assert sum(once[4]) == pytest.approx(3 / GATE_UNIT, abs=9), "each token counts for 1 in all"
    for row in reversed(PROBABILITIES):
        router(row[None])
    assert counter.take()() == once


def test_a_closed_counter_leaves_the_router_as_it_was() -> None:
    router = Router()
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    assert "routing" in vars(router)
    counter.close()
    assert "routing" not in vars(router)


def test_passes_without_gradients_do_not_count() -> None:
    router = Router()
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    with torch.no_grad():
        router(PROBABILITIES)
    assert counter.take()() == {4: (0, 0, 0)}


def test_what_was_taken_stays_what_it_was_while_the_next_passes_count() -> None:
    router = Router()
    counter = TokenCounter([router])
    router(PROBABILITIES)
    taken = counter.take()
    router(PROBABILITIES)
    assert taken() == taken() == {4: (3, 2, 1)}


def test_a_captured_router_is_refused_in_any_loop_since_its_hooks_do_not_run() -> None:
    router = Router()
    vars(router.config).update(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"])
    TokenCounter([router])
    router.config.cuda_graph_modules.append("moe_router")
    with pytest.raises(UsageError, match=r"tokens cannot be counted: routers run in a CUDA graph.*modules attn"):
        TokenCounter([router])
