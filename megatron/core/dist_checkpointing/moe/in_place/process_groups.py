"""The connections of a live process: its process groups, and what is bound to them, replaced without touching a tensor.

Megatron-Core hands process groups to modules, optimizers, buckets of gradients and dispatchers when they are built,
each of which keeps them as plain attributes. So whoever refers to an old group is found by asking the garbage
collector, and gets the new group of the same name: c10d names groups by the order in which they are made, and the same
code makes them in the same order. What cannot be changed in place is reported, and then this process has to end.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.core import full_cuda_graph, parallel_state
from megatron.core.transformer.moe import fused_a2a

from ..device import device_thread
from ..errors import NewProcessesNeeded
from ..runtime.peer_links import close_connections, named_groups, take_aborted_groups
from ..types.operators import scaled

log = logging.getLogger(__name__)


class StillConnected(NewProcessesNeeded):
    """Something holds a process group of before the fault and cannot be given the new one."""


class ProcessGroups:
    """The process groups that this process had, and that its objects still refer to.

    Sequence: `taken_down`; `find_holders`, while others are waited for; then whoever made the groups makes them again,
    with as many ranks and the same layout; then `replace`.

    Args:
        groups: By c10d's names.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = dict(groups)
        self._holders: list[Any] = []

    @classmethod
    def taken_down(cls) -> ProcessGroups:
        """End all connections of this process, and let c10d and Megatron-Core forget all groups. Waits for nobody."""
        # Closed first, so that `destroy_process_group` finds no work that still waits for a lost peer.
        close_connections()
        # Where NCCL was aborted c10d has forgotten its groups, which were noted before that; else it still names them.
        groups = take_aborted_groups() | named_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        c10d._world.group_count = 0  # else the names continue from where a fault struck while groups were made
        parallel_state.destroy_model_parallel()
        return cls(groups)

    def find_holders(self) -> None:
        """Find whoever refers to an old group; can be left out, and then `replace` takes longer."""
        # What training before the fault left in circles holds sockets of c10d's stores, too; and nobody waits for this.
        gc.collect()
        groups = list(self._groups.values())
        self._holders = [one for one in _holders_of(groups, self._groups) if one is not self._groups]

    def replace(self) -> Counter[str]:
        """Give whoever refers to an old group the new one of its name; how many references, by the kind of holder.

        Raises StillConnected.
        """
        new, olds = named_groups(), list(self._groups.values())
        swap = {id(group): new[name] for name, group in self._groups.items() if name in new}
        # `olds` must be the only reference of this method: `_are_referred_to` counts all others.
        self._groups = {}
        found = _exchanged(self._holders, swap)
        self._holders = []
        # `find_holders` may not have run, or something took an old group after it.
        if _are_referred_to(olds):
            found += _exchanged(_holders_of(olds), swap)
        if left := _kinds_of_holders(olds):
            gc.collect()  # what the interrupted iteration left in circles
            left = _kinds_of_holders(olds)
        if left:
            raise StillConnected(
                f"{', '.join(left)} keep process groups of before the fault, which cannot be replaced there: this"
                " process ends, and another one takes its rank"
            )
        # The destructor of a group joins torch's threads, which may sleep for minutes after an error.
        device_thread(olds.clear, "moe-ckpt-old-groups").start()
        return found


def _kinds_of_holders(groups: Sequence[dist.ProcessGroup]) -> list[str]:
    return sorted({_kind(holder) for holder in _holders_of(groups)}) if _are_referred_to(groups) else []


def _are_referred_to(groups: Sequence[dist.ProcessGroup], known: Mapping[int, int] | None = None) -> bool:
    """Whether anything in Python refers to one of these groups, but `groups` itself. Asks their counts of references,
    which takes no time, and counts running frames, too. known: references to each, by its id, that do not count."""
    # The count of an object that one list refers to and nothing else. What the call itself adds is in both numbers.
    alone, known = [object()], known or {}
    counts = [*map(sys.getrefcount, groups)]  # before anything else here refers to one of them
    own = max(map(sys.getrefcount, alone))
    return any(count - known.get(id(group), 0) > own for group, count in zip(groups, counts, strict=True))


