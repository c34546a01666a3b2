"""What happens around each call of the stock loop, so that it is protected: its order of calls becomes the manager's.

One iteration of the loop, and the calls of `MoECheckpointManager` on the way:

    train_step                      `begin` before the first one of a replay, `rejoin` before the first one that is new
        forward_backward            inside `forward_backward`; once more for each time that the loop runs it again. What
                                    the loop wraps it with lies inside, too: CUDA graphs of whole iterations
        optimizer.step              wrapped by the manager
        returns                     `step_done`, unless the loop is about to leave with no step made
    samples are counted
    training_log, evaluation
    checkpoint_and_decide_exit      `after_step` and `reported` when it returns: behind evaluation and checkpoint, as a
                                    run that is resumed must not do either again

A replayed iteration has `train_step`, and `after_step` at its end; it is not logged, evaluated or saved. Where only
some stages of the pipeline replay, no collective over others is left on the way, see `SuppressedEffects`. What a
fault kept from following the last iteration is made up for when all ranks stand there, see `DeferredSaves`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import MoECheckpointConfig
from ..dense_saves.choosing import one_iteration
from ..errors import CheckpointFailure, UsageError
from ..extensions import load
from ..in_place.newest_state import refuse_another_model
from ..megatron_state.optimizer_state import allocate_step_counts, loading_step_counts
from ..megatron_state.restore import any_rank
from ..megatron_state.trainer_state import random_states, restore_random
from ..recovery.timeline import RecoveryTimeline
from ..runtime.peer_links import is_lost_peer
from ..runtime.session import NOTHING
from ..runtime.status import report_silence
from ..standby.heartbeat import own_heartbeat
from ..strategies import STRATEGIES
from . import flags
from .dense import LOST, StockSaves, newest_checkpoint, newest_iteration, written_folder
from .iteration import (
    CommonIterations,
    DeferredSaves,
    Report,
    StockCounts,
    StockIteration,
    SuppressedEffects,
    boundary,
    mean_loss,
)
from .resumed_settings import changed_model, flags_hold, refuse_other_flags, shaping_flags, told
from .seams import Call, Hook
from .survivors import Survivors

if TYPE_CHECKING:
    from ..resharding.store import PreviousWindow

log = logging.getLogger(__name__)

Manager = Any
MakeManager = Callable[..., Manager]


class Hooks:
    """The hooks of one call of `pretrain`, by the names of their seams.

    Use it as a context around that call: a good end ends protection, an error parks what is whole.

    Args:
        loop: The module that has the loop.
        version: Of Megatron-Core.
        make_manager: `MoECheckpointManager`.
        report: Gets how each iteration came out.
        survivors: What keeps this process through faults of others; nothing does if not given.
        recover_only: Whether training ends, with a checkpoint, once it has come back to where it continues.
    """

    def __init__(
        self,
        loop: Any,
        version: str,
        make_manager: MakeManager,
        report: Report | None = None,
        survivors: Survivors | None = None,
        *,
        recover_only: bool = False,
    ) -> None:
        self._loop, self._version, self._make, self._report = loop, version, make_manager, report
        self._recover_only = recover_only
        self._survivors = survivors or Survivors(loop, version)
        self._config: MoECheckpointConfig | None = None
        self._manager: Manager = None
        self._running = contextlib.ExitStack()
        self._saved = self._loaded = -1
        self._has_other_past = False
        self._told: RecoveryTimeline | None = None
        self._is_in_step = self._is_updated = False
        self._lost_peer: Exception | None = None

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *error: Any) -> None:
        unsaved = error[1] is None and self._manager is not None and self._is_unsaved()
        if unsaved:
            self._manager.finish(keep_memory=True)
        self._running.__exit__(*error)
        if error[1] is not None:
            report_silence(error[1])
        if unsaved:
            raise self._unsaved()

    def _is_unsaved(self) -> bool:
        """Whether only the memory has what this job came to. A collective."""
        # Asked for first, by all: a process that stayed knows more of what was published than one that came since.
        iteration, newest = self._manager.iteration, newest_iteration(self._args.save)
        is_saved = any_rank(self._saves.has(iteration)) or (newest >= iteration and not self._has_other_past)
        return iteration > self._loaded and not is_saved

    def _unsaved(self) -> CheckpointFailure:
        return CheckpointFailure(
            f"training has ended, but its last checkpoint is not in {self._args.save}, for the reason above: the state"
            f" of iteration {self._manager.iteration} stays in memory; start the job again once it can be saved"
        )

    def by_name(self) -> Mapping[str, Hook]:
        """For `seams.installed`."""
        return {
            "setup_model_and_optimizer": self._setup,
            "load_checkpoint": self._load_checkpoint,
            "build_train_valid_test_data_iterators": self._build_data,
            "train": self._train,
            "train_step": self._train_step,
            "training_log": self._training_log,
            "post_training_step_callbacks": self._post_training_step_callbacks,
            "checkpoint_and_decide_exit": self._checkpoint_and_decide_exit,
            "save_checkpoint_and_time": self._save_checkpoint_and_time,
            "save_checkpoint": self._save_checkpoint,
            "enable_forward_pre_hook": self._enable_forward_pre_hook,
            "check_param_hashes_across_dp_replicas": self._check_param_hashes,
            # Activations are saved in a replay, too: its forward pass is that of the first run.
            "save_grads": self._unless_replaying,
            "save_dgrads": self._unless_replaying,
            "_run_gpu_sniff_test": self._run_gpu_sniff_test,
            "update_pg_timeout": self._update_pg_timeout,
            "logical_and_across_model_parallel_group": self._reduce,
            "reduce_max_stat_across_model_parallel_group": self._reduce,
        }

    def of_saving(self) -> Mapping[str, Hook]:
        """For `seams.installed`, of core's functions."""
        return {"save": lambda call: self._saves.shards(call), "load": self._load_shards}

    def is_on(self, name: str) -> bool:
        """Whether the hook of this name is to be called now: most only protect what is there."""
        return self._manager is not None or name in ("setup_model_and_optimizer", "load_checkpoint", "load")

    def _setup(self, call: Call) -> Any:
        args = self._args = self._loop.get_args()
        if args.load is not None and (line := one_iteration(args)):
            self._say("%s", line)
        config = flags.read(args)
        if config.strategy == "none":
            flags.check_unused(config, args)
            if not config.inject_fault and self._report is None:
                return call.go_on()
        else:
            self._check(config)
        self._config, self._flags = config, shaping_flags(args)
        if config.strategy != "none":
            replays = STRATEGIES[config.strategy].replays
            refuse_another_model(config, functools.partial(changed_model, given=self._flags, replays=replays))
        # Asks behind each iteration whether nodes wait to join.
        self._growth = load("elastic.growth").Growth(config, args) if config.elastic is not None else None
        self._saves = StockSaves(args, config.secret_file, protects=config.strategy != "none")
        own_heartbeat().loads()
        built = call.go_on()
        if self._manager is None:  # no checkpoint was to be loaded on the way
            self._resume(*built)
        return built

    def _check(self, config: MoECheckpointConfig) -> None:
        warning = flags.check(config, self._args, self._version)
        if warning:
            self._say("%s", warning)

    def _load_checkpoint(self, call: Call) -> Any:
        """In place of the checkpoint what is newer in memory or storage, if anything is."""
        if self._config is None or self._manager is not None:
            return call.go_on()
        load = functools.partial(self._saves.load, call)
        self._resume(call["ddp_model"], call["optimizer"], call["opt_param_scheduler"], load)
        return self._args.iteration, self._args.num_floating_point_operations_so_far

    def _resume(self, model: Any, optimizer: Any, scheduler: Any, load: Callable[[], Any] | None = None) -> None:
        """Bring training to where it continues, and protect it from here to the end of `pretrain`, or the next
        fault."""
        self._survivors.built(model)
        with self._survivors.together():
            self._bring_back(model, optimizer, scheduler, load)

    def _bring_back(self, model: Any, optimizer: Any, scheduler: Any, load: Callable[[], Any] | None) -> None:
        args, self._load = self._args, load
        if load is None:
            args.iteration, args.num_floating_point_operations_so_far = 0, 0
        state = self._state = StockCounts(args, self._loop, self._flags)
        manager = self._make(
            model,
            optimizer,
            scheduler,
            self._config,
            train_iters=args.train_iters,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            state=state,
            timestamps=self._survivors.marks,
            save=written_folder(args),
        )
        loaded = False

        def load_with(load_checkpoint: Callable[[], Any]) -> int:
            nonlocal loaded
            # Core copies into master weights in place, which autograd refuses for the model's own.
            with torch.no_grad(), loading_step_counts(optimizer), flags_hold(optimizer, scheduler):
                args.iteration, args.num_floating_point_operations_so_far = load_checkpoint()
            state.counted(args.num_floating_point_operations_so_far)
            loaded = True
            return int(args.iteration)

        def run_again(window: PreviousWindow, copy_previous: Callable[[Path], None]) -> int:
            from .previous_windows import made_whole  # brings what starts processes

            assert self._config is not None
            load_original = inspect.unwrap(self._loop.load_checkpoint)
            with made_whole(args, self._config, window, copy_previous):
                return load_with(functools.partial(load_original, model, optimizer, scheduler))

        if self._recover_only:  # the state to recover may be older than a checkpoint, of which only flags are read
            load = None
        asked = load is not None and getattr(args, "ckpt_step", None) and manager.job_id
        followed_by = frozenset[str]()
        if asked:
            from .going_back import came_to, followers  # which few jobs do

            assert self._config is not None
            followed_by = followers(manager.job_id, self._config.takes_over, args)
        newest = replace(newest_checkpoint(args), only_of=followed_by) if load is not None else NOTHING
        load_newest = None if load is None else functools.partial(load_with, load)
        try:
            iteration = manager.resume(load_newest, newest, run_again=run_again)
        except UsageError as error:
            if not (changed := self._changed(state.recorded_flags)):
                raise
            raise UsageError(f"{error}; flags are others than before: {changed}") from error
        if manager.repeats_steps and state.recorded_flags is not None:
            refuse_other_flags(state.recorded_flags, self._flags)
        if (iteration or loaded) and (changed := self._changed(None if loaded else state.recorded_flags)):
            self._say("from iteration %d on, flags are others than before: %s", iteration + 1, changed)
        if self._recover_only:
            self._require_recovered(manager)
        if loaded:
            manager.lost_before(self._saves.lost_tokens)
        if asked:
            came_to(iteration, args, manager.job_id, loaded=loaded)
        self._manager, self._quiet = manager, SuppressedEffects(self._loop, manager)
        if optimizer is not None:  # as with --skip-train
            allocate_step_counts(optimizer)
        self._running.enter_context(manager.run())
        self._begun, self._joined, self._leaves = not manager.is_replaying, False, False
        if self._begun:
            # May make a step that this rank missed: data iterators are built behind it. A replay begins only in the
            # first iteration: the loop sets up hooks of the model before, which a replay takes out.
            manager.begin()
        self._common = CommonIterations(self._loop)
        recovered, self._loaded = iteration > 0 and not loaded, iteration if loaded else -1
        self._saves.protect(model, loaded=loaded)
        self._catch_up = DeferredSaves(self._loop, state, manager, recovered=recovered)
        self._catch_up.agree()
        self._random = random_states() if iteration > 0 else None

    def _changed(self, recorded: Mapping[str, Any] | None) -> str:
        """What the flags change of the state that training continues from. recorded: of a snapshot; None: of what was
        loaded."""
        if recorded is None and self._saves.recorded_args is not None:
            recorded = shaping_flags(self._saves.recorded_args)
        keeps_schedule = bool(getattr(self._args, "use_checkpoint_opt_param_scheduler", False))
        return told(recorded, self._flags, keeps_schedule=keeps_schedule) if recorded is not None else ""

    def _say(self, line: str, *values: object) -> None:
        if torch.distributed.get_rank() == 0:
            log.warning(line, *values)

    def _require_recovered(self, manager: Manager) -> None:
        if not (manager.is_replaying or manager.iteration):
            persist_dir = getattr(self._config, "persist_dir", None)
            raise UsageError(f"no state can be recovered from {persist_dir}; the lines above say why")
        self._saves.device_states = manager.random_states_of_another_device

    def _build_data(self, call: Call) -> Any:
        if self._recover_only and not self._manager.is_replaying:
            vars(self._args).update(do_train=True, do_valid=False, do_test=False)
            return None, None, None  # no iteration reads any
        with self._catch_up.reading_on():
            return self._survivors.data(call)

    def _train(self, call: Call) -> Any:
        """All of training: again from here, with the same objects, after each fault that this process outlives."""
        if self._recover_only and not self._manager.is_replaying:
            self._args.train_iters = self._manager.iteration
        kept = self._survivors.train(call["model"], call["optimizer"])
        while kept is not None:
            try:
                if kept.has_left:
                    self._survivors.connect()
                    self._resume(call["model"], call["optimizer"], call["opt_param_scheduler"], self._load)
                    self._survivors.renew_data()
                return self._run(call)
            except Exception as error:
                error, manager = self._left_with(error), self._manager
                self._manager = None
                kept.stay(error, manager)
        return self._run(call)

    def _left_with(self, error: Exception) -> Exception:
        """End protection, which puts aside what is whole."""
        if self._manager is not None:
            self._quiet.end()
        try:
            self._running.__exit__(type(error), error, error.__traceback__)
        except Exception as other:
            return other
        return error

    def _run(self, call: Call) -> Any:
        self._catch_up.starts(call)
        self._common.entered(call["config"], replays=self._manager.is_replaying)
        if self._random is not None:
            restore_random(self._random)  # data loaders drew their seeds meanwhile
        try:
            result = call.go_on()
        except SystemExit:
            # Told to leave early: what no checkpoint has, only the memory has.
            iteration = self._manager.iteration
            makes_way = self._growth is not None and self._growth.makes_way
            self._manager.finish(keep_memory=makes_way or not (self._saved == iteration and self._saves.has(iteration)))
            if self._growth is not None:
                self._growth.make_way(lambda: bool(self._manager.is_told_to_end))
            raise
        self._join()  # where no iteration was left
        return result

    def _train_step(self, call: Call) -> Any:
        manager, args = self._manager, self._args
        if manager.is_replaying:
            self._begin_replay()
        else:
            self._join()
            if self._leaves:  # as core's own step leaves the loop
                args.curr_iteration -= 1  # this one is not made: by it `protected` knows whether training has ended
                return {}, True, False, True, 0, None, None, 0
            self._common.begin()
        replayed, started_s = manager.is_replaying, time.monotonic()
        self._is_in_step, self._is_updated, self._lost_peer = True, False, None
        try:
            outcome = call.replacing(forward_backward_func=self._protected(call["forward_backward_func"])).go_on()
        except Exception as error:
            if self._is_updated and is_lost_peer(error):
                self._count()  # all that is missing is the mean loss
            raise
        finally:
            self._is_in_step = False
        losses, skipped, _, should_exit, _, grad_norm, *_ = outcome
        self._iteration = StockIteration(
            args.curr_iteration + 1,
            {name: float(value) for name, value in losses.items()} if self._report is not None else {},
            None if grad_norm is None or self._report is None else float(grad_norm),
            bool(skipped),
            replayed,
            time.monotonic() - started_s,
        )
        if not should_exit:  # else the loop leaves before the step
            self._count()
        return outcome

    def _count(self) -> None:
        """The optimizer has made its step, and the schedule moved on: the state is that of the next iteration."""
        self._state.stepped()
        self._manager.step_done()
        if self._lost_peer is not None:
            raise self._lost_peer

    def _begin_replay(self) -> None:
        if not self._begun:
            self._begun = True
            self._quiet.begin()
            self._manager.begin()

    def _join(self) -> None:
        """Before the first iteration that is new: wait until all ranks stand there."""
        if not self._joined:
            self._joined = True
            self._manager.rejoin()
            self._quiet.end()
            # As with --ckpt-step: what an earlier training saved of iterations ahead says nothing of this one's.
            self._has_other_past = newest_iteration(self._args.save) > self._manager.iteration
            self._leaves = self._catch_up.make_up()
            self._quiet.forget_losses()
            self._quiet.go_on()

    def _protected(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """The passes of a step, as the loop has wrapped them, with the calls of the manager around."""
        manager = self._manager

        def protected(**options: Any) -> Any:
            with manager.forward_backward():
                losses = forward_backward(**options | boundary(manager, options))
            manager.loss = mean_loss(losses)
            return losses

        return protected

    def _training_log(self, call: Call) -> Any:
        self._iteration = replace(self._iteration, **call.given("learning_rate", "loss_scale"))
        if self._manager.is_replaying:
            self._quiet.forget_losses()
            return call["report_memory_flag"]
        return call.replacing(is_first_iteration=self._common.is_first).go_on()

    def _post_training_step_callbacks(self, call: Call) -> Any:
        if self._manager.is_replaying:
            return call["num_floating_point_operations_since_last_log_event"]
        return call.go_on()

    def _checkpoint_and_decide_exit(self, call: Call) -> Any:
        manager, replayed = self._manager, self._manager.is_replaying
        self._state.counted(call["num_floating_point_operations_so_far"])
        if not replayed:
            self._state.evaluated = call["iteration"]
        ending: AbstractContextManager[bool] = contextlib.nullcontext(False)
        if not replayed and self._growth is not None:
            ending = self._growth.ending(call["iteration"], begins=manager.begins_snapshot)
        with ending as makes_way:
            should_exit = False if replayed else call.go_on()
        started_s = time.monotonic()
        protection = manager.after_step()
        if self._report is not None:
            stall_s = time.monotonic() - started_s if protection is None else protection.stall_s
            newest = self._told if replayed else manager.recovery
            recovery = newest if newest is not self._told else None
            self._told = newest
            self._report(replace(self._iteration, protection=protection, stall_s=stall_s, recovery=recovery))
        manager.reported()
        if self._recover_only and not manager.is_replaying:
            self._args.train_iters = call["iteration"]
        if replayed and not manager.is_replaying and call["iteration"] >= self._args.train_iters:
            self._join()  # the loop begins no further iteration, and takes away what a replay put off
        return should_exit or makes_way

    def _save_checkpoint(self, call: Call) -> Any:
        if (lost := self._manager.lost_tokens) is not None:
            setattr(self._args, LOST, [*lost])
        return self._saves.save(call)

    def _save_checkpoint_and_time(self, call: Call) -> Any:
        if self._manager.is_replaying:
            return None
        logs_progress = getattr(self._args, "log_progress", False)
        try:
            result = call.go_on()
        finally:
            self._args.log_progress = logs_progress
        in_part = getattr(self._args, "no_save_optim", None) or getattr(self._args, "no_save_rng", None)
        if not (in_part or call["non_persistent_ckpt"]):
            self._saved = call["iteration"]
        self._manager.saved()
        return result

    def _load_shards(self, call: Call) -> Any:
        return call.go_on() if self._config is None else self._saves.load_shards(call)

    def _enable_forward_pre_hook(self, call: Call) -> Any:
        return self._quiet.later(call) if self._manager.is_replaying else call.go_on()

    def _check_param_hashes(self, call: Call) -> Any:
        """At the head of `train`: where some stages run steps again, all gather their weights only when they rejoin."""
        return (self._manager.repeats_steps and not self._joined) or call.go_on()

    def _unless_replaying(self, call: Call) -> None:
        """In a replay frozen operators have no gradients, and weights of another iteration: the files of the first run
        are the right ones."""
        if not self._manager.is_replaying:
            call.go_on()

    def _run_gpu_sniff_test(self, call: Call) -> None:
        """Draws matrices, at each start and behind iterations that a replay leaves out: training draws as if not."""
        states = random_states()
        call.go_on()
        restore_random(states)

    def _update_pg_timeout(self, call: Call) -> None:
        """A barrier of all ranks, which `CommonIterations` calls where they all stand at the same iteration."""

    def _reduce(self, call: Call) -> Any:
        """Over tensor and pipeline ranks: those that replay alone have the result from a record, the others wait.

        In a step the optimizer is done, and the schedule not yet. Where a peer is lost there, this rank's own value
        serves, which is the verdict of all, and the error goes up once the iteration is whole and counted.
        """
        manager, value = self._manager, call.first
        if manager.is_replaying and manager.replays_alone:
            return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value
        if manager.is_replaying or not self._is_in_step:
            return call.go_on()
        self._is_updated = True
        try:
            return call.go_on() if self._lost_peer is None else value
        except Exception as error:
            if not is_lost_peer(error):
                raise
            self._lost_peer = error
            return value
