"""ETTR by formula (MoEvement App. C): no events, no chance."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.policy.checks import positive

from .behaviour import Behaviour


def ettr(behaviour: Behaviour, mtbf_s: float, duration_s: float = 12 * 3600.0) -> float:
    """Effective training time ratio, from 0 to 1: 1 / (1 + T_ckpt / (T_iter I)) x 1 / (1 + E[R] / MTBF).

    Where faults change a strategy, it is the mean over a run of `duration_s` seconds, for each stretch between faults
    with both factors as the faults so far have left them; otherwise the duration does not matter.
    Raises UsageError for times that are not above 0 and finite.

    Args:
        behaviour: The system in its job; it is copied and stays as it was.
        mtbf_s: Mean time between failures of the whole job, in seconds.
        duration_s: Length of the run in wall-clock seconds.
    """
    positive("mtbf_s", mtbf_s)
    positive("duration_s", duration_s)
    state = behaviour.fresh()
    useful_s, wall_s, iteration = 0.0, 0.0, 0.0
    while wall_s < duration_s:
        stretch_s = mtbf_s + state.expected_recovery_s
        part = min(1.0, (duration_s - wall_s) / stretch_s)
        trained_s = part * mtbf_s / (1 + state.overhead_s / state.iteration_s)
        useful_s += trained_s
        wall_s += part * stretch_s
        iteration += trained_s / state.iteration_s
        if part < 1:
            break
        state.strike(int(iteration), nodes=frozenset((0,)))
    return useful_s / wall_s
