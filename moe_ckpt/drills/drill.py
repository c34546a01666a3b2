"""The jobs of a drill: the subject under faults, stock checkpoints under the same faults, and a run without any."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ckpt.drills.job import ROOT, STOP_SIGNAL, DrillFailure, DrillJob, DrillOutcome, JobPlan
from moe_ckpt.drills.reports import (
    Journal,
    checkpoint_costs,
    differences,
    ettr,
    read_journal,
    recoveries_in,
    trained_again,
    unlike_components,
)
from moe_ckpt.drills.schedule import PlannedKill, StockCosts, best_interval

RESTARTS = 10_000
"""So many that no schedule uses them up; each node counts its own."""
CALIBRATED = 24
CALIBRATION_INTERVAL = 6
REFERENCE_INTERVAL = 100
SUBJECT = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "4")
UNTIED = ("--untie-embeddings-and-output-weights",)
"""Else first and last stage recover together, and with two stages that is the whole pipeline."""


@dataclass(frozen=True)
class DrillSettings:
    """What is run where.

    Args:
        folder: gets the folders of all jobs.
        memory: a folder on a tmpfs.
        run_s, mtbf_s, kills: for subject and baseline alike.
        flags: of the training script, for all jobs, and those that begin with --moe-ckpt- for the subject.
        standbys: processes of each node that wait to take the place of lost ranks of the subject. With any, the
            baseline has one for each rank, since all of its ranks start again: both jobs start from processes that
            have done their imports.
    """

    folder: Path
    memory: Path
    nodes: int
    nproc: int
    run_s: float
    mtbf_s: float
    patience_s: float
    kills: tuple[PlannedKill, ...]
    flags: tuple[str, ...] = ()
    standbys: int = 0

    @property
    def iterations(self) -> int:
        """More than any job reaches."""
        return max(1000, int(20 * self.run_s))

    @property
    def common(self) -> tuple[str, ...]:
        """Flags of all jobs. Schedules and the order of samples depend on --train-iters, so it is the same for all."""
        return ("--train-iters", str(self.iterations), *UNTIED, *_flags_of(self.flags, subject=False))

    @property
    def subject(self) -> tuple[str, ...]:
        """What protects the subject: the usual strategy and window, or the given strategy with its own flags."""
        own = _flags_of(self.flags, subject=True)
        return own if "--moe-ckpt-strategy" in own else (*SUBJECT, *own)


def _flags_of(flags: Iterable[str], *, subject: bool) -> tuple[str, ...]:
    """The flags with their values that configure the subject's checkpoints, or the others."""
    found, taking = [], False
    for text in flags:
        taking = text.startswith("--moe-ckpt-") == subject if text.startswith("--") else taking
        found += [text] if taking else []
    return tuple(found)


