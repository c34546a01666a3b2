"""Who saves which bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from random import Random

import pytest
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.shard.assignment import (
    SHARDINGS,
    ParameterRange,
    ShardAssignment,
    adaptive_layers,
    fixed_layers,
    shard_checkpoint,
)
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    ModelShape,
    OperatorId,
    OperatorKind,
    Part,
    Topology,
    expert,
)
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.paper_sizes import checkpoint_bytes

GPT = PRESETS["GPT-350M-16E"]
H = 1024
EMBEDDING = (50257 + 1024) * H
# 12 dense layers (attention, two norms, FFN), 12 MoE layers (attention, two norms, router of 16), final norm; biases.
NON_EXPERT = EMBEDDING + 12 * (12 * H * H + 13 * H) + 12 * (4 * H * H + 8 * H + 16 * (H + 1)) + 2 * H
EXPERT = 12 * 16 * (8 * H * H + 5 * H)
WEIGHT, OPTIMIZER = 2, 12  # bytes per parameter: B_w and B_o
CASES = {"Case1": (8, 8), "Case2": (16, 16), "Case3": (16, 8)}  # MoC Table 2: DP, EP

# MoC Fig. 4: three ranks, MoE layers 1, 3, 5, 7, and one expert of each layer selected.
FIG_4 = ModelShape("fig4", 8, 64, 4, 10, 256, 3, 1, moe_layer_freq=(0, 1) * 4)
FIG_4_SELECTED = (expert(1, 0), expert(3, 1), expert(5, 2), expert(7, 0))


def selected_parts(shape: ModelShape, selected: set[OperatorId]) -> dict[OperatorId, Part]:
    return {operator: Part.EVERYTHING for operator in shape.operators if not operator.is_expert or operator in selected}


def bottleneck(strategy: str, case: str) -> int:
    dp, ep = CASES[case]
    return shard_checkpoint(strategy, GPT, Topology(dp, ep=ep), FP16_FP32).bottleneck_bytes


def bytes_of(assignment: ShardAssignment, rank: int, *, experts: bool, part: Part = Part.COMPUTE) -> int:
    return sum(
        shard.total_bytes
        for shard in assignment.shards(rank)
        if shard.operator.is_expert == experts and shard.part == part
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, Topology]:
    """A small model on a topology that can hold it; tensor and expert-tensor degrees may differ."""
    tp, cp, pp = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2]))
    etp, ep = draw(st.sampled_from([None, None, 1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    world = lcm(tp * cp * pp, (etp or tp) * ep * pp) * draw(st.integers(1, 3))
    layers = draw(st.integers(pp, 5))
    shape = ModelShape(
        "small",
        layers,
        draw(st.integers(1, 8)) * 2,
        2,
        draw(st.integers(1, 60)),
        draw(st.integers(1, 40)),
        ep * draw(st.integers(1, 3)),
        1,
        moe_layer_freq=draw(st.integers(1, 2)),
    )
    return shape, Topology(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[ModelShape, Topology, dict[OperatorId, Part]]:
    """A layout and what a partial checkpoint saves of each operator; some save nothing of it."""
    shape, topology = draw(layouts())
    choices = st.sampled_from(
        [Part.EVERYTHING, Part.EVERYTHING, Part.MASTER_AND_MOMENTS, Part.COMPUTE, Part.MASTER, Part.NOTHING]
    )
    experts = [operator for operator in shape.operators if operator.is_expert]
    parts = dict.fromkeys(shape.operators, Part.EVERYTHING)
    drawn = draw(st.lists(choices, min_size=len(experts), max_size=len(experts)))
    return shape, topology, parts | dict(zip(experts, drawn, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_baseline_loads_rank_0_with_all_non_experts_and_its_experts(case: str) -> None:
    dp, ep = CASES[case]
    owned = (NON_EXPERT + EXPERT) * OPTIMIZER // dp
    assert bottleneck("none", case) == owned + NON_EXPERT * WEIGHT + EXPERT * WEIGHT // ep


@pytest.mark.parametrize("case", CASES)
def test_equal_sharding_is_bound_by_the_embedding_beside_even_shares(case: str) -> None:
    dp, _ = CASES[case]
    owned = (NON_EXPERT + EXPERT) * OPTIMIZER // dp
    assert bottleneck("equal", case) == owned + EMBEDDING * WEIGHT + EXPERT * WEIGHT // dp


@pytest.mark.parametrize("case", CASES)
def test_splitting_large_units_brings_the_bottleneck_to_the_even_share(case: str) -> None:
    dp, ep = CASES[case]
    unit = 1 << 20
    split = shard_checkpoint("equal", GPT, Topology(dp, ep=ep), FP16_FP32, max_unit_bytes=unit)
    even = (NON_EXPERT + EXPERT) * (WEIGHT + OPTIMIZER) / dp
    assert even <= split.bottleneck_bytes <= even + unit


def test_equal_sharding_of_experts_changes_nothing_with_one_ep_group() -> None:
    for case in ("Case1", "Case2"):
        assert bottleneck("EE", case) == bottleneck("none", case)


def test_equal_sharding_of_experts_halves_expert_weights_over_two_ep_groups() -> None:
    assert bottleneck("none", "Case3") - bottleneck("EE", "Case3") == EXPERT * WEIGHT // 8 // 2


@pytest.mark.parametrize("case", CASES)
def test_without_zero_rank_0_saves_the_optimizer_state_of_all_non_experts_too(case: str) -> None:
    dp, ep = CASES[case]
    plain = shard_checkpoint("none", GPT, Topology(dp, ep=ep), FP16_FP32, optimizer_sharded=False)
    assert plain.bottleneck_bytes == (NON_EXPERT + EXPERT // ep) * (WEIGHT + OPTIMIZER)
    assert plain.bytes_by_rank[0] == plain.bottleneck_bytes


def test_without_zero_the_second_ep_group_saves_nothing_in_the_baseline() -> None:
    plain = shard_checkpoint("none", GPT, Topology(16, ep=8), FP16_FP32, optimizer_sharded=False)
    assert plain.bytes_by_rank[8:] == (0,) * 8
    assert all(plain.bytes_by_rank[:8])


def test_a_full_checkpoint_has_weights_and_optimizer_state_of_all_parameters() -> None:
    whole = shard_checkpoint("equal", GPT, Topology(16, ep=8), FP16_FP32).total_bytes
    assert whole == checkpoint_bytes(GPT, FP16_FP32, 16).total_bytes == (NON_EXPERT + EXPERT) * 14


def test_one_of_sixteen_experts_makes_a_checkpoint_of_19_percent() -> None:
    found = checkpoint_bytes(GPT, FP16_FP32, 1).total_bytes
    assert found == (NON_EXPERT + EXPERT // 16) * 14
    assert found / ((NON_EXPERT + EXPERT) * 14) == pytest.approx(0.19, abs=0.005)


def is_balanced(k: int, moe_layers: int, d_ep: int, d_dp: int) -> bool:
    """Whether MoC eq. 9 finds no reason for imbalance when k experts of each MoE layer are saved."""
    per_rank, left = divmod(k * moe_layers, d_ep)
    return left == 0 and per_rank % (d_dp // d_ep) == 0


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.data())
def test_selections_that_eq_9_calls_balanced_load_all_ranks_with_the_same_expert_bytes(
    ep: int, layers: int, groups: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, ep))
    assume(is_balanced(k, layers, ep, ep * groups))
    shape = ModelShape("moe", layers, 12, 2, 10, 20, ep, 1)  # an expert has 480 parameters: 1, 2 or 3 equal parts
    chosen = {expert(layer, (layer * k + step) % ep) for layer in range(layers) for step in range(k)}
    assignment = shard_checkpoint(
        "equal", shape, Topology(ep * groups, ep=ep), FP16_FP32, selected_parts(shape, chosen)
    )
    assert len({bytes_of(assignment, rank, experts=True) for rank in range(ep * groups)}) == 1


def test_rank_0_saves_two_experts_in_the_setting_of_fig_4() -> None:
    parts = selected_parts(FIG_4, set(FIG_4_SELECTED))
    fixed = shard_checkpoint("equal", FIG_4, Topology(3, ep=3), FP16_FP32, parts)
    one = FIG_4.parameters[expert(1, 0)] * WEIGHT
    assert [bytes_of(fixed, rank, experts=True) for rank in range(3)] == [2 * one, one, one]
    assert fixed.bytes_by_rank[0] == fixed.bottleneck_bytes


def test_adaptive_sharding_gives_rank_0_fewer_layers_in_the_setting_of_fig_4() -> None:
    parts = selected_parts(FIG_4, set(FIG_4_SELECTED))
    topology = Topology(3, ep=3)
    fixed = shard_checkpoint("equal", FIG_4, topology, FP16_FP32, parts)
    adaptive = shard_checkpoint("adaptive", FIG_4, topology, FP16_FP32, parts)
    rest = [bytes_of(adaptive, rank, experts=False) for rank in range(3)]
    assert rest[0] < min(rest[1:])
    assert adaptive.bottleneck_bytes < fixed.bottleneck_bytes
    assert adaptive.total_bytes == fixed.total_bytes


def test_each_ep_group_saves_its_half_of_each_expert_in_the_setting_of_fig_7() -> None:
    shape = ModelShape("fig7", 2, 8, 2, 10, 16, 2, 1)
    assignment = shard_checkpoint("equal", shape, Topology(4, ep=2), FP16_FP32)
    whole = shape.parameters[expert(0, 0)]
    found = {
        rank: [
            (shard.operator, shard.first, shard.end) for shard in assignment.shards(rank) if is_weight_of_layer_0(shard)
        ]
        for rank in range(4)
    }
    assert found == {
        0: [(expert(0, 0), 0, whole // 2)],
        1: [(expert(0, 1), 0, whole // 2)],
        2: [(expert(0, 0), whole // 2, whole)],
        3: [(expert(0, 1), whole // 2, whole)],
    }


def is_weight_of_layer_0(shard: ParameterRange) -> bool:
    return shard.operator.is_expert and shard.operator.layer == 0 and shard.part == Part.COMPUTE


def test_the_embedding_stays_in_one_piece_unless_a_unit_is_bounded() -> None:
    embedding = OperatorId(-1, OperatorKind.EMBEDDING)

    def savers(max_unit_bytes: int | None) -> int:
        found = shard_checkpoint("equal", GPT, Topology(8, ep=8), FP16_FP32, max_unit_bytes=max_unit_bytes)
        return sum(
            any(shard.operator == embedding and shard.part == Part.COMPUTE for shard in found.shards(rank))
            for rank in range(8)
        )

    assert savers(None) == 1
    assert savers(EMBEDDING * WEIGHT // 3) >= 3


def test_where_the_greedy_choice_ends_higher_the_fixed_one_is_taken() -> None:
    # Greedy: 6 to rank 1, then both 5 to rank 0, which ends at 1 + 5 + 5. Fixed: 6 to rank 0, both 5 to rank 1.
    loads, sizes, ranks = (1, 0), (6, 5, 5), range(2)
    units = [
        ParameterRange(OperatorId(layer, OperatorKind.NON_EXPERT), Part.COMPUTE, 0, size, 1, ranks)
        for layer, size in enumerate(sizes)
    ]
    placed = adaptive_layers(units, loads)
    assert placed == fixed_layers(units, loads)
    assert [loads[rank] + sum(unit.total_bytes for unit in placed if rank in unit.ranks) for rank in ranks] == [7, 10]


@settings(max_examples=examples(150), deadline=None)
@given(checkpoints(), st.sampled_from(sorted(SHARDINGS)), st.booleans(), st.sampled_from([None, 14, 200]))
def test_every_byte_is_saved_exactly_once_by_a_rank_that_holds_it(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], strategy: str, zero: bool, unit: int | None
) -> None:
    shape, topology, parts = checkpoint
    assignment = shard_checkpoint(
        strategy, shape, topology, FP16_FP32, parts, optimizer_sharded=zero, max_unit_bytes=unit
    )
    saved = {(operator, bit): [] for operator, part in parts.items() for bit in part}
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        here = shape.operators_of_stages(topology)[at.pp]
        for shard in assignment.shards(rank):
            assert shard.operator in here
            if shard.operator.is_expert:
                assert shape.expert_rank(shard.operator.expert, topology) == at.ep
            ways, piece = (topology.expert_tp, at.etp) if shard.operator.is_expert else (topology.tp, at.tp)
            assert is_inside(shard, shape.parameters[shard.operator], ways, piece)
            for bit in shard.part:
                saved[shard.operator, bit].append((shard.first, shard.end))
    for (operator, _), ranges in saved.items():
        ranges.sort()
        assert [first for first, _ in ranges] + [shape.parameters[operator]] == [0] + [end for _, end in ranges]


def is_inside(shard: ParameterRange, parameters: int, ways: int, piece: int) -> bool:
    """Whether the shard lies in the given tensor-parallel piece of its operator, the first pieces being the larger."""
    starts = [0]
    for index in range(ways):
        starts.append(starts[-1] + parameters // ways + (index < parameters % ways))
    return starts[piece] <= shard.first < shard.end <= starts[piece + 1]


@settings(max_examples=examples(150), deadline=None)
@given(checkpoints(), st.sampled_from(sorted(SHARDINGS)), st.booleans())
def test_bytes_of_ranks_are_those_of_their_shards(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], strategy: str, zero: bool
) -> None:
    shape, topology, parts = checkpoint
    assignment = shard_checkpoint(strategy, shape, topology, FP16_FP32, parts, optimizer_sharded=zero)
    by_rank = tuple(sum(s.total_bytes for s in assignment.shards(rank)) for rank in range(topology.world_size))
    assert assignment.bytes_by_rank == by_rank
    assert assignment.total_bytes == sum(
        shape.parameters[operator] * FP16_FP32.bytes_per_parameter(part) for operator, part in parts.items()
    )


@settings(max_examples=examples(150), deadline=None)
@given(checkpoints(), st.booleans())
def test_adaptive_sharding_is_never_above_any_other(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], zero: bool
) -> None:
    shape, topology, parts = checkpoint
    found = {
        name: shard_checkpoint(name, shape, topology, FP16_FP32, parts, optimizer_sharded=zero).bottleneck_bytes
        for name in SHARDINGS
    }
    assert found["AN"] <= found["EN"]
    assert found["adaptive"] <= found["equal"]
    assert found["AN"] <= found["none"]
    assert found["adaptive"] <= found["EE"]


@settings(max_examples=examples(150), deadline=None)
@given(checkpoints(), st.booleans())
def test_equal_sharding_of_experts_is_never_above_the_baseline(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], zero: bool
) -> None:
    shape, topology, parts = checkpoint
    assume(topology.tp == topology.expert_tp)  # else tensor pieces of unequal size meet on one rank
    equal, baseline = (
        shard_checkpoint(name, shape, topology, FP16_FP32, parts, optimizer_sharded=zero).bottleneck_bytes
        for name in ("EE", "none")
    )
    assert equal <= baseline


@settings(max_examples=examples(150), deadline=None)
@given(checkpoints(), st.booleans())
def test_adaptive_sharding_is_within_one_module_of_even_or_bound_by_what_is_no_choice(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], zero: bool
) -> None:
    shape, topology, parts = checkpoint
    without_rest = parts | {
        operator: part & Part.MASTER_AND_MOMENTS if zero else Part.NOTHING
        for operator, part in parts.items()
        if not operator.is_expert
    }
    given_loads = shard_checkpoint("adaptive", shape, topology, FP16_FP32, without_rest, optimizer_sharded=zero)
    assignment = shard_checkpoint("adaptive", shape, topology, FP16_FP32, parts, optimizer_sharded=zero)
    for first in {topology.data_parallel_peers(rank)[0] for rank in range(topology.world_size)}:
        group = topology.data_parallel_peers(first)
        loads = [assignment.bytes_by_rank[rank] for rank in group]
        largest = max(
            (
                s.total_bytes
                for s in assignment.stretches
                if not s.operator.is_expert and len(s.ranks) == 1 and s.ranks[0] in group
            ),
            default=0,
        )
        no_choice = max(given_loads.bytes_by_rank[rank] for rank in group)
        assert max(loads) <= max(no_choice, sum(loads) / len(group) + largest)


@settings(deadline=None)
@given(checkpoints(), st.sampled_from(sorted(SHARDINGS)), st.randoms())
def test_the_order_of_the_parts_does_not_matter(
    checkpoint: tuple[ModelShape, Topology, dict[OperatorId, Part]], strategy: str, random: Random
) -> None:
    shape, topology, parts = checkpoint
    shuffled = list(parts.items())
    random.shuffle(shuffled)
    assert shard_checkpoint(strategy, shape, topology, FP16_FP32, parts) == shard_checkpoint(
        strategy, shape, topology, FP16_FP32, dict(shuffled)
    )


def test_pipeline_and_tensor_ranks_save_their_own_pieces_alike() -> None:
    shape = ModelShape("even", 4, 16, 2, 32, 32, 4, 1)
    one = shard_checkpoint("equal", shape, Topology(4, ep=4), FP16_FP32)
    four = shard_checkpoint("equal", shape, Topology(16, tp=2, pp=2, ep=4), FP16_FP32)
    assert four.total_bytes == one.total_bytes
    assert four.bytes_by_rank[0::2] == four.bytes_by_rank[1::2]


def test_a_checkpoint_of_nothing_is_even() -> None:
    nothing = shard_checkpoint("adaptive", GPT, Topology(8, ep=8), FP16_FP32, {})
    assert (nothing.total_bytes, nothing.imbalance) == (0, 1.0)


def test_the_imbalance_of_one_busy_rank_of_four_is_four() -> None:
    dense = ModelShape("dense", 2, 8, 2, 10, 16)
    busy = shard_checkpoint("none", dense, Topology(4), FP16_FP32, optimizer_sharded=False)
    assert (busy.bytes_by_rank[0], busy.imbalance) == (busy.bottleneck_bytes, 4.0)


ONE_GROUP = Topology(8, ep=8)


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: shard_checkpoint("fair", GPT, ONE_GROUP, FP16_FP32), "sharding is 'fair', but must be one of none,"),
        (
            lambda: shard_checkpoint("none", GPT, ONE_GROUP, FP16_FP32, max_unit_bytes=13),
            "max_unit_bytes is 13, but must be at least 14",
        ),
        (
            lambda: shard_checkpoint("none", GPT, ONE_GROUP, FP16_FP32, {expert(0, 0): Part.MASTER_AND_MOMENTS}),
            "parts names layer0.expert0, which model GPT-350M-16E does not have",
        ),
        (lambda: shard_checkpoint("none", GPT, Topology(3, ep=3), FP16_FP32), "ep 3 does not divide num_experts 16"),
    ],
)
def test_what_cannot_work_is_refused_with_the_value_and_the_range(attempt: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        attempt()
    assert sentence in str(caught.value)


def test_a_rank_outside_the_world_has_no_shards() -> None:
    with pytest.raises(IndexError, match="rank 8 is not in a world of 8"):
        shard_checkpoint("none", GPT, Topology(8, ep=8), FP16_FP32).shards(8)
