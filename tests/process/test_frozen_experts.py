"""Fine-tuning with frozen experts (MoC Table 4, FT-w.o.E): saved once, restored exactly, and never trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout
from runs import flags_of_own_loop as flags
from sparse_runs import BF16, LENGTH, SAVE_INTERVAL, Case, FaultFree, Run, assert_identical, assert_replayed, killed

from moe_ckpt.dense.dense import open_dense

pytestmark = pytest.mark.own_loop

LAYOUT = Layout(1, 1, 2, ranks=2)
FROZEN = (*BF16, "--freeze-experts")
SPARSE = Case(LAYOUT, FROZEN, faults=("1@8:forward-backward", "0@14:step"))
HIDDEN, LAYERS, EXPERTS_OF_RANK = 32, 2, 2
EXPERT_BYTES = LAYERS * EXPERTS_OF_RANK * 3 * HIDDEN * HIDDEN * 2
"""Weights of a rank's experts in bf16; they have neither master weights nor moments."""


def saving(folder: Path) -> tuple[object, ...]:
    return "--save", folder, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", folder / "reports"


def copied(run: Run, start: int, stop: int) -> list[int]:
    """Bytes of the snapshots of these iterations, as they were first trained."""
    found: dict[int, int] = {}
    for report in run.reports:
        found.setdefault(report["iteration"], report["snapshot_bytes"])
    return [found[iteration] for iteration in range(start, stop) if found[iteration]]


def test_under_full_frozen_experts_are_copied_once_and_come_back_to_the_bit(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    full = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2", "--moe-ckpt-inject-fault", "1@12:step")
    outcomes = cluster.run(
        LAYOUT, *LENGTH, *FROZEN, *full, *saving(tmp_path), hooks=(once_sealed(cluster.memory, 10, 2),)
    )
    assert len(outcomes) == 2
    assert recovered(outcomes[1])[0] == "recovered iteration 10 exactly", outcomes[1].said
    run = Run(tmp_path, tuple(outcomes))
    assert_identical(run, fault_free(SPARSE))
    first, *others = copied(run, 1, 19)
    assert len(others) == 8
    assert set(others) == {first - EXPERT_BYTES}
    assert_experts_stayed(tmp_path)


def test_under_sparse_windows_hold_what_is_trained_and_a_replay_is_exact(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    run = killed(cluster, SPARSE, tmp_path / "killed")
    assert_replayed(run, int(SPARSE.window))
    assert_identical(run, fault_free(SPARSE))
    windows = [sum(copied(run, first, first + 3)) for first in (1, 4)]
    assert windows[0] - windows[1] == EXPERT_BYTES
    assert_experts_stayed(run.folder)


@pytest.mark.parametrize("strategy", ["full", pytest.param("sparse", marks=pytest.mark.full)])
def test_when_all_memory_is_lost_storage_has_frozen_experts_of_an_older_snapshot(
    strategy: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    window = ("--moe-ckpt-interval", "2") if strategy == "full" else ("--moe-ckpt-window", "2")
    storage = ("--moe-ckpt-persist-dir", tmp_path / "storage", "--moe-ckpt-persist-interval", "2")
    killed = tmp_path / "killed"
    outcomes = cluster.run(
        LAYOUT, *LENGTH, *FROZEN, "--moe-ckpt-strategy", strategy, *window, *storage, *saving(killed),
        "--moe-ckpt-inject-fault", "0@13:step", nodes=Nodes((("node-0",) * 2,), lost={0: "node-0"}),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0].startswith("recovered iteration ") and table[0].endswith("exactly"), outcomes[1].said
    assert any("persistent" in line for line in table), table
    assert_identical(Run(killed, tuple(outcomes)), fault_free(SPARSE))


def test_frozen_experts_leave_nothing_to_choose_to_strategies_that_choose_experts(cluster: Cluster) -> None:
    pec = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-memory-dir", str(cluster.memory))
    outcome = cluster.world.run(flags(cluster.corpus, LAYOUT, *FROZEN, *pec), LAYOUT.ranks)
    assert set(outcome.codes) == {2}, outcome.said
    assert "--moe-ckpt-strategy pec chooses among experts" in outcome.said


def assert_experts_stayed(folder: Path) -> None:
    """From the first dense checkpoint to the last; all else was trained."""
    first, last = (weights(folder, iteration) for iteration in (SAVE_INTERVAL, 18))
    experts = {name for name in first if ".mlp.experts." in name}
    assert experts
    assert {name for name in first if torch.equal(first[name], last[name])} == experts


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """The tensors of the model in a dense checkpoint."""
    dense = open_dense(folder / f"iter_{iteration:07d}")
    return {
        name: torch.cat([block.flatten() for block in dense.read_blocks(name)])
        for name in dense.tensors
        if name.startswith(("decoder.", "embedding."))
    }
