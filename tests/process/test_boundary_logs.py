"""Boundary logs of real training: what neighbours received is what the logs hold, to the last bit, in their order."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from boundary_hooks import BASE, ITERATIONS, JOB, KILLED_IN, logged
from effort import cases
from runs import Layout, Start, flags
from stock_trainer import configured
from world import World, node_memory

from megatron.core.dist_checkpointing.moe.storage.ownership import slot_directories
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from megatron.core.dist_checkpointing.moe.types import LOG


@dataclass(frozen=True)
class Run:
    """One job: its layout, microbatches, and flags besides the common ones."""

    layout: Layout
    microbatches: int
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def flags(self, corpus: str) -> list[str]:
        """All flags of the job; an evaluation follows each second iteration."""
        replicas = self.layout.ranks // (self.layout.tp * self.layout.pp)
        batch = ["--global-batch-size", str(self.microbatches * replicas)]
        return flags(corpus, self.layout, *batch, *EVALUATION.split(), *self.text.split())

    @property
    def boundary_tensors(self) -> int:
        """Tensors that all ranks together send in an iteration: two per microbatch and boundary of the model."""
        pipelines = self.layout.ranks // self.layout.pp
        return 2 * pipelines * (self.layout.pp * (self.layout.vpp or 1) - 1) * self.microbatches

    @property
    def tensor_bytes(self) -> int:
        """Of one: 32 tokens of one sequence, hidden size 32."""
        return 32 // self.layout.tp * 1 * 32 * (2 if "--bf16" in self.text else 4)


# As Megatron-LM does it on GPUs, but for what outputs hold: gloo, unlike NCCL, does not keep it while it sends.
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": False}
EVALUATION = "--eval-iters 1 --eval-interval 2"
RUNS = {
    "two stages, experts on two ranks each, bf16, 4 microbatches": Run(Layout(), 4, "--bf16"),
    "two stages of two virtual ones, 4 microbatches": Run(Layout(vpp=2, ep=1, ranks=2), 4),
    "tensor and sequence parallel, bf16, 4 microbatches": Run(Layout(tp=2, ep=1), 4, "--bf16"),
}
REST = {
    "two stages, 8 microbatches": Run(Layout(ep=1, ranks=2), 8),
    "four stages, 8 microbatches": Run(Layout(pp=4, ep=1), 8),
    "two stages, 4 microbatches": Run(Layout(ep=1, ranks=2), 4),
    "four stages, bf16, 4 microbatches": Run(Layout(pp=4, ep=1), 4, "--bf16"),
    "two stages of two virtual ones, sends overlapped, 8 microbatches": Run(
        Layout(vpp=2, ep=1, ranks=2), 8, settings=OVERLAPPED
    ),
    "two stages of two virtual ones, groups of 4": Run(
        Layout(vpp=2, ep=1, ranks=2), 8, settings={"microbatch_group_size_per_vp_stage": 4}
    ),
}
CASES = cases(RUNS | REST, fast=("two stages, experts on two ranks each, bf16, 4 microbatches",), full=REST)


@dataclass(frozen=True)
class Seen:
    """What all ranks of one run wrote down."""

    run: Run
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def tmpfs() -> Iterator[Path]:
    with node_memory() as folder:
        yield folder


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, world: World, corpus: str, tmpfs: Path) -> Seen:
    run, folder = (RUNS | REST)[request.param], Path(tempfile.mkdtemp(dir=tmpfs))
    hooks = [partial(logged, str(folder)), partial(configured, **run.settings)]
    outcome = world.run(run.flags(corpus), run.layout.ranks, hooks)
    assert set(outcome.codes) == {0}, outcome.said
    return Seen(run, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(run.layout.ranks)])


def test_what_a_rank_received_is_what_its_neighbours_logs_hold_in_their_order(seen: Seen) -> None:
    assert [rank["differences"] for rank in seen.ranks] == [[]] * len(seen.ranks)


def test_all_that_crossed_a_boundary_was_compared(seen: Seen) -> None:
    for iteration in range(ITERATIONS):
        counts = [rank["compared"][iteration] for rank in seen.ranks]
        assert sum(sum(one.values()) for one in counts) == seen.run.boundary_tensors


def test_no_two_tensors_are_alike_so_that_any_mistaken_one_would_differ(seen: Seen) -> None:
    for rank in seen.ranks:
        assert len(rank["checksums"]) == len(set(rank["checksums"]))
        assert rank["checksums"]


def test_logs_have_the_bytes_that_the_plan_predicts(seen: Seen) -> None:
    for rank in seen.ranks:
        assert set(rank["log_bytes"].values()) == {rank["predicted_bytes"]}
    total = sum(rank["predicted_bytes"] for rank in seen.ranks)
    assert total == seen.run.boundary_tensors * seen.run.tensor_bytes


def test_replays_are_covered_from_the_base_on_and_older_logs_are_gone(seen: Seen) -> None:
    for rank in seen.ranks:
        assert sorted(map(int, rank["log_bytes"])) == list(range(BASE + 1, ITERATIONS + 1))
        assert rank["coverage"][-1] == [BASE + 1, ""]
        assert rank["problems"] == []


def test_a_rank_that_is_killed_while_it_sends_leaves_a_torn_log_beside_those_that_are_whole(
    start: Start, tmpfs: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmpfs))
    outcome = start(Layout(ep=1, ranks=2), hooks=[partial(logged, str(folder), 0)]).wait_or_restart()
    assert outcome.codes[0] == -9
    listing = SlotReader(slot_directories(folder, JOB, "standby")[0]).snapshots()
    assert [one.iteration for one in listing.sealed if one.kind == LOG] == [2]
    assert [one.snapshot.iteration for one in listing.torn] == [KILLED_IN]
