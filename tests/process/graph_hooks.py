"""CUDA graphs of whole iterations in workers without a GPU: core's own wrapper, over a stand-in for a capture."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


class Graph:
    """What was captured runs again at each replay, over the buffers that the wrapper has filled by then.

    As kernels would, it computes the gradients that parameters required at the capture, and no others.
    """

    def __init__(self) -> None:
        self._result: list[Any] = []

    def register_generator_state(self, _: Any) -> None:
        """Whatever draws, draws from the generators of this process."""

    def captured(self, passes: Callable[..., Any], options: dict[str, Any]) -> list[Any]:
        """Runs nothing. The list is filled by each replay."""
        self._passes, self._options = passes, options
        parameters = [parameter for chunk in options["model"] for parameter in chunk.parameters()]
        self._required = {parameter: parameter.requires_grad for parameter in parameters}
        return self._result

    def replay(self) -> None:
        """Run it."""
        from megatron.core.full_cuda_graph import StaticBufferLoader

        buffers = StaticBufferLoader.static_buffers["training"][: self._options["num_microbatches"]]
        now = {parameter: parameter.requires_grad for parameter in self._required}
        _require(self._required)
        self._result[:] = self._passes(**self._options | {"data_iterator": [iter(buffers)]})
        _require(now)


def _require(gradients: dict[torch.nn.Parameter, bool]) -> None:
    for parameter, required in gradients.items():
        parameter.requires_grad_(required)


@contextlib.contextmanager
def capturing(graph: Graph, **_of_core: Any) -> Iterator[None]:
    """In place of `torch.cuda.graph`, in the wrapper's own frame."""
    wrapper = sys._getframe(2).f_locals["self"]
    passes = wrapper.forward_backward_func
    with mock.patch.object(wrapper, "forward_backward_func", lambda **options: graph.captured(passes, options)):
        yield


@contextlib.contextmanager
def whole_iterations() -> Iterator[None]:
    """`--cuda-graph-impl full_iteration` works in this process."""
    from megatron.core import full_cuda_graph, tensor_parallel

    seed = tensor_parallel.model_parallel_cuda_manual_seed

    def seeded(*given: Any, **named: Any) -> None:
        """Without generators that graphs could refer to, which only CUDA has."""
        bound = inspect.signature(seed).bind(*given, **named)
        bound.arguments["use_cudagraphable_rng"] = False
        seed(*bound.args, **bound.kwargs)

    places = {"CUDAGraph": Graph, "graph": capturing, "graph_pool_handle": lambda: (0, 1)}
    with contextlib.ExitStack() as stack:
        for name, value in places.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed", seeded))
        stack.enter_context(mock.patch.object(full_cuda_graph, "get_all_rng_states", dict))
        yield


@contextlib.contextmanager
def replayed_through_graphs() -> Iterator[None]:
    """Iterations are run again through the wrapper, which captures frozen operators."""
    from megatron.core.dist_checkpointing.moe.replay import execution

    with mock.patch.object(execution, "graphs_off", contextlib.nullcontext):
        yield
