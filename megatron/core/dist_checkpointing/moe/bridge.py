"""Megatron-Bridge: protects its training loop with `full` or `pec` from behind its checkpoint manager.

    from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, bridge

    bridge.protected(pretrain, MoECheckpointConfig(strategy="full"))(cfg, forward_step)

or with the settings in the configuration, where a YAML file of Bridge's can set them:

    cfg.checkpoint.moe_ckpt = {"strategy": "full", "interval": "auto"}
    bridge.protected(pretrain)(cfg, forward_step)

`protected` names `BridgeCheckpointManager` as `checkpoint.custom_manager_class`. What Bridge 0.6.2 then calls, and what
becomes of it (lines of its `training/train.py` and `training/setup.py`):

    setup      408    load                             the newest usable of memory, storage and Bridge's own checkpoint
    train      389    finalize_async_saves             at the head of each iteration: random states are put back before
                                                       the first one, and the iteration before this one is protected
               1331   save                             Bridge's own dense checkpoint
               782    finalize_async_saves(terminate)  at the end, also before it leaves early: the last iteration is
                                                       protected
               798    finalize_async_saves(terminate)  once more, before it leaves early, or behind the last evaluations
                                                       (`_finish_train`, 1533): protection ends

An iteration is protected at the head of the next one, and not in the callback `on_train_step_end`: there Bridge has not
counted its samples and operations yet, nor evaluated or saved. What is restored has all of that behind it.

Nothing of Bridge is imported before Bridge has made its manager.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches

from . import features
from .bridge_survivors import BridgeSurvivors
from .config import MoECheckpointConfig, add_flags, from_namespace
from .core_versions.training import ending_with_their_trainer, is_in_doubt, results_in_process
from .dense_saves.saving import is_doubtful, mark_doubtful
from .dense_saves.writing import on_rank_zero
from .errors import UsageError
from .in_place.newest_state import refuse_another_model
from .in_place.process_restart import missing_kernels
from .manager import MoECheckpointManager
from .megatron_state.optimizer_state import loading_step_counts
from .megatron_state.trainer_state import MODEL, random_states, restore_random
from .ports import Json
from .runtime.opening import one_spelling
from .runtime.peer_links import is_lost_peer, set_for_parking
from .runtime.session import NOTHING, Loadable
from .runtime.watcher import waiting_for_no_rank
from .standby.verdict import leave_early, permanent_errors_end_the_job

SETTINGS = "MOE_CKPT_FLAGS"
"""Environment variable with `--moe-ckpt-*` flags, for launch scripts whose text is not to be changed."""

FIELD = "moe_ckpt"
"""Attribute of Bridge's `cfg.checkpoint` with the settings: names of flags without `--moe-ckpt-`, with underscores."""

_COUNTS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "floating_point_operations_so_far",
)
_OF_MODEL = "num_layers", "hidden_size", "num_moe_experts", "mtp_num_layers"