def _holders_of(groups: Sequence[dist.ProcessGroup], *known: object) -> list[Any]:
    """All objects that refer to one of these groups, apart from frames that run and from `groups` itself.

    The collector does not look through what was there when imports were frozen (`gc.freeze`), modules and what is in
    them, nor through dicts and tuples with nothing in them that could be a part of a circle, such as process groups:
    those are looked through here, until all references are found. known: objects that are looked at early.
    """
    wanted, seen = {id(group) for group in groups}, {id(groups)}
    holders: list[Any] = []  # whole, before any of them is given another group: references are counted meanwhile
    found: Counter[int] = Counter()
    # The quickest first. Core forgets all but one of its groups.
    near = lambda: gc.get_referrers(*groups), lambda: [vars(parallel_state), *known]
    for search in (*near, _hidden_containers, _containers_of_modules):
        for holder in search():
            if id(holder) in seen or isinstance(holder, types.FrameType):
                continue
            seen.add(id(holder))
            # By identity: tensors and arrays in these containers compare element by element.
            if held := [one for one in map(id, _held(holder)) if one in wanted]:
                found.update(held)
                holders.append(holder)
        if not _are_referred_to(groups, found):
            break
    return holders


def _hidden_containers() -> list[Any]:
    """Dicts and tuples that the collector does not track, in objects that it does, and in each other."""
    found: list[Any] = []  # in a dict or a tuple they would be found again
    seen: set[int] = set()
    news = gc.get_referents(*gc.get_objects())
    while news:
        hidden = []
        for one in news:
            if type(one) in (dict, tuple) and id(one) not in seen and not gc.is_tracked(one):
                seen.add(id(one))
                hidden.append(one)
        found += hidden
        news = [held for one in hidden for held in _held(one)]
    return found


def _containers_of_modules() -> Iterator[Any]:
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict):
            yield space
            yield from [value for value in space.values() if type(value) in (dict, list, tuple, type)]


def _held(holder: Any) -> Iterable[Any]:
    """What it refers to, as the collector has it, each reference once; of a class the values of its attributes."""
    return vars(holder).values() if isinstance(holder, type) else gc.get_referents(holder)


def _exchanged(holders: Iterable[Any], swap: Mapping[int, Any]) -> Counter[str]:
    """How many references were replaced, by the kind of holder.

    A function of its own: a name that a loop leaves behind in `replace` would be a holder, too.
    """
    found: Counter[str] = Counter()
    for holder in holders:
        found[_kind(holder)] += _swapped(holder, swap)
    return +found


def _swapped(holder: Any, swap: Mapping[int, Any]) -> int:
    """How many references of this holder were replaced: items of dicts and lists, variables of closures, attributes."""
    replaced = 0
    if isinstance(holder, dict):
        # Values only. A group that is a key stays, and `replace` reports its dict.
        for key, value in list(holder.items()):
            if id(value) in swap:
                holder[key] = swap[id(value)]
                replaced += 1
    elif isinstance(holder, list):
        for index, value in enumerate(holder):
            if id(value) in swap:
                holder[index] = swap[id(value)]
                replaced += 1
    elif isinstance(holder, types.CellType):
        if id(holder.cell_contents) in swap:
            holder.cell_contents = swap[id(holder.cell_contents)]
            replaced = 1
    elif hasattr(holder, "__dict__"):
        # Since Python 3.11 the attributes of an object are kept beside it until somebody asks for their dict.
        assign = type.__setattr__ if isinstance(holder, type) else object.__setattr__
        for name, value in list(vars(holder).items()):
            if id(value) in swap:
                assign(holder, name, swap[id(value)])
                replaced += 1
    return replaced


def _kind(holder: Any) -> str:
    """For people."""
    if isinstance(holder, dict) and "__name__" in holder and "__loader__" in holder:
        return f"module {holder['__name__']}"
    if isinstance(holder, dict):
        return f"dict with {', '.join(map(str, list(holder)[:3]))}"
    return f"{type(holder).__module__}.{type(holder).__qualname__}"


# CUDA graphs and buffers that peers write to: bound to connections of a process, without a reference to a group.
#
# Each is released before groups are made again, and made by its owner as in a new process: graphs are captured in the
# iterations after the recovery, a dispatcher's buffer by its next dispatch, the buffers of `--tp-comm-overlap` by
# Megatron-LM's own function. All ranks make them together, those that stayed and those that are new. Read in core
# 0.17 to 0.19, Transformer Engine 2.20, DeepEP and its branch with HybridEP.


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
