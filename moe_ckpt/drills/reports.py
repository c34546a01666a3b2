"""What jobs leave behind, and how one that was struck compares with one that was not."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARED = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_train_samples")
"""What must be the same to the last bit in every report of an iteration, repeated and replayed ones too."""

_RECOVERED = re.compile(r"recovered iteration \d+ .* \((\w+) rollback\)")
_LOADED = re.compile(r"loaded checkpoint from")


@dataclass(frozen=True)
class Journal:
    """The lines of a --metrics-jsonl file: reports of iterations, and timelines of recoveries."""

    reports: tuple[Mapping[str, Any], ...]
    recoveries: tuple[Mapping[str, Any], ...] = ()

    @property
    def newest(self) -> int:
        """The iteration of the last report, 0 without any."""
        return int(self.reports[-1]["iteration"]) if self.reports else 0

    @property
    def trained(self) -> tuple[Mapping[str, Any], ...]:
        """Reports of iterations that were trained, some perhaps again; replayed ones are not here."""
        return tuple(report for report in self.reports if not report.get("replayed"))


def read_journal(path: Path) -> Journal:
    """What is there by now; a line that is just being written is left out."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return Journal(
        tuple(line for line in lines if "iteration" in line),
        tuple(line["recovery"] for line in lines if "recovery" in line),
    )


def differences(journal: Journal, reference: Journal) -> Iterator[str]:
    """A sentence for each report that differs from the reference, or that the reference lacks.

    Args:
        journal: Reports of the job that was struck.
        reference: Reports of the run without faults.
    """
    expected = {report["iteration"]: report for report in reference.reports}
    for report in journal.reports:
        iteration = report["iteration"]
        name = f"iteration {iteration}{' (replayed)' if report.get('replayed') else ''}"
        if iteration not in expected:
            yield f"{name} is not in the reference, which ends at {max(expected, default=0)}"
            continue
        for key in COMPARED:
            found, right = report.get(key), expected[iteration].get(key)
            if repr(found) != repr(right):
                yield f"{name}: {key} is {found!r}, but {right!r} without faults"


def unlike_components(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, ...]:
    """Components of a checkpoint whose digests differ, or that one of two checkpoints lacks.

    Args:
        found: Digest of each component of one checkpoint.
        expected: Digest of each component of the other checkpoint.
    """
    return tuple(name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))


def recoveries_in(log: str) -> dict[str, int]:
    """How many recoveries of each scope a log tells of; `checkpoint` where one was loaded from storage instead."""
    scopes = Counter(_RECOVERED.findall(log))
    scopes["checkpoint"] += len(_LOADED.findall(log))
    return dict(sorted((scope, count) for scope, count in scopes.items() if count))


def trained_again(journal: Journal) -> int:
    """Iterations beyond the first time that each was trained; what was replayed is not among them."""
    trained = [report["iteration"] for report in journal.trained]
    return len(trained) - len(set(trained))


def iteration_s(journal: Journal, warm: int = 3) -> float:
    """Seconds of an iteration: the median without the first ones, in which much happens for the first time.

    Raises ValueError when there are no more reports than these.

    Args:
        journal: Reports of the run.
        warm: Number of first iterations to leave out.
    """
    times: list[float] = [report["iteration_time_s"] for report in journal.trained[warm:]]
    if not times:
        raise ValueError(f"only {len(journal.reports)} iterations were trained; {warm + 1} are needed")
    return statistics.median(times)


@dataclass(frozen=True)
class CheckpointCosts:
    """Seconds that training takes longer: for a checkpoint, and for the first one after a start beyond that, since much
    is imported and allocated for it. training_s: an iteration without any."""

    each_s: float
    first_s: float
    training_s: float


def checkpoint_costs(plain: Journal, saving: Journal, interval: int) -> CheckpointCosts:
    """The costs of checkpoints, from the times between reports, whatever a loop counts as part of an iteration.

    Writes in the background count too. The cost of one is at least the time by which iterations with a checkpoint took
    longer than their neighbours, which a busy machine does not hide.

    Args:
        plain: Reports of training without checkpoints.
        saving: Reports of the same training with at least two checkpoints.
        interval: Iterations between two checkpoints of `saving`.
    """
    training_s = statistics.fmean(between for at, between in _times_between(plain) if at >= interval)
    with_first_s = dict(_times_between(saving))[interval]
    later = [(at, between) for at, between in _times_between(saving) if at > interval]
    slowed_s = statistics.fmean(between for _, between in later)
    with_one, without = (
        statistics.median(between for at, between in later if (at % interval == 0) is has_one)
        for has_one in (True, False)
    )
    each_s = max((slowed_s - training_s) * interval, with_one - without, 0.0)
    return CheckpointCosts(each_s, max(with_first_s - with_one, 0.0), training_s)


def _times_between(journal: Journal) -> list[tuple[int, float]]:
    """Each iteration but the first, and the seconds since the report of the one before."""
    pairs = zip(journal.reports, journal.reports[1:], strict=False)
    return [(int(report["iteration"]), report["since_boot_s"] - before["since_boot_s"]) for before, report in pairs]


def ettr(iterations: int, useful_iteration_s: float, wall_s: float) -> float:
    """Effective training time ratio, measured (MoEvement 2.4: useful training time over wall time).

    All else lowers it: stalls and slower iterations for checkpoints, waiting for the restart, recovery, and iterations
    that were run again. Noise can lift it a little above 1.

    Args:
        iterations: those that the final state consists of, each counted once however often it was run.
        useful_iteration_s: what each would take without faults and without any checkpoints, by the fault-free run.
        wall_s: from the end of the first iteration counted to the end of the last one, so that the start of the job,
            which is the same for all, does not count.
    """
    return iterations * useful_iteration_s / wall_s
