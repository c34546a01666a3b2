"""CUDA graphs and buffers that peers write to: bound to connections of a process, without a reference to a group.

Each is released before groups are made again, and made by its owner as in a new process: graphs are captured in the
iterations after the recovery, a dispatcher's buffer by its next dispatch, the buffers of `--tp-comm-overlap` by
Megatron-LM's own function. All ranks make them together, those that stayed and those that are new. Read in core 0.17 to
0.19, Transformer Engine 2.20, DeepEP and its branch with HybridEP.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core import full_cuda_graph
from megatron.core.transformer.moe import fused_a2a
from megatron.core.utils import get_te_version, is_te_min_version

from ..types.operators import scaled

log = logging.getLogger(__name__)

NVLINK_RANKS = 8
"""Of how many ranks a buffer of DeepEP has no NVSHMEM in it."""
_RESETS_GRAPHS = "2.10.0"


def unreleasable(config: Any) -> Iterator[str]:
    """What a process with this model cannot release, and so has to end.

    Args:
        config: Core's configuration of the model, or Megatron-LM's arguments.

    Yields:
        A sentence for each, with its flag.
    """
    impl, has_engine = getattr(config, "cuda_graph_impl", "none"), "transformer_engine" in sys.modules
    if impl == "transformer_engine" and has_engine and not is_te_min_version(_RESETS_GRAPHS):
        yield f"--cuda-graph-impl {impl}: transformer-engine {get_te_version()} cannot reset graphs"
    if getattr(config, "tp_comm_overlap", False) and getattr(config, "tp_comm_bootstrap_backend", "") == "mpi":
        yield "--tp-comm-bootstrap-backend mpi: MPI ends all processes with the first; use nccl or gloo"
    if getattr(config, "moe_token_dispatcher_type", "") != "flex":
        return
    backend = flex_backend(config)
    if backend == "ncclep":
        yield "--moe-flex-dispatcher-backend ncclep: it borrows a communicator that a fault aborts; use hybridep"
    ranks = config.expert_model_parallel_size * (getattr(config, "expert_tensor_parallel_size", None) or 1)
    if backend == "deepep" and ranks > NVLINK_RANKS:
        yield (
            f"--moe-flex-dispatcher-backend deepep over {ranks} ranks: NVSHMEM cannot connect to a new process; use"
            " hybridep"
        )


def flex_backend(config: Any) -> str:
    """Whose kernels `--moe-token-dispatcher-type flex` runs: deepep, hybridep or ncclep.

    config: core's configuration of the model, or Megatron-LM's arguments, whose older flag decides.
    """
    if getattr(config, "moe_enable_deepep", False):
        return "deepep"
    return str(getattr(config, "moe_flex_dispatcher_backend", None) or "deepep")


def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Release all of it; the device has come to the end of its work. Waits for no peer.

    chunks: the model chunks of this rank.
    """
    # Graphs first: their kernels refer to the buffers, and an abort of a communicator waits for graphs that have it.
    _release_graphs(chunks)
    _release_dispatchers()
    if base := sys.modules.get("transformer_engine.pytorch.module.base"):
        base.destroy_ub()


def _release_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    of_passes = full_cuda_graph.FullCudaGraphWrapper
    graphs = [graph for graph in of_passes.cuda_graph.values() if graph is not None]
    for stage in of_passes.cuda_graph:
        of_passes.cuda_graph[stage] = of_passes.result[stage] = None
        of_passes.curr_iteration[stage] = 0
    graphs += [graph for chunk in chunks for module in chunk.modules() for graph in _take_graphs(module)]
    of_layers = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if of_layers is not None:
        # A fault may have struck in a capture.
        of_layers._set_capture_end()
        of_layers._set_warmup_end()
        if of_layers.CudaGraphManager.global_mempool is not None:
            _begin_recording(of_layers)
    for graph in graphs:
        graph.reset()
    if graphs:
        log.info("released %d CUDA graphs; they are captured again", len(graphs))
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def _take_graphs(module: torch.nn.Module) -> Iterator[Any]:
    """Those of one layer, captured by Transformer Engine (`cuda_graphs`) or by core (in the runners of a manager)."""
    if getattr(module, "cuda_graphs", None):
        yield from module.cuda_graphs
        module.cuda_graphs, module.cuda_graph_manual_hooks = [], []
    if hasattr(module, "cudagraph_runners"):
        for runner in module.cudagraph_runners:
            yield from (graph for graph in (runner.fwd_graph, runner.bwd_graph) if graph is not None)
        module.cudagraph_runners = []
        for name in ("custom_cudagraphs_lookup_table", "inference_cudagraphs_lookup_table"):  # the second until 0.17
            getattr(module, name, {}).clear()


def _begin_recording(of_layers: Any) -> None:
    """Let managers record the next iteration, and capture behind it, as when the first of them was built."""
    of_layers.delete_cuda_graphs()  # of the record alone, which is empty once graphs were captured
    of_layers.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
    torch.cuda.set_stream(torch.cuda.Stream())
    observe = getattr(of_layers._CudagraphGlobalRecord, "_enable_saved_tensors_observer", None)  # from 0.19 on
    if observe is not None:
        observe()


def _release_dispatchers() -> None:
    fused_a2a.reset_hybrid_ep_buffer()
    buffer, fused_a2a._buffer = fused_a2a._buffer, None
    if buffer is not None:
        # Its destructor has a barrier on the device of all ranks that shared it, and one of them may be gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer.runtime))
        log.warning("DeepEP: %s of device memory stay with a buffer of lost ranks", scaled(buffer.num_nvl_bytes))
