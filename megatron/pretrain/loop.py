"""The training loop: iterations, evaluation, checkpoints, the end.

An iteration, and what the checkpoint manager does on the way:

    forward_backward    around all passes and the reduction of gradients: frozen operators in a replay, boundary logs
    optimizer.step      is the manager's: it waits until snapshots have copied what the step is going to change
    step_done           the scheduler has stepped, the loop has counted: the state after the iteration is complete
    after_step          after evaluation and dense checkpoint: the snapshot, if one is due; in a replay its record
    reported            when the numbers of the iteration are written

Faults are injected, and SIGTERM is acted on, in these calls only.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe import MoECheckpointManager, StepJournal
from megatron.core.dist_checkpointing.moe.core_versions.training import forget_auxiliary_losses
from megatron.core.dist_checkpointing.moe.seats.joining import joining_here
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.auxiliary import auxiliary_losses
from megatron.pretrain.batches import Datasets, evaluation_iterators, forward_step, training_iterators
from megatron.pretrain.checkpoint.due import Checkpoints
from megatron.pretrain.checkpoint.state import TrainingState, gather_parameters
from megatron.pretrain.errors import TrainingFailure
from megatron.pretrain.metrics import IterationReport, Metrics, protection_fields
from megatron.pretrain.optimization import LossScale
from megatron.pretrain.stopping import StopConditions

log = logging.getLogger(__name__)


class Trainer:
    """Trains to `--train-iters`; all methods are collectives over all ranks.

    Args:
        manager: Protects the training.
    """

    def __init__(
        self,
        state: TrainingState,
        transformer: TransformerConfig,
        datasets: Datasets,
        metrics: Metrics,
        manager: MoECheckpointManager,
    ) -> None:
        training = state.config.training
        self._state, self._transformer, self._datasets = state, transformer, datasets
        self._metrics, self._manager = metrics, manager
        self._checkpoints, self._loss_scale = Checkpoints(state, manager), LossScale(state.config, state.optimizer)
        protected = state.config.moe_checkpoint
        joining = joining_here() if protected.elastic is not None else None
        waits = state.config.parallel.distributed_timeout_minutes
        self._stop = StopConditions(training, waits, joining, protected.interval)
        assert training.global_batch_size and training.micro_batch_size
        data_parallel = parallel_state.get_data_parallel_world_size()
        self._microbatches = training.global_batch_size // (training.micro_batch_size * data_parallel)
        transformer.grad_scale_func = state.optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads

    def run(self) -> None:
        """Train from the current progress to the end, or to an exit condition."""
        state, progress = self._state, self._state.progress
        batches, reason = self._recover(), None
        while progress.iteration < (state.config.training.train_iters or 0) and reason is None:
            self.iterate(batches)
            reason = self._stop.reason(progress.iteration)
        if reason is not None:
            log.info("leaving training at iteration %d: %s", progress.iteration, reason)
        self._checkpoints.finish(early=reason is not None)
        # Left early without a checkpoint of this iteration, only the memory has it.
        is_needed = self._stop.makes_way or not self._checkpoints.has_newest
        self._manager.finish(keep_memory=reason is not None and is_needed)
        if self._stop.makes_way:
            self._stop.make_way()
        if reason is None:
            self._evaluate("test", self._datasets.test, 0)

    def replay(self) -> None:
        """Run the iterations that make the recovered state dense, save it, and end."""
        self._recover()
        self._checkpoints.finish()
        self._manager.finish(keep_memory=False)

    def abandon(self) -> None:
        """Training ended with an error: nothing is written any more."""
        self._checkpoints.abandon()

    def _recover(self) -> Any:
        """Make this rank's state dense by replaying iterations, wait for the stages that still do, and finish the
        iteration that all have reached; returns the batches that follow."""
        manager = self._manager
        manager.begin()  # may make a step: batches are counted from behind it
        batches = self._begin()
        while manager.is_replaying:
            # In the middle of a replay there is no state to leave behind, so no stop is asked for.
            self.iterate(batches)
        if manager.rejoin():
            self._catch_up()
        return batches

    def _catch_up(self) -> None:
        """What the fault kept from following the last iteration's step: its report, evaluation and checkpoint."""
        progress, manager = self._state.progress, self._manager
        if manager.recovery is not None:
            self._metrics.recovered(manager.recovery.to_data(), progress.iteration)
        if manager.unreported is not None:
            self._metrics.record(self._report(manager.unreported, replayed=True))
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
        started_at = time.monotonic()
        replayed = self._manager.is_replaying
        journal = self._train_step(batches)
        trained_at = time.monotonic()
        if not replayed:
            # Before the checkpoint, as in stock Megatron: a resumed run must not read this evaluation's samples again.
            self._evaluate_if_due()
        evaluated_at = time.monotonic()
        if not replayed:
            self._checkpoints.save_if_due()
        saved_at = time.monotonic()
        done = self._manager.after_step()
        now = time.monotonic()
        report = dataclasses.replace(
            self._report(journal, replayed=replayed),
            iteration_time_s=now - evaluated_at + trained_at - started_at,
            stall_s=saved_at - evaluated_at + (now - saved_at if done is None else done.stall_s),
            **protection_fields(done, with_tokens=self._state.config.moe_checkpoint.log_expert_tokens),
        )
        self._metrics.record(report)
        self._manager.reported()
        self._log(report)

    def _report(self, journal: StepJournal, *, replayed: bool) -> IterationReport:
        """The report of the newest iteration, without times and checkpoints."""
        state, progress = self._state, self._state.progress
        return IterationReport(
            iteration=progress.iteration,
            consumed_train_samples=progress.consumed_train_samples,
            lm_loss=journal.lm_loss,
            grad_norm=journal.grad_norm,
            learning_rate=get_canonical_lr_for_logging(state.optimizer.param_groups),
            loss_scale=self._loss_scale.now(),
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

    def _train_step(self, batches: Any) -> StepJournal:
        state, progress, manager = self._state, self._state.progress, self._manager
        samples, replayed = state.config.training.global_batch_size or 0, manager.is_replaying
        with manager.forward_backward():
            for chunk in state.chunks:
                chunk.zero_grad_buffer()
            state.optimizer.zero_grad()
            losses = self._forward_backward(batches, forward_only=False)
        # Known before the step: whoever is parked after it can still tell the loss.
        manager.loss = loss = _mean_loss(losses)
        updated, grad_norm, _ = state.optimizer.step()
        if updated:
            state.scheduler.step(increment=samples)
        progress.iteration += 1
        progress.consumed_train_samples += samples
        manager.step_done()
        checked = state.config.training.check_for_nan_in_loss_and_grad and not replayed
        if loss is not None and math.isnan(loss) and checked:
            raise TrainingFailure(
                f"the loss of iteration {progress.iteration} is NaN; lower --lr or resume from an earlier checkpoint "
                "with --ckpt-step, or pass --no-check-for-nan-in-loss-and-grad to train on"
            )
        return StepJournal(None if grad_norm is None else float(grad_norm), not updated, loss)

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
            p2p_communicator=self._manager.communicator,
            pg_collection=self._manager.process_groups,
        )
        return losses

    def _log(self, report: IterationReport) -> None:
        config, losses = self._state.config, {}
        due = report.iteration % config.training.log_interval == 0
        if config.moe.num_experts is not None:
            # Stages that replay alone have no others to sum these losses up with.
            if due and not self._manager.replays_alone:
                board = self._metrics.board
                losses = auxiliary_losses(config.moe, self._transformer, self._microbatches, report.iteration, board)
            else:
                forget_auxiliary_losses()
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
