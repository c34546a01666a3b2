"""Jobs under sparse checkpoints, with and without faults, and what must be the same in both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import sparse_hooks
from attempts import Between, Cluster, Nodes
from runs import Layout, differences, digest, flags, published, reports_in
from world import Hook, Outcome, World

ITERATIONS, SAVE_INTERVAL = 18, 6
LENGTH = ("--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS))
WEIGHED = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_train_samples")

Scaled = tuple[str, ...]
FP32: Scaled = ()
BF16: Scaled = ("--bf16",)
# The scale climbs every two iterations until gradients overflow, so every third or fourth iteration is skipped.
FP16: Scaled = ("--fp16", *"--initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1".split())

AUX_LOSS: Scaled = ()
EXPERT_BIAS: Scaled = tuple(
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05".split()
)
CAPACITY: Scaled = ("--moe-expert-capacity-factor", "1.0")
SHARED: Scaled = ("--moe-shared-expert-intermediate-size", "32")
UNTIED: Scaled = ("--untie-embeddings-and-output-weights",)
DROPOUT: Scaled = ("--hidden-dropout", "0.1")


@dataclass(frozen=True)
class Case:
    """A job and where it is killed (RANK@ITER:PHASE); `window` is that of `--moe-ckpt-window`, empty under `full`.

    All flags that shape training are in `model`; those of `sparse` change nothing but how a job comes back.
    """

    layout: Layout
    model: tuple[str, ...] = ()
    distributed: bool = True
    window: str = "3"
    recovery: str = "global"
    faults: tuple[str, ...] = ("1@8:forward-backward", "0@14:step")
    sparse: tuple[str, ...] = ()

    @property
    def training(self) -> tuple[Layout, tuple[str, ...], bool]:
        """What two cases share when they train the same."""
        return self.layout, self.model, self.distributed

    @property
    def flags(self) -> tuple[str, ...]:
        """What the driver is given beside the layout."""
        faults = (part for fault in self.faults for part in ("--moe-ckpt-inject-fault", fault))
        window = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", self.window) if self.window else ()
        window += ("--moe-ckpt-recovery", self.recovery) if self.window else ("--moe-ckpt-strategy", "full")
        return (*LENGTH, *self.model, *window, *self.sparse, *faults)


@dataclass(frozen=True)
class Run:
    """What a run left: `folder` has its dense checkpoints; outcomes of all attempts; what each rank wrote down.

    unreported: Iterations that may lack a report. In Megatron-LM's loop that is so where a fault struck, if ranks
    recovered locally.
    """

    folder: Path
    outcomes: tuple[Outcome, ...] = ()
    events: tuple[tuple[dict[str, Any], ...], ...] = field(default=(), repr=False)
    unreported: frozenset[int] = frozenset()

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports of all iterations in the order of training, repeated and replayed ones included."""
        return reports_in(self.folder / "reports")

    @property
    def replays(self) -> list[list[dict[str, Any]]]:
        """The reports of each replay; one that was cut short and the one that began again are two."""
        found: list[list[dict[str, Any]]] = []
        for before, report in itertools.pairwise([{"iteration": 0}, *self.reports]):
            if report.get("replayed"):
                continues = before.get("replayed") and report["iteration"] == before["iteration"] + 1
                found += [] if continues else [[]]
                found[-1].append(report)
        return found

    @property
    def frozen(self) -> list[dict[str, Any]]:
        """Of each iteration that a rank replayed with frozen operators: how many of its own were, and of how many."""
        return [event for of_rank in self.events for event in of_rank if event["event"] == "frozen" and event["frozen"]]


FaultFree = Callable[[Case], Run]


def fault_free(world: World, corpus: str, case: Case, folder: Path) -> Run:
    """The same training without faults and without any protection."""
    layout, model, distributed = case.training
    saving = ("--save", str(folder), "--save-interval", str(SAVE_INTERVAL), "--metrics-jsonl", str(folder / "reports"))
    argv = flags(corpus, layout, *LENGTH, *model, *saving, distributed=distributed)
    outcome = world.run(argv, layout.ranks)
    assert set(outcome.codes) == {0}, outcome.said
    return Run(folder, (outcome,))


def killed(
    cluster: Cluster,
    case: Case,
    folder: Path,
    *,
    nodes: Nodes | None = None,
    hooks: tuple[Hook, ...] = (),
    between: Between = lambda attempt: None,
    forgiven: str = "",
) -> Run:
    """The job under sparse checkpoints, killed as the case says, to its end."""
    folder.mkdir(parents=True)
    saving = ("--save", folder, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", folder / "reports")
    outcomes = cluster.run(
        case.layout, *case.flags, *saving, nodes=nodes, hooks=[partial(sparse_hooks.watched, str(folder)), *hooks],
        distributed=case.distributed, between=between, forgiven=forgiven, job=f"{folder.parent.name}-{folder.name}",
    )  # fmt: skip
    events = tuple(tuple(_lines(folder / f"rank-{rank}.jsonl")) for rank in range(case.layout.ranks))
    struck = {int(fault.partition("@")[2].partition(":")[0]) for fault in case.faults}
    may_lack = struck if case.recovery == "auto" else ()
    return Run(folder, tuple(outcomes), events, frozenset(may_lack))


def assert_identical(run: Run, expected: Run, after: int = 0) -> None:
    """Past `after`: every report of every iteration, replayed or not, and every bit of every dense checkpoint."""
    saved = [iteration for iteration in published(expected.folder) if iteration > after]
    assert published(run.folder) == saved
    was = {report["iteration"]: weighed(report) for report in expected.reports if report["iteration"] > after}
    reports = run.reports
    found = {report["iteration"] for report in reports}
    assert found | (run.unreported & was.keys()) == was.keys(), (found, run.unreported)
    for report in reports:
        told = f"iteration {report['iteration']}{' (replayed)' * bool(report.get('replayed'))}"
        assert weighed(report) == was[report["iteration"]], told
    for iteration in saved:
        assert not differences(digest(run.folder, iteration), _kept_digest(expected.folder, iteration)), iteration


@cache
def _kept_digest(folder: Path, iteration: int) -> dict[str, str]:
    """Of a run without faults, which many others are compared with and nothing is written to any more."""
    return digest(folder, iteration)


def weighed(report: dict[str, Any]) -> dict[str, str]:
    """What an iteration computed, to the last bit."""
    return {name: repr(report[name]) for name in WEIGHED}


def assert_replayed(run: Run, window: int) -> None:
    """Replays of all stages, with frozen operators, took place, and none was longer than W - 1."""
    assert any(0 < event["frozen"] < event["operators"] for event in run.frozen), "nothing was ever partly frozen"
    assert run.replays
    assert all(len(replay) < window for replay in run.replays), [len(replay) for replay in run.replays]


def losses_after_recovery(run: Run) -> int:
    """How many iterations were trained, not replayed, after the first replay."""
    reports = run.reports
    first = next(at for at, report in enumerate(reports) if report.get("replayed"))
    return len([report for report in reports[first:] if not report.get("replayed")])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(line)
