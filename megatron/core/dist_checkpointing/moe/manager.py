"""Checkpoints of a training job, from any loop over Megatron-Core: the one door into this package.

A loop that trains with `full` or `pec` makes three calls:

    manager = MoECheckpointManager(model, optimizer, scheduler, config, train_iters=..., ...)
    with manager.run():
        for iteration in range(manager.resume(), train_iters):
            ...                          # passes, optimizer.step(), scheduler.step()
            manager.after_step()

`sparse` runs iterations again after a fault, perhaps on some pipeline stages only, so it asks for two more:

        manager.resume()
        for iteration in manager.iterations():
            with manager.forward_backward():
                losses = forward_backward(..., p2p_communicator=manager.communicator,
                                          pg_collection=manager.process_groups)
            optimizer.step(); scheduler.step(...)
            manager.after_step(loss)

What the manager needs between these calls it hangs on the live optimizer: `optimizer.step` waits for copies of what it
is going to change, and is followed from inside, so that a rank that fails in it knows how far it came.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from . import features
from .config import MoECheckpointConfig
from .contradictions import contradictions, must_repeat_itself, not_repeatable
from .core_versions.training import captures_passes, captures_routers
from .errors import MoECheckpointError, Terminated, UsageError
from .extensions import load
from .in_place.building import own_build
from .local_recovery.communicator import BoundaryCommunicator, process_groups
from .local_recovery.survivor import Passes
from .megatron_state.partitions import drawing_settings, draws_in, random_draws
from .megatron_state.pass_state import PassState
from .megatron_state.trainer_state import LiveTrainerState, LoopState, NoLoopState
from .recovery.timeline import RecoveryTimeline, Timestamps
from .runtime.faults import Phase, Termination, fault_injector
from .runtime.iterations import Iterations, LoopCall, LoopPhase
from .runtime.live_state import Training
from .runtime.opening import leases_without_session
from .runtime.peer_links import (
    device_settings,
    is_blameless,
    process_group_backend,
    process_group_timeout_s,
    wrong_settings,
)
from .runtime.process_info import ProcessInfo, ranks_of_node
from .runtime.protected_session import ProtectedSession
from .runtime.session import NOTHING, Loadable, Request, RunAgain, Session
from .runtime.status import report_silence
from .runtime.watcher import PATIENCE_S, Watcher, hang_up, stood_down
from .standby.heartbeat import own_heartbeat
from .standby.slot import own_slot
from .strategies import STRATEGIES
from .types import StepJournal

log = logging.getLogger(__name__)


class MoECheckpointManager(Iterations):
    """Protects one training process, and brings it back after a fault; all ranks make the same calls.

    Args:
        model: The model chunk of this rank, or all of them, wrapped in core's DistributedDataParallel.
        optimizer: What core's `get_megatron_optimizer` gave for them; its `step` is the one that the loop calls.
        scheduler: Core's, stepped by the loop after the optimizer.
        config: The `--moe-ckpt-*` settings; with strategy `none`, the default, every call is free and does nothing.
        train_iters: Iterations of the whole training.
        global_batch_size: Samples of an iteration.
        micro_batch_size: Samples of a microbatch.
        seq_length: Tokens of a sample.
        state: What the loop itself counts; restored with everything else.
        place: Where this process runs; what the environment says if not given.
        timestamps: What this process passed so far, for the timeline of a recovery.
        session: Protects in place of what `config` asks for; benchmarks put other savers here.
        save: Folder that the loop saves checkpoints to, in which no other job may write.

    Raises:
        UsageError: Settings, model or folders cannot work; on all ranks alike, before anything was changed.
        IncompleteState: Some bytes of the training state belong to no operator; names them.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None = None,
        config: MoECheckpointConfig | None = None,
        *,
        train_iters: int,
        global_batch_size: int,
        micro_batch_size: int,
        seq_length: int,
        state: LoopState | None = None,
        place: ProcessInfo | None = None,
        timestamps: Timestamps | None = None,
        session: Session | None = None,
        save: str | None = None,
    ) -> None:
        config, place = config or MoECheckpointConfig(), place or ProcessInfo.from_environment()
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._train_iters, transformer, self._given = train_iters, get_model_config(chunks[0]), 0
        refuse_contradictions(config, chunks[0], transformer)
        config = _without_logs(config, transformer)
        if config.elastic is not None:
            refuse_sizes_that_do_not_fit(config, transformer, global_batch_size, micro_batch_size)
        refuse_what_cannot_repeat_itself(config, chunks[0], transformer)
        draws = "" if config.reshard == "inexact" else draws_in(chunks)
        trainer = LiveTrainerState(optimizer, scheduler, state or NoLoopState(), chunks, draws)
        if config.strategy != "none" and own_build().answers is not None:
            own_slot().keep(hang_up)
        if session is None and config.strategy == "none":
            session = Session(leases_without_session(config, save, place) if save is not None else None)
        elif session is None:
            microbatches = global_batch_size // (micro_batch_size * parallel_state.get_data_parallel_world_size())
            training = Training(
                chunks,
                optimizer,
                trainer,
                tokens_per_iteration=global_batch_size * seq_length,
                iterations=train_iters,
                topk=getattr(transformer, "moe_router_topk", None) or 1,
                passes=Passes(transformer, seq_length, micro_batch_size, microbatches),
                save=save,
            )
            try:
                session = ProtectedSession(config, training, place, timestamps)
            except BaseException as error:
                report_silence(error)
                raise
        if session.protects:
            let_copies_run_beside_sends(chunks)
            for line in wrong_settings():
                if torch.distributed.get_rank() == 0:
                    log.warning("%s", line)
        rank = torch.distributed.get_rank() if config.inject_fault else 0
        super().__init__(
            session,
            optimizer,
            transformer,
            trainer,
            faults=fault_injector(config.inject_fault, rank, session.job_id or place.job_here),
            termination=Termination(),
            replays=config.strategy != "none" and STRATEGIES[config.strategy].replays,
            is_active=session.protects or bool(config.inject_fault),
            passes_change=PassState.of(chunks) if session.protects else None,
        )

    # Before training.

    def resume(
        self,
        load: Callable[[], int] | None = None,
        newest: Loadable = NOTHING,
        *,
        run_again: RunAgain | None = None,
    ) -> int:
        """Bring model, optimizer, scheduler, random states and the loop's state to where training continues.

        The newest usable state is taken, of memory, of storage, and of what `load` has to offer. A collective.

        Args:
            load: Loads a dense checkpoint in the way of the loop, or begins from scratch if there is none; returns the
                iteration after which training then stands.
            newest: What it would load; the same on all ranks.
            run_again: Runs a sparse window of another parallel layout again there, and loads the state after it; a
                collective that returns its iteration. The second argument copies what that layout left to a folder.
                Without it such windows are refused.

        Returns:
            The iteration after which training stands. With `sparse` it may be one from which iterations are run again.

        Raises:
            UsageError: There are snapshots, but none can be used, and nothing else to begin from was given.
            NoExactState: The only way back is a replay that has diverged before, and there is no other checkpoint.
            NewProcessesNeeded: Some ranks kept their processes, and nothing that was found brings them back.
        """
        run_again = None if newest.asked_for else run_again
        own_heartbeat().loads()
        try:
            request = Request(load, newest, run_again, own_build().survivors)
            self._session.restore(self._trainer, request)
        except BaseException as error:
            self.abandon()
            report_silence(error)
            raise
        self.restored()
        return self.iteration

    def lost_before(self, lost_tokens: Sequence[int] | None) -> None:
        """Continue the count of lost tokens; between `resume`, which has loaded a dense checkpoint, and `begin`.

        Args:
            lost_tokens: `lost_tokens` as the checkpoint was saved; None: not known, then the count begins here.
        """
        self._session.lost_before(self.iteration, lost_tokens)

    @contextlib.contextmanager
    def run(self) -> Iterator[MoECheckpointManager]:
        """A block around training that ends well or is left with an error, which it lets through.

        Where it ends well, also by `sys.exit(0)`, memory goes back to the node, unless iterations are left: then the
        next start continues from it. For an error other ranks are told at once and what is whole is put aside. SIGTERM
        is caught where there is something to put aside, and becomes a Terminated error between two phases of a step.
        """
        if self._session.parks:
            self._termination.install()
        watcher = self._watch()
        is_good = lost_a_peer = False
        try:
            with self._judged():
                yield self
            self.finish(keep_memory=self.iteration < self._train_iters)
            is_good = True
        except BaseException as error:
            is_good = isinstance(error, SystemExit) and not error.code
            if is_good:
                self.finish(keep_memory=self.iteration < self._train_iters)
            else:
                try:
                    cause = stood_down(watcher)
                except MoECheckpointError:  # the main thread was about to be interrupted, and leaves anyway
                    cause = stood_down(watcher)
                lost_a_peer = cause is not None or isinstance(error, Terminated) or is_blameless(error)
                own_heartbeat().rest(lost_a_peer=lost_a_peer)
                if self._session.protects and not self._finished:  # else this rank is gone soon enough
                    self.leave(error, cause)
            raise
        finally:
            own_heartbeat().rest(lost_a_peer=lost_a_peer)
            if watcher is not None:
                watcher.stop(is_good=is_good)
            self._termination.uninstall()
            if self._session.leases is not None:
                self._session.leases.leave()

    def iterations(self) -> Iterator[int]:
        """The iterations to run, from 1, each followed by `after_step`; those that are run again come first."""
        self.begin()
        while self.is_replaying:
            yield self._next()
        self.rejoin()
        while self.iteration < self._train_iters:
            yield self._next()

    def reported(self) -> None:
        """The iteration's numbers were written down: a recovery of its state need not write them again."""
        self._session.reported(self.iteration)
        self._faults.reached(self.iteration, Phase.END)

    def saved(self) -> None:
        """A dense checkpoint was saved or scheduled; a point at which faults can be injected."""
        self._faults.reached(self.iteration, Phase.SAVE)

    def abandon(self) -> bool:
        """Training has ended with an error and begins again in this process, with another manager: release threads,
        connections and memory. Whether all work beside training has come to an end. See `in_place`."""
        self.detach()
        if self._session.leases is not None:
            self._session.leases.leave()
        return self._session.abandon()

    @property
    def is_told_to_end(self) -> bool:
        """Whether SIGTERM has come."""
        return self._termination.is_requested

    # What a loop may ask.

    @property
    def job_id(self) -> str:
        """The same at all starts of this job; empty without a strategy."""
        return self._session.job_id

    @property
    def iteration(self) -> int:
        """The iteration after which training stands."""
        return self._trainer.iteration

    @property
    def is_replaying(self) -> bool:
        """Whether iterations are run again: nothing may be evaluated, saved or reported as new meanwhile."""
        return self._session.is_replaying

    @property
    def replays_alone(self) -> bool:
        """Whether other pipeline stages only wait meanwhile: no collective may include them."""
        return self._session.replays_alone

    @property
    def repeats_steps(self) -> bool:
        """Whether any rank runs iterations again, which have to be shaped as they were; the same on all ranks."""
        return self._session.repeats_steps

    @property
    def begins_snapshot(self) -> bool:
        """Whether `after_step` will begin a snapshot of this iteration."""
        return self._session.coordinator is not None and self._session.coordinator.begins(self.iteration)

    @property
    def lost_tokens(self) -> tuple[int, ...] | None:
        """What faults have cost so far, by MoE layer, for a dense checkpoint; None where they can cost nothing."""
        return self._session.lost_tokens

    @property
    def communicator(self) -> BoundaryCommunicator | None:
        """For the `p2p_communicator` of pipeline schedules; None: core's own."""
        return self._session.communicator

    @property
    def process_groups(self) -> Any:
        """For the `pg_collection` of pipeline schedules, which goes with the communicator; None: core's own."""
        return None if self._session.communicator is None else process_groups()

    @property
    def recovery(self) -> RecoveryTimeline | None:
        """Phases and seconds of the recovery that training continues from, once ranks have rejoined."""
        return self._session.episode

    @property
    def random_states_of_another_device(self) -> Mapping[str, bytes]:
        """Those of the restored snapshot for which this device has no place, by name; a conversion hands them on."""
        return self._trainer.of_another_device

    @property
    def unreported(self) -> StepJournal | None:
        """How the recovered iteration came out where its numbers were not written down by this rank."""
        return self._session.unreported

    def _next(self) -> int:
        """The iteration that comes now. Raises UsageError if the one before it was given out and not made."""
        iteration = self.iteration + 1
        if self._given == iteration:
            raise UsageError(
                f"iteration {iteration} ended without {LoopCall.AFTER_STEP.value}, so nothing of it is protected; call"
                " it once in each iteration, after the optimizer's and the scheduler's step"
            )
        self._given = iteration
        return iteration

    def _watch(self) -> Watcher | None:
        """Begin to watch this process; None where nothing is protected."""
        backend, links = process_group_backend(), self._session.links
        if links is None:
            return None
        watcher = Watcher(
            torch.distributed.get_rank(),
            self._session,
            links,
            lambda: self._termination.is_installed,
            PATIENCE_S["nccl" if "nccl" in backend else "gloo"],
            # Torch's own watchdog would do it, were it not told to leave errors alone. Megatron-LM may set another
            # limit behind the first iteration.
            stall_s=process_group_timeout_s if "nccl" in backend else None,
            phase=lambda: None if self._phase is LoopPhase.BETWEEN else (self._phase, self.iteration),
            finish_s=lambda lost: 0.0 if self._session.needs(lost) else self._slot.finish_s,
        )
        watcher.start()
        return watcher