def protected[**Given, Returned](
    pretrain: Callable[Given, Returned], settings: MoECheckpointConfig | None = None
) -> Callable[Given, Returned]:
    """Bridge's `pretrain`, or `finetune` of all weights, with training protected from its load to its end.

    Where it ends with an error other ranks are told at once. With strategy `none` it is given back as it is.

    Args:
        pretrain: Takes Bridge's configuration first, or as `config`.
        settings: If not given, those of the environment variable MOE_CKPT_FLAGS, else of `cfg.checkpoint.moe_ckpt`.

    Raises:
        UsageError: The settings cannot work with Bridge. From the returned function: the configuration has another
            checkpoint manager, or a feature of `refusals`.
        SystemExit: In place of an error that would come again at each restart, where `moe-ckpt-run` started the job.
    """
    settings = settings or _settings_from_environment()
    if settings is not None and settings.strategy == "none":
        return pretrain
    run = None if settings is None else _Run(settings)

    @wraps(pretrain)
    @permanent_errors_end_the_job()
    def protected_pretrain(*given: Given.args, **named: Given.kwargs) -> Returned:
        config: Any = named["config"] if "config" in named else given[0]
        name = f"{BridgeCheckpointManager.__module__}.{BridgeCheckpointManager.__qualname__}"
        other = config.checkpoint.custom_manager_class
        if other not in (None, name):
            raise UsageError(f"checkpoint.custom_manager_class is {other}, and there can be only one: leave it unset")
        config.checkpoint.custom_manager_class = name
        current = run or _Run(_settings_of(config.checkpoint))
        if sentences := "; ".join(refusals(config)):  # before anything is built
            raise UsageError(sentences)
        set_for_parking(config.dist.distributed_backend or "nccl")
        current.model = shaping(config)
        refuse_another_model(current.settings, partial(_changed, given=current.model))
        queues = results_in_process(lambda: _is_on(config.checkpoint, "async_save"))
        with ending_with_their_trainer(), queues, current.current(), current.survivors.building(config):
            try:
                return pretrain(*given, **named)
            except SystemExit as ending:
                if not ending.code and current.is_early:
                    leave_early()
                raise

    return protected_pretrain


