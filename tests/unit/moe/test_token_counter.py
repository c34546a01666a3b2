"""What routers of this rank send to each expert: whole tokens, or gating probabilities in whole units."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter
from megatron.core.dist_checkpointing.moe.strategies import GATE_UNIT
from megatron.core.transformer.moe.router import TopKRouter

PROBABILITIES = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.0, 0.5], [0.1, 0.9, 0.0]])


class Router(TopKRouter):
    """Gives the probabilities that it is called with."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.weight = 5, torch.zeros(1)
        self.config = SimpleNamespace(num_moe_experts=3)

    def forward(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return probabilities, probabilities > 0


def test_a_token_counts_once_for_each_of_its_experts() -> None:
    router = Router()
    counter = TokenCounter([router])
    router(PROBABILITIES)
    assert counter.take()() == {4: (3, 2, 1)}
    assert counter.take()() == {4: (0, 0, 0)}


def test_gating_probabilities_are_summed_in_whole_units_in_any_order() -> None:
    router = Router()
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    router(PROBABILITIES)
    once = counter.take()()
    assert once == {4: tuple(sum(round(float(p) / GATE_UNIT) for p in column) for column in PROBABILITIES.T)}
    for row in reversed(PROBABILITIES):
        router(row[None])
    assert counter.take()() == once


def test_gates_of_experts_that_a_token_was_not_sent_to_do_not_count() -> None:
    class Dropping(Router):
        def forward(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return probabilities, probabilities > 0.3

    router = Dropping()
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    router(PROBABILITIES[:1])
    assert counter.take()() == {4: (round(0.75 / GATE_UNIT), 0, 0)}


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