def _without_logs(config: MoECheckpointConfig, transformer: Any) -> MoECheckpointConfig:
    """Roll back all stages where what they send each other is inside of a CUDA graph, which no log can be made of."""
    may_be_local = config.recovery == "auto" and _replays(config)
    if not (may_be_local and captures_passes(transformer) and transformer.pipeline_model_parallel_size > 1):
        return config
    if torch.distributed.get_rank() == 0:
        log.info(
            "localized recovery: unavailable with CUDA graphs of whole iterations; a failure rolls back all stages"
        )
    return replace(config, recovery="global")


# What has to hold before a live training process can be protected, and what is set in it so that it can.


def refuse_contradictions(config: MoECheckpointConfig, chunk: torch.nn.Module, transformer: Any) -> None:
    """Refuse settings that contradict each other, this job, or what any loop can do.

    Args:
        config: The settings.
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.

    Raises:
        UsageError: Has all contradictions in one line.
    """
    settings = getattr(chunk, "ddp_config", None)
    found = contradictions(
        config,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        num_experts=getattr(transformer, "num_moe_experts", None) or 0,
        use_distributed_optimizer=bool(getattr(settings, "use_distributed_optimizer", False)),
        stages=getattr(transformer, "pipeline_model_parallel_size", None),
    )
    unfit = (*unfit_graphs(config, transformer), *_unfit_batches(config))
    if sentences := "; ".join((*found, *unfit, *features.refusals(features.Loop.API, config))):
        raise UsageError(sentences)


