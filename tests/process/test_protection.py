"""Snapshots of everything in host memory: after a real kill training comes back to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout, UndisturbedRun, differences, digest, reports_in

FULL = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2")


def losses(reports: Path) -> dict[int, str]:
    """Loss and gradient norm of each iteration to the last bit; every report of an iteration must say the same."""
    found: dict[int, str] = {}
    for report in reports_in(reports):
        said = repr((report["lm_loss"], report["grad_norm"], report["learning_rate"], report["loss_scale"]))
        assert found.setdefault(report["iteration"], said) == said, f"iteration {report['iteration']} came out twice"
    return found


def assert_same_end(straight: Path, killed: Path) -> None:
    """Every loss, and every bit of the final state."""
    assert losses(killed / "reports") == losses(straight / "reports")
    assert not differences(digest(killed, 6), digest(straight, 6))


def test_a_lost_node_with_its_memory_is_replaced_from_replicas_though_ranks_move(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout()
    straight = undisturbed_run(layout, "--bf16")
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-1", "node-1", "node-2")
    nodes = Nodes((before, after), lost={0: "node-0"})
    faults = ["--moe-ckpt-inject-fault", "0@6", "--moe-ckpt-inject-fault", "1@6"]
    outcomes = cluster.run(
        layout, *FULL, "--bf16", "--metrics-jsonl", killed / "reports", "--save", killed, *faults, nodes=nodes,
        hooks=(once_sealed(cluster.memory, 4, 2 * layout.ranks),),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == "recovered iteration 4 exactly", outcomes[1].said
    assert any("peer memory" in line for line in table), table
    assert_same_end(straight, killed)


@pytest.mark.ci
def test_a_fault_before_the_first_snapshot_begins_again_with_the_same_result(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=2, ep=1, ranks=2)
    straight = undisturbed_run(layout)
    outcomes = cluster.run(
        layout, *FULL, "--metrics-jsonl", killed / "reports", "--save", killed, "--moe-ckpt-inject-fault", "1@2"
    )
    assert len(outcomes) == 2
    assert not recovered(outcomes[1])
    assert_same_end(straight, killed)


def test_faults_at_every_phase_of_the_step_lose_nothing(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=2, ep=1, ranks=2)
    straight = undisturbed_run(layout)
    points = ("1@3", "0@4:forward-backward", "1@4:step", "0@5:end", "1@6:start")
    faults = [part for point in points for part in ("--moe-ckpt-inject-fault", point)]
    every = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1")
    outcomes = cluster.run(layout, *every, "--metrics-jsonl", killed / "reports", "--save", killed, *faults)
    assert len(outcomes) >= 5, "two points of two ranks may strike in the same attempt"
    assert any(map(recovered, outcomes[1:])), "the first fault may come before a snapshot is sealed"
    assert_same_end(straight, killed)


def test_when_all_memory_is_lost_training_continues_from_persistent_storage(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=2, ep=1, ranks=2)
    straight = undisturbed_run(layout)
    storage = ["--moe-ckpt-persist-dir", tmp_path / "storage", "--moe-ckpt-persist-interval", "2"]
    outcomes = cluster.run(
        layout, *FULL, *storage, "--metrics-jsonl", killed / "reports", "--save", killed,
        "--moe-ckpt-inject-fault", "0@6:step", nodes=Nodes((("node-0",) * 2,), lost={0: "node-0"}),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] in ("recovered iteration 4 exactly", "recovered iteration 2 exactly"), outcomes[1].said
    assert any("persistent" in line for line in table), table
    assert_same_end(straight, killed)


def test_a_damaged_copy_is_refused_and_the_peers_copy_is_taken(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=2, ep=1, ranks=2)
    straight = undisturbed_run(layout)

    def damage(_attempt: int) -> None:
        flip_newest(cluster.memory / "node-0")

    outcomes = cluster.run(
        layout, *FULL, "--moe-ckpt-interval", "3", "--metrics-jsonl", killed / "reports", "--save", killed,
        "--moe-ckpt-inject-fault", "1@6:step", nodes=Nodes((("node-0", "node-1"),)), between=damage,
        hooks=(once_sealed(cluster.memory, 3, 2 * layout.ranks),),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == "recovered iteration 3 exactly", outcomes[1].said
    assert any("refused: snapshot of rank 0 after iteration 3" in line for line in table), table
    assert any(line.startswith("  peer memory of node 1") for line in table), table
    assert_same_end(straight, killed)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saves", "strategy"),
    [
        pytest.param(2, (*FULL, "--moe-ckpt-shard", "equal"), id="an older one is left"),
        pytest.param(4, FULL, id="none is left", marks=pytest.mark.full),
    ],
)
def test_a_damaged_checkpoint_that_is_newer_does_not_win_over_a_snapshot(
    saves: int, strategy: tuple[str, ...], cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=1, ep=1, ranks=2)
    straight = undisturbed_run(layout, distributed=False)

    def damage(_attempt: int) -> None:
        for shard in (killed / "iter_0000004").glob("*.distcp"):
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 4
            shard.write_bytes(content)

    outcomes = cluster.run(
        layout, *strategy, "--moe-ckpt-interval", "3", "--metrics-jsonl", killed / "reports", "--save", killed,
        "--save-interval", saves, "--load", killed, "--moe-ckpt-inject-fault", "1@5:step", between=damage,
        hooks=(once_sealed(cluster.memory, 3, layout.ranks),), distributed=False,
    )  # fmt: skip
    assert recovered(outcomes[1])[0] == "recovered iteration 3 exactly", outcomes[1].said
    assert_same_end(straight, killed)


def flip_newest(node: Path) -> None:
    """Flip a bit in the middle of slot 0's newest snapshot of its own."""
    sealed = sorted(node.glob("*/slot-000/segment-*.iter_*-rank_00000-snapshot.json"), key=lambda one: one.name[12:])
    with sealed[-1].with_name(f"{sealed[-1].name[:11]}.bin").open("r+b") as segment:
        segment.seek(100_000)
        (byte,) = segment.read(1)
        segment.seek(100_000)
        segment.write(bytes([byte ^ 4]))
