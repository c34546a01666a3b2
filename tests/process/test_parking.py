"""Survivors of a fault in a step: what they park is the state before or after it, to the last bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from effort import cases
from parking_hooks import KINDS, interrupted
from runs import Layout, flags
from world import World

BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
SCALED = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
DROPOUT = "--hidden-dropout 0.1"


@dataclass(frozen=True)
class Run:
    """One job: its layout, its flags besides the common ones."""

    layout: Layout
    text: str
    distributed: bool = True

    def flags(self, corpus: str) -> list[str]:
        """All flags of the job."""
        # A search for faulty hardware has collectives of its own between those that are counted.
        return flags(corpus, self.layout, "--rerun-mode", "disabled", *self.text.split(), distributed=self.distributed)


SAMPLE = {
    "distributed, fp16": Run(Layout(ep=1), f"{SCALED} {DROPOUT}"),
}
REST = {
    "plain, bf16, two ranks": Run(Layout(ep=1, ranks=2), f"--bf16 {BIAS} {DROPOUT}", distributed=False),
    "distributed, bf16": Run(Layout(), f"--bf16 {BIAS} {DROPOUT}"),
    "plain, fp32": Run(Layout(), f"{BIAS} {DROPOUT}", distributed=False),
    "distributed, fp32": Run(Layout(ep=1), f"{BIAS} {DROPOUT}"),
    "plain, bf16": Run(Layout(vpp=2), f"--bf16 {BIAS} {DROPOUT}", distributed=False),
    "plain, fp16": Run(Layout(), f"{SCALED} {DROPOUT}", distributed=False),
    "distributed, fp16, gradients in fp32": Run(Layout(), f"{SCALED} --accumulate-allreduce-grads-in-fp32"),
    "distributed, bf16, tensor parallel": Run(Layout(tp=2, ep=1), f"--bf16 {DROPOUT} --clip-grad 0"),
}
RUNS = SAMPLE | REST
CASES = cases(RUNS, fast=(), full=REST)


@dataclass(frozen=True)
class Seen:
    """What all ranks of one run wrote down."""

    run: Run
    name: str
    ranks: list[dict[str, Any]]

    def faults(self, *kinds: str) -> list[dict[str, Any]]:
        """Of all ranks, those at collectives of these kinds."""
        return [fault for facts in self.ranks for fault in facts["faults"] if fault["kind"] in kinds]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("parking")
    outcome = world.run(run.flags(corpus), run.layout.ranks, [partial(interrupted, str(folder))])
    assert set(outcome.codes) == {0}, outcome.said
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(run.layout.ranks)]
    return Seen(run, request.param, ranks)


def test_a_step_that_is_followed_comes_out_as_ever(seen: Seen) -> None:
    assert [facts["guarded"] for facts in seen.ranks] == [[]] * len(seen.ranks)


def test_peers_are_lost_in_every_kind_of_collective(seen: Seen) -> None:
    expected = set(KINDS) if seen.run.distributed else set(KINDS) - {"gather"}
    assert {fault["kind"] for fault in seen.faults(*KINDS)} == expected
    assert any(fault["failed"] for fault in seen.faults("step"))
    if "fp16" in seen.name:
        assert set(seen.ranks[0]["skipped"]) == {True, False}


def test_what_is_parked_and_what_is_made_of_it_is_bit_equal_to_the_run_without_faults(seen: Seen) -> None:
    assert [fault for fault in seen.faults(*KINDS) if fault["wrong"]] == []


def test_a_rank_stands_before_or_after_the_iteration_by_the_phase_that_the_fault_struck(seen: Seen) -> None:
    expected = {"PASSES": (0, False), "REDUCED": (0, True), "UPDATED": (1, False), "IDLE": (0, False)}
    for fault in seen.faults(*KINDS):
        steps = fault["steps"] - 1 if fault["phase"] == "IDLE" else fault["steps"]
        assert (steps, fault["gradients"]) == expected[fault["phase"]], fault


def test_a_fault_after_the_norm_leaves_nobody_behind(seen: Seen) -> None:
    assert all(fault["reaches"] for fault in seen.faults("gather", "report"))
    assert all(fault["steps"] == 1 for fault in seen.faults("gather", "report"))


def test_some_ranks_that_are_one_step_behind_roll_forward_to_those_that_are_not(seen: Seen) -> None:
    mixed = [fault for fault in seen.faults("step") if fault["losers"] != "all" and fault["reaches"]]
    assert {fault["steps"] for fault in mixed} == {0, 1}
