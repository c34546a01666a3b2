"""Names of parameters in a model chunk, and the operators, keys and holders that follow from them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state.operators import (
    ChunkPlace,
    GlobalName,
    Shard,
    ShardSpread,
    holders,
    is_constant,
    locate,
)
from megatron.core.dist_checkpointing.moe.megatron_state.partitions import Cover, Extent, IncompleteState, check_cover
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Topology, expert

FIRST = ChunkPlace(first_layer=0, num_layers=12)
LATER = ChunkPlace(first_layer=8, num_layers=12, first_expert=4)
TIED = ChunkPlace(first_layer=8, num_layers=12, tied=True)
AHEAD = ChunkPlace(first_layer=8, num_layers=12, first_expert=4, tied=True, layers_ahead=2, copies_embedding=True)

EMBEDDING = OperatorId(-1, OperatorKind.EMBEDDING)
HEAD = OperatorId(12, OperatorKind.HEAD)


def rest_of(layer: int) -> OperatorId:
    return OperatorId(layer, OperatorKind.NON_EXPERT)


def router(layer: int) -> OperatorId:
    return OperatorId(layer, OperatorKind.ROUTER)


@pytest.mark.parametrize(
    ("name", "chunk", "operator"),
    [
        ("embedding.word_embeddings.weight", FIRST, EMBEDDING),
        ("embedding.position_embeddings.weight", FIRST, EMBEDDING),
        ("decoder.final_layernorm.weight", LATER, HEAD),
        ("decoder.final_layernorm.bias", LATER, HEAD),
        ("output_layer.weight", LATER, HEAD),
        ("output_layer.bias", TIED, HEAD),
        ("decoder.layers.0.input_layernorm.weight", FIRST, rest_of(0)),
        ("decoder.layers.3.self_attention.linear_qkv.weight", LATER, rest_of(11)),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", LATER, rest_of(11)),
        ("decoder.layers.1.self_attention.q_layernorm.weight", FIRST, rest_of(1)),
        ("decoder.layers.1.self_attention.core_attention.softmax_offset", FIRST, rest_of(1)),
        ("decoder.layers.1.pre_mlp_layernorm.weight", FIRST, rest_of(1)),
        ("decoder.layers.0.mlp.linear_fc1.weight", LATER, rest_of(8)),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", LATER, rest_of(8)),
        ("decoder.layers.0.mlp.linear_fc2.bias", LATER, rest_of(8)),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", LATER, rest_of(9)),
        ("decoder.layers.1.mlp.shared_experts.gate_weight", LATER, rest_of(9)),
        ("decoder.layers.1.mlp.fc1_latent_proj.weight", LATER, rest_of(9)),
        # Of Gemma 4 in Megatron-Bridge.
        ("decoder.layers.0.layer_scalar", LATER, rest_of(8)),
        ("decoder.layers.0.post_self_attn_layernorm.weight", LATER, rest_of(8)),
        ("decoder.layers.0.pre_shared_expert_layernorm.weight", LATER, rest_of(8)),
        ("decoder.layers.0.post_ffn_layernorm.weight", LATER, rest_of(8)),
        ("decoder.layers.1.mlp.post_moe_layernorm.weight", LATER, rest_of(9)),
        ("decoder.layers.1.mlp.post_shared_expert_layernorm.weight", LATER, rest_of(9)),
        ("decoder.layers.1.mlp.router.per_expert_scale", LATER, router(9)),
        ("decoder.layers.1.mlp.router.weight", LATER, router(9)),
        ("decoder.layers.1.mlp.router.bias", LATER, router(9)),
        ("decoder.layers.1.mlp.router.expert_bias", LATER, router(9)),
        ("decoder.layers.1.mlp.router.local_tokens_per_expert", LATER, router(9)),
        ("decoder.layers.1.mlp.router.ga_steps", FIRST, router(1)),
        ("decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight", LATER, expert(11, 5)),
        ("decoder.layers.3.mlp.experts.local_experts.0.linear_fc2.bias", FIRST, expert(3, 0)),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight1", LATER, expert(11, 5)),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight12", LATER, expert(11, 16)),
        ("decoder.layers.3.mlp.experts.linear_fc2.bias3", FIRST, expert(3, 3)),
    ],
)
def test_a_name_and_the_place_of_its_chunk_give_the_operator(
    name: str, chunk: ChunkPlace, operator: OperatorId
) -> None:
    assert locate(name, chunk).operator == operator


@pytest.mark.parametrize(
    ("name", "operator", "of_model"),
    [
        ("mtp.layers.1.eh_proj.weight", rest_of(13), ""),
        ("mtp.layers.0.final_layernorm.weight", rest_of(12), ""),
        ("mtp.layers.0.mtp_model_layer.mlp.router.expert_bias", router(12), ""),
        ("mtp.layers.1.mtp_model_layer.self_attention.linear_qkv.weight", rest_of(13), ""),
        (
            "mtp.layers.1.mtp_model_layer.mlp.experts.local_experts.1.linear_fc1.weight",
            expert(13, 5),
            "mtp.layers.1.mtp_model_layer.mlp.experts.5.linear_fc1.weight",
        ),
        ("decoder.layers.3.mlp.router.weight", router(11), "decoder.layers.11.mlp.router.weight"),
        ("decoder.final_layernorm.weight", OperatorId(14, OperatorKind.HEAD), ""),
        ("output_layer.weight", OperatorId(14, OperatorKind.HEAD), ""),
        ("embedding.word_embeddings.weight", EMBEDDING, ""),
        ("embedding.position_embeddings.weight", EMBEDDING, "mtp.embedding.position_embeddings.weight"),
    ],
)
def test_layers_that_predict_further_tokens_come_after_the_others(
    name: str, operator: OperatorId, of_model: str
) -> None:
    assert locate(name, AHEAD) == GlobalName(operator, of_model or name)


def test_names_are_those_of_the_whole_model() -> None:
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    assert locate(name, LATER).name == "decoder.layers.9.self_attention.linear_proj.weight"
    assert locate(name, FIRST).name == name


@pytest.mark.parametrize("tensor", ["linear_fc1.weight", "linear_fc2.bias"])
def test_sequential_and_grouped_experts_have_the_same_names(tensor: str) -> None:
    one = locate(f"decoder.layers.2.mlp.experts.local_experts.3.{tensor}", LATER)
    other = locate(f"decoder.layers.2.mlp.experts.{tensor}3", LATER)
    assert one == other == GlobalName(expert(10, 7), f"decoder.layers.10.mlp.experts.7.{tensor}")


def test_the_last_stages_copy_of_tied_embeddings_is_the_embedding() -> None:
    assert locate("output_layer.weight", TIED) == locate("embedding.word_embeddings.weight", FIRST)
    assert locate("output_layer.weight", LATER) == GlobalName(HEAD, "output_layer.weight")


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.adapter.weight",
        "vision_model.weight",
        "decoder.layers.x.input_layernorm.weight",
        "decoder.layers.0.adapter.weight",
        "decoder.layers.0.moe_experts.gate_up_proj",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc3.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
        "module.decoder.layers.0.input_layernorm.weight",
        "rotary_pos_emb.cos_cached",
    ],
)
def test_an_unknown_name_is_refused_with_the_name_and_what_is_expected(name: str) -> None:
    with pytest.raises(UsageError, match="expected") as refusal:
        locate(name, FIRST)
    assert repr(name) in str(refusal.value)


@pytest.mark.parametrize("tensor", ["weight1", "weight2"])
def test_one_tensor_for_all_experts_is_refused_with_the_way_out(tensor: str) -> None:
    with pytest.raises(UsageError, match="--moe-grouped-gemm"):
        locate(f"decoder.layers.0.mlp.experts.{tensor}", FIRST)


def test_tables_of_angles_are_constants_and_router_counts_are_not() -> None:
    assert is_constant("rotary_pos_emb.cos_cached")
    assert is_constant("decoder.layers.3.self_attention.rotary_pos_emb.sin_cached")
    assert not is_constant("decoder.layers.0.mlp.router.expert_bias")


def test_keys_tell_partitions_shards_fields_and_owners_apart() -> None:
    of = GlobalName(expert(2, 5), "decoder.layers.2.mlp.experts.5.linear_fc1.weight")
    assert Shard(of, 0, 64, 64).key("master") == "decoder.layers.2.mlp.experts.5.linear_fc1.weight[0:64]/master"
    shards = [
        Shard(of, 0, 64, 64),
        Shard(of, 0, 32, 64),
        Shard(of, 32, 64, 64),
        Shard(of, 0, 64, 64, tp_rank=0, tp_size=2),
        Shard(of, 0, 64, 64, tp_rank=1, tp_size=2),
        Shard(of, 0, 64, 64, own_of=0),
        Shard(of, 0, 64, 64, own_of=1),
    ]
    assert len({shard.key(field) for shard in shards for field in ("master", "exp_avg")}) == 14


DENSE, EXPERT = False, True


@pytest.mark.parametrize(
    ("rank", "spread", "ranks"),
    [
        (5, ShardSpread(DENSE, partitioned=True, sharded=True), (5,)),
        (5, ShardSpread(DENSE, partitioned=True, sharded=False), (1, 3, 5, 7)),
        (5, ShardSpread(DENSE, partitioned=False, sharded=True), (4, 5)),
        (5, ShardSpread(DENSE, partitioned=False, sharded=False), (0, 1, 2, 3, 4, 5, 6, 7)),
        (5, ShardSpread(DENSE, partitioned=True, sharded=True, tied=True), (5, 13)),
        (13, ShardSpread(DENSE, partitioned=True, sharded=True, tied=True), (5, 13)),
        (13, ShardSpread(DENSE, partitioned=True, sharded=False), (9, 11, 13, 15)),
        (5, ShardSpread(EXPERT, partitioned=True, sharded=True), (5,)),
        (5, ShardSpread(EXPERT, partitioned=True, sharded=False), (1, 5)),
        (5, ShardSpread(EXPERT, partitioned=False, sharded=True), (4, 5)),
        (5, ShardSpread(EXPERT, partitioned=False, sharded=False), (0, 1, 4, 5)),
    ],
)
def test_holders_follow_from_how_a_tensor_is_spread(rank: int, spread: ShardSpread, ranks: tuple[int, ...]) -> None:
    """Two stages of eight ranks: tp 2, dp 4; experts etp 2, ep 2, edp 2."""
    assert holders(Topology(16, tp=2, pp=2, ep=2), rank, spread) == ranks


def test_experts_off_the_tensor_ranks_have_holders_of_their_own() -> None:
    topology = Topology(4, tp=2, ep=2, etp=1)
    assert holders(topology, 1, ShardSpread(EXPERT, partitioned=False, sharded=False)) == (1, 3)
    assert holders(topology, 1, ShardSpread(DENSE, partitioned=True, sharded=False)) == (1, 3)
    assert holders(topology, 1, ShardSpread(DENSE, partitioned=False, sharded=True)) == (0, 1)


def test_context_parallel_ranks_share_what_data_parallel_ranks_share() -> None:
    topology = Topology(8, tp=2, cp=2, ep=2)
    assert holders(topology, 1, ShardSpread(DENSE, partitioned=True, sharded=False)) == (1, 3, 5, 7)
    assert holders(topology, 1, ShardSpread(DENSE, partitioned=True, sharded=True)) == (1,)


def test_instances_of_the_distributed_optimizer_hold_the_same_shards() -> None:
    topology = Topology(16, tp=2, pp=2, ep=2, instances=2)
    assert holders(topology, 5, ShardSpread(DENSE, partitioned=True, sharded=True)) == (1, 5)
    assert holders(topology, 7, ShardSpread(DENSE, partitioned=True, sharded=True)) == (3, 7)
    assert holders(topology, 5, ShardSpread(EXPERT, partitioned=True, sharded=True)) == (1, 5)
    assert holders(topology, 5, ShardSpread(DENSE, partitioned=True, sharded=False)) == (1, 3, 5, 7)
    context = Topology(8, cp=2, ep=2, instances=2)
    assert holders(context, 1, ShardSpread(DENSE, partitioned=True, sharded=True)) == (1, 5)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda span: (span[0], sum(span))), max_size=6)


@given(expected=spans, found=spans)
def test_a_cover_is_judged_as_a_count_of_every_byte_would_judge_it(
    expected: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    wanted = {byte for start, end in expected for byte in range(start, end)}
    counts = Counter(byte for start, end in found for byte in range(start, end))
    is_exact = set(counts) == wanted and set(counts.values()) <= {1}
    extents = [[Extent(*span, "it") for span in spans] for spans in (expected, found)]
    if is_exact:
        check_cover(*extents)
    else:
        with pytest.raises(IncompleteState):
            check_cover(*extents)


@given(covered=spans, asked=spans)
def test_missing_bytes_are_counted_one_by_one(covered: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    cover = Cover(Extent(*span, "it") for span in covered)
    inside = {byte for start, end in covered for byte in range(start, end)}
    for start, end in asked:
        assert cover.missing_bytes(Extent(start, end, "it")) == len(set(range(start, end)) - inside)


def test_the_verdict_names_what_is_missing_what_is_doubled_and_what_is_foreign() -> None:
    weights, moments = Extent(0, 64, "weights"), Extent(100, 164, "moments")
    with pytest.raises(IncompleteState, match=r"moments \(and 1 more\) belongs to no operator .*: 60 of its 64 bytes"):
        check_cover([weights, moments, Extent(200, 208, "step")], [weights, Extent(100, 104, "part")])
    with pytest.raises(IncompleteState, match="weights and again share memory"):
        check_cover([weights], [weights, Extent(60, 64, "again")])
    with pytest.raises(IncompleteState, match="stale is no live training state"):
        check_cover([weights], [weights, Extent(300, 308, "stale")])
