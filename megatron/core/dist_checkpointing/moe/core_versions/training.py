"""What a training loop calls that has moved, or takes other arguments, in some release of Megatron-Core, and how its
attributes are replaced for a block."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from itertools import accumulate
from multiprocessing.managers import SyncManager
from typing import Any

import torch

from megatron.core import rerun_state_machine
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from ..standby.slot import end_with_parent

try:  # from 0.18 on
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
except ImportError:
    get_moe_metrics_tracker = None
try:  # from 0.18 on
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as _Indexers
except ImportError:
    _Indexers = None
try:  # from 0.18 on
    from megatron.core.transformer.moe import paged_stash
except ImportError:
    paged_stash = None


def forget_auxiliary_losses() -> None:
    """Set to zero what routers, and layers that predict further tokens, have noted of this iteration."""
    for noted in _of_iteration():
        MTPLossLoggingHelper.tracker[noted].zero_()
    if _Indexers is not None and "values" in _Indexers.tracker:
        _Indexers.tracker["values"].zero_()
    if get_moe_metrics_tracker is None:
        moe_utils.clear_aux_losses_tracker()
    else:
        get_moe_metrics_tracker().clear()


def drop_auxiliary_losses() -> None:
    """Drop the tensors of these trackers, which have as many elements as this job's model has layers, and the process
    groups that they are reduced over."""
    for noted in (*_of_iteration(), "reduce_group", "avg_group"):
        MTPLossLoggingHelper.tracker.pop(noted, None)
    if _Indexers is not None:
        _Indexers.tracker.clear()
    if get_moe_metrics_tracker is None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


@contextlib.contextmanager
def saving_without_padding(optimizer: Any) -> Iterator[None]:
    """A block in which core saves `fully_reshardable` state of the distributed optimizer as it is.

    It gathers buffers without the padding between buckets, but (up to 0.19.2) takes each parameter from its place in a
    buffer that has it: behind the first padding it saved the state of neighbours.
    """
    with contextlib.ExitStack() as stack:
        for member in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
            for buffer in getattr(member, "buffers", ()):
                before = [
                    *accumulate((one.grad_data.numel() - one.numel_unpadded for one in buffer.buckets), initial=0)
                ]
                places = buffer.param_index_map.items()
                moved = {of: (start - before[at], end - before[at], at) for of, (start, end, at) in places}
                stack.enter_context(replaced(buffer, param_index_map=moved))
        yield


def _of_iteration() -> list[str]:
    """What layers that predict further tokens have noted since it was last reported; rates of all training are left."""
    items = MTPLossLoggingHelper.tracker.items()
    return [name for name, value in items if torch.is_tensor(value) and not name.startswith("cumulative")]


def forget_offloading() -> None:
    """Drop what core has learned of activations that it offloads: its next iteration is to it the first one.

    In that one it lists them in their order, and at its end all ranks of the job gather how much each offloads.
    """
    fine_grained_activation_offload.PipelineOffloadManager.OFFLOAD_MGR = None


@contextlib.contextmanager
def offloading_alone() -> Iterator[None]:
    """A block with one iteration in which core offloads other activations than in training, maybe on some ranks only.

    Core learns of them in it as in a first iteration, asks no other ranks, and has forgotten them behind the block.
    """
    forget_offloading()
    with replaced(fine_grained_activation_offload, print_offload_summary_table=lambda _: None):
        yield
    forget_offloading()


def forget_pages() -> None:
    """Drop what core has learned of activations that it keeps in pages (`--moe-paged-stash`), and the pages.

    Its next iteration is to it the first one, which keeps them as they are.
    """
    if paged_stash is not None and (manager := paged_stash.PagedStashManager.STASH_MGR) is not None:
        vars(manager).update(vars(type(manager)()))  # in place: who runs passes again holds this one


@contextlib.contextmanager
def noting_pages(note: Callable[[bool], None]) -> Iterator[None]:
    """A block around the passes of an iteration. Calls `note` where some rank has too few pages for its activations,
    with whether that alone has passes run again: all ranks had room for their tokens."""
    if paged_stash is None:
        yield
        return
    runner = paged_stash.PagedStashRunner
    check = runner.check_moe_overflow

    def noted(self: Any) -> tuple[int, int, int]:
        pages, room, spilled = check(self)
        if pages:
            note(not room)
        return pages, room, spilled

    with replaced(runner, check_moe_overflow=noted):
        yield


@contextlib.contextmanager
def before_passes_are_repeated(call: Callable[[], None]) -> Iterator[None]:
    """A block in which `call` is called where core runs the passes of an iteration once more, for an overflow.

    Those of an evaluation come behind an iteration whose counts nobody has taken yet.
    """
    if paged_stash is None:
        yield
        return
    runner = paged_stash.PagedStashRunner
    prepare = runner.prepare_for_rerun

    def prepared(self: Any, *given: Any, **named: Any) -> None:
        if named.get("is_training", all(given)):  # its only argument
            call()
        prepare(self, *given, **named)

    with replaced(runner, prepare_for_rerun=prepared):
        yield


@contextlib.contextmanager
def judging_results(note: Callable[[], None], put_back: Callable[[], None], *, from_first: bool) -> Iterator[None]:
    """A block around training in which core may go back to before the passes of an iteration: where it runs them again,
    to see whether a doubtful result comes out again, and for the checkpoint that it then saves.

    Nothing is done for a loop that has made no machine of core's for it by then, so that none is made here.

    Args:
        note: Called before passes which core may run again.
        put_back: Puts back what passes have changed since, besides random states.
        from_first: Whether results of the first iteration are judged, which core leaves out: it could not save before
            an optimizer's first step. One that was restored can be saved, and the iteration is none of the first.
    """
    machine = vars(rerun_state_machine).get("_GLOBAL_RERUN_STATE_MACHINE")
    if machine is None:
        yield
        return
    save, restore = machine.state_save_func, machine.state_restore_func

    def saved() -> list[Any]:
        note()
        return [save() if save is not None else None]  # never empty, which core would not restore

    def restored(state: list[Any]) -> None:
        put_back()
        if restore is not None and state[0]:
            # Of copies: core's tracker of random states takes the very dictionary that it is given, and notes in it
            # what the next passes draw; before the checkpoint that would be put back.
            restore({name: dict(one) if isinstance(one, dict) else one for name, one in state[0].items()})

    machine.first_iteration_complete |= from_first
    with replaced(machine, state_save_func=saved, state_restore_func=restored):
        yield


def is_in_doubt() -> bool:
    """Whether core saves now to have the next start run a doubtful iteration again, elsewhere, and judge it."""
    machine = vars(rerun_state_machine).get("_GLOBAL_RERUN_STATE_MACHINE")
    return machine is not None and machine.state is rerun_state_machine.RerunState.WILL_RERUN_FROM_CHECKPOINT


@contextlib.contextmanager
def pages_as_noted(out_of_pages: bool) -> Iterator[None]:
    """A block with one iteration that is run again, maybe with fewer activations, and without pages.

    Passes are run again where they were in training. That there is no room for all tokens comes out again by itself.

    Args:
        out_of_pages: Whether there were too few pages then.
    """
    if paged_stash is None:
        yield
        return
    runner, overflows = paged_stash.PagedStashRunner, [int(out_of_pages)]
    check = runner.check_moe_overflow

    def as_noted(self: Any) -> tuple[int, int, int]:
        _, room, _ = check(self)
        return (overflows.pop() if overflows else 0), room, 0

    forget_pages()
    with replaced(runner, check_moe_overflow=as_noted):
        yield
    forget_pages()


def uses_cuda_graphs(config: Any) -> bool:
    """Whether a model of this configuration runs kernels that were captured in an earlier iteration."""
    return getattr(config, "cuda_graph_impl", "none") != "none" or bool(getattr(config, "enable_cuda_graph", False))


def captures_passes(config: Any) -> bool:
    """Whether all passes of an iteration are one CUDA graph; nothing of theirs runs in Python once it is captured."""
    # Up to 0.17 a scope, which newer releases turn into an implementation.
    return getattr(config, "cuda_graph_impl", "none") == "full_iteration" or "full_iteration" in _captured(config)


def captures_routers(config: Any) -> bool:
    """Whether routers run inside of CUDA graphs, where their hooks are not called."""
    if not uses_cuda_graphs(config):
        return False
    modules = _captured(config)  # none named: whole layers
    return captures_passes(config) or not modules or not modules.isdisjoint(("moe", "moe_router", "moe_preprocess"))


def _captured(config: Any) -> set[str]:
    """The modules that are captured, by name; `cuda_graph_scope` until 0.18."""
    found: set[str] = set()
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        given = getattr(config, name, None) or ()
        each = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
        found.update(getattr(one, "name", one) for one in each)
    return found - {"full"}


def gathers_after_step(member: Any) -> list[tuple[Any, str]]:
    """The methods, as owner and name, by which one optimizer, or a chain apart from its members, has compute weights
    gathered at the end of its step."""
    chunks = [(chunk, "start_param_sync") for chunk in getattr(member, "model_chunks", [])]
    return [*((member, name) for name in _GATHERS if hasattr(member, name)), *chunks]


_GATHERS = (
    "start_param_sync_for_bucket_group_subset",  # from 0.18 on optimizers go through the groups of buckets themselves
    "allgather_params",  # of a layer-wise chain that was made without the layout of buckets
    "_start_deferred_mxfp8_param_sync",  # of a chain that waits until the last of its optimizers has staged its masters
)


def last_before_clipping(optimizer: Any) -> str:
    """The method whose return the step of an optimizer, or a chain, begins to clip after."""
    # From 0.19 on the norms of groups come last, and not where nothing is clipped.
    of_groups = "_compute_grad_norms_by_group"
    return of_groups if hasattr(optimizer, of_groups) else "get_grad_norm"


def skips_for_norm(config: Any) -> bool:
    """Whether an optimizer of this configuration skips steps whose gradients have too large a norm (from 0.18 on)."""
    return math.isfinite(getattr(config, "grad_norm_skip_threshold", math.inf))


def has_norm_of_its_own(parameter: torch.nn.Parameter) -> bool:
    """Whether gradients of this parameter are clipped by the norm of a group of their own (from 0.19 on)."""
    return getattr(parameter, "grad_norm_group", None) is not None


def norm_as_in_training(optimizer: ChainedOptimizer, norm: float | None) -> float | torch.Tensor | None:
    """A gradient norm from a journal as the optimizer's step had it when it clipped by it.

    Newer releases (0.19.2) leave it on the device where Transformer Engine can scale by what is there: the
    scale is then computed in single precision, else in double. Gradients differ in the last bit.

    Args:
        optimizer: Whose step clips.
        norm: The total norm as the journal has it; None where it has none.

    Returns:
        A float32 tensor of one element on the current device where core would have one, else the number.
    """
    if norm is None or getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is None:
        return norm
    if len(optimizer.chained_optimizers) > 1 and not optimizer.grads_states_parallel_group_is_shared():
        return norm  # made of the norms of all parts, as a number
    return torch.tensor([norm], dtype=torch.float32, device=torch.cuda.current_device())


# The processes in which core writes checkpoints in the background, made to end with the trainer that started them.
#
# Core (0.17 to 0.19) keeps a worker, and a manager of a queue for its results. Both wait for a trainer that was killed
# without end, with torch imported and all that they were given.

_LOOP = "async_loop"
_core_loop = getattr(PersistentAsyncCaller, _LOOP)  # here it is core's own, also in a worker, which imports this again


@contextlib.contextmanager
def ending_with_their_trainer() -> Iterator[None]:
    """In this block workers that core starts end with this process."""
    with replaced(PersistentAsyncCaller, **{_LOOP: staticmethod(worker)}):
        yield


def worker(*arguments: Any) -> None:
    """What such a worker does: as core's."""
    end_with_parent()
    _core_loop(*arguments)