def unfit_graphs(config: MoECheckpointConfig, model: Any) -> Iterator[str]:
    """What of protection has to see, or repeat, what runs inside of CUDA graphs.

    Args:
        config: The settings.
        model: Core's configuration of the model, or flags of its names.

    Yields:
        A sentence for each.
    """
    impl = getattr(model, "cuda_graph_impl", "none")
    unfit = f"--cuda-graph-impl {impl} does not go with"
    # Transformer Engine puts back the generator by whose numbers it rounds.
    draws = random_draws(model) if impl == "local" else ", ".join(drawing_settings(model))
    captures_modules = impl in ("local", "transformer_engine") and not captures_passes(model)
    if config.strategy in ("full", "sparse") and captures_modules and draws:
        # Core runs modules before it captures them, and leaves the generators where that moved them. On an H100
        # iterations that run without the graphs, as those of a replay, gave other losses (docs/results/h100.md).
        yield (
            f"{unfit} --moe-ckpt-strategy {config.strategy} and {draws}: a capture draws random numbers, and a job that"
            " comes back captures at another iteration; draw none"
        )
    boosts = config.strategy == "selective" and config.capacity_boost > 0
    if boosts and getattr(model, "moe_expert_capacity_factor", None) and captures_routers(model):
        yield (
            f"{unfit} --moe-ckpt-capacity-boost {config.capacity_boost}: a captured router keeps its capacity; use"
            " 0, or --cuda-graph-modules attn"
        )
    if config.recovery == "local" and _replays(config) and captures_passes(model):
        yield f"{unfit} --moe-ckpt-recovery local: what stages send is in the graph, unseen; use auto"
    if config.copy_placement == "bubbles" and captures_passes(model):
        yield f"{unfit} --moe-ckpt-copy-placement bubbles: stages wait in the graph, unseen; use spread"