class BridgeCheckpointManager:
    """What Bridge makes of `checkpoint.custom_manager_class`; its own manager continues making dense checkpoints.

    Without `protected` around Bridge's `pretrain`, MOE_CKPT_FLAGS or `cfg.checkpoint.moe_ckpt` has the settings, and
    other ranks learn of an error on this one as they do without protection.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        run = _CURRENT.get()
        self._run = run if run is not None else _Run(_settings_from_environment() or _settings_of(checkpoint_config))
        self._dense = _bridge("checkpointing").DefaultCheckpointManager(checkpoint_config)
        self._manager: MoECheckpointManager | None = None
        self._random: Mapping[str, memoryview] | None = None
        self._iterations, self._has_trained = 0, False
        self._finetunes: bool | None = None
        self._loaded_with: Any = None

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """As Bridge's own; an entry makes Bridge call `load` although it may know of no checkpoint."""
        return {"local_checkpoint_manager": _AlwaysLoads(), **self._dense.checkpointing_context}

    def load(self, ctx: Any) -> tuple[int, int]:
        """Bring training to the newest usable state; the iteration after which it stands, and operations so far."""
        state, cfg = ctx.state, ctx.state.cfg
        if sentences := "; ".join(refusals(cfg, ctx)):
            raise UsageError(sentences)
        self._loaded_with = ctx
        with self._run.survivors.together():
            self._bring_back(ctx)
        assert self._manager is not None
        return self._manager.iteration, state.train_state.floating_point_operations_so_far

    def load_again(self) -> None:
        """As `load` did it, after a fault that this process has outlived."""
        self.load(self._loaded_with)

    def left_with(self, error: Exception) -> tuple[Exception, MoECheckpointManager | None]:
        """End protection, which puts aside what is whole, after an error: what to raise, and what has protected."""
        manager, self._manager = self._manager, None
        return self._run.left_with(error), manager

    def _bring_back(self, ctx: Any) -> None:
        state, cfg = ctx.state, ctx.state.cfg
        self._iterations, self._random, loaded = cfg.train.train_iters, None, False
        self._has_trained = _is_on(cfg.validation, "skip_train")
        manager = MoECheckpointManager(
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            self._run.settings,
            train_iters=cfg.train.train_iters,
            global_batch_size=cfg.train.global_batch_size,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_length=cfg.model.seq_length,
            state=_BridgeCounts(state, self._run.model),
            timestamps=self._run.survivors.marks,
        )

        def load_dense() -> int:
            nonlocal loaded
            loaded = True
            with loading_step_counts(ctx.optimizer):
                iteration, _ = self._dense.load(ctx)
            return int(iteration)

        checkpoint = cfg.checkpoint
        # Bridge sets it as it loads a pretrained checkpoint, and a process that stays would keep what no new one has.
        checkpoint.finetune = self._finetunes = checkpoint.finetune if self._finetunes is None else self._finetunes
        newest = _newest_dense(cfg, self._dense)
        manager.resume(None if newest is None else load_dense, newest or NOTHING)
        if manager.iteration > 0 and not loaded:
            self._random = random_states()
            update_num_microbatches(state.train_state.consumed_train_samples)
        if loaded:
            manager.lost_before(None)  # Bridge's checkpoints have no place for it
        self._manager = manager
        self._run.protect(manager)

    def save(self, ctx: Any, callback_manager: Any) -> None:
        """Save a dense checkpoint as Bridge does.

        Args:
            ctx: Bridge's context of the save.
            callback_manager: Bridge's.
        """
        with waiting_for_no_rank():
            self._dense.save(ctx, callback_manager)
            save, step = ctx.state.cfg.checkpoint.save, int(ctx.state.train_state.step)
            mark_doubtful(save, step, in_doubt=is_in_doubt())
        if self._manager is not None:
            self._manager.saved()

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Protect the iteration that Bridge has counted since the last call.

        Args:
            state: Bridge's global state.
            blocking: Whether Bridge waits for its saves.
            terminate: Whether training ends, and protection with it.
        """
        with waiting_for_no_rank() if blocking else contextlib.nullcontext():  # for as long as storage takes
            self._dense.finalize_async_saves(state, blocking, terminate)
        manager = self._manager
        if manager is None:
            raise UsageError(
                "Megatron-Bridge trains without having called `load` of its checkpoint manager, as it does for adapters"
                " (peft), so nothing would be protected: leave checkpoint.custom_manager_class unset"
            )
        if self._random is not None:
            restore_random(self._random)  # data loaders drew their seeds meanwhile
            self._random = None
        if state.train_state.step > manager.iteration:
            manager.after_step()
            manager.reported()
        if not terminate:
            manager.rejoin()
            manager.passes_begin()
        elif self._has_trained:
            self._run.is_early = manager.iteration < self._iterations
            manager.finish(keep_memory=self._run.is_early)
        # It is called so twice: by `train`, and where evaluations behind it have ended as well, or the process ends.
        self._has_trained = terminate


def refusals(cfg: Any, ctx: Any = None) -> Iterator[str]:
    """What of a configuration of Bridge's cannot be protected: a sentence for each.

    Args:
        cfg: Bridge's ConfigContainer.
        ctx: The CheckpointLoadContext, once there is one.
    """
    optimizer = str(getattr(cfg.optimizer, "optimizer", ""))
    yield from missing_kernels(getattr(cfg.model, "transformer", None) or cfg.model)
    if optimizer.endswith("muon") and find_spec("emerging_optimizers") is None:
        yield f"optimizer.optimizer {optimizer}: a package is missing: pip install emerging-optimizers"
    iterations = getattr(cfg.train, "iterations_to_skip", None)
    kept = "checkpoints of training would not include it"
    found = {
        f"train.iterations_to_skip {iterations} makes iterations without a step": bool(iterations),
        "rerun_state_machine.error_injection_rate draws random numbers that a start leaves out": _is_on(
            cfg.rerun_state_machine, "error_injection_rate"
        ),
        "optimizer.optimizer_cuda_graph takes the optimizer's step out of sight": _is_on(
            cfg.optimizer, "optimizer_cuda_graph"
        ),
        "optimizer.optimizer_cpu_offload: Bridge rounds masters to the weights of the device after each load": _is_on(
            cfg.optimizer, "optimizer_cpu_offload"
        ),
        "inprocess_restart restarts without a new process": _is_on(cfg.inprocess_restart, "enabled"),
        "peft trains adapters beside frozen weights": cfg.peft is not None,
        "dist.use_decentralized_pg hides the process groups of Megatron-Core": _is_on(cfg.dist, "use_decentralized_pg"),
        "dist.use_torch_fsdp2 and ddp.use_megatron_fsdp shard weights in another way": (
            _is_on(cfg.dist, "use_torch_fsdp2") or _is_on(cfg.ddp, "use_megatron_fsdp")
        ),
        "several modules with process groups of their own (MIMO) are not one model": (
            getattr(ctx, "module_name", None) is not None
        ),
        f"dataset.dataloader_type external has a state of its own, and {kept}": (
            getattr(cfg.dataset, "dataloader_type", None) == "external"
        ),
        "dataset.fim_data draws from a random state that no checkpoint has": _is_on(cfg.dataset, "fim_data"),
        "checkpoint.non_persistent_ckpt_type is for what this does instead": (
            cfg.checkpoint.non_persistent_ckpt_type is not None
        ),
    }
    yield from (f"{what}: leave it out, or train without protection" for what, is_so in found.items() if is_so)


def shaping(cfg: Any) -> dict[str, Json]:
    """What of a configuration decides which tensors a state has, before Bridge completes it; as it is read from JSON.

    Args:
        cfg: Bridge's ConfigContainer.
    """
    model = getattr(cfg.model, "transformer", None) or cfg.model
    found = {f"model.{name}": getattr(model, name, None) for name in _OF_MODEL}
    return found | {"optimizer.optimizer": getattr(cfg.optimizer, "optimizer", None)}


def _changed(recorded: Mapping[str, Any], given: Mapping[str, Json]) -> list[str]:
    before = recorded.get(MODEL)
    if not isinstance(before, Mapping):  # saved without `protected`, or by another loop
        return []
    return [f"{name} was {before[name]} and is {now}" for name, now in given.items() if before.get(name, now) != now]


class _BridgeCounts:
    """What Bridge's loop counts; its `train_state` is another object once a checkpoint was loaded."""

    def __init__(self, state: Any, model: Mapping[str, Json]) -> None:
        self._state, self._model = state, model

    def state_dict(self) -> dict[str, Json]:
        return {name: getattr(self._state.train_state, name) for name in _COUNTS} | {MODEL: dict(self._model)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._state.train_state.step = values["iteration"]
        for name in _COUNTS:
            setattr(self._state.train_state, name, values[name])


class _AlwaysLoads:
    """In the place of Bridge's manager of local checkpoints: says that there is something to load."""

    def find_latest(self) -> int:
        return 0


class _Run:
    """Calls of one protected `pretrain`."""

    def __init__(self, settings: MoECheckpointConfig) -> None:
        if settings.strategy == "none":
            raise UsageError(
                f"missing strategy: set cfg.checkpoint.{FIELD} = {{'strategy': 'full'}}, give bridge.protected a"
                f" MoECheckpointConfig, or set the environment variable {SETTINGS} to flags such as"
                " --moe-ckpt-strategy full"
            )
        if sentences := "; ".join(features.refusals(features.Loop.BRIDGE, settings)):
            raise UsageError(sentences)
        self.settings, self._running = settings, contextlib.ExitStack()
        self.survivors = BridgeSurvivors(settings.timeout_s)
        self.model: Mapping[str, Json] = {}  # unknown without `protected`
        self.is_early = False  # whether training has ended before its last iteration
        self._owns_errors = False

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """A block around the call of `pretrain`: managers made in it belong to this run."""
        token, self._owns_errors = _CURRENT.set(self), True
        self.survivors = BridgeSurvivors(self.settings.timeout_s)  # of this call: what an earlier one has kept is gone
        self.is_early = False
        try:
            with self._running:
                yield
        finally:
            self._owns_errors = False
            _CURRENT.reset(token)

    def protect(self, manager: MoECheckpointManager) -> None:
        """From here on an error out of the block is one of protected training."""
        if self._owns_errors:
            self._running.enter_context(manager.run())

    def left_with(self, error: Exception) -> Exception:
        """End protection with this error, which may become another one."""
        try:
            self._running.__exit__(type(error), error, error.__traceback__)
        except Exception as other:
            return other
        return error


_CURRENT: ContextVar[_Run | None] = ContextVar("protected run", default=None)


def _settings_from_environment() -> MoECheckpointConfig | None:
    """What MOE_CKPT_FLAGS says, None where it is not set, or empty. Raises UsageError for flags that do not exist, or
    do not say whether there is to be protection."""
    try:
        words = shlex.split(os.environ.get(SETTINGS, ""))
    except ValueError as error:
        raise UsageError(f"{SETTINGS}: {error}") from error
    if not words:
        return None
    found = _parsed(words, SETTINGS)
    if not any(word.startswith(f"--{MoECheckpointConfig.PREFIX}strategy") for word in words):
        raise UsageError(
            f"{SETTINGS} has no --moe-ckpt-strategy: add one, or unset the variable and use cfg.checkpoint.{FIELD}"
        )
    return found


def _settings_of(checkpoint: Any) -> MoECheckpointConfig:
    """What `cfg.checkpoint.moe_ckpt` says, no strategy where it is missing. Raises UsageError for unknown names."""
    given = getattr(checkpoint, FIELD, None) or {}
    if isinstance(given, MoECheckpointConfig):
        return given
    words: list[str] = []
    repeated = {field.name for field in dataclasses.fields(MoECheckpointConfig) if field.metadata["flag"].repeatable}
    for name, value in given.items():
        if value is None or value is False:
            continue
        values = [] if value is True else list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]
        flag = f"--{MoECheckpointConfig.PREFIX}{name.replace('_', '-')}"
        words += [word for one in values for word in (flag, one)] if name in repeated else [flag, *values]
    return _parsed(words, f"checkpoint.{FIELD}")


