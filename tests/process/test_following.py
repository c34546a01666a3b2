"""Replicas that follow their owner's optimizer: gradients go to peers in place of state, and lead to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout, differences, digest, flags, reports_in

pytestmark = pytest.mark.ci

SCALED = "--fp16 --initial-loss-scale 524288 --loss-scale-window 4 --hysteresis 1".split()
IN_BF16 = ("--bf16", "--grad-reduce-in-bf16")
ENGINE = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
NODES = (("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-1", "node-1", "node-2"))


@pytest.mark.parametrize(
    ("strategy", "iterations", "distributed", "model"),
    [
        pytest.param("full", 10, True, (), id="full"),
        pytest.param("full", 10, True, IN_BF16, id="gradients in two bytes"),
        pytest.param("selective", 10, False, (), id="selective-plain-optimizer", marks=pytest.mark.full),
        pytest.param("full", 60, True, (), id="full-60", marks=pytest.mark.full),
        pytest.param("full", 10, True, ("--freeze-experts",), id="frozen experts", marks=pytest.mark.full),
        pytest.param("full", 10, True, ENGINE, id="Transformer Engine", marks=pytest.mark.full),
    ],
)
def test_a_lost_node_comes_back_to_the_bit_from_replicas_that_followed_gradients(
    strategy: str,
    iterations: int,
    distributed: bool,
    model: tuple[str, ...],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    cluster: Cluster = request.getfixturevalue("engine_cluster" if model == ENGINE else "cluster")
    straight, killed, layout, last = tmp_path / "straight", tmp_path / "killed", Layout(), iterations - 3
    given = ("--train-iters", iterations, "--lr-decay-iters", iterations, *(() if model == IN_BF16 else SCALED), *model)
    alone = *given, "--metrics-jsonl", straight / "reports", "--save", straight
    argv = flags(cluster.corpus, layout, *map(str, alone), distributed=distributed)
    undisturbed = cluster.world.start(argv, layout.ranks).wait()
    assert set(undisturbed.codes) == {0}, undisturbed.said
    faults = [part for rank in (0, 1) for part in ("--moe-ckpt-inject-fault", f"{rank}@{iterations - 1}")]
    outcomes = cluster.run(
        layout, *given, "--moe-ckpt-strategy", strategy, "--moe-ckpt-replicate", "gradients",
        "--metrics-jsonl", killed / "reports", "--save", killed, *faults, distributed=distributed,
        nodes=Nodes(NODES, lost={0: "node-0"}), hooks=(once_sealed(cluster.memory, last, 2 * layout.ranks),),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == f"recovered iteration {last} exactly", outcomes[1].said
    assert any("peer memory" in line for line in table), table
    assert "goes whole" not in outcomes[0].said + outcomes[1].said
    assert not differences(digest(killed, iterations), digest(straight, iterations))
    first = reports_in(killed / "reports")[: iterations - 2]
    assert [one["iteration"] for one in first] == list(range(1, iterations - 1))
    if model != IN_BF16:
        assert any(one["skipped"] for one in first[3:]), "a step was skipped after replicas had begun to follow"
    # The state once, and from then on gradients: 4 or 2 of 12 bytes of a parameter, beside what no optimizer makes.
    state_bytes, rounds = first[0]["snapshot_bytes"], first[-1]["protected_iteration"]
    assert rounds >= 3
    assert sum(one["replicated_bytes"] for one in first) < state_bytes * (
        1 + (rounds - 1) / (4 if model == IN_BF16 else 2)
    )
