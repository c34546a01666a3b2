"""Fine-tuning with frozen experts (MoC Table 4, FT-w.o.E) that come back from storage, and what has nothing to choose
there."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from runs import Layout, flags
from sparse_runs import BF16, LENGTH, SAVE_INTERVAL, Case, FaultFree, Run, assert_identical

pytestmark = pytest.mark.ci

LAYOUT = Layout(1, 1, 2, ranks=2)
FROZEN = (*BF16, "--freeze-experts")


@pytest.mark.parametrize("strategy", ["full", pytest.param("sparse", marks=pytest.mark.full)])
def test_when_all_memory_is_lost_storage_has_frozen_experts_of_an_older_snapshot(
    strategy: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    window = ("--moe-ckpt-interval", "2") if strategy == "full" else ("--moe-ckpt-window", "2")
    storage = ("--moe-ckpt-persist-dir", tmp_path / "storage", "--moe-ckpt-persist-interval", "2")
    killed = tmp_path / "killed"
    saving = ("--save", killed, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", killed / "reports")
    outcomes = cluster.run(
        LAYOUT, *LENGTH, *FROZEN, "--moe-ckpt-strategy", strategy, *window, *storage, *saving,
        "--moe-ckpt-inject-fault", "0@13:step", nodes=Nodes((("node-0",) * 2,), lost={0: "node-0"}),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0].startswith("recovered iteration ") and table[0].endswith("exactly"), outcomes[1].said
    assert any("persistent" in line for line in table), table
    assert_identical(Run(killed, tuple(outcomes)), fault_free(Case(LAYOUT, FROZEN)))


def test_frozen_experts_leave_nothing_to_choose_to_strategies_that_choose_experts(cluster: Cluster) -> None:
    pec = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-memory-dir", str(cluster.memory))
    outcome = cluster.world.run(flags(cluster.corpus, LAYOUT, *FROZEN, *pec), LAYOUT.ranks)
    assert set(outcome.codes) == {2}, outcome.said
    assert "--moe-ckpt-strategy pec chooses among experts" in outcome.said
