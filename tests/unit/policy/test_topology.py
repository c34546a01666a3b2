"""Who sits where: against Megatron-Core's own groups and layer offsets."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import Coordinates, Topology
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

MEGATRON_ORDER = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
LAYOUTS = [
    Topology(1),
    Topology(8, ep=8),
    Topology(8, tp=2, pp=2, ep=2),
    Topology(16, tp=4, pp=2, ep=8, etp=1),
    Topology(16, tp=1, pp=2, ep=2, etp=4),
    Topology(16, tp=2, pp=1, ep=4, etp=4),
    Topology(24, tp=2, pp=3, cp=2, ep=2, etp=1),
    Topology(32, tp=2, pp=2, cp=4, ep=8, etp=2),
    Topology(96, tp=1, pp=12, ep=8),
    Topology(512, tp=4, pp=4, ep=32, etp=1),
]
degrees = st.sampled_from([1, 2, 3, 4])


def grouped(topology: Topology, key: Callable[[Coordinates], Hashable]) -> set[frozenset[int]]:
    """Ranks that have the same key."""
    found: dict[Hashable, list[int]] = {}
    for rank in range(topology.world_size):
        found.setdefault(key(topology.coordinates(rank)), []).append(rank)
    return {frozenset(ranks) for ranks in found.values()}


def check_groups(topology: Topology) -> None:
    """Every group that both sides have must have the same ranks."""
    dense = RankGenerator(topology.tp, 1, topology.dp, topology.pp, topology.cp, MEGATRON_ORDER)
    routed = RankGenerator(topology.expert_tp, topology.ep, topology.edp, topology.pp, 1, MEGATRON_ORDER)
    ours: list[tuple[RankGenerator, str, Callable[[Coordinates], Hashable]]] = [
        (dense, "tp", lambda at: (at.cp, at.dp, at.pp)),
        (dense, "cp", lambda at: (at.tp, at.dp, at.pp)),
        (dense, "dp", lambda at: (at.tp, at.cp, at.pp)),
        (dense, "dp-cp", lambda at: (at.tp, at.pp)),
        (dense, "pp", lambda at: (at.tp, at.cp, at.dp)),
        (routed, "tp", lambda at: (at.ep, at.edp, at.pp)),
        (routed, "ep", lambda at: (at.etp, at.edp, at.pp)),
        (routed, "dp", lambda at: (at.etp, at.ep, at.pp)),
        (routed, "tp-ep", lambda at: (at.edp, at.pp)),
        (routed, "pp", lambda at: (at.etp, at.ep, at.edp)),
    ]
    for generator, token, key in ours:
        assert {frozenset(ranks) for ranks in generator.get_ranks(token)} == grouped(topology, key), token


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_groups_are_those_of_megatron_core(topology: Topology) -> None:
    check_groups(topology)


@settings(max_examples=examples(150), deadline=None)
@given(tp=degrees, cp=degrees, pp=degrees, dp=degrees, ep=degrees, etp=degrees)
def test_groups_are_those_of_megatron_core_for_all_degrees(
    tp: int, cp: int, pp: int, dp: int, ep: int, etp: int
) -> None:
    assume((tp * cp * dp) % (ep * etp) == 0)
    check_groups(Topology(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_peers_are_the_groups_over_which_the_distributed_optimizer_shards(topology: Topology) -> None:
    dense = RankGenerator(topology.tp, 1, topology.dp, topology.pp, topology.cp, MEGATRON_ORDER)
    routed = RankGenerator(topology.expert_tp, topology.ep, topology.edp, topology.pp, 1, MEGATRON_ORDER)
    for ranks in dense.get_ranks("dp-cp"):
        assert all(topology.data_parallel_peers(rank) == tuple(ranks) for rank in ranks)
    for ranks in routed.get_ranks("dp"):
        assert all(topology.expert_data_parallel_peers(rank) == tuple(ranks) for rank in ranks)


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_shards_are_those_of_the_groups_that_each_instance_of_the_distributed_optimizer_has(instances: int) -> None:
    """As `initialize_model_parallel` cuts these groups: into as many stretches as there are instances."""
    topology = Topology(32, tp=2, cp=2, ep=2, etp=1, instances=instances)
    dense = RankGenerator(topology.tp, 1, topology.dp, topology.pp, topology.cp, MEGATRON_ORDER)
    routed = RankGenerator(topology.expert_tp, topology.ep, topology.edp, topology.pp, 1, MEGATRON_ORDER)
    for generator, token, is_expert in ((dense, "dp-cp", False), (routed, "dp", True)):
        for ranks in generator.get_ranks(token):
            found = [topology.shard_of(topology.coordinates(rank), is_expert=is_expert) for rank in ranks]
            assert found == [*range(len(ranks) // instances)] * instances


def test_instances_have_to_divide_the_data_parallel_ranks() -> None:
    with pytest.raises(UsageError, match="data-parallel ranks of experts = 2 is not a multiple of instances 4"):
        Topology(8, ep=4, instances=4)
    with pytest.raises(UsageError, match="cp x dp = 8 is not a multiple of instances 3"):
        Topology(8, instances=3)


def test_expert_tensor_parallelism_is_tensor_parallelism_unless_given() -> None:
    assert Topology(8, tp=4).expert_tp == 4
    assert Topology(8, tp=4, etp=1).expert_tp == 1
    assert Topology(8, tp=4, etp=1).edp == 8


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_layers_of_stages_are_where_megatron_core_puts_them(pp: int, vpp: int) -> None:
    per_chunk = 2
    layers = pp * vpp * per_chunk
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype="float32",
    )
    stages = Topology(pp, pp=pp, vpp=vpp).layers_of_stages(layers)
    for stage in range(pp):
        firsts = [get_transformer_layer_offset(config, chunk if vpp > 1 else None, stage) for chunk in range(vpp)]
        assert stages[stage] == tuple(layer for first in firsts for layer in range(first, first + per_chunk))


@settings(max_examples=examples(100), deadline=None)
@given(pp=st.integers(2, 6), vpp=st.integers(1, 4), more=st.integers(0, 30))
def test_uneven_layers_are_each_on_one_stage_and_differ_by_one_per_virtual_stage(pp: int, vpp: int, more: int) -> None:
    layers = pp * vpp + more
    stages = Topology(pp, pp=pp, vpp=vpp).layers_of_stages(layers)
    assert sorted(layer for stage in stages for layer in stage) == list(range(layers))
    assert all(list(stage) == sorted(stage) for stage in stages)
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_the_first_stages_get_the_layers_that_are_left_over() -> None:
    assert Topology(4, pp=4).layers_of_stages(6) == ((0, 1), (2, 3), (4,), (5,))


def test_stages_are_contiguous_blocks_of_ranks() -> None:
    topology = Topology(8, pp=2)
    assert topology.stage_ranks(1) == range(4, 8)
    assert [topology.stage(rank) for rank in range(8)] == [0] * 4 + [1] * 4


def test_nodes_are_blocks_of_ranks_unless_they_are_given() -> None:
    topology = Topology(4, ranks_per_node=2)
    assert topology.ranks_by_node == {0: (0, 1), 1: (2, 3)}
    after_a_spare = Topology(4, ranks_per_node=2, nodes=(7, 7, 1, 1))
    assert after_a_spare.ranks_by_node == {7: (0, 1), 1: (2, 3)}
    assert after_a_spare.ranks_on([1, 7]) == (0, 1, 2, 3)
    assert after_a_spare.coordinates(0).node == 7
    assert after_a_spare.ranks_on([0]) == ()


def test_the_last_node_may_have_fewer_ranks() -> None:
    assert Topology(5, ranks_per_node=2).ranks_by_node == {0: (0, 1), 1: (2, 3), 2: (4,)}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"world_size": 0}, "world_size is 0, but must be at least 1"),
        ({"tp": -1}, "tp is -1, but must be at least 1"),
        ({"etp": 0}, "etp is 0, but must be at least 1"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0, but must be at least 1"),
        ({"tp": 3}, "world_size 8 is not a multiple of tp x cp x pp = 3"),
        ({"tp": 2, "ep": 8}, "world_size 8 is not a multiple of etp x ep x pp = 16"),
        ({"ep": 3}, "world_size 8 is not a multiple of etp x ep x pp = 3"),
        ({"vpp": 2}, "vpp is 2 with pp 1: virtual stages need at least 2 pipeline stages"),
        ({"nodes": (0, 1)}, "nodes names 2 ranks, but world_size is 8"),
    ],
)
def test_degrees_that_cannot_be_are_refused(degrees: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Topology(**{"world_size": 8, **degrees})  # type: ignore[arg-type]


def test_a_rank_that_does_not_exist_has_no_coordinates() -> None:
    with pytest.raises(IndexError, match="rank 8 is not in a world of 8"):
        Topology(8).coordinates(8)


def test_stages_without_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="7 layers cannot fill pp x vpp = 8 stages"):
        Topology(4, pp=4, vpp=2).layers_of_stages(7)