def _unfit_batches(config: MoECheckpointConfig) -> Iterator[str]:
    """A sentence where batches differ in size, by what core counts their microbatches with, if it does."""
    constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
    if isinstance(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR, constant | None):
        return
    if config.strategy not in ("none", "full"):
        yield (
            f"batches of several sizes do not go with --moe-ckpt-strategy {config.strategy}, which runs iterations of"
            " one shape again, or counts lost tokens as shares of a training with equal batches; use full"
        )


def _replays(config: MoECheckpointConfig) -> bool:
    return config.strategy in STRATEGIES and STRATEGIES[config.strategy].replays


def refuse_sizes_that_do_not_fit(config: MoECheckpointConfig, transformer: Any, batch: int, microbatch: int) -> None:
    """Judge `--moe-ckpt-elastic` by the layout of this job.

    Args:
        config: The settings.
        transformer: Core's configuration of the model.
        batch: Samples of an iteration.
        microbatch: Samples of a microbatch.

    Raises:
        UsageError: The job cannot have all sizes that the range allows.
    """
    if config.elastic is None:
        return
    tp, pp = transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size
    experts = (transformer.expert_tensor_parallel_size or tp) * transformer.expert_model_parallel_size
    found = load("elastic.sizes").inelastic(
        config,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        replica_ranks=tp * pp * transformer.context_parallel_size,
        node_ranks=ranks_of_node(),
        expert_ranks=experts * pp if transformer.num_moe_experts else 1,
        global_batch=batch,
        micro_batch=microbatch,
    )
    if sentences := "; ".join(found):
        raise UsageError(sentences)


