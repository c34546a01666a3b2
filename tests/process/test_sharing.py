"""State that data-parallel ranks hold alike, stored once: as many bytes as predicted, and enough after real kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout, Train, differences, digest

from megatron.core.dist_checkpointing.moe.extensions.shard.assignment import ShardAssignment, shard_checkpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import decode
from megatron.core.dist_checkpointing.moe.storage.slot_reader import written_over
from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape, OperatorId, Part, Topology, full_plan

FULL = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "3")
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
VOCABULARY, LAYERS, HIDDEN, EXPERTS, EXPERT_HIDDEN = 384, 2, 32, 4, 32
FULL_BYTES = 12
"""Of one parameter: master weights and both moments, in fp32 and in mixed precision."""
SHARED = ("master", "exp_avg", "exp_avg_sq")

REPLICATED = Layout(tp=1, pp=1, ep=1, ranks=2)
GROUPS = Layout(tp=1, pp=1, ep=2, ranks=4)
STAGES = Layout(tp=1, pp=2, ep=1, ranks=4)
PARTITIONED = Layout(tp=2, pp=1, ep=1, ranks=4)


@dataclass(frozen=True)
class Stored:
    """What a snapshot of one rank holds of operators, in bytes by field."""

    bytes_by_field: Mapping[str, int]

    @property
    def shared_bytes(self) -> int:
        """Master weights and moments."""
        return sum(self.bytes_by_field[field] for field in SHARED)


def stored(memory: Path, iteration: int) -> dict[int, Stored]:
    """What the snapshots of an iteration that are in memory hold, by the rank whose state it is."""
    found: dict[int, Stored] = {}
    for path in memory.glob(f"*/*/slot-*/segment-*.iter_{iteration:07d}-*-snapshot.json"):
        manifest = decode(written_over(path.read_bytes()), path.name)
        counted: Counter[str] = Counter()
        for one in manifest.layout.fields:
            if one.operator is not None:
                counted[one.key.rpartition("/")[2]] += one.nbytes
        found[manifest.snapshot.rank] = Stored(counted)
    return found


def predicted(
    shard: str, layout: Layout, operators: Sequence[OperatorId] = (), frequency: int | tuple[int, ...] = 1
) -> ShardAssignment:
    """By the policy, from hyper-parameters alone."""
    shape = ModelShape(
        name="trained here",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        ffn_hidden_size=4 * HIDDEN,
        num_experts=EXPERTS,
        moe_ffn_hidden_size=EXPERT_HIDDEN,
        gated_linear_unit=True,
        moe_layer_freq=frequency,
    )
    topology = Topology(layout.ranks, tp=layout.tp, pp=layout.pp, ep=layout.ep)
    parts = full_plan(0, operators or shape.operators, Part.MASTER_AND_MOMENTS).parts
    return shard_checkpoint(shard, shape, topology, FP32, parts, optimizer_sharded=False)


CASES = [
    pytest.param(REPLICATED, "equal", "", id="2-replicas-equal-fp32"),
    pytest.param(REPLICATED, "adaptive", "--bf16", id="2-replicas-adaptive-bf16", marks=pytest.mark.full),
    pytest.param(GROUPS, "equal", "--bf16", id="2-expert-groups-equal-bf16", marks=pytest.mark.full),
    pytest.param(GROUPS, "adaptive", "", id="2-expert-groups-adaptive-fp32", marks=pytest.mark.ci),
    pytest.param(STAGES, "adaptive", f"--bf16 {BIAS}", id="2-stages-tied-adaptive-bf16", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "shard", "flags"), CASES)
def test_ranks_store_the_predicted_bytes_and_come_back_from_them_to_the_last_bit(
    layout: Layout, shard: str, flags: str, cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    straight, killed, seen = tmp_path / "straight", tmp_path / "killed", dict[int, Stored]()
    train(layout, *flags.split(), "--save", straight, distributed=False)
    outcomes = cluster.run(
        layout, *FULL, "--moe-ckpt-shard", shard, *flags.split(), "--save", killed,
        "--moe-ckpt-inject-fault", f"{layout.ranks - 1}@6", distributed=False,
        hooks=(once_sealed(cluster.memory, 3, layout.ranks),),
        between=lambda _: seen.update(stored(cluster.memory, iteration=3)),
    )  # fmt: skip
    assert recovered(outcomes[1])[0] == "recovered iteration 3 exactly", outcomes[1].said
    assert not differences(digest(killed, 6), digest(straight, 6))

    buffers = {"buffer"} if BIAS in flags else set()
    assignment, per_stage = predicted(shard, layout), layout.ranks // layout.pp
    assert sorted(seen) == list(range(layout.ranks))
    for rank, held in seen.items():
        is_tied_copy = rank >= per_stage
        known_bytes = assignment.bytes_by_rank[rank] + is_tied_copy * VOCABULARY * HIDDEN * FULL_BYTES
        assert held.shared_bytes == known_bytes, f"rank {rank}"
    # Step counts and router buffers, a few bytes, are stored by every holder.
    for held in seen.values():
        assert {field for field, nbytes in held.bytes_by_field.items() if nbytes} == {*SHARED, "step", *buffers}
    for first in range(0, layout.ranks, per_stage):
        assert len({seen[rank].bytes_by_field["buffer"] for rank in range(first, first + per_stage)}) == 1


@pytest.mark.full
def test_without_sharing_every_rank_stores_all_that_it_holds_which_is_more(cluster: Cluster) -> None:
    seen = dict[int, Stored]()
    cluster.run(
        GROUPS, *FULL, "--moe-ckpt-shard", "none", "--moe-ckpt-inject-fault", "1@6", distributed=False,
        hooks=(once_sealed(cluster.memory, 3, GROUPS.ranks),),
        between=lambda _: seen.update(stored(cluster.memory, iteration=3)),
    )  # fmt: skip
    experts_elsewhere = LAYERS * (EXPERTS // GROUPS.ep) * 3 * HIDDEN * EXPERT_HIDDEN
    held_bytes = predicted("equal", GROUPS).total_bytes - experts_elsewhere * FULL_BYTES
    assert {rank: held.shared_bytes for rank, held in seen.items()} == dict.fromkeys(range(4), held_bytes)
    for shard in ("equal", "adaptive"):
        assert predicted(shard, GROUPS).bottleneck_bytes < 0.6 * held_bytes


@pytest.mark.full
def test_a_node_lost_with_its_memory_is_replaced_from_replicas_of_its_parts(
    cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(PARTITIONED, "--bf16", "--save", straight, distributed=False)
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-1", "node-1", "node-2")
    faults = ["--moe-ckpt-inject-fault", "0@6", "--moe-ckpt-inject-fault", "1@6"]
    outcomes = cluster.run(
        PARTITIONED, *FULL, "--moe-ckpt-shard", "adaptive", "--bf16", "--save", killed, *faults, distributed=False,
        nodes=Nodes((before, after), lost={0: "node-0"}),
        hooks=(once_sealed(cluster.memory, 3, 2 * PARTITIONED.ranks),),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == "recovered iteration 3 exactly", outcomes[1].said
    assert any("peer memory" in line for line in table), table
    assert not differences(digest(killed, 6), digest(straight, 6))


@pytest.mark.ci
def test_what_is_no_expert_goes_to_ranks_that_a_skewed_selection_leaves_free_as_planned(
    cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    pec = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-interval", "3", "--moe-ckpt-pec-k-snapshot", "1")
    seen = dict[int, Counter[OperatorId]]()
    outcomes = cluster.run(
        GROUPS, *pec, "--moe-ckpt-shard", "adaptive", "--moe-layer-freq", "[0,1]",
        "--ffn-hidden-size", str(4 * HIDDEN), "--train-iters", "8", "--save", tmp_path / "killed",
        "--moe-ckpt-inject-fault", "2@8", distributed=False,
        hooks=(once_sealed(cluster.memory, 6, GROUPS.ranks + 2),),
        between=lambda _: seen.update(selected(cluster.memory, iteration=6)),
    )  # fmt: skip
    assert "recovered iteration 6 " in outcomes[1].said, outcomes[1].said
    assert sorted(seen) == list(range(GROUPS.ranks))
    operators = sorted(frozenset[OperatorId]().union(*seen.values()))
    experts = [one for one in operators if one.is_expert]
    assert len(experts) == 1, "the ranks of one expert-parallel group store it, those of the other none"
    shares = {shard: predicted(shard, GROUPS, operators, (0, 1)) for shard in ("equal", "adaptive")}
    found = {rank: counted.total() for rank, counted in seen.items()}
    assert found == dict(enumerate(shares["adaptive"].bytes_by_rank))
    assert max(found.values()) < shares["equal"].bottleneck_bytes


def selected(memory: Path, iteration: int) -> dict[int, Counter[OperatorId]]:
    """Bytes of master weights and moments in the snapshot of each rank's own memory, by operator."""
    found: dict[int, Counter[OperatorId]] = {}
    for path in memory.glob(f"*/*/slot-*/segment-*.iter_{iteration:07d}-*.json"):
        manifest = decode(written_over(path.read_bytes()), path.name)
        counted = found.setdefault(manifest.snapshot.rank, Counter())
        for one in manifest.layout.fields:
            if one.operator is not None and one.key.rpartition("/")[2] in SHARED:
                counted[one.operator] += one.nbytes
    return found


@pytest.mark.full
def test_experts_saved_in_turn_come_back_the_same_whether_shared_out_or_not(cluster: Cluster, tmp_path: Path) -> None:
    pec = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-interval", "4", "--moe-ckpt-pec-k-snapshot", "2", "--bf16")
    for shard in ("none", "adaptive"):
        outcomes = cluster.run(
            GROUPS, *pec, "--moe-ckpt-shard", shard, "--train-iters", "14", "--save", tmp_path / shard,
            "--moe-ckpt-inject-fault", "2@12", distributed=False, job=shard,
            hooks=(once_sealed(cluster.memory, 8, GROUPS.ranks),),
        )  # fmt: skip
        assert "recovered iteration 8 " in outcomes[1].said, outcomes[1].said
        assert "lost in layer 0" in outcomes[1].said
    assert not differences(digest(tmp_path / "adaptive", 14), digest(tmp_path / "none", 14))
