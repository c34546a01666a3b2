"""How a training loop continues in the process that lost a peer.

kept = KeptProcess(chunks, optimizer)
while True:
    manager = None
    try:
        if kept.has_left:
            connect()                         # process groups, as at the start
            kept.connected()
        manager = MoECheckpointManager(chunks, optimizer, ...)
        with manager.run():
            ...
        break
    except Exception as error:
        kept.stay(error, manager)         # raises it again where this process has to end
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron.core import full_cuda_graph
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.moe import fused_a2a
from megatron.core.utils import get_model_config, get_te_version, is_te_min_version

from ..core_versions.training import as_in_new_process
from ..device import device_thread
from ..errors import PeerLost, Terminated
from ..megatron_state.quantization import forget_reductions
from ..runtime.peer_links import is_lost_peer
from ..standby.slot import WorkerSlot, own_slot
from ..types.operators import scaled
from .building import own_build
from .process_groups import ProcessGroups

log = logging.getLogger(__name__)

SEAT_S = 900.0
"""How long a rank waits to be let continue: nodes may have to be replaced, and their processes to start."""
_DEVICE_S = 10.0


class AbandonedManager(Protocol):
    """What protected training until the fault: a `MoECheckpointManager`."""

    def abandon(self) -> bool:
        """Release threads, connections and memory; whether that could be done."""

    @property
    def is_told_to_end(self) -> bool:
        """Whether the launcher has told this process to end."""


class InProcessRestart:
    """Keeps this process, its model and its optimizer through faults of others.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Theirs.

    Attributes:
        has_left: Whether this process has a slot again after a fault, and no connections yet.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._groups: ProcessGroups | None = None
        self.has_left = False

    def stay(self, error: BaseException, manager: AbandonedManager | None) -> None:
        """`error` has ended training in this process: release all connections, and wait until the launcher has put
        others on the ranks that were lost.

        Args:
            error: What has ended training.
            manager: What protected training; None where that was not made yet.

        Raises:
            BaseException: `error`, where this process has to end: its own fault, a launcher that keeps no survivors, or
                a model that cannot be connected again.
            PeerLost: The launcher has ended, or says nothing.
        """
        why = "" if manager is not None and manager.is_told_to_end else _has_to_end(error, self._chunks)
        if why is None and manager is not None and not manager.abandon():
            why = "work beside training does not end"
        if why is None and not _device_answers():
            why = "its device does not answer"
        if why is not None:
            if why:
                log.info("cannot recover in place, another process takes this rank: %s", why)
            raise error
        # Order matters. Frames go first: locals of the interrupted iteration refer to work handles and process groups,
        # which `replace` could not exchange there.
        _clear_frames(error)
        as_in_new_process(self._chunks, self._optimizer)
        forget_reductions(self._chunks)
        release(self._chunks)
        # Last: from here on no collective works, until all ranks have connected again.
        lost = ProcessGroups.taken_down()
        # A fault while all connected again: what refers to groups still refers to those before.
        self._groups = self._groups or lost
        self.has_left = True
        # The search goes through all objects of the process. It runs while the launcher replaces the lost ranks.
        own_slot().leave(SEAT_S, meanwhile=self._groups.find_holders)

    def connected(self) -> None:
        """All ranks are connected again: let model and optimizer use the new process groups.

        Raises StillConnected.
        """
        if self._groups is not None:
            # Cleared before `replace`, which may raise: then this process ends, and nothing is tried twice.
            groups, self._groups = self._groups, None
            replaced = groups.replace()
            facts = sum(replaced.values()), dict(replaced)
            log.debug("%d references to process groups were renewed: %s", *facts)
        self.has_left = False


def _has_to_end(error: BaseException, chunks: Sequence[torch.nn.Module]) -> str | None:
    """Why this process cannot stay; empty where that goes without saying, None where it can."""
    slot = own_slot()
    if not slot.may_stay or isinstance(error, Terminated) or not (is_lost_peer(error) or slot.is_called_off):
        return ""
    if own_build().answers is None:
        return "others could not build beside it"
    return needs_fresh_process(get_model_config(chunks[0]))


def needs_fresh_process(config: Any) -> str | None:
    """Why a process with this model has to end with a fault; None where it can stay.

    config: core's configuration of the model, or Megatron-LM's arguments.
    """
    return "; ".join(unreleasable(config)) or None


def _device_answers() -> bool:
    """Whether the GPU has come to the end of what was aborted; true where there is none."""
    if not torch.cuda.is_initialized():
        return True
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # an error that stays: the context is lost
            torch.cuda.synchronize()
            answers.append(True)

    # CUDA waits without a timeout, so a thread does. It is a daemon: where the device hangs for good it never returns,
    # and must not keep the process from ending.
    thread = device_thread(ask, "moe-ckpt-device")
    thread.start()
    thread.join(_DEVICE_S)
    return bool(answers)


def _clear_frames(error: BaseException | None) -> None:
    """Release what the interrupted iteration held."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


# Work that waits for other ranks inside of torch, and is left there once training begins again.

POLL_S = 0.02
GRACE_S = 1.0
"""How long the work may take to fail by itself once connections are closed."""


class RestartSuperseded(PeerLost):
    """Training begins again while this rank waited for others."""


def unless_called_off(work: Callable[[], object], slot: WorkerSlot) -> None:
    """Do work that waits for other ranks: on a thread of its own where this process keeps its slot, else right here.

    A rank that dies while all connect leaves the others in calls of torch and gloo (2.13) that wait for it to dial;
    there is no connection yet whose end would wake them, so they last for as long as the timeout of collectives. The
    launcher knows better and tells `slot`. Then the thread is left behind, with an exception that strikes it
    should it ever come back to Python.

    Args:
        work: Makes connections to other ranks. It uses the caller's current device on whichever thread it runs.
        slot: Of this process; `is_called_off` is polled every 20 ms.

    Raises:
        CalledOff: The launcher begins training again, and the work did not end within a second after that.
        BaseException: What the work raises.
    """
    if not slot.keeps:
        work()
        return
    # The current device is a setting of each thread: without it NCCL would connect on device 0.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            work()
        except BaseException as error:  # raised by whoever waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="moe-ckpt-connect", daemon=True)
    thread.start()
    while thread.is_alive() and not slot.is_called_off:
        thread.join(POLL_S)
    # Where connections are closed already the work fails by itself: its own error says more than `RestartSuperseded`.
    thread.join(GRACE_S)
    if errors:
        raise errors[0]
    if thread.is_alive():
        _raise_in(thread, RestartSuperseded)
        raise RestartSuperseded("training begins again while this rank connected to others")


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have this raised in another thread as soon as it runs Python again."""
    assert thread.ident is not None
    # Noted in the thread's state and raised between two bytecodes. A call into C that never returns never sees it.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))


# CUDA graphs and buffers that peers write to: bound to connections of a process, without a reference to a group.
#
# Each is released before groups are made again, and made by its owner as in a new process: graphs are captured in the
# iterations after the recovery, a dispatcher's buffer by its next dispatch, the buffers of `--tp-comm-overlap` by
# Megatron-LM's own function. All ranks make them together, those that stayed and those that are new. Read in core
# 0.17 to 0.19, Transformer Engine 2.20, DeepEP and its branch with HybridEP.

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