def results_queue(mp_mode: str = "spawn") -> Any:
    """As core's queue for results of saves, one for all; the process that keeps it ends with this one.

    mp_mode: how that is started, at the first call.
    """
    if not _kept:
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
        manager.start(end_with_parent)
        _kept.append((manager, manager.Queue()))  # the queue ends with its manager
    return _kept[0][1]


_kept: list[tuple[SyncManager, Any]] = []


# Core's writer of `torch_dist` checkpoints.

_QUEUE = (
    "get_write_results_queue" if hasattr(filesystem_async, "get_write_results_queue") else "_get_write_results_queue"
)


@contextlib.contextmanager
def results_in_process(is_async: Callable[[], bool]) -> Iterator[None]:
    """Keep core from starting a manager process for the results of a save that this process writes itself.

    Starting one imports torch again on every rank, at the first save after each start. One that is needed ends with
    this process.

    Each save has a queue of its own, where core has one for all. When a rank is lost, or cannot write, the results of
    the others stay in it: the next save would take them for its own, and its index would say where other bytes lie.

    Args:
        is_async: Whether other processes write, whose results come through that manager.
    """

    def chosen(*given: Any, **named: Any) -> Any:
        return results_queue(*given, **named) if is_async() else queue.Queue()

    with replaced(filesystem_async, **{_QUEUE: chosen}):
        yield


# Attributes of core's objects and modules, for a block.


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an instance, a class or a module, and put back what it had of its own."""
    own = vars(owner)  # not `getattr`: a bound method put back would shadow the class's for good
    before = {name: own[name] for name in values if name in own}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
