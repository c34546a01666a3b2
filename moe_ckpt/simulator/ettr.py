"""What checkpoints cost over a whole run: the effective training time ratio, and the overhead of MoC."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole


def expected_recovery_s(iteration_time_s: float, interval: int, restart_s: float = 0.0) -> float:
    """E[R] of dense checkpoints (MoEvement 2.4, 3.6): half an interval is run again, after a constant restart.

    Raises UsageError for times that are negative or not finite, and an interval below 1.

    Args:
        iteration_time_s: T_iter, seconds of an iteration.
        interval: Iterations between two checkpoints.
        restart_s: Seconds that detection, spawning and loading take; 0 as in the paper's closed form.
    """
    positive("iteration_time_s", iteration_time_s)
    not_negative("restart_s", restart_s)
    return restart_s + whole("interval", interval, 1) * iteration_time_s / 2


def ettr(
    iteration_time_s: float, checkpoint_overhead_s: float, interval: int, expected_recovery_s: float, mtbf_s: float
) -> float:
    """Effective training time ratio, between 0 and 1 (MoEvement 2.4 and App. C).

    1 / (1 + T_ckpt / (T_iter I)) x 1 / (1 + E[R] / MTBF). Raises UsageError for times that are negative or not finite,
    and an iteration time, mean time between failures or interval of 0.

    Args:
        iteration_time_s: T_iter, seconds of an iteration.
        checkpoint_overhead_s: T_ckpt, seconds that one checkpoint adds to the training time.
        interval: I, iterations between two checkpoints.
        expected_recovery_s: E[R], mean seconds that a failure costs.
        mtbf_s: Mean time between failures of the whole job, in seconds.
    """
    positive("iteration_time_s", iteration_time_s)
    not_negative("checkpoint_overhead_s", checkpoint_overhead_s)
    whole("interval", interval, 1)
    not_negative("expected_recovery_s", expected_recovery_s)
    positive("mtbf_s", mtbf_s)
    runtime_overhead = checkpoint_overhead_s / iteration_time_s / interval
    return 1 / (1 + runtime_overhead) / (1 + expected_recovery_s / mtbf_s)


def gemini_oracle(
    iteration_time_s: float,
    checkpoint_overhead_s: float,
    mtbf_s: float,
    max_interval: int,
    restart_s: float = 0.0,
) -> int:
    """The interval with the highest ETTR; of equals the smallest (MoEvement 5.2).

    It needs to know the mean time between failures, which a running job does not: an upper bound for any policy that
    fixes an interval. Raises UsageError as `ettr` does.

    Args:
        iteration_time_s: T_iter, seconds of an iteration.
        checkpoint_overhead_s: T_ckpt, seconds that one checkpoint adds to the training time.
        mtbf_s: Mean time between failures of the whole job, in seconds.
        max_interval: The largest interval to try, in iterations; the smallest is 1.
        restart_s: Seconds that detection, spawning and loading take.
    """
    whole("max_interval", max_interval, 1)

    def quality(interval: int) -> float:
        recovery_s = expected_recovery_s(iteration_time_s, interval, restart_s)
        return ettr(iteration_time_s, checkpoint_overhead_s, interval, recovery_s, mtbf_s)

    return max(range(1, max_interval + 1), key=quality)


@dataclass(frozen=True)
class TrainingRun:
    """What MoC eq. 4 takes as given of a whole training run.

    `faults_per_iteration` is the constant rate lambda of eq. 11, `iteration_time_s` over the mean time between
    failures. Raises UsageError for values that are negative or not finite, and an iteration that takes no time.
    """

    iterations: int
    iteration_time_s: float
    faults_per_iteration: float
    restart_s: float

    def __post_init__(self) -> None:
        whole("iterations", self.iterations, 0)
        positive("iteration_time_s", self.iteration_time_s)
        not_negative("faults_per_iteration", self.faults_per_iteration)
        not_negative("restart_s", self.restart_s)

    @property
    def expected_faults(self) -> float:
        """N_fault of MoC eq. 11."""
        return self.faults_per_iteration * self.iterations


def moc_save_overhead_s(snapshot_s: float, forward_backward_s: float) -> float:
    """O_save of MoC eq. 10: the seconds by which a snapshot outlasts the forward and backward passes.

    Raises UsageError for times that are negative or not finite.

    Args:
        snapshot_s: Seconds of the snapshot's copy, which overlaps the passes.
        forward_backward_s: Seconds of the forward and backward passes of one iteration.
    """
    not_negative("snapshot_s", snapshot_s)
    not_negative("forward_backward_s", forward_backward_s)
    return max(0.0, snapshot_s - forward_backward_s)


def moc_overhead_s(save_s: float, interval: int, run: TrainingRun) -> float:
    """O_ckpt of MoC eq. 4 with the expected faults of eq. 11, which is eq. 12 and eq. 13: seconds over the whole run.

    The paper adds I_ckpt / 2 iterations to seconds; here the lost iterations count with the time they take. Two
    strategies compare as eq. 14 to 16 say: by `save_s` and `interval` alone. Raises UsageError for a `save_s` that is
    negative or not finite, and an interval below 1.

    Args:
        save_s: O_save, seconds that one checkpoint adds to the training time.
        interval: I_ckpt, iterations between two checkpoints.
        run: Iterations, seconds of one, restart time and expected faults of the run.
    """
    not_negative("save_s", save_s)
    lost_s = whole("interval", interval, 1) / 2 * run.iteration_time_s
    return save_s * run.iterations / interval + run.expected_faults * (run.restart_s + lost_s)
