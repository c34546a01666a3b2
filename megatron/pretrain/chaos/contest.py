"""The jobs of a drill: the subject under faults, stock checkpoints under the same faults, and a run without any."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.pretrain.chaos.faults import Fault
from megatron.pretrain.chaos.job import ROOT, STOP_SIGNAL, ChaosFailure, Job, Outcome, Plan
from megatron.pretrain.chaos.oracle import Costs, best_interval
from megatron.pretrain.chaos.reports import (
    Journal,
    checkpoint_cost_s,
    ettr,
    read_journal,
    recoveries_in,
    trained_again,
    unlike,
    unlike_components,
)

RESTARTS = 10_000
"""So many that no schedule uses them up; each node counts its own."""
CALIBRATED = 24
CALIBRATION_INTERVAL = 6
REFERENCE_INTERVAL = 100
SUBJECT = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "4")
UNTIED = ("--untie-embeddings-and-output-weights",)
"""Else first and last stage recover together, and with two stages that is the whole pipeline."""
MOST_TOLD = 5


@dataclass(frozen=True)
class Settings:
    """What is run where. flags: of the training script, for all jobs, and those that begin with --moe-ckpt- for the
    subject. memory: a folder on a tmpfs. run_s, mtbf_s, faults: for subject and baseline alike."""

    folder: Path
    memory: Path
    nodes: int
    nproc: int
    run_s: float
    mtbf_s: float
    patience_s: float
    faults: tuple[Fault, ...]
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    @property
    def common(self) -> tuple[str, ...]:
        """Flags of all jobs. Schedules and the order of samples depend on --train-iters, so it is the same for all."""
        iterations = ("--train-iters", str(max(1000, int(20 * self.run_s))))
        return (*iterations, *UNTIED, *_chosen(self.flags, ours=False))

    @property
    def subject(self) -> tuple[str, ...]:
        """What protects the subject; given flags win over the defaults before them."""
        return (*SUBJECT, *_chosen(self.flags, ours=True))


def _chosen(flags: Iterable[str], *, ours: bool) -> tuple[str, ...]:
    """The flags with their values that configure checkpoints, or the others."""
    found, taking = [], False
    for text in flags:
        taking = text.startswith("--moe-ckpt-") == ours if text.startswith("--") else taking
        found += [text] if taking else []
    return tuple(found)


class Drill:
    """Runs the jobs; `say` is told what happens. Raises ChaosFailure."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say

    def subject(self) -> Outcome:
        """The job with our checkpoints under faults."""
        folder = self._settings.folder / "subject"
        memory = ["--moe-ckpt-memory-dir", str(self._settings.memory)]
        persist = ["--moe-ckpt-persist-dir", str(folder / "persistent")]
        return self._run("subject", [*memory, *persist, *self._settings.subject, *_kept(folder)], struck=True)

    def best_interval(self) -> dict[str, float]:
        """What a stock checkpoint and a restart cost, and the interval in iterations that is best under these faults.

        See `checkpoint_cost_s`. A restart takes as long as the start of a job.
        """
        plain = self._run("calibration-plain", ["--exit-interval", str(CALIBRATED)])
        folder = self._settings.folder / "calibration-saving"
        often = ["--save-interval", str(CALIBRATION_INTERVAL), "--async-save"]
        saving = self._run(folder.name, ["--exit-interval", str(CALIBRATED), *often, *_kept(folder)])
        cost_s, training_s = checkpoint_cost_s(plain.journal, saving.journal, CALIBRATION_INTERVAL)
        costs = Costs(training_s, cost_s, plain.start_s)
        interval = best_interval([fault.at_s for fault in self._settings.faults], self._settings.run_s, costs)
        return dataclasses.asdict(costs) | {"interval": interval}

    def baseline(self, interval: int) -> Outcome:
        """The same job with stock asynchronous checkpoints under the same faults."""
        folder = self._settings.folder / "baseline"
        flags = ["--save-interval", str(interval), "--async-save", "--keep-last", "2", *_kept(folder)]
        return self._run("baseline", flags, struck=True)

    def reference(self, folder: Path, iterations: int, saved: int) -> Journal:
        """A run without faults and without our checkpoints, with a checkpoint of iteration `saved`.

        What an earlier drill with the same flags left in the folder is gone on from. Raises ChaosFailure when its flags
        were others.
        """
        self._check_same(folder)
        for upto in sorted({saved, iterations}):
            have = [step for step in published(folder) if step <= upto]
            if read_journal(folder / "reports").newest < upto or (upto == saved and saved not in have):
                step = ["--ckpt-step", str(max(have))] if have else []
                flags = ["--exit-interval", str(upto), "--save-interval", str(REFERENCE_INTERVAL), *step]
                self._run("reference", [*flags, *_kept(folder)], folder=folder)
        return read_journal(folder / "reports")

    def _run(self, name: str, flags: Sequence[str], *, struck: bool = False, folder: Path | None = None) -> Outcome:
        settings = self._settings
        stop = ["--exit-signal-handler", "--exit-signal", STOP_SIGNAL.name] if struck else []
        environment = {"NPROC": str(settings.nproc), "NNODES": str(settings.nodes), "MAX_RESTARTS": str(RESTARTS)}
        plan = Plan(
            name,
            [str(ROOT / "scripts" / "train_cpu.sh"), *settings.common, *flags, *stop],
            environment | dict(settings.environment or {}),
            settings.faults if struck else (),
            settings.run_s if struck else None,
            settings.patience_s,
        )
        self._say(f"{name}: begins")
        with Job(plan, folder or settings.folder / name, settings.memory, self._say) as job:
            outcome = job.run()
        self._say(f"{name}: iteration {outcome.last} after {outcome.wall_s:.1f} s and {len(outcome.strikes)} faults")
        return outcome

    def _check_same(self, folder: Path) -> None:
        """A reference is one of these flags only."""
        names = ("TP", "PP", "EP", "VPP", "CORPUS", "SCRIPT")
        places = {name: os.environ[name] for name in names if name in os.environ}
        ranks = self._settings.nodes * self._settings.nproc
        told = json.dumps({"flags": self._settings.common, "ranks": ranks} | places, indent=1)
        path = folder / "flags.json"
        if path.exists() and path.read_text() != told:
            raise ChaosFailure(f"the reference in {folder} was made with other flags, see {path}: use another folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(told)


def judged(outcome: Outcome, reference: Journal, useful_s: float) -> dict[str, Any]:
    """What came of a job that was struck, as JSON values. useful_s: an iteration without faults and checkpoints."""
    return {
        "iterations": outcome.last,
        "wall_s": outcome.wall_s,
        "useful_iteration_s": useful_s,
        "ettr": ettr(outcome.last - outcome.first, useful_s, outcome.wall_s),
        "trained_again": trained_again(outcome.journal),
        # A stage that replays without the last one reports nothing; timelines know.
        "replayed": sum(one["replayed"] for one in outcome.journal.recoveries),
        "recoveries": recoveries_in(outcome.log),
        "timelines": list(outcome.journal.recoveries),
        "faults": [
            {
                "kind": strike.fault.kind.value,
                "target": strike.fault.target,
                "planned_s": strike.fault.at_s,
                "struck_s": strike.at_s,
                "after_iteration": strike.iteration,
                "node": strike.node,
            }
            for strike in outcome.strikes
        ],
        "wrong": list(unlike(outcome.journal, reference)),
    }


def wrong_components(one: Path, other: Path, iteration: int) -> tuple[str, ...]:
    """Components in which the checkpoints of an iteration in two folders of jobs differ, by `moe-ckpt digest`."""
    from megatron.core.dist_checkpointing.moe.store.dense import open_dense
    from megatron.core.dist_checkpointing.moe.store.digest import digest_components

    found, expected = (
        {part.component: part.digest for part in digest_components(open_dense(_checkpoint(folder, iteration)))}
        for folder in (one, other)
    )
    return unlike_components(found, expected)


def published(folder: Path) -> list[int]:
    """The iterations of which a job has a checkpoint."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("iter_*"))


def _checkpoint(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / f"iter_{iteration:07d}"


def _kept(folder: Path) -> list[str]:
    place = str(folder / "checkpoints")
    return ["--save", place, "--load", place]