def refuse_what_cannot_repeat_itself(config: MoECheckpointConfig, chunk: torch.nn.Module, transformer: Any) -> None:
    """Refuse a job whose iterations cannot be repeated to the bit, where its strategy has to repeat them.

    A collective then, since environments of nodes may differ.

    Args:
        config: The settings.
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.

    Raises:
        UsageError: Says on which rank first, and what to set; on all ranks alike.
    """
    if not must_repeat_itself(config):
        return
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    told = [list(not_repeatable(config, device_settings(chunk, transformer, ranks)))]
    first = 0
    if torch.distributed.is_initialized():
        own = torch.distributed.get_rank() if told[0] else ranks
        refusing = torch.tensor([own], device=torch.cuda.current_device())
        torch.distributed.all_reduce(refusing, op=torch.distributed.ReduceOp.MIN)
        first = int(refusing.item())
        if first == ranks:
            return
        torch.distributed.broadcast_object_list(told, src=first)
    if told[0]:
        advice = "or say with --moe-ckpt-replay-tolerance by how much losses may differ"
        raise UsageError("\n".join([*(f"rank {first}: {line}" for line in told[0]), advice]))


def let_copies_run_beside_sends(chunks: Sequence[torch.nn.Module]) -> None:
    """Without this core's schedules wait for the whole device after each send, and so for copies of snapshots: none
    would run beside the passes of a pipeline. Read by core in each call, so it may be set after the model was built."""
    for chunk in chunks:
        get_model_config(chunk).batch_p2p_sync = False
