"""How a training loop continues in the process that lost a peer.

kept = InProcessRestart(chunks, optimizer)
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
import importlib
import json
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config, get_te_version, is_te_min_version

from ..device import device_thread
from ..errors import NewProcessesNeeded, NoExactState, PeerLost, ReplayDiverged, Terminated
from ..megatron_state.quantization import forget_reductions
from ..recovery.timeline import Milestone, Timestamps
from ..runtime.opening import RECOVERY_PATIENCE
from ..runtime.peer_links import is_lost_peer, process_group_backend
from ..runtime.watcher import watched_start
from ..standby.heartbeat import own_heartbeat
from ..standby.slot import WorkerSlot, own_slot
from .building import VAIN_STARTS, built_beside_survivors, own_build
from .passes import as_in_new_process
from .process_groups import ProcessGroups, release

log = logging.getLogger(__name__)

SEAT_S = 900.0
"""How long a rank waits to be let continue: nodes may have to be replaced, and their processes to start."""
_DEVICE_S = 10.0
_OWN = (MemoryError, torch.OutOfMemoryError, NewProcessesNeeded, NoExactState, ReplayDiverged)
"""What no connection raises that others have closed."""


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
        self._vain_starts = 0

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
        # Before the launcher sees this process leave. Where it closed what was being connected, any error is of that.
        if is_lost_peer(error) or (manager is None and own_slot().is_called_off):
            own_heartbeat().rest(lost_a_peer=True)
        why = "" if manager is not None and manager.is_told_to_end else _has_to_end(error, self._chunks)
        self._vain_starts = self._vain_starts + 1 if manager is None else 0
        if why is None and self._vain_starts >= VAIN_STARTS:
            why = f"training did not begin with others, {VAIN_STARTS} times"
        if why is None and not _device_answers():  # first: to abandon what a device holds up would wait for it
            why = "its device does not answer"
        if why is None and manager is not None and not manager.abandon():
            why = "work beside training does not end"
        if why is not None:
            if why:
                log.info("cannot recover in place, another process takes this rank: %s", why)
            raise error
        if manager is not None and not is_lost_peer(error):
            # Closed connections raise errors of many kinds: one of this rank's own looks no different.
            log.error("this rank stays for the restart of training; its iteration ended with", exc_info=error)
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
    is_others = is_lost_peer(error) or (slot.is_called_off and not isinstance(error, _OWN))
    if not slot.may_stay or isinstance(error, Terminated) or not is_others:
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
        RestartSuperseded: The launcher begins training again, and the work did not end within a second after that.
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


# What is bound to connections and cannot be released (see `process_groups.release`).

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


_KERNELS = {
    "deepep": ("deep_ep", "Buffer"),
    "hybridep": ("deep_ep", "HybridEPBuffer"),
    "ncclep": ("transformer_engine.pytorch.ep", "ep_bootstrap"),
}
"""What core takes of which package, by backend of the flex dispatcher."""


def missing_kernels(args: Any) -> Iterator[str]:
    """A sentence where the flex dispatcher of this job is not installed, or in part.

    args: of Megatron-LM, or core's configuration of the model.
    """
    experts = getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None)
    if getattr(args, "moe_token_dispatcher_type", None) != "flex" or not experts:
        return
    backend = flex_backend(args)
    if backend not in _KERNELS:
        yield f"--moe-flex-dispatcher-backend {backend} is unknown; choose {', '.join(_KERNELS)}"
        return
    package, name = _KERNELS[backend]
    try:
        if hasattr(importlib.import_module(package), name):
            return
        why = f"{package} has none, it is another version"
    except (ImportError, OSError, RuntimeError) as error:  # compiled parts that do not load
        why = str(error)
    yield (
        f"--moe-token-dispatcher-type flex with --moe-flex-dispatcher-backend {backend} needs {package}.{name}: {why};"
        " install it, or use --moe-token-dispatcher-type alltoall"
    )


# A training loop that a process outlives: its `train` is left at a fault of others, and entered again.
#
# Model, optimizer and datasets stay as they are; iterators over data are made again. What takes the place of a lost
# rank goes through all of the loop's script, alone: up to `train` its collectives are answered, see `building`.

_TOLD = "moe-ckpt-stock-data"
_TIMEOUT_S = 600.0


class Datasets:
    """A provider of datasets that remembers what it gave."""

    def __init__(self, provider: Callable[..., Any]) -> None:
        self._provider = provider
        self._given: dict[str, Any] = {}
        self.is_distributed = getattr(provider, "is_distributed", False)

    def __call__(self, *sizes: Any, **options: Any) -> Any:
        # By sizes asked for: a loop that asks for other sizes after a fault gets them.
        asked_for = repr((sizes, options))
        if asked_for not in self._given:
            self._given = {asked_for: self._provider(*sizes, **options)}
        return self._given[asked_for]


def become(old: Any, new: Any) -> None:
    """Let iterators that others hold read what new ones would read.

    Args:
        old: One of them, a sequence of any depth, or None.
        new: As many.
    """
    if isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            become(one, other)
    elif old is not None:
        # In place: the loop, its callbacks and wrappers have it in variables of their own.
        vars(old).clear()
        vars(old).update(vars(new))


def tell(facts: dict[str, Any]) -> None:
    """For survivors: what all ranks agreed on when data were built."""
    # The store of this attempt, which replacements have, too; no collective works for them yet.
    _get_default_store().set(_TOLD, json.dumps(facts))


def survivors_facts() -> dict[str, Any]:
    """For a process that comes to them. Raises PeerLost."""
    store = _get_default_store()
    try:
        store.wait([_TOLD], timedelta(seconds=_TIMEOUT_S))
    except RuntimeError:
        raise PeerLost(f"waited {_TIMEOUT_S:g} s for a survivor to tell which data there are") from None
    facts: dict[str, Any] = json.loads(store.get(_TOLD))
    return facts


class LoopSurvivor:
    """This process as one that stays, or as one that comes to those; a loop's adapter calls what its loop does.

    Attributes:
        marks: Of this process or of its newest slot, for the timeline of a recovery.
    """

    def __init__(self) -> None:
        self._build, self._watched = contextlib.ExitStack(), contextlib.ExitStack()
        self._connect: Callable[[], object] | None = None
        self._overlap: Callable[[], object] | None = None
        self._kept: InProcessRestart | None = None
        self.marks = _marks(stayed=False)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block with collectives of all ranks."""
        self._build.close()
        try:
            yield
        finally:
            self._watched.close()  # the session has a watcher of its own by now
        if self._kept is None:
            self._begin_building()

    def _imported(self) -> None:
        self.marks.mark(Milestone.IMPORTED)

    def _met(self) -> None:
        self.marks.mark(Milestone.RENDEZVOUS)

    def _connected(self, connect: Callable[[], object]) -> None:
        """All ranks are connected for the first time in this process, and it can stay. connect: does that again."""
        own_build().connected()
        self._connect = connect
        self._begin_building()

    def _cannot_stay(self, reason: str) -> None:
        if own_slot().may_stay and dist.get_rank() == 0:
            log.warning("in-place recovery disabled, a failure restarts all ranks: %s", reason)

    def _overlapping(self, overlap: Callable[[], object]) -> None:
        """Make the buffers of `--tp-comm-overlap`: survivors make them, too, so nothing is answered."""
        self._build.close()
        overlap()
        self._overlap = overlap
        self._begin_building()

    def _connect_again(
        self, timeout_s: float, facts: dict[str, Any], connected: Callable[[], None] = lambda: None
    ) -> None:
        """After a fault. facts: that all ranks agreed on when data were built; connected: what the loop does then."""
        assert self._kept is not None
        self.marks = _marks(stayed=True)
        unless_called_off(self._connect_all, own_slot())
        self._watch(timeout_s)
        try:
            self.marks.mark(Milestone.RENDEZVOUS)
            tell(facts)
            self._kept.connected()
            connected()
        except BaseException:
            self._watched.close()  # this process may stay, and waits for its launcher now
            raise

    def _connect_all(self) -> None:
        assert self._connect is not None
        self._connect()
        own_build().connected()
        # Behind that, as new processes do once they know of survivors: a collective.
        if self._overlap is not None:
            self._overlap()

    def _watch(self, timeout_s: float) -> None:
        """Until the session watches: a rank that is stopped before keeps others in collectives of NCCL for ever."""
        if "nccl" in process_group_backend():
            self._watched.enter_context(watched_start(dist.get_rank(), RECOVERY_PATIENCE * timeout_s))

    def _begin_building(self) -> None:
        if self._connect is not None:
            self._build.enter_context(built_beside_survivors(own_build()))


def settings_of(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Settings that this release has, by name.

    Args:
        config: Of a model chunk.
        names: Of settings.
    """
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def prepare_chunks(chunks: Sequence[Any], timers: Any) -> None:
    """Let `train` begin with them as it does in a process that was just built.

    Args:
        chunks: Of the model of this rank.
        timers: Of the loop.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
    for timer in timers._timers.values():
        timer.reset()  # one that runs cannot be started


def _marks(*, stayed: bool) -> Timestamps:
    marks = Timestamps(stayed=stayed)
    marks.mark(Milestone.RESTARTED, own_slot().began_s)
    return marks
