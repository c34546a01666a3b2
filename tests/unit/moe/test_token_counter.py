"""What routers of this rank send to each expert: whole tokens, or gating probabilities in whole units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter
from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
from megatron.core.dist_checkpointing.moe.strategies import GATE_UNIT
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.paged_stash import PagedStashRunner
from megatron.core.transformer.moe.router import TopKRouter

PROBABILITIES = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.0, 0.5], [0.1, 0.9, 0.0]])


class Router(TopKRouter):
    """Gives the probabilities that it is called with."""

    def __init__(self, score_function: str = "softmax", **config: Any) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.weight = 5, torch.zeros(1)
        config = {"num_layers": 4, "num_moe_experts": 3, "moe_pad_expert_input_to_capacity": False, **config}
        self.config = SimpleNamespace(moe_router_score_function=score_function, **config)

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


class Padding(Router):
    """Drops tokens beyond a capacity, and fills experts up to it, as core does."""

    def routing(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = self.config.moe_pad_expert_input_to_capacity
        routed = apply_router_token_dropping(probabilities, probabilities > 0, 2, 1.0, pad_to_capacity=padded)
        return cast("tuple[torch.Tensor, torch.Tensor]", routed)


def test_tokens_that_only_pad_an_expert_up_to_its_capacity_are_not_counted() -> None:
    found = []
    for padded in (False, True):
        router = Padding(moe_pad_expert_input_to_capacity=padded)
        counter = TokenCounter([router])
        router(PROBABILITIES)
        found.append(counter.take()())
    assert found == [{4: (2, 2, 1)}] * 2


def test_a_layer_that_runs_for_several_depths_counts_each_token_once() -> None:
    router = Router(mtp_num_layers=2, mtp_use_repeated_layer=True)
    router.layer_number, router.is_mtp_layer = 1, True
    counter = TokenCounter([router])
    router(PROBABILITIES)
    router(PROBABILITIES[:2])
    assert counter.take()() == {4: (3, 2, 1)}


def test_tokens_of_passes_that_run_once_more_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Callable[..., None] = lambda _, is_training=True: None  # noqa: E731
    monkeypatch.setattr(PagedStashRunner, "prepare_for_rerun", stub)
    router = Router()
    counter = TokenCounter([router])
    router(PROBABILITIES)
    PagedStashRunner.prepare_for_rerun(SimpleNamespace())  # for an overflow
    router(PROBABILITIES)
    session: Any = SimpleNamespace(_counter=counter, _passed=6, _extensions=(), survivor=None)
    for iteration in (7, 7):  # core validates a result
        ProtectedSession.passes(session, iteration)
        router(PROBABILITIES[:2])
    PagedStashRunner.prepare_for_rerun(SimpleNamespace(), is_training=False)  # for one in an evaluation behind it
    assert counter.take()() == {4: (2, 1, 1)}
    counter.close()
    assert vars(PagedStashRunner)["prepare_for_rerun"] is stub


def test_counts_of_iterations_before_stay_when_the_passes_of_one_begin_once_more() -> None:
    router, at = Router(), SimpleNamespace(iteration=1)
    counter = TokenCounter([router], iteration=lambda: at.iteration)
    for at.iteration in (1, 2, 3):
        router(PROBABILITIES)
    counter.begin()  # for an overflow
    router(PROBABILITIES)
    once = TokenCounter([router])
    router(PROBABILITIES)
    (counted,), (of_one,) = counter.take()().values(), once.take()().values()
    assert counted == tuple(4 * count for count in of_one), "three iterations, and a pass of the third behind them"
    assert set(*counter.take()().values()) == {0}


def test_gates_of_an_overflow_that_are_no_number_count_nothing() -> None:
    router = Router()
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    router(torch.full((3, 3), torch.nan))
    assert counter.take()() == {4: (0, 0, 0)}


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gating_probabilities_are_summed_over_all_tokens_and_experts_in_any_order(function: str) -> None:
    router = Router(function)
    counter = TokenCounter([router], gate_unit=GATE_UNIT)
    router(PROBABILITIES)
    once = counter.take()()
    scores = PROBABILITIES.double()
    given = {"softmax": scores.exp(), "sigmoid": scores.sigmoid(), "sqrtsoftplus": (1 + scores.exp()).log().sqrt()}
    gates = given[function] / given[function].sum(1, keepdim=True)
    assert once == {4: tuple(sum(round(float(gate) / GATE_UNIT) for gate in column) for column in gates.T)}
    assert sum(once[4]) == pytest.approx(3 / GATE_UNIT, abs=9), "each token counts for 1 in all"
    for row in reversed(PROBABILITIES):
        router(row[None])
    assert counter.take()() == once


def test_gates_of_a_score_function_that_is_not_known_are_refused_before_training() -> None:
    with pytest.raises(UsageError, match=r"soft-count does not know the gates of routers with entmax"):
        TokenCounter([Router("entmax")], gate_unit=GATE_UNIT)


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


class Captured(TorchDispatchMode):
    """A stand-in for a capture: what is added in place, it adds at each replay, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self._kernels.append(partial(func, *args))
            return args[0]
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):  # the memory that a graph writes to, from what is read by then
            self._kernels.append(lambda: result.copy_(func(*args, **kwargs or {})))
        return result

    def replay(self) -> None:
        """Run the kernels in their order."""
        for kernel in self._kernels:
            kernel()


@pytest.mark.parametrize("gate_unit", [None, GATE_UNIT])
def test_tokens_of_a_captured_router_are_counted_by_each_replay_and_by_no_run_before_the_capture(
    gate_unit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, tokens = Router(), PROBABILITIES.clone()
    counter, graph = TokenCounter([router], gate_unit=gate_unit), Captured()
    router(tokens)
    eagerly = counter.take()()
    assert sum(eagerly[4]) > 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_graphs._set_capture_start()
    try:
        router(tokens)  # as core and Transformer Engine warm up
        with graph:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            router(tokens)
    finally:
        cuda_graphs._set_capture_end()
    assert counter.take()() == {4: (0, 0, 0)}
    graph.replay()
    assert counter.take()() == eagerly
    graph.replay()
    tokens.copy_(PROBABILITIES[[0, 0, 0]])
    graph.replay()
    both = counter.take()()
    assert both != {4: tuple(2 * count for count in eagerly[4])}
    assert sum(both[4]) > sum(eagerly[4])