def _parsed(words: list[str], where: str) -> MoECheckpointConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_flags(parser, MoECheckpointConfig, "checkpoints", prefix=MoECheckpointConfig.PREFIX)
    try:
        found, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"{where}: {error}") from error
    if unknown:
        raise UsageError(f"{where} has {' '.join(unknown)}, but takes only --moe-ckpt-* flags")
    return from_namespace(MoECheckpointConfig, found, prefix=MoECheckpointConfig.PREFIX)


def _newest_dense(cfg: Any, dense: Any) -> Loadable | None:
    """What Bridge itself would load, of iteration -1 if it could not; None if nothing.

    Where Bridge raises, as for a checkpoint that is required and not there, it does so again when it is to load: a job
    may have gone on from there since, and retention may have removed it.
    """
    checkpoint = cfg.checkpoint
    try:
        if not _bridge("setup")._should_load_checkpoint(cfg, dense):
            return None
        iteration, _ = _bridge("checkpointing")._resolve_checkpoint_iteration(checkpoint.load, checkpoint.ckpt_step)
    except (FileNotFoundError, RuntimeError) as error:
        if is_lost_peer(error):
            raise
        return Loadable(asked_for=True)
    # Below -1: `load` is the folder of one iteration. At -1 only pretrained weights are there.
    asked_for = iteration < -1 or checkpoint.ckpt_step is not None or bool(checkpoint.finetune)
    found = Loadable(asked_for=asked_for, in_part=bool(checkpoint.finetune or not checkpoint.load_optim))
    load, save = checkpoint.load, checkpoint.save
    own = not asked_for and load and save and one_spelling(load) == one_spelling(save)
    if own and checkpoint.load_optim and not checkpoint.save_optim:
        return dataclasses.replace(found, lacks=True)
    lacks = bool(own and checkpoint.load_rng and not checkpoint.save_rng)
    in_doubt = bool(own) and on_rank_zero(lambda: is_doubtful(load, iteration))
    return dataclasses.replace(found, iteration=max(iteration, 0), lacks=lacks, in_doubt=in_doubt)


def _bridge(module: str) -> Any:
    """A module of Bridge's training."""
    return import_module(f"megatron.bridge.training.{module}")


def _is_on(section: Any, name: str) -> bool:
    """Whether a section of the configuration is there and has this switched on."""
    return bool(getattr(section, name, False))
