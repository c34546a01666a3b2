"""Each ingredient of an exact replay, broken by itself, is noticed: by the replay, or in what comes out of it."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mutation_hooks
import pytest
from effort import cases
from runs import Layout, differences, digest, flags
from sparse_hooks import untouched
from sparse_runs import DROPOUT, EXPERT_BIAS, FP16, Case, FaultFree, Run, weighed
from world import Hook, Outcome, World, node_memory

LAST = 12
# Iterations 6, 7 and 8 are replayed, from a window that began with 5; one of these steps was skipped.
CASE = Case(Layout(1, 1, 2, ranks=2), (*FP16, *EXPERT_BIAS, *DROPOUT), window="4", faults=("1@10:step",))

SAMPLE = [
    mutation_hooks.the_norm_of_active_gradients_alone,
    mutation_hooks.random_states_left_as_they_are,
    mutation_hooks.a_frozen_operator_active,
    mutation_hooks.weights_of_frozen_operators_left_as_they_were,
    mutation_hooks.compute_weights_not_derived_from_loaded_masters,
    mutation_hooks.expert_bias_lost,
    mutation_hooks.step_counts_of_adam_one_too_high,
    mutation_hooks.another_learning_rate,
    mutation_hooks.data_one_iteration_ahead,
    mutation_hooks.another_loss_scale,
]
REST = [  # each breaks what one of the sample breaks in another way
    mutation_hooks.the_norm_of_another_iteration,
    mutation_hooks.gradients_that_are_not_finite_ignored,
    mutation_hooks.another_weight_decay,
    mutation_hooks.another_count_of_steps_since_the_last_overflow,
    mutation_hooks.an_active_operator_frozen,
    mutation_hooks.frozen_operators_stepped_too,
]
MUTATIONS = cases([*SAMPLE, *REST], fast=(), full=REST)


@dataclass(frozen=True)
class Left:
    """What a killed job left: its memory, and the reports until then."""

    memory: Path
    folder: Path
    world: World
    corpus: str

    def start(self, memory: Path, folder: Path, *hooks: Hook) -> Outcome:
        """Another attempt of the job, to iteration `LAST`."""
        saving = ("--save", folder, "--exit-interval", LAST, "--metrics-jsonl", folder / "reports")
        places = ("--moe-ckpt-memory-dir", memory, "--moe-ckpt-strict")
        argv = flags(self.corpus, CASE.layout, *CASE.flags, *map(str, (*saving, *places)))
        environments = [
            {"MOE_CKPT_NODE": "node-0", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": self.memory.name}
            for rank in range(CASE.layout.ranks)
        ]
        return self.world.start(argv, CASE.layout.ranks, hooks, environments).wait_or_restart()


Attempt = Callable[[Hook], tuple[Outcome, Run]]


@pytest.fixture(scope="module")
def left(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    with node_memory() as memory:
        job = Left(memory, tmp_path_factory.mktemp("left"), world, corpus)
        outcome = job.start(job.memory, job.folder)
        assert -signal.SIGKILL in outcome.codes, outcome.said
        yield job


@pytest.fixture
def attempt(left: Left, tmp_path: Path) -> Iterator[Attempt]:
    """Starts the job again on a copy of what was left, with a hook."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-copy-", dir=left.memory.parent) as memory:
        shutil.copytree(left.memory, memory, dirs_exist_ok=True)

        def start(hook: Hook) -> tuple[Outcome, Run]:
            folder = tmp_path / "attempt"
            shutil.copytree(left.folder, folder)
            outcome = left.start(Path(memory), folder, hook, partial(untouched, str(tmp_path)))
            events = (path.read_text().splitlines() for path in sorted(tmp_path.glob("rank-*.jsonl")))
            return outcome, Run(folder, (outcome,), tuple(tuple(map(json.loads, lines)) for lines in events))

        yield start


def what_is_unlike(run: Run, expected: Run) -> list[str]:
    """What is not as without faults: in the reports, in the state after iteration `LAST`, or in frozen operators."""
    was = {report["iteration"]: report for report in expected.reports}
    unlike = [
        f"{'replayed ' * report['replayed']}iteration {report['iteration']}: {name}"
        for report in run.reports
        for name, value in weighed(report).items()
        if value != weighed(was[report["iteration"]])[name]
    ]
    touched = [f"frozen {key}" for of_rank in run.events for event in of_rank for key in event["changed"]]
    return unlike + touched + differences(digest(run.folder, LAST), digest(expected.folder, LAST))


@pytest.mark.ci
def test_with_nothing_broken_all_is_as_without_faults(attempt: Attempt, fault_free: FaultFree) -> None:
    outcome, run = attempt(mutation_hooks.nothing_broken)
    assert set(outcome.codes) == {0}, outcome.said
    assert [report["iteration"] for report in run.replays[0]] == [6, 7, 8]
    assert {report["skipped"] for report in run.replays[0]} == {True, False}, "both kinds of steps are to be replayed"
    assert all(any(event["tensors"] for event in of_rank) for of_rank in run.events), "nothing was frozen"
    assert what_is_unlike(run, fault_free(CASE)) == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_is_noticed(mutation: Hook, attempt: Attempt, fault_free: FaultFree) -> None:
    outcome, run = attempt(mutation)
    if any(outcome.codes):
        assert "the replay of iteration" in outcome.said, outcome.said
    else:
        assert what_is_unlike(run, fault_free(CASE))
