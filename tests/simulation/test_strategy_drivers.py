"""One strategy object for the flags, the job and the planner: what is planned is what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seldom
from simulated import EXPERTS, LAYERS, Simulation
from simulated_world.world import Event

from megatron.core.dist_checkpointing.moe import strategies
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.contradictions import contradictions
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.stock import flags as stock_flags
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Strategy
from megatron.core.dist_checkpointing.moe.types import ModelShape, SnapshotPlan
from moe_ckpt.commands.counts_file import load_counts
from moe_ckpt.simulator.driver import Driver, newest_usable

CONFIG = MoECheckpointConfig(replicas=1, persist_dir="disk", persist_interval=8, timeout_s=60.0)
JOBS = {
    "full": replace(CONFIG, strategy="full", interval=4),
    "pec in turn": replace(CONFIG, strategy="pec", interval=4),
    "pec by load": replace(CONFIG, strategy="pec", interval=4, pec_selection="load-aware", pec_k_persist=1),
    "pec with dynamic K": replace(CONFIG, strategy="pec", interval=4, plt_threshold=0.05),
    "selective": replace(CONFIG, strategy="selective", interval=4, budget_local="2500", budget_remote="1500"),
    "sparse": replace(CONFIG, strategy="sparse", window="3", replicas=0),
    "sparse with moving averages": replace(CONFIG, strategy="sparse", window="2", ordering="time-decayed", replicas=0),
}
SHAPE = ModelShape("tiny", LAYERS, 8, 2, 16, 16, num_experts=EXPERTS)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and the line that each strategy adds."""
    for kind in ("Seldom", "Nothing"):
        monkeypatch.setitem(sys.modules, f"{strategies.__name__}.{kind.lower()}", seldom)
        monkeypatch.setitem(
            strategies._REGISTRY, kind.lower(), strategies._Registered(f".{kind.lower()}", kind, ("replay_",))
        )


