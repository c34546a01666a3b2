"""What jobs leave behind, and how one that was struck compares with one that was not."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHED = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_train_samples")
"""What must come out the same to the last bit, in every report of an iteration, repeated and replayed ones too."""

_RECOVERED = re.compile(r"recovered iteration \d+ .* \((\w+) rollback\)")
_LOADED = "loaded checkpoint of iteration"

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Journal:
    """The lines of a --metrics-jsonl file: reports of iterations, and timelines of recoveries."""

    reports: tuple[Report, ...]
    recoveries: tuple[Report, ...] = ()

    @property
    def newest(self) -> int:
        """The iteration of the last report, 0 without any."""
        return int(self.reports[-1]["iteration"]) if self.reports else 0

    @property
    def trained(self) -> tuple[Report, ...]:
        """Reports of iterations that were trained, some perhaps again; replayed ones are not here."""
        return tuple(report for report in self.reports if not report.get("replayed"))


def read_journal(path: Path) -> Journal:
    """What is there by now; a line that is just being written is left out."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return Journal(
        tuple(line for line in lines if "recovery" not in line),
        tuple(line["recovery"] for line in lines if "recovery" in line),
    )


def unlike(journal: Journal, reference: Journal) -> tuple[str, ...]:
    """A sentence for each report that differs from that of the reference; also where the reference has none."""
    expected = {report["iteration"]: report for report in reference.reports}
    return tuple(_unlike(journal.reports, expected))


def _unlike(reports: Sequence[Report], expected: Mapping[int, Report]) -> Iterator[str]:
    for report in reports:
        iteration = report["iteration"]
        told = f"iteration {iteration}{' (replayed)' if report.get('replayed') else ''}"
        if iteration not in expected:
            yield f"{told} is not in the reference, which ends at {max(expected, default=0)}"
            continue
        for name in WEIGHED:
            found, right = report.get(name), expected[iteration].get(name)
            if repr(found) != repr(right):
                yield f"{told}: {name} is {found!r}, but {right!r} without faults"


def unlike_components(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, ...]:
    """Components of a checkpoint whose digests differ, or that one of two checkpoints lacks."""
    return tuple(name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))


def recoveries_in(log: str) -> dict[str, int]:
    """How many recoveries of each scope a log tells of; `checkpoint` where one was loaded from storage instead."""
    scopes = Counter(_RECOVERED.findall(log))
    scopes["checkpoint"] += log.count(_LOADED)
    return dict(sorted((scope, count) for scope, count in scopes.items() if count))


def trained_again(journal: Journal) -> int:
    """Iterations beyond the first time that each was trained; what was replayed is not among them."""
    trained = [report["iteration"] for report in journal.trained]
    return len(trained) - len(set(trained))


def iteration_s(journal: Journal, warm: int = 3) -> float:
    """Seconds of an iteration: the median without the first ones, in which much happens for the first time.

    Raises ValueError when there are no more reports than that.
    """
    times: list[float] = [report["iteration_time_s"] for report in journal.trained[warm:]]
    if not times:
        raise ValueError(f"only {len(journal.reports)} iterations were trained; {warm + 1} are needed")
    return statistics.median(times)


def checkpoint_cost_s(plain: Journal, saving: Journal, interval: int) -> tuple[float, float]:
    """Seconds that a checkpoint costs training, and those of an iteration without any.

    plain, saving: the same training without checkpoints, and with one every `interval` iterations. The cost is what all
    iterations from the first checkpoint on took longer, so what is written beside training counts too; at least what
    training waited for, which a busy machine does not hide.
    """
    tails = [[one for one in journal.reports if one["iteration"] >= interval] for journal in (plain, saving)]
    training_s, slowed_s = (statistics.fmean(one["iteration_time_s"] for one in tail) for tail in tails)
    saves = sum(one["iteration"] % interval == 0 for one in tails[1])
    waited_s = sum(one["stall_s"] for one in tails[1]) / saves
    return max((slowed_s - training_s) * interval, waited_s), training_s


def ettr(iterations: int, useful_iteration_s: float, wall_s: float) -> float:
    """Effective training time ratio, measured (MoEvement 2.4: useful training time over wall time).

    iterations: those that the final state consists of, each counted once, whether it was trained, trained again or
    replayed. useful_iteration_s: what each would take without faults and without any checkpoints, by the fault-free
    run. So all else lowers the ratio: stalls and slower iterations for checkpoints, waiting for the restart, recovery,
    and iterations that were run again. wall_s: from the end of the first iteration counted to the end of the last one,
    so that the start of the job, which is the same for all, does not count. Noise can lift it a little above 1.
    """
    return iterations * useful_iteration_s / wall_s
