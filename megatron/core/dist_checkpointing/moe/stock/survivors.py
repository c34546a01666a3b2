"""How a process in the stock loop outlives faults of others: it leaves the loop's `train`, and enters it again.

Nothing of `pretrain` comes a second time but `train`: flags, model, optimizer and datasets stay as they are. What takes
the place of a lost rank goes through all of `pretrain`, alone: up to `train` its collectives are answered, see
`in_place.building`, apart from the recovery, in which all ranks take part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron.core import rerun_state_machine as rerun
from megatron.core.utils import get_model_config

from ..core_versions.training import replaced
from ..errors import UsageError
from ..in_place.building import own_build, rehearsed
from ..in_place.process_restart import (
    Datasets,
    InProcessRestart,
    LoopSurvivor,
    become,
    needs_fresh_process,
    prepare_chunks,
    settings_of,
    survivors_facts,
)
from . import flags
from .seams import Call, release_of

# Jobs in the stock loop whose processes cannot outlive a fault of others: all start again, from standbys.

RELEASES = ("0.17", "0.18", "0.19")
"""Of Megatron-Core, with which processes were seen to stay: what its loop keeps differs between releases."""

_HELD = "holds process groups of the lost connections"
_TWICE = "cannot be set up twice in a process"

_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("async_save", bool, f"its queue of checkpoints {_HELD}"),
    ("non_persistent_ckpt_type", lambda kind: kind == "local", f"its manager {_HELD}"),
    ("enable_ft_package", bool, "its monitor takes a rank that waits for a hung one"),
    ("log_straggler", bool, f"its detector {_TWICE}"),
    ("profile", bool, f"a profile {_TWICE}"),
    ("logits_load_dir", bool, "the reader of its teacher's logits would continue where it stood"),
    ("moe_routing_trace_path", bool, f"its tracer {_TWICE}"),
    ("run_workload_inspector_server", bool, f"its server {_TWICE}"),
    ("ckpt_assume_constant_structure", bool, "its plan of saving would be known to those alone that stay"),
    ("full_validation", bool, "the iterations that it has counted would make other datasets"),
    ("nccl_ub", bool, f"its registered gradient buffers {_HELD}"),
    ("save_activations_interval", bool, f"its hooks {_TWICE}"),
    ("save_dgrads_interval", bool, f"its hooks {_TWICE}"),
    ("save_tokens_per_expert_interval", bool, f"its hooks {_TWICE}"),
    ("lazy_mpu_init", bool, "groups are then made by somebody else"),
)

_FLAGS = {"nccl_ub": "use_nccl_ub"}


def why_not(args: Any, version: str, *, is_started_by_script: bool = False) -> str | None:
    """Why processes of this job cannot stay, None where they can.

    Args:
        args: Of Megatron-LM.
        version: The version of Megatron-Core.
        is_started_by_script: Whether torch.distributed was started before `pretrain`, by nobody who could be asked to
            start it again.
    """
    if release_of(version) not in RELEASES:
        return f"Megatron-Core {version} was never tested with: known are {', '.join(RELEASES)}"
    if is_started_by_script:
        return (
            "torch.distributed was started before `pretrain`; give `stock.protected(pretrain, connect=...)` what"
            " starts it"
        )
    for name, applies, reason in _RULES:
        value = getattr(args, name, None)
        if value is not None and applies(value):
            shown = "" if value is True else f" {value}"
            return f"--{_FLAGS.get(name, name).replace('_', '-')}{shown}: {reason}"
    return needs_fresh_process(args)


# What the stock loop keeps in globals and in the model's configuration, where `train` is entered a second time.
#
# `docs/internals/decisions/039-survivors-in-the-stock-loop.md` lists all of them, with those that stay as they are.

_SET_BY_TRAIN = (
    *("grad_scale_func", "timers", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *("finalize_model_grads_func", "moe_paged_stash"),
)


class KeptGlobals:
    """As they are when the model is built, and `train` was not called yet.

    Args:
        loop: The module that has the loop.
        chunks: Of the model of this rank.
    """

    def __init__(self, loop: Any, chunks: Any) -> None:
        self._loop, self._chunks = loop, chunks
        configs = {id(config): config for config in map(get_model_config, chunks)}.values()
        self._before = [(config, settings_of(config, _SET_BY_TRAIN)) for config in configs]
        args = loop.get_args()
        self._flags = {"finetune": args.finetune, "ckpt_step": getattr(args, "ckpt_step", None)}

    def as_before_training(self) -> None:
        """Let `train` begin as it does in a process that was just built."""
        for config, before in self._before:
            vars(config).update(before)
        # Changed by what was loaded, which a new process does not know.
        vars(self._loop.get_args()).update(self._flags)
        if vars(self._loop).get("_seqlen_stats_active", False):  # of packed sequences that are read again
            vars(self._loop)["_seqlen_stats_in_iteration"].zero_()
        prepare_chunks(self._chunks, self._loop.get_timers())
        self._renew_rerun_machine()

    def _renew_rerun_machine(self) -> None:
        """It may be in the middle of an iteration, and has statistics of iterations that are run again."""
        args, old = self._loop.get_args(), rerun.get_rerun_state_machine()
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(
            state_save_func=old.state_save_func,
            state_restore_func=old.state_restore_func,
            mode=rerun.RerunMode(args.rerun_mode),
            error_injector=old.error_injector,
            result_rejected_tracker_filename=old.result_rejected_tracker_filename,
        )


# Datasets of the stock loop are built once; iterators over them are made again where training is brought back.

_FACTS = "do_train", "do_valid", "do_test", "eval_iters"
"""What ranks agree on in `args` when data are built."""


class KeptData:
    """Those of this rank. loop: the module that has the loop."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._providers: list[Datasets] = []
        self._iterators: list[Any] = []

    def build(self, call: Call) -> Any:
        """Make the iterators that a call is to make, of the datasets that its provider gives."""
        if isinstance(call.first, Datasets):
            return call.go_on()
        provider = Datasets(call.first)
        iterators = call.instead(provider).go_on()
        self._providers.append(provider)
        self._iterators.append(iterators)
        return iterators

    def renew(self) -> None:
        """Let all iterators continue where `args` say that training stands. Whoever has one of them keeps it."""
        for provider, iterators in zip(self._providers, self._iterators, strict=True):
            become(iterators, self._loop.build_train_valid_test_data_iterators(provider))

    def facts(self) -> dict[str, Any]:
        """What all ranks have agreed on."""
        return {name: getattr(self._loop.get_args(), name) for name in _FACTS}

    def set_facts(self, facts: dict[str, Any]) -> None:
        """Take what survivors have agreed on."""
        for name, value in facts.items():
            setattr(self._loop.get_args(), name, value)


