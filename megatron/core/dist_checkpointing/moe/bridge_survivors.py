"""How a process in Megatron-Bridge's loop outlives faults of others: it leaves Bridge's `train`, and enters it again.

As in the loop of Megatron-LM (`stock.survivors`): nothing of `pretrain` comes a second time but `train`. Configuration,
model, optimizer and datasets stay as they are, and so does Bridge's `GlobalState`, whose counts the recovery sets back.
What takes the place of a lost rank goes through all of `pretrain`, alone: up to `train` its collectives are answered,
see `in_place.building`, apart from the recovery, in which all ranks take part. Lines are those of Bridge 0.6.2.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch.distributed as dist

from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.utils import get_model_config

from .core_versions.training import replaced
from .in_place.building import built_beside_survivors, own_build, rehearsed
from .in_place.datasets import Datasets, become, survivors_facts, tell
from .in_place.process_restart import InProcessRestart, needs_fresh_process, unless_called_off
from .recovery.timeline import Milestone, Timestamps
from .runtime.nccl_settings import process_group_backend
from .runtime.opening import RECOVERY_PATIENCE
from .runtime.watcher import watched_start
from .standby.slot import own_slot

log = logging.getLogger(__name__)

TRAINING = "megatron.bridge.training"
_CONNECTS, _OVERLAPS = "_initialize_distributed", "_initialize_tp_communicators"
_DATA = "setup_data_iterators"
_FACTS = "do_train", "do_valid", "do_test"
"""What ranks agree on in `train_state` when data are built."""

_TWICE = "cannot be set up twice in a process"
_RULES = (
    ("checkpoint", "async_save", "its queue of checkpoints holds process groups of the lost connections"),
    ("ft", "enable_ft_package", "its monitor takes a rank that waits for a hung one"),
    ("straggler", "log_straggler", f"its detector {_TWICE}"),
    ("nvrx_straggler", "enabled", f"its detector {_TWICE}"),
    ("profiling", "use_pytorch_profiler", f"a profile {_TWICE}"),
    ("profiling", "use_nsys_profiler", f"a profile {_TWICE}"),
    ("logger", "log_energy", f"its monitor {_TWICE}"),
    ("tensor_inspect", "enabled", f"it {_TWICE}"),
    ("dist", "lazy_mpu_init", "groups are then made by somebody else"),
    ("optimizer", "optimizer_cpu_offload", "it was never tested with"),
)


def why_not(cfg: Any) -> str | None:
    """Why processes of a job with this ConfigContainer cannot stay, None where they can."""
    for section, name, reason in _RULES:
        if getattr(getattr(cfg, section, None), name, False):
            return f"{section}.{name}: {reason}"
    return needs_fresh_process(getattr(cfg.model, "transformer", None) or cfg.model)


class BridgeSurvivors:
    """This process as one of them, or as one that comes to them.

    Args:
        timeout_s: For a collective wait of a recovery, as the settings have it.

    Attributes:
        marks: Of this process or of its newest slot, for the timeline of a recovery.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._build = contextlib.ExitStack()
        self._watched = contextlib.ExitStack()
        self._connect: Callable[[], object] | None = None
        self._overlap: Callable[[], object] | None = None
        self._kept: InProcessRestart | None = None
        self._given_data: dict[str, Any] = {}
        self._iterators: Any = None
        self.marks = _marks(stayed=False)

    @contextlib.contextmanager
    def building(self, cfg: Any) -> Iterator[None]:
        """A block around Bridge's `pretrain`, in which its own functions are taken hold of; no source is changed.

        cfg: Bridge's ConfigContainer.
        """
        names = "pretrain", "initialize", "setup"
        loop, initialize, setup = (sys.modules.get(f"{TRAINING}.{name}") for name in names)
        taken = (loop, "train"), (initialize, _CONNECTS), (initialize, _OVERLAPS), (setup, _DATA)
        if not all(hasattr(module, name) for module, name in taken):  # another loop, or a release that is not known
            yield
            return
        connect, overlap = getattr(initialize, _CONNECTS), getattr(initialize, _OVERLAPS)
        reason = "torch.distributed was started before `pretrain`" if dist.is_initialized() else why_not(cfg)

        def connecting(*given: Any, **named: Any) -> Any:
            groups = connect(*given, **named)
            if reason is None:
                self._watch()
                own_build().connected()
                self.marks.mark(Milestone.RENDEZVOUS)
                self._connect = functools.partial(connect, *given, **named)
                self._begin_building()
            elif own_slot().may_stay and dist.get_rank() == 0:
                log.warning("in-place recovery disabled, a failure restarts all ranks: %s", reason)
            return groups

        def overlapping(*given: Any) -> None:
            self._build.close()  # survivors make these buffers, too: nothing is answered
            overlap(*given)
            self._overlap = functools.partial(overlap, *given)
            self._begin_building()

        data, train = getattr(setup, _DATA), vars(loop)["train"]
        with (
            self._build, self._watched, replaced(initialize, **{_CONNECTS: connecting, _OVERLAPS: overlapping}),
            replaced(setup, **{_DATA: functools.partial(self._build_data, data)}),
            replaced(loop, train=functools.partial(self._train, train)),
        ):  # fmt: skip
            yield

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

    def _build_data(self, set_up: Callable[..., Any], **named: Any) -> Any:
        """In place of `setup_data_iterators`, setup 466: datasets are built once."""
        if self._connect is None:
            return set_up(**named)
        provider = "train_valid_test_datasets_provider"
        self._set_up, self._given_data = set_up, {**named, provider: Datasets(named[provider])}
        self._iterators = set_up(**self._given_data)
        if own_build().survivors and self._kept is None:
            vars(named["train_state"]).update(survivors_facts())
        return self._iterators

    def _train(self, train: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """In place of `train`, pretrain 149: again from here, with the same objects, after each fault that this process
        outlives."""
        self._build.close()
        call = inspect.signature(train).bind(*given, **named).arguments
        if self._connect is None:
            return train(*given, **named)
        model, state, manager = call["model"], call["global_state"], call["checkpoint_manager"]
        self._kept = kept = InProcessRestart(model, call["optimizer"])
        config = get_model_config(model[0])
        sync = config.param_sync_func
        while True:
            try:
                if kept.has_left:
                    self._connect_again(kept, state)
                    config.param_sync_func = sync
                    _as_before_training(model, state)
                    manager.load_again()
                    self._renew_data(state)
                return train(*given, **named)
            except Exception as error:
                kept.stay(*manager.left_with(error))

    def _connect_again(self, kept: InProcessRestart, state: Any) -> None:
        self.marks = _marks(stayed=True)
        unless_called_off(self._connect_all, own_slot())
        self._watch()
        self.marks.mark(Milestone.RENDEZVOUS)
        tell(_facts(state))
        kept.connected()

    def _connect_all(self) -> None:
        assert self._connect is not None
        self._connect()
        own_build().connected()
        # Behind that, as new processes do once they know of survivors: a collective.
        if self._overlap is not None:
            self._overlap()

    def _renew_data(self, state: Any) -> None:
        """Let data iterators read on from where training was brought back to."""
        if self._given_data:
            facts = _facts(state)
            with rehearsed():  # replacements are answered, too
                become(self._iterators, self._set_up(**{**self._given_data, "train_state": state.train_state}))
            vars(state.train_state).update(facts)

    def _watch(self) -> None:
        """Until the session watches: a rank that is stopped before keeps others in collectives of NCCL for ever."""
        if "nccl" in process_group_backend():
            self._watched.enter_context(watched_start(dist.get_rank(), RECOVERY_PATIENCE * self._timeout_s))

    def _begin_building(self) -> None:
        if self._connect is not None:
            self._build.enter_context(built_beside_survivors(own_build()))


def _as_before_training(chunks: Any, state: Any) -> None:
    """Let `train` begin as it does in a process that was just built."""
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
    for timer in state.timers._timers.values():
        timer.reset()  # one that runs cannot be started
    # It may be in the middle of an iteration, and has statistics of iterations that are run again.
    destroy_rerun_state_machine()
    import_module(f"{TRAINING}.initialize").init_rerun_state(state.cfg.rerun_state_machine)
    # Of the checkpoint that was newest when this process started.
    import_module(f"{TRAINING}.utils.checkpoint_utils").read_train_state.cache_clear()


def _facts(state: Any) -> dict[str, Any]:
    return {name: getattr(state.train_state, name) for name in _FACTS}


def _marks(*, stayed: bool) -> Timestamps:
    marks = Timestamps(stayed=stayed)
    if own_slot().taken_s is not None:
        marks.mark(Milestone.RESTARTED, own_slot().taken_s)
    return marks