class Drill:
    """Runs the jobs, and says what happens. Raises DrillFailure."""

    def __init__(self, settings: DrillSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say

    def subject(self) -> DrillOutcome:
        """The job with our checkpoints under faults."""
        folder = self._settings.folder / "subject"
        memory = ["--moe-ckpt-memory-dir", str(self._settings.memory)]
        persist = ["--moe-ckpt-persist-dir", str(folder / "persistent")]
        only_at_the_end = ["--save-interval", str(self._settings.iterations)]  # Megatron-LM wants one
        flags = [*memory, *persist, *self._settings.subject, *only_at_the_end, *_kept(folder)]
        return self._run("subject", flags, struck=True, standbys=self._settings.standbys)

    def best_interval(self) -> dict[str, float]:
        """What a stock checkpoint and a restart cost, and the interval in iterations that is best under these faults.

        See `checkpoint_costs`. A restart takes as long as the start of a job; from standbys it is shorter, which the
        best interval hardly depends on.
        """
        plain = self._run("calibration-plain", ["--exit-interval", str(CALIBRATED)])
        folder = self._settings.folder / "calibration-saving"
        often = ["--save-interval", str(CALIBRATION_INTERVAL)]
        saving = self._run(folder.name, ["--exit-interval", str(CALIBRATED), *often, *_kept(folder)])
        found = checkpoint_costs(plain.journal, saving.journal, CALIBRATION_INTERVAL)
        costs = StockCosts(found.training_s, found.each_s, plain.start_s, found.first_s)
        interval = best_interval([kill.at_s for kill in self._settings.kills], self._settings.run_s, costs)
        return dataclasses.asdict(costs) | {"interval": interval}

    def baseline(self, interval: int) -> DrillOutcome:
        """The same job with stock synchronous checkpoints under the same faults, and as good a start after each."""
        settings = self._settings
        folder = settings.folder / "baseline"
        flags = ["--save-interval", str(interval), *_kept(folder)]
        return self._run("baseline", flags, struck=True, standbys=settings.nproc if settings.standbys else 0)

    def reference(self, folder: Path, iterations: int, saved: int) -> Journal:
        """A run without faults and without our checkpoints.

        It continues what an earlier drill left in the folder. Raises DrillFailure when that had other flags.

        Args:
            folder: Folder of the run, kept between drills.
            iterations: Number of iterations to train.
            saved: Iteration of which the run saves a checkpoint.
        """
        self._check_same_flags(folder)
        for upto in sorted({saved, iterations}):
            have = [step for step in published(folder) if step <= upto]
            if read_journal(folder / "reports").newest < upto or (upto == saved and saved not in have):
                step = ["--ckpt-step", str(max(have))] if have else []
                flags = ["--exit-interval", str(upto), "--save-interval", str(REFERENCE_INTERVAL), *step]
                self._run("reference", [*flags, *_kept(folder)], folder=folder)
        return read_journal(folder / "reports")

    def _run(
        self, name: str, flags: Sequence[str], *, struck: bool = False, folder: Path | None = None, standbys: int = 0
    ) -> DrillOutcome:
        settings = self._settings
        stop = ["--exit-signal-handler", "--exit-signal", STOP_SIGNAL.name] if struck else []
        plan = JobPlan(
            name,
            [str(ROOT / "scripts" / "train_cpu.sh"), *settings.common, *flags, *stop],
            {
                "NPROC": str(settings.nproc),
                "NNODES": str(settings.nodes),
                "MAX_RESTARTS": str(RESTARTS),
                "STANDBYS": str(standbys),
            },
            settings.kills if struck else (),
            settings.run_s if struck else None,
            settings.patience_s,
        )
        self._say(f"{name}: begins")
        with DrillJob(plan, folder or settings.folder / name, settings.memory, self._say) as job:
            outcome = job.run()
        self._say(f"{name}: iteration {outcome.last} after {outcome.wall_s:.1f} s and {len(outcome.strikes)} faults")
        return outcome

    def _check_same_flags(self, folder: Path) -> None:
        """A reference belongs to one set of flags only."""
        names = ("TP", "PP", "EP", "VPP", "MOE_CKPT_CORPUS", "MOE_CKPT_SCRIPT")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        ranks = self._settings.nodes * self._settings.nproc
        flags = json.dumps({"flags": self._settings.common, "ranks": ranks} | environment, indent=1)
        path = folder / "flags.json"
        if path.exists() and path.read_text() != flags:
            raise DrillFailure(f"the reference in {folder} was made with other flags, see {path}: use another folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(flags)


def judged(outcome: DrillOutcome, reference: Journal, useful_s: float) -> dict[str, Any]:
    """The results of a job that was struck, as JSON values.

    Args:
        outcome: The job, its log and the faults that struck it.
        reference: Reports of the run without faults.
        useful_s: Seconds of an iteration without faults and checkpoints.
    """
    return {
        "iterations": outcome.last,
        "wall_s": outcome.wall_s,
        "useful_iteration_s": useful_s,
        "ettr": ettr(outcome.last - outcome.first, useful_s, outcome.wall_s),
        "trained_again": trained_again(outcome.journal),
        # A stage that replays without the last one reports nothing; timelines know.
        "replayed": sum(timeline["replayed"] for timeline in outcome.journal.recoveries),
        "recoveries": recoveries_in(outcome.log),
        "timelines": list(outcome.journal.recoveries),
        "faults": [
            {
                "kind": strike.planned.kind.value,
                "target": strike.planned.target,
                "planned_s": strike.planned.at_s,
                "struck_s": strike.at_s,
                "after_iteration": strike.iteration,
                "node": strike.node,
            }
            for strike in outcome.strikes
        ],
        "wrong": list(differences(outcome.journal, reference)),
    }


def wrong_components(folder: Path, reference: Path, iteration: int) -> tuple[str, ...]:
    """Components in which the checkpoints of an iteration differ, by `moe-ckpt digest`.

    Args:
        folder: Folder of the job that was struck.
        reference: Folder of the run without faults.
        iteration: Iteration that both have saved.
    """
    from moe_ckpt.dense.dense import open_dense
    from moe_ckpt.dense.digest import digest_components

    found, expected = (
        {part.component: part.digest for part in digest_components(open_dense(path))}
        for path in (job / "checkpoints" / f"iter_{iteration:07d}" for job in (folder, reference))
    )
    return unlike_components(found, expected)


def published(folder: Path) -> list[int]:
    """The iterations of which a job has a checkpoint."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("iter_*"))


def _kept(folder: Path) -> list[str]:
    return ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
