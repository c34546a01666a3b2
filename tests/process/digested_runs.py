"""Jobs whose ranks write down digests of their state at the end, and facts of it on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fp8_hooks
from attempts import Cluster
from runs import Layout, flags
from sparse_runs import LENGTH, Case, Run, weighed
from world import Hook, World

Seen = list[dict[str, Any]]
"""What each rank of a small job found in its state."""


def states(folder: Path, ranks: int) -> list[dict[str, str]]:
    """Digests of what each rank had at the end."""
    return [json.loads((folder / f"state-{rank}.json").read_text()) for rank in range(ranks)]


def ended(world: World, corpus: str, layout: Layout, folder: Path, *given: object, hooks: Sequence[Hook] = ()) -> Run:
    """An undisturbed job to its end, with the digests of its state."""
    argv = flags(corpus, layout, *map(str, given))
    outcome = world.run(argv, layout.ranks, [*hooks, partial(fp8_hooks.digested, str(folder))])
    assert set(outcome.codes) == {0}, outcome.said
    return Run(folder, (outcome,))


def examined(
    world: World, corpus: str, layout: Layout, folder: Path, model: Sequence[str], hooks: Sequence[Hook]
) -> Seen:
    """What the hooks of a small job wrote down of each rank."""
    outcome = world.run(flags(corpus, layout, *model), layout.ranks, hooks)
    assert set(outcome.codes) == {0}, outcome.said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(layout.ranks)]


def killed_under(
    strategy: Sequence[str], cluster: Cluster, case: Case, folder: Path, hooks: Sequence[Hook] = ()
) -> Run:
    """The case with its faults under a strategy, by its name and flags."""
    faults = [part for fault in case.faults for part in ("--moe-ckpt-inject-fault", fault)]
    argv = [*LENGTH, *case.model, "--metrics-jsonl", folder / "reports", "--moe-ckpt-strategy", *strategy, *faults]
    outcomes = cluster.run(case.layout, *argv, hooks=[*hooks, partial(fp8_hooks.digested, str(folder))])
    assert len(outcomes) == 1 + len(case.faults)
    return Run(folder, tuple(outcomes))


def unlike(run: Run, expected: Run, layout: Layout) -> list[str]:
    """What is not the same to the last bit: of the state at the end on each rank, and of the reports."""
    both = zip(states(run.folder, layout.ranks), states(expected.folder, layout.ranks), strict=True)
    was = {report["iteration"]: weighed(report) for report in expected.reports}
    return [
        f"{name} on rank {rank}"
        for rank, (one, other) in enumerate(both)
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ] + [f"report of {report['iteration']}" for report in run.reports if weighed(report) != was[report["iteration"]]]


def check_saves_resume(world: World, corpus: str, layout: Layout, folder: Path, *model: str) -> None:
    """A job that continues from a save of iteration 3 ends as the one that made it."""
    once, again = folder / "once", folder / "again"
    for one in (once, again):
        one.mkdir()
    saving = ("--save-interval", "3", "--save")
    ended(world, corpus, layout, once, *model, *saving, once)
    (once / "iter_0000003").rename(again / "iter_0000003")
    (again / "latest_checkpointed_iteration.txt").write_text("3")
    ended(world, corpus, layout, again, *model, *saving, again, "--load", again)
    assert states(again, layout.ranks) == states(once, layout.ranks)
