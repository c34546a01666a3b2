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
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch.distributed as dist

from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.utils import get_model_config

from .core_versions.training import replaced
from .in_place.building import own_build, rehearsed
from .in_place.process_restart import (
    Datasets,
    InProcessRestart,
    LoopSurvivor,
    become,
    needs_fresh_process,
    prepare_chunks,
    settings_of,
    survivors_facts,
)

TRAINING = "megatron.bridge.training"
_CONNECTS, _OVERLAPS = "_initialize_distributed", "_initialize_tp_communicators"
_DATA = "setup_data_iterators"
_FACTS = "do_train", "do_valid", "do_test"
"""What ranks agree on in `train_state` when data are built."""

_SET_BY_TRAIN = "param_sync_func", "timers", "moe_paged_stash"
"""What `train` changes of the model's configuration, where a fault may keep it from putting that back."""

_TWICE = "cannot be set up twice in a process"
_RULES = (
    ("checkpoint", "async_save", "its queue of checkpoints holds process groups of the lost connections"),
    ("checkpoint", "ckpt_assume_constant_structure", "its plan of saving would be known to those alone that stay"),
    ("ddp", "nccl_ub", "its registered gradient buffers are bound to the lost connections"),
    ("ft", "enable_ft_package", "its monitor takes a rank that waits for a hung one"),
    ("straggler", "log_straggler", f"its detector {_TWICE}"),
    ("nvrx_straggler", "enabled", f"its detector {_TWICE}"),
    ("profiling", "use_pytorch_profiler", f"a profile {_TWICE}"),
    ("profiling", "use_nsys_profiler", f"a profile {_TWICE}"),
    ("logger", "log_energy", f"its monitor {_TWICE}"),
    ("tensor_inspect", "enabled", f"it {_TWICE}"),
    ("dist", "lazy_mpu_init", "groups are then made by somebody else"),
)


def why_not(cfg: Any) -> str | None:
    """Why processes of a job with this ConfigContainer cannot stay, None where they can."""
    for section, name, reason in _RULES:
        if getattr(getattr(cfg, section, None), name, False):
            return f"{section}.{name}: {reason}"
    return needs_fresh_process(getattr(cfg.model, "transformer", None) or cfg.model)


class BridgeSurvivors(LoopSurvivor):
    """This process as one of them, or as one that comes to them.

    Args:
        timeout_s: For a collective wait of a recovery, as the settings have it.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._given_data: dict[str, Any] = {}
        self._iterators: Any = None

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
        by_others = dist.is_initialized()
        reason = "torch.distributed was started before `pretrain`" if by_others else why_not(cfg)

        def connecting(*given: Any, **named: Any) -> Any:
            if not by_others:
                self._imported()
            groups = connect(*given, **named)
            if not by_others:
                self._met()
            if reason is None:
                self._watch(self._timeout_s)
                self._connected(functools.partial(connect, *given, **named))
            else:
                self._cannot_stay(reason)
            return groups

        def overlapping(*given: Any) -> None:
            self._overlapping(functools.partial(overlap, *given))

        data, train = getattr(setup, _DATA), vars(loop)["train"]
        with (
            self._build, self._watched, replaced(initialize, **{_CONNECTS: connecting, _OVERLAPS: overlapping}),
            replaced(setup, **{_DATA: functools.partial(self._build_data, data)}),
            replaced(loop, train=functools.partial(self._train, train)),
        ):  # fmt: skip
            yield

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
            try:
                return train(*given, **named)
            except Exception as error:
                # First of all: Bridge aborts its process groups, which may take as long as their timeout.
                found, _ = call["checkpoint_manager"].left_with(error)
                if found is error:
                    raise
                raise found from error
        model, state, manager = call["model"], call["global_state"], call["checkpoint_manager"]
        self._kept = kept = InProcessRestart(model, call["optimizer"])
        config = get_model_config(model[0])
        before = settings_of(config, _SET_BY_TRAIN)
        while True:
            try:
                if kept.has_left:
                    self._connect_again(self._timeout_s, _facts(state))
                    vars(config).update(before)
                    _as_before_training(model, state)
                    manager.load_again()
                    self._renew_data(state)
                return train(*given, **named)
            except Exception as error:
                kept.stay(*manager.left_with(error))

    def _renew_data(self, state: Any) -> None:
        """Let data iterators read on from where training was brought back to."""
        if self._given_data:
            facts = _facts(state)
            with rehearsed():  # replacements are answered, too
                become(self._iterators, self._set_up(**{**self._given_data, "train_state": state.train_state}))
            vars(state.train_state).update(facts)


def _as_before_training(chunks: Any, state: Any) -> None:
    """Let `train` begin as it does in a process that was just built."""
    prepare_chunks(chunks, state.timers)
    # It may be in the middle of an iteration, and has statistics of iterations that are run again.
    destroy_rerun_state_machine()
    import_module(f"{TRAINING}.initialize").init_rerun_state(state.cfg.rerun_state_machine)
    # Of the checkpoint that was newest when this process started.
    import_module(f"{TRAINING}.utils.checkpoint_utils").read_train_state.cache_clear()


def _facts(state: Any) -> dict[str, Any]:
    return {name: getattr(state.train_state, name) for name in _FACTS}
