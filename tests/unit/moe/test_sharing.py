"""Sharing out of state that data-parallel ranks hold alike: each element is stored by exactly one of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from megatron_flags import judged

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.shard import sharing
from megatron.core.dist_checkpointing.moe.extensions.shard.assignment import ShardAssignment, shard_checkpoint
from megatron.core.dist_checkpointing.moe.extensions.shard.sharing import Portion, join, share_out
from megatron.core.dist_checkpointing.moe.megatron_state.operators import (
    GlobalName,
    Shard,
    ShardSpread,
    StateTensor,
    holders,
)
from megatron.core.dist_checkpointing.moe.types import (
    FP32,
    ModelShape,
    OperatorId,
    OperatorKind,
    Part,
    Topology,
    full_plan,
)

SHAPE = ModelShape("small", 2, 8, 2, 24, 16, num_experts=4, moe_ffn_hidden_size=7, gated_linear_unit=True)
FIELDS = ("master", "exp_avg", "exp_avg_sq")
AWKWARD = [-0.0, math.nan, math.inf, -1.5, 3e-40, -math.nan, 0.0, -math.inf, 2.0]
TOPOLOGIES = {
    "two replicas": Topology(2),
    "three replicas, which divide nothing": Topology(3),
    "two replicas of two groups of experts": Topology(4, ep=2),
    "pipeline stages with tied embeddings": Topology(4, pp=2),
    "tensor parallel": Topology(4, tp=2, ep=2, etp=1),
}


def assigned(strategy: str, topology: Topology) -> ShardAssignment:
    parts = full_plan(0, SHAPE.operators, Part.MASTER_AND_MOMENTS).parts
    return shard_checkpoint(strategy, SHAPE, topology, FP32, parts, optimizer_sharded=False)


def state(topology: Topology, rank: int) -> list[StateTensor]:
    """What a rank holds with a plain optimizer: each operator as one tensor cut by tensor ranks, and a whole one."""
    here = topology.coordinates(rank)
    operators = list(SHAPE.operators_of_stages(topology)[here.pp])
    if here.pp == topology.pp - 1 and topology.pp > 1:
        operators.append(OperatorId(-1, OperatorKind.EMBEDDING))
    found: list[StateTensor] = []
    for operator in operators:
        if not operator.is_expert or SHAPE.expert_rank(operator.expert, topology) == here.ep:
            found += _tensors(operator, topology, rank)
    return found


def _tensors(operator: OperatorId, topology: Topology, rank: int) -> Iterator[StateTensor]:
    here, numel = topology.coordinates(rank), SHAPE.parameters[operator]
    at, ways = (here.etp, topology.expert_tp) if operator.is_expert else (here.tp, topology.tp)
    whole = 4 if operator.kind is OperatorKind.NON_EXPERT else 0
    cut = (numel - whole) // ways
    for name, size, of in (("weight", cut, (at, ways)), ("norm", whole, (0, 1))):
        shard = Shard(GlobalName(operator, f"{operator}.{name}"), 0, size, size, *of)
        tied = operator.kind is OperatorKind.EMBEDDING
        ranks = holders(topology, rank, ShardSpread(operator.is_expert, of[1] > 1, False, tied))
        for field in (*FIELDS, "step") if size else ():
            tensor = torch.zeros(1 if field == "step" else size)
            part = Part.MASTER if field == "master" else Part.MOMENTS
            yield StateTensor(shard, field, part, tensor, ranks, in_forward=field == "master")


@pytest.mark.parametrize("strategy", ["equal", "adaptive"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_slices_of_all_ranks_cover_every_shared_element_once_and_hold_what_the_policy_predicts(
    strategy: str, topology: Topology
) -> None:
    assignment, covered = assigned(strategy, topology), Counter[tuple[str, int]]()
    shared: dict[str, int] = {}
    for rank in range(topology.world_size):
        portions = share_out(state(topology, rank), assignment, topology, rank)
        stored_bytes = 0
        for one in portions:
            if one.own is None:
                continue
            shared[one.tensor.key] = one.tensor.tensor.numel()
            for part in one.stored:
                covered.update((one.tensor.key, element) for element in range(part.shard.start, part.shard.end))
                assert part.tensor.numel() == part.shard.end - part.shard.start
                stored_bytes += part.nbytes
        if topology.tp == 1:
            assert stored_bytes == assignment.bytes_by_rank[rank]
    assert covered == {(key, element): 1 for key, numel in shared.items() for element in range(numel)}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_what_the_policy_does_not_know_is_stored_by_every_holder(topology: Topology) -> None:
    assignment = assigned("equal", topology)
    for rank in range(topology.world_size):
        last = topology.pp > 1 and topology.coordinates(rank).pp == topology.pp - 1
        for one in share_out(state(topology, rank), assignment, topology, rank):
            operator, ways = one.tensor.operator, topology.expert_tp if one.tensor.operator.is_expert else topology.tp
            second_copy = last and operator.kind is OperatorKind.EMBEDDING
            replicated = one.tensor.shard.tp_size != ways
            assert (one.own is None) == (one.tensor.field == "step" or second_copy or replicated), one.tensor.key
            if one.own is None:
                assert one.stored == (one.tensor,)


def test_slices_are_views_whose_keys_tell_their_ranges() -> None:
    topology = Topology(2)
    tensors = state(topology, 1)
    cut = [one for one in share_out(tensors, assigned("equal", topology), topology, 1) if one.tensor.operator.is_expert]
    for one in (one for one in cut if one.own is not None):
        (part,), numel = one.stored, one.tensor.tensor.numel()
        half = (numel + 1) // 2
        assert part.key == f"{one.tensor.shard.of.name}[{half}:{numel}]/{one.tensor.field}"
        part.tensor.fill_(7)
        assert one.tensor.tensor.tolist() == [0] * half + [7] * (numel - half)


def test_buffers_and_compute_weights_are_never_shared_out() -> None:
    topology, operator = Topology(2), OperatorId(0, OperatorKind.ROUTER)
    numel = SHAPE.parameters[operator]
    shard = Shard(GlobalName(operator, "router.weight"), 0, numel, numel)
    parts = {"master": Part.MASTER, "buffer": Part.MASTER, "compute": Part.COMPUTE}
    tensors = [StateTensor(shard, field, part, torch.zeros(numel), (0, 1)) for field, part in parts.items()]
    for rank in range(topology.world_size):
        master, *kept = share_out(tensors, assigned("equal", topology), topology, rank)
        assert master.own is not None
        assert [one.stored for one in kept] == [(one,) for one in tensors[1:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("own", [(), (range(0, 9),), (range(2, 5),), (range(0, 2), range(6, 8))], ids=str)
def test_parts_are_joined_to_the_last_bit(
    dtype: torch.dtype, own: tuple[range, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.tensor(AWKWARD if dtype.is_floating_point else range(250, 259)).to(dtype)
    mine, theirs = whole.clone(), whole.clone()
    others = sorted(set(range(whole.numel())).difference(*own))
    mine[others] = math.nan if dtype.is_floating_point else 255
    theirs[sorted(set(range(whole.numel())).difference(others))] = 0

    def add_what_others_store(bits: torch.Tensor, group: object) -> None:
        assert group == "of the router"
        bits += theirs.view(bits.dtype)

    monkeypatch.setattr(torch.distributed, "all_reduce", add_what_others_store)
    operator = OperatorId(0, OperatorKind.ROUTER)
    shard = Shard(GlobalName(operator, "weight"), 0, whole.numel(), whole.numel())
    join([Portion(StateTensor(shard, "master", Part.MASTER, mine, (0, 1)), own)], lambda operator: "of the router")
    assert torch.equal(mine.view(torch.uint8), whole.view(torch.uint8))


def test_a_model_that_the_policy_counts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(4, ep=2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(sharing, "model_shape", lambda chunks: SHAPE)
    assert sharing.assign("equal", [], state(topology, 1), topology) == assigned("equal", topology)
    without = [one for one in state(topology, 1) if one.operator != OperatorId(1, OperatorKind.EXPERT, 3)]
    with pytest.raises(
        UsageError, match=r"layer1\.expert3 has 0 parameters on rank 1, where 168 .* --moe-ckpt-shard none"
    ):
        sharing.assign("equal", [], without, topology)


def test_the_distributed_optimizer_which_shards_already_is_refused() -> None:
    given = (
        "--device cpu --transformer-impl local --no-rope-fusion --distributed-backend gloo --num-layers 2"
        " --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
        " --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --moe-ckpt-strategy full"
        " --moe-ckpt-shard adaptive"
    ).split()
    assert judged(given, 2).moe_ckpt_shard == "adaptive"
    with pytest.raises(UsageError, match=r"--moe-ckpt-shard adaptive .* sharded already"):
        judged([*given, "--use-distributed-optimizer"], 2)