def routed(rank: int, iteration: int) -> dict[int, tuple[int, ...]]:
    """Tokens by layer of one rank; popular experts change in time."""
    return {
        layer: tuple((7 * (index + layer + iteration // 6)) % (5 + rank) for index in range(EXPERTS))
        for layer in range(LAYERS)
    }


def judged(*flags: str) -> list[str]:
    config = stock_flags.read(stock_flags.arguments(ArgumentParser()).parse_args(flags))
    return list(contradictions(config, world_size=4, num_experts=4, use_distributed_optimizer=False))


@pytest.mark.usefixtures("registry")
def test_flags_take_a_new_strategy_and_judge_by_its_own_rules() -> None:
    assert judged("--moe-ckpt-strategy", "nothing") == []
    assert judged("--moe-ckpt-strategy", "seldom", "--moe-ckpt-replay-tolerance", "0.1") == []
    (problem,) = judged("--moe-ckpt-strategy", "seldom", "--moe-ckpt-interval", "3")
    assert problem == "--moe-ckpt-interval 3 does not go with seldom: leave it out"
    (problem,) = judged("--moe-ckpt-strategy", "seldom", "--moe-ckpt-pec-k-snapshot", "2")
    assert problem == "--moe-ckpt-pec-k-snapshot is for --moe-ckpt-strategy pec, not seldom"
    (problem, *_) = judged("--moe-ckpt-interval", "3")
    assert problem.endswith("choose full, pec, selective, sparse, seldom or nothing")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("name", "ends_protected"), [("seldom", True), ("nothing", False)])
def test_the_coordinator_of_a_job_drives_a_new_strategy(name: str, ends_protected: bool) -> None:
    simulation = Simulation(MoECheckpointConfig(strategy=name, replicas=1, timeout_s=60.0))
    _, job, starts = simulation.run(1)
    assert starts[-1].is_done
    assert all((report.snapshot_bytes > 0) == ends_protected for report in simulation.told.reports.values())
    assert len(job.models) == len(simulation.told.reports)


def planned(strategy: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`moe-ckpt plan` of an installation that has two more lines in its registry."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
import seldom
from megatron.core.dist_checkpointing.moe import strategies
for kind in ("Seldom", "Nothing"):
    sys.modules[f"{{strategies.__name__}}.{{kind.lower()}}"] = seldom
    strategies._REGISTRY[kind.lower()] = strategies._Registered(f".{{kind.lower()}}", kind)
from moe_ckpt.commands.main import main
main()
"""
    model = ("--model", "GPT-125M-8E", "--pp", "2", "--ranks-per-node", "1", "--moe-ckpt-replicas", "1")
    arguments = ["plan", *model, "--lost-ranks", "1", "--json", "--moe-ckpt-strategy", strategy, *flags]
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_the_planner_drives_a_new_strategy() -> None:
    done = planned("seldom", "--iteration", "8")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["iteration_of_the_failure"], report["recovered_iteration"]) == (8, 7)
    assert [segment["from"] for segment in report["segments"]] == [7]
    refused = planned("seldom", "--moe-ckpt-interval", "3")
    assert refused.returncode == 2
    assert "does not go with seldom" in refused.stderr.splitlines()[-1]
    assert "the strategy restores no state" in planned("nothing").stderr.splitlines()[-1]


@pytest.mark.parametrize("ended", [4, 5, 6])
@pytest.mark.parametrize(("strategy", "flags"), [("full", {"interval": 2}), ("sparse", {"window": "2"})])
def test_a_fault_before_the_step_finds_the_snapshots_that_the_planner_expects(
    strategy: str, flags: dict[str, Any], ended: int
) -> None:
    simulation = Simulation(MoECheckpointConfig(strategy=strategy, replicas=1, timeout_s=60.0, **flags))

    def strikes(rank: int, event: Event) -> bool:
        job = simulation.job
        at_the_end_of_the_passes = event.text == "forward pass changes random/cuda"
        return at_the_end_of_the_passes and rank == 2 and not job.starts and job.models[rank].iteration == ended  # type: ignore[union-attr]

    _, _, starts = simulation.run(1, should_crash=strikes)
    assert len(starts) == 2
    assert {outcome.plan.target for _, outcome in simulation.told.outcomes} == {newest_usable(ended) // 2 * 2}


class Recorded:
    """What the strategy of a job was asked and answered; the same on all of its ranks."""

    def __init__(self, kind: type[Strategy]) -> None:
        self.plans: dict[int, SnapshotPlan] = {}
        self.persisted: dict[int, list[SnapshotPlan]] = {}
        self.counts: dict[int, list[list[int]]] = {}
        self.job: Job | None = None
        recorded = self

        class Recording(kind):  # type: ignore[misc, valid-type]
            def __init__(self, job: Job) -> None:
                super().__init__(job)
                recorded.job = job

            def plan(self, iteration: int) -> SnapshotPlan | None:
                plan = super().plan(iteration)
                if plan is not None:
                    assert recorded.plans.setdefault(iteration, plan) == plan
                return plan

            def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
                parts = super().persistent(plan)
                if parts:
                    assert recorded.persisted.setdefault(plan.iteration, list(parts)) == list(parts)
                return parts

            def on_token_counts(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
                recorded.counts[iteration] = [list(row) for row in counts]
                super().on_token_counts(iteration, counts)

        self.kind: Any = Recording


@pytest.mark.parametrize("name", JOBS)
def test_the_planner_plans_each_snapshot_of_a_job_from_its_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JOBS[name]
    recorded = Recorded(STRATEGIES[config.strategy])
    with monkeypatch.context() as patched:
        patched.setattr(type(STRATEGIES), "__getitem__", lambda _, name: recorded.kind)
        Simulation(config, iterations=30, counts=routed).run(3)
    assert recorded.job is not None
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([recorded.counts[at] for at in sorted(recorded.counts)] or [[1] * EXPERTS] * LAYERS))
    tokens = load_counts(counts, SHAPE)
    planned = list(Driver(recorded.job, tokens.of).snapshots(30))
    assert len(planned) >= 7
    assert {snapshot.plan.iteration: snapshot.plan for snapshot in planned} == recorded.plans
    stored = {snapshot.plan.iteration: list(snapshot.persisted) for snapshot in planned if snapshot.persisted}
    assert len(recorded.persisted) >= 2
    assert {at: stored[at] for at in recorded.persisted} == recorded.persisted


def test_a_strategy_that_is_built_refuses_what_the_flags_refuse() -> None:
    with pytest.raises(UsageError, match="pec needs --num-experts"):
        STRATEGIES["pec"](Job(MoECheckpointConfig(strategy="pec"), (), None, 1, 1))  # type: ignore[arg-type]
