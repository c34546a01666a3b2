"""Iterations that are run again pass CUDA graphs by, and leave them as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.replay.patches import graphs_off
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import GraphableMegatronModule


class Layer(GraphableMegatronModule):
    """Doubles; by a graph, if it has one, to something else."""

    def __init__(self, impl: str) -> None:
        torch.nn.Module.__init__(self)
        self.config: Any = SimpleNamespace(cuda_graph_impl=impl, fine_grained_activation_offloading=False)
        self.cuda_graphs: list[Any] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * hidden_states

    def route(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 3 * hidden_states


def manager(func: Any = None) -> CudaGraphManager:
    """One that has captured."""
    made = CudaGraphManager.__new__(CudaGraphManager)
    torch.nn.Module.__init__(made)
    made.func, made.reuse_cudagraphs, made.is_first_microbatch = func, False, True
    made.cudagraph_runners = ["of a graph"]
    return made


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(*_: Any, **__: Any) -> Any:
        raise AssertionError("a graph was run")

    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", True)
    monkeypatch.setattr(CudaGraphManager, "get_cudagraph_runner", replayed)


def test_whole_iterations_run_eagerly_and_count_as_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"curr_iteration": {"training": 7}, "cuda_graph": {"training": "a graph"}, "result": {"training": "a loss"}}
    for name, value in kept.items():
        monkeypatch.setattr(FullCudaGraphWrapper, name, dict(value))
    wrapped = FullCudaGraphWrapper.__new__(FullCudaGraphWrapper)
    wrapped.forward_backward_func = lambda **options: options
    with graphs_off():
        assert wrapped(model=[], forward_only=False) == {"model": [], "forward_only": False}
    assert {name: getattr(FullCudaGraphWrapper, name) for name in kept} == kept
    with pytest.raises(AssertionError):  # core's own again, which asks for more
        wrapped(model=[], forward_only=False)


@pytest.mark.usefixtures("captured")
def test_layers_and_methods_that_core_captured_run_eagerly() -> None:
    layer, tokens = Layer("local"), torch.ones(2, requires_grad=True)
    layer.cudagraph_manager, of_method = manager(), manager(layer.route)
    with graphs_off():
        assert torch.equal(layer(tokens), 2 * tokens)
        assert torch.equal(layer(hidden_states=tokens), 2 * tokens)
        assert torch.equal(of_method(layer, (tokens,), {}, cache_key=None), 3 * tokens)
    for call in (lambda: layer(tokens), lambda: of_method(layer, (tokens,), {})):
        with pytest.raises(AssertionError, match="a graph was run"):
            call()
    assert layer.cudagraph_manager.cudagraph_runners == ["of a graph"]


def test_layers_that_transformer_engine_captured_run_eagerly() -> None:
    layer, tokens = Layer("transformer_engine"), torch.ones(2)
    layer.cuda_graphs, layer.cuda_graph_manual_hooks = [lambda tokens, **_: 5 * tokens], []
    with graphs_off():
        assert torch.equal(layer(tokens), 2 * tokens)
    assert torch.equal(layer(tokens), 5 * tokens)
