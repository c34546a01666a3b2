"""What a job that ran says of itself in its `--metrics-jsonl`, as inputs of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..runs.accounts import Run
from ..runs.run_log import read_run
from ..simulator.systems.links import SystemSetting

RESTART = ("restart", "import", "rendezvous", "build")
"""The parts of a timeline that make up a restart."""

FEWEST = 3
"""Iterations of which a median is taken."""


@dataclass(frozen=True)
class Measured:
    """Medians of one job. None: the job does not say.

    iteration_s: without waiting for checkpoints and without what copies added. added_s: by copies, to an iteration with
    copied_bytes of this rank, each of which went to so many replicas. sent_bytes_per_s: to peers, in the fastest
    iteration: links carry at least that.
    detect_s, restart_s: of its recoveries, with parts_s of the restart by name. recoveries: how many they were.
    """

    iteration_s: float
    added_s: float | None
    copied_bytes: float | None
    replicas: float
    sent_bytes_per_s: float | None
    detect_s: float | None
    restart_s: float | None
    parts_s: Mapping[str, float]
    recoveries: int

    def applied(self, machine: SystemSetting) -> SystemSetting:
        """The same job with measured values in the place of estimated ones.

        A rate to peers only raises the cluster's: a job that copies little does not show what its links carry.

        Args:
            machine: The job on its cluster, with estimated rates and costs.
        """
        cost = machine.cost.lasting(self.iteration_s)
        cluster, constants = machine.cluster, machine.constants
        if self.sent_bytes_per_s is not None:
            reached = self.sent_bytes_per_s / constants.network_share
            cluster = replace(cluster, inter_node_bytes_per_s=max(cluster.inter_node_bytes_per_s, reached))
        if self.added_s is not None and self.copied_bytes:
            busy_s = self.copied_bytes * (1 + self.replicas) / cluster.host_link_bytes_per_s
            constants = replace(constants, contention=self.added_s / busy_s)
        if self.restart_s is not None:
            constants = replace(constants, restart_s=self.restart_s)
        if self.detect_s is not None:
            constants = replace(constants, detect_s=self.detect_s)
        return replace(machine, cost=cost, cluster=cluster, constants=constants)


def measured(path: Path) -> Measured:
    """Read a job's metrics.

    Raises UnreadableCheckpoint for a file that is none, UsageError for one with too few iterations.
    """
    run = Run(read_run(path, path.name))
    rows = list(zip(*(run.of_kept(name) for name in _COLUMNS), strict=True))[1:]  # the first one warms up
    rows = [row for row in rows if _passes_s(*row) > 0]  # and not NaN
    if len(rows) < FEWEST:
        raise UsageError(f"--from {path} has {len(rows)} iterations after the first, but it takes {FEWEST} of them")
    added = [max(0.0, slowed) for _, _, slowed, copied, _ in rows if copied > 0 and not math.isnan(slowed)]
    copied = [copied for _, _, slowed, copied, _ in rows if copied > 0 and not math.isnan(slowed)]
    sent = [nbytes / taken for taken, _, _, _, nbytes in rows if nbytes > 0 and taken > 0]
    recoveries = [one.parts for one in run.log.recoveries if one.is_whole]
    parts = {name: found for name in RESTART if (found := _median(of.get(name, 0.0) for of in recoveries)) is not None}
    return Measured(
        iteration_s=median(_passes_s(*row) for row in rows),
        added_s=_median(added),
        copied_bytes=_median(copied),
        replicas=sum(_or_0(row[-1]) for row in rows) / max(1.0, sum(_or_0(row[-2]) for row in rows)),
        sent_bytes_per_s=max(sent, default=None),
        detect_s=_median(of.get("detect", 0.0) for of in recoveries),
        restart_s=_median(sum(of.get(name, 0.0) for name in RESTART) for of in recoveries),
        parts_s=parts,
        recoveries=len(recoveries),
    )


def _passes_s(taken_s: float, stall_s: float, slowed_s: float, copied: float, _: float) -> float:
    """An iteration without what checkpoints added; without a copy a row repeats what the last one did."""
    return taken_s - _or_0(stall_s) - (max(0.0, _or_0(slowed_s)) if copied > 0 else 0.0)


_COLUMNS = ("iteration_time_s", "stall_s", "slowed_s", "snapshot_bytes", "replicated_bytes")


def _or_0(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
