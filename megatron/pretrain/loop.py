"""The training loop: iterations, evaluation, checkpoints, the end.

An iteration, and the calls of its session on the way:

    passes              before the first forward pass
    reduced             after the last backward pass, when gradients are reduced
    before_optimizer    waits until snapshots have copied what the step is going to change
    stepping            around the optimizer's step, so that a rank that fails inside knows how far it came
    whole               when the state after the iteration is complete
    step_end            after evaluation and dense checkpoint: the snapshot, if one is due
    reported            when the numbers of the iteration are written

A replayed iteration has `stepped` in place of `step_end`, which also takes progress, schedules and random states from
the record of the iteration; nothing is evaluated or saved then. Faults are injected, and SIGTERM is acted on, between
these calls only (`Phase`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.local_recovery.communicator import process_groups
from megatron.core.dist_checkpointing.moe.runtime.faults import FaultInjector, Phase
from megatron.core.dist_checkpointing.moe.runtime.session import Session
from megatron.core.dist_checkpointing.moe.runtime.unprotected import Unprotected
from megatron.core.dist_checkpointing.moe.types import StepJournal
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.auxiliary import auxiliary_losses
from megatron.pretrain.batches import Datasets, evaluation_iterators, forward_step, training_iterators
from megatron.pretrain.checkpoint.due import Checkpoints
from megatron.pretrain.checkpoint.state import TrainingState, gather_parameters
from megatron.pretrain.errors import TrainingFailure
from megatron.pretrain.metrics import IterationReport, Metrics
from megatron.pretrain.stopping import StopConditions, Termination

log = logging.getLogger(__name__)

UNPROTECTED = Unprotected()


@dataclasses.dataclass(frozen=True)
class _OptimizerStep:
    """One optimizer step on this rank: what a replay of it has to come out with, and how long training waited."""

    journal: StepJournal
    stall_s: float


class Trainer:
    """Trains to `--train-iters`; all methods are collectives over all ranks.

    Args:
        session: Protects the training; called in a fixed order around each phase of an iteration.
        termination: Knows whether SIGTERM has come; training then ends between two phases of a step.
    """

    def __init__(
        self,
        state: TrainingState,
        transformer: TransformerConfig,
        datasets: Datasets,
        metrics: Metrics,
        faults: FaultInjector,
        session: Session | Unprotected = UNPROTECTED,
        termination: Termination | None = None,
    ) -> None:
        training = state.config.training
        self._session, self._termination = session, termination or Termination()
        self._state, self._transformer, self._datasets = state, transformer, datasets
        self._metrics, self._faults = metrics, faults
        self._checkpoints = Checkpoints(state, faults)
        self._stop = StopConditions(training)
        assert training.global_batch_size and training.micro_batch_size
        data_parallel = parallel_state.get_data_parallel_world_size()
        self._microbatches = training.global_batch_size // (training.micro_batch_size * data_parallel)
        transformer.grad_scale_func = state.optimizer.scale_loss
        transformer.finalize_model_grads_func = self._finalize
        self._boundary = session.communicator
        self._num_tokens: int | None = None

    def run(self) -> None:
        """Train from the current progress to the end, or to an exit condition."""
        state, progress = self._state, self._state.progress
        batches, reason = self._recover(), None
        while progress.iteration < (state.config.training.train_iters or 0) and reason is None:
            self.iterate(batches)
            reason = self._stop.reason(progress.iteration)
        if reason is not None:
            log.info("leaving training at iteration %d: %s", progress.iteration, reason)
        self._checkpoints.finish()
        # Left early without a checkpoint of this iteration, only the memory has it.
        self._session.shutdown(keep_memory=reason is not None and not self._checkpoints.has_newest)
        if reason is None:
            self._evaluate("test", self._datasets.test, 0)

    def replay(self) -> None:
        """Run the iterations that make the recovered state dense, save it, and end."""
        self._recover()
        self._checkpoints.finish()
        self._session.shutdown(keep_memory=False)

    def _recover(self) -> Any:
        """Make this rank's state dense by replaying iterations, wait for the stages that still do, and finish the
        iteration that all have reached; returns the batches that follow."""
        session = self._session
        session.begin(self._state.progress.iteration)  # may make a step: batches are counted from behind it
        batches = self._begin()
        while session.is_replaying:
            # In the middle of a replay there is no state to leave behind, so no stop is asked for.
            self.iterate(batches)
        if session.rejoin():
            self._catch_up()
        return batches

    def _catch_up(self) -> None:
        """What the fault kept from following the last iteration's step: its report, evaluation and checkpoint."""
        progress, session = self._state.progress, self._session
        if session.episode is not None:
            self._metrics.recovered(session.episode.to_data())
        if session.unreported is not None:
            self._metrics.record(self._report(session.unreported, replayed=True))
        # Some ranks were parked before the evaluation, others after it.
        agreed = torch.tensor(
            [progress.evaluated_iteration, progress.consumed_valid_samples], device=torch.cuda.current_device()
        )
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
        progress.evaluated_iteration, progress.consumed_valid_samples = map(int, agreed.tolist())
        if progress.evaluated_iteration < progress.iteration:
            self._evaluate_if_due()
        self._checkpoints.save_if_missed()

    def _begin(self) -> Any:
        """The batches from the current progress on, with the model in training mode."""
        for chunk in self._state.chunks:
            chunk.train()
        return training_iterators(self._state.config, self._datasets, self._state.progress)

    def iterate(self, batches: Any) -> None:
        """One iteration with all that belongs to it: faults, checkpoint, report, evaluation."""
        progress, started_at = self._state.progress, time.monotonic()
        iteration, replayed = progress.iteration + 1, self._session.is_replaying
        self._faults.reached(iteration, Phase.START)
        self._termination.check()
        step = self._train_step(iteration, batches)
        trained_at = time.monotonic()
        if not replayed:
            # Before the checkpoint, as in stock Megatron: a resumed run must not read this evaluation's samples again.
            self._evaluate_if_due()
        evaluated_at = time.monotonic()
        if not replayed:
            self._checkpoints.save_if_due()
        protection = self._protect(iteration, step.journal)
        now = time.monotonic()
        report = dataclasses.replace(
            self._report(step.journal, replayed=replayed),
            iteration_time_s=now - evaluated_at + trained_at - started_at,
            stall_s=now - evaluated_at + step.stall_s,
            **protection,
        )
        self._metrics.record(report)
        self._session.reported(iteration)
        self._log(report)
        self._faults.reached(iteration, Phase.END)

    def _report(self, journal: StepJournal, *, replayed: bool) -> IterationReport:
        """The report of the newest iteration, without times and checkpoints."""
        state, progress = self._state, self._state.progress
        return IterationReport(
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            lm_loss=journal.lm_loss,
            grad_norm=journal.grad_norm,
            learning_rate=get_canonical_lr_for_logging(state.optimizer.param_groups),
            loss_scale=float(state.optimizer.get_loss_scale().item()),
            skipped=journal.skipped,
            iteration_time_s=0.0,
            stall_s=0.0,
            replayed=replayed,
        )

    def _evaluate_if_due(self) -> None:
        training, progress = self._state.config.training, self._state.progress
        if training.eval_iters and progress.iteration % training.eval_interval == 0:
            self._evaluate("valid", self._datasets.valid, progress.consumed_valid_samples)
            progress.consumed_valid_samples += training.eval_iters * (training.global_batch_size or 0)
        progress.evaluated_iteration = progress.iteration

    def _train_step(self, iteration: int, batches: Any) -> _OptimizerStep:
        state, progress, session = self._state, self._state.progress, self._session
        session.passes(iteration)
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        losses = self._forward_backward(batches, forward_only=False)
        session.reduced()
        # Known before the step: whoever is parked after it can still tell the loss.
        loss = _mean_loss(losses)
        self._faults.reached(iteration, Phase.FORWARD_BACKWARD)
        self._termination.check()
        stall_s = session.before_optimizer()
        with session.stepping(iteration, loss, self._num_tokens):
            updated, grad_norm, _ = state.optimizer.step()
            if updated:
                state.scheduler.step(increment=state.config.training.global_batch_size)
            progress.iteration = iteration
            progress.consumed_train_samples += state.config.training.global_batch_size or 0
        norm = None if grad_norm is None else float(grad_norm)
        step = _OptimizerStep(StepJournal(norm, not updated, loss, self._num_tokens), stall_s)
        session.whole(iteration, step.journal)
        self._faults.reached(iteration, Phase.STEP)
        self._termination.check()
        checked = state.config.training.check_for_nan_in_loss_and_grad and not session.is_replaying
        if loss is not None and math.isnan(loss) and checked:
            raise TrainingFailure(
                f"the loss of iteration {iteration} is NaN; lower --lr or resume from an earlier checkpoint with "
                "--ckpt-step, or pass --no-check-for-nan-in-loss-and-grad to train on"
            )
        return step

    def _finalize(self, chunks: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
        """Core's, which sums up the tokens of the global batch in place where gradients are divided by them."""
        finalize_model_grads(chunks, num_tokens, **options)
        self._num_tokens = None if num_tokens is None else int(num_tokens.item())

    def _forward_backward(self, batches: Any, *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        training = self._state.config.training
        losses: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self._state.chunks,
            num_microbatches=self._microbatches,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._boundary,
            pg_collection=None if self._boundary is None else process_groups(),
        )
        return losses

    def _protect(self, iteration: int, journal: StepJournal) -> dict[str, Any]:
        """Snapshot the iteration if that is due; what checkpointing did, for the report.

        After a replayed iteration, take what its snapshot has instead: progress, schedules and random states too.
        """
        if self._session.is_replaying:
            self._session.stepped(journal)
            return {}
        self._session.step_end(iteration, journal)
        done = self._session.report()
        if done is None:
            return {}
        return {
            "snapshot_bytes": done.snapshot_bytes,
            "replicated_bytes": done.replicated_bytes,
            "protection": done.protection.state.name.lower(),
            "protection_since": done.protection.since_iteration,
            "persistence": done.persistent.state.name.lower() if done.persistent else None,
            "checkpoint_memory": dataclasses.asdict(done.memory) if done.memory else None,
            "expert_tokens": dict(done.tokens) if self._state.config.moe_checkpoint.log_expert_tokens else None,
        }

    def _log(self, report: IterationReport) -> None:
        config, losses = self._state.config, {}
        due = report.iteration % config.training.log_interval == 0
        if config.moe.num_experts is not None:
            # Stages that replay alone have no others to sum these losses up with.
            if due and not self._session.replays_alone:
                board = self._metrics.board
                losses = auxiliary_losses(config.moe, self._transformer, self._microbatches, report.iteration, board)
            else:
                clear_aux_losses_tracker()
        if due:
            self._metrics.show(report, losses)

    def _evaluate(self, split: str, dataset: Any, consumed_samples: int) -> None:
        state = self._state
        if not state.config.training.eval_iters or split not in self._datasets.present:
            return
        gather_parameters(state)
        batches = evaluation_iterators(state.config, dataset, consumed_samples)
        for chunk in state.chunks:
            chunk.eval()
        with torch.no_grad():
            losses = [
                part
                for _ in range(state.config.training.eval_iters)
                for part in self._forward_backward(batches, forward_only=True)
            ]
        for chunk in state.chunks:
            chunk.train()
        self._metrics.show_evaluation(split, state.progress.iteration, _mean_loss(losses))


def _mean_loss(losses: list[dict[str, torch.Tensor]]) -> float | None:
    """Mean loss per unmasked token over microbatches and data-parallel ranks; None off the last pipeline stage."""
    if not losses:
        return None
    total = torch.stack([part["lm loss"] for part in losses]).sum(dim=0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total[0] / total[1])