_INITIALIZE = "megatron.training.initialize"
_CONNECTS = "_initialize_distributed"
_OVERLAPS = "_initialize_tp_communicators"


class Survivors(LoopSurvivor):
    """This process as one of them, or as one that comes to them.

    Sequence: a block of `building` around `pretrain`; in it a block of `together` for each recovery, `data` for each
    time that data iterators are built, and `train` when the loop's is called. After a fault: `connect`, `together`,
    `renew_data`.

    Args:
        loop: The module that has the loop.
        version: Of Megatron-Core.
        start: Starts torch.distributed; None where the loop does.
    """

    def __init__(self, loop: Any, version: str, start: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._loop, self._version, self._start = loop, version, start
        self._globals: KeptGlobals | None = None
        self._data = KeptData(loop)
        self._timeout_s = 0.0

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A block around `pretrain`: from where all ranks are connected, its collectives are noted or answered."""
        by_others = dist.is_initialized() and self._start is None
        if self._start is not None and not dist.is_initialized():
            self._imported()
            self._start()
        initialize = importlib.import_module(_INITIALIZE)
        original, overlap = (getattr(initialize, name, None) for name in (_CONNECTS, _OVERLAPS))
        if original is None or overlap is None:  # a release that is not known
            yield
            return

        def connecting(*arguments: Any, **options: Any) -> None:
            def connect_again() -> None:
                if self._start is not None:
                    self._start()
                original(*arguments, **options)

            if not dist.is_initialized():
                self._imported()
            original(*arguments, **options)
            self._connected_by(connect_again, by_others=by_others)

        overlapping = functools.partial(self._overlapping, overlap)
        with self._build, self._watched, replaced(initialize, **{_CONNECTS: connecting, _OVERLAPS: overlapping}):
            yield

    def built(self, chunks: Any) -> None:
        """The model is built. chunks: of it."""
        if self._globals is None and self._connect is not None:
            self._globals = KeptGlobals(self._loop, chunks)

    def data(self, call: Call) -> Any:
        """Build data iterators, from datasets that are built once."""
        if self._connect is None:
            return call.go_on()
        built = self._data.build(call)
        if own_build().survivors and self._kept is None:
            self._data.set_facts(survivors_facts())
        return built

    def train(self, chunks: Any, optimizer: Any) -> InProcessRestart | None:
        """The loop's `train` is called.

        Args:
            chunks: The model chunks of this rank.
            optimizer: Its optimizer.

        Returns:
            What keeps this process; None where it ends with a fault.
        """
        self._build.close()
        if self._connect is not None:
            self._kept = InProcessRestart(chunks, optimizer)
        return self._kept

    def connect(self) -> None:
        """After a fault: connect all ranks, and let what this process has kept use the new connections."""
        assert self._globals is not None
        self._connect_again(self._timeout_s, self._data.facts(), self._globals.as_before_training)

    def renew_data(self) -> None:
        """Let data iterators read on from where training was brought back to."""
        facts = self._data.facts()
        with rehearsed():  # replacements are answered, too
            self._data.renew()
        self._data.set_facts(facts)

    def _connected_by(self, connect_again: Callable[[], object], *, by_others: bool) -> None:
        """All ranks are connected for the first time in this process."""
        args = self._loop.get_args()
        try:
            config = flags.read(args)
        except UsageError:
            return  # said where the model is built
        if config.strategy == "none":
            return
        self._timeout_s = config.timeout_s
        self._watch(self._timeout_s)
        reason = why_not(args, self._version, is_started_by_script=by_others)
        if not by_others:  # else imports would count as connecting: nobody saw when it began
            self._met()
        if reason is None:
            self._connected(connect_again)
        else:
            self._cannot_stay(reason)
