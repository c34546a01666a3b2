"""Sparse checkpoints: whoever is killed when, training comes out as if nothing had happened, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import Cluster
from effort import cases
from runs import Layout
from sparse_runs import (
    AUX_LOSS,
    BF16,
    CAPACITY,
    DROPOUT,
    EXPERT_BIAS,
    FP16,
    FP32,
    SAVE_INTERVAL,
    SHARED,
    UNTIED,
    Case,
    FaultFree,
    Run,
    assert_identical,
    assert_replayed,
    killed,
    losses_after_recovery,
)

PAIR, CHUNKS = Layout(1, 1, 2, ranks=2), Layout(1, 2, 2, ranks=4, vpp=2)
TENSOR, CHUNK_PAIR = Layout(2, 1, 1, ranks=2), Layout(1, 2, 1, ranks=2, vpp=2)
LAYOUTS = (
    PAIR,
    Layout(1, 1, 4, ranks=4),
    Layout(1, 2, 2, ranks=4),
    Layout(2, 1, 2, ranks=4),
    Layout(1, 4, 1, ranks=4),
    Layout(1, 2, 2, ranks=8),
    CHUNKS,
)
PHASES = ("start", "forward-backward", "step", "save", "end")
FIRST = dict.fromkeys(PHASES, 8) | {"save": SAVE_INTERVAL}
"""By phase, an iteration that has it and comes after the first window."""

# Each value of each dimension at least once: precision, optimizer, window, routing, embeddings, dropout, and the kinds
# of parallelism. The product below repeats them in further layouts.
SAMPLE = {
    "ep2-fp16-skips": Case(PAIR, (*FP16, *EXPERT_BIAS, *DROPOUT), window="4"),
    "tp2-plain": Case(TENSOR, (*BF16, *CAPACITY, *SHARED), distributed=False, window="2", faults=("1@8:end",)),
    "vpp2-untied": Case(CHUNK_PAIR, (*FP32, *UNTIED, *DROPOUT), faults=("1@8:step",)),
}
ALONE = {"plain-fp32-shared": Case(Layout(1, 1, 1, ranks=2), SHARED, distributed=False, faults=("0@8:end",))}
CASES = SAMPLE | ALONE


@pytest.mark.parametrize("name", cases(CASES, fast=("ep2-fp16-skips",), full=ALONE))
def test_after_kills_every_loss_and_every_bit_are_those_of_a_run_without_faults(
    name: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    run = assert_exact(CASES[name], cluster, fault_free, tmp_path)
    if "skips" in name:
        assert any(report["skipped"] for replay in run.replays for report in replay), "no step was skipped in a replay"


def assert_exact(case: Case, cluster: Cluster, fault_free: FaultFree, folder: Path) -> Run:
    """Killed as the case says, the job replays and ends as without faults."""
    run = killed(cluster, case, folder / "killed")
    assert len(run.outcomes) > 1
    assert_replayed(run, int(case.window))
    assert losses_after_recovery(run) >= 10
    assert {one["checkpoint_memory"]["window"] for one in run.reports if not one["replayed"]} == {int(case.window)}
    assert_identical(run, fault_free(case))
    return run


@pytest.mark.full
def test_with_a_window_of_one_iteration_nothing_is_replayed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    case = Case(PAIR, (*FP16, *EXPERT_BIAS, *DROPOUT), window="1")
    run = killed(cluster, case, tmp_path / "killed")
    assert len(run.outcomes) == 3
    assert not run.replays
    assert not run.frozen
    assert_identical(run, fault_free(case))


def product() -> Iterator[Case]:
    """All layouts, precisions and windows; the other dimensions take turns at different speeds beside them."""
    routings, embeddings = itertools.cycle((AUX_LOSS, EXPERT_BIAS, CAPACITY)), itertools.cycle(((), UNTIED))
    shared, distributed = itertools.cycle((SHARED, (), SHARED, (), ())), itertools.cycle((True, True, False))
    for layout, precision, window in itertools.product(LAYOUTS, (FP32, BF16, FP16), ("2", "3", "5")):
        at = itertools.count(7 + layout.ranks + int(window))
        points = [(next(at) % layout.ranks, PHASES[next(at) % 5], n) for n in range(2)]
        faults = tuple(f"{rank}@{FIRST[phase] + SAVE_INTERVAL * n}:{phase}" for rank, phase, n in points)
        model = (*precision, *next(routings), *next(embeddings), *next(shared), *DROPOUT)
        yield Case(layout, model, next(distributed), window, faults=faults)


PRODUCT = tuple(product())


@pytest.mark.full
@pytest.mark.parametrize("case", PRODUCT, ids=[f"{at}-{case.layout}-w{case.window}" for at, case in enumerate(PRODUCT)])
def test_in_every_layout_precision_and_window_nothing_is_lost(
    case: Case, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    assert_exact(case, cluster, fault_free, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("iteration", range(4, 10))
@pytest.mark.parametrize("layout", [PAIR, LAYOUTS[2]], ids=str)
def test_any_rank_may_be_killed_in_any_phase_of_any_iteration(
    layout: Layout, iteration: int, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """Six iterations are two windows: together all steps of a window, and kills before and after it is whole."""
    for rank in range(layout.ranks):
        faults = tuple(
            f"{rank}@{iteration}:{phase}" for phase in PHASES if phase != "save" or iteration == SAVE_INTERVAL
        )
        case = Case(layout, (*BF16, *EXPERT_BIAS), faults=faults)
        run = killed(cluster, case, tmp_path / f"rank-{rank}")
        assert len(run.outcomes) == len(faults) + 1
        assert_replayed(run, int(case.window))
        assert_identical(run, fault_free(case))
