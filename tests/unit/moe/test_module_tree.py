"""Which operator a parameter belongs to in a tree of modules that is no plain GPT."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state import partitions
from megatron.core.dist_checkpointing.moe.megatron_state.megatron import stepped_parameters
from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import (
    ModuleTree,
    chunk_parts,
    model_operators,
    number_layers,
    trees_of,
)
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName
from megatron.core.dist_checkpointing.moe.megatron_state.stage_layers import StageLayers
from megatron.core.dist_checkpointing.moe.policy.resharding import Grid
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Topology, expert
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.pretrain.testing import cpu_device

Linear = torch.nn.Linear


def made(kind: type, num_experts: int = 0, /, **parts: torch.nn.Module) -> torch.nn.Module:
    """A module of this class with these parts, without what its constructor needs."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.config = SimpleNamespace(num_moe_experts=num_experts, pipeline_model_parallel_size=1)
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def moe(experts: int) -> torch.nn.Module:
    local = torch.nn.ModuleList(made(torch.nn.Module, linear_fc1=Linear(2, 2, bias=False)) for _ in range(2))
    return made(MoELayer, experts, router=Linear(2, 2), experts=made(torch.nn.Module, local_experts=local))


def staged(experts: int = 4, other: int = 4) -> torch.nn.Module:
    """A stem, a dense layer, a layer with experts, merging, another one with experts, a classifier."""
    first = torch.nn.ModuleList(
        [made(TransformerLayer, mlp=Linear(2, 2)), made(TransformerLayer, norm=Linear(2, 2), mlp=moe(experts))]
    )
    return made(
        torch.nn.Module, stem=Linear(2, 2), one=first, merge=Linear(2, 2),
        two=torch.nn.ModuleList([made(TransformerLayer, mlp=moe(other))]), classify=Linear(2, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("stem.weight", OperatorId(-1, OperatorKind.EMBEDDING)),
        ("one.0.mlp.weight", OperatorId(0, OperatorKind.NON_EXPERT)),
        ("one.1.norm.bias", OperatorId(1, OperatorKind.NON_EXPERT)),
        ("one.1.mlp.router.weight", OperatorId(1, OperatorKind.ROUTER)),
        ("one.1.mlp.experts.local_experts.1.linear_fc1.weight", expert(1, 3)),
        ("merge.weight", OperatorId(1, OperatorKind.NON_EXPERT)),
        ("two.0.mlp.experts.local_experts.0.linear_fc1.weight", expert(2, 2)),
        ("classify.bias", OperatorId(3, OperatorKind.HEAD)),
    ],
)
def test_layers_give_operators_and_what_is_around_them_belongs_to_its_place(name: str, operator: OperatorId) -> None:
    assert ModuleTree(staged()).locate(name, first_expert=2).operator == operator


def test_names_say_the_experts_of_the_whole_model_however_they_are_computed() -> None:
    tree = ModuleTree(staged())
    sequential = tree.locate("one.1.mlp.experts.local_experts.1.linear_fc1.weight", 2)
    grouped = tree.locate("one.1.mlp.experts.linear_fc1.weight1", 2)
    assert sequential == grouped
    assert sequential.name == "one.1.mlp.experts.3.linear_fc1.weight"


def test_operators_are_those_of_all_ranks() -> None:
    experts = [operator for operator in ModuleTree(staged()).operators if operator.is_expert]
    assert experts == [expert(layer, index) for layer in (1, 2) for index in range(4)]


def test_routers_are_told_apart_by_the_tree() -> None:
    model = staged()
    assert ModuleTree(model).layer_of(model.two[0].mlp.router) == 2


def test_what_has_no_layers_or_experts_of_several_kinds_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="different numbers of experts"):
        trees_of([staged(4, 8)])
    with pytest.raises(UsageError, match="no transformer layer"):
        trees_of([made(torch.nn.Module, stem=Linear(2, 2))])
    with pytest.raises(UsageError, match="all experts in one tensor"):
        ModuleTree(staged()).locate("one.1.mlp.experts.weight1", 0)


# Over pipeline stages.

LAYERS = {
    "M": lambda: made(MambaLayer, mixer=Linear(2, 2)),
    "*": lambda: made(TransformerLayer, self_attention=Linear(2, 2)),
    "E": lambda: made(TransformerLayer, pre_mlp_layernorm=Linear(2, 2), mlp=moe(4)),
}


def hybrid(pattern: str, *, first: bool = False, last: bool = False, kind: type = HybridModel) -> torch.nn.Module:
    """A chunk of a hybrid model, on one of two stages."""
    decoder = made(torch.nn.Module, layers=torch.nn.ModuleList(LAYERS[each]() for each in pattern))
    parts: dict[str, torch.nn.Module] = {"decoder": decoder}
    if first:
        words = made(torch.nn.Module, word_embeddings=torch.nn.Embedding(4, 2))
        parts = {"embedding": words, **parts}
    if last:
        decoder.final_norm = Linear(2, 2)
        parts["output_layer"] = Linear(2, 4, bias=False)
    model = made(kind, **parts)
    model.config.pipeline_model_parallel_size = 2
    return model


def over_stages(monkeypatch: pytest.MonkeyPatch, *stages: list[torch.nn.Module]) -> None:
    """Number the layers of all stages, each of which has its chunks."""
    for rank, chunks in enumerate(stages):
        group = SimpleNamespace(size=lambda: len(stages), rank=lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda group=group: group)

        def gather(into: list[object], own: object, group: object, rank: int = rank) -> None:
            into[:] = [[chunk_parts(chunk) for chunk in chunks] for chunks in stages]
            assert into[rank] == own

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        number_layers(chunks)


def names(trees: list[ModuleTree], chunks: list[torch.nn.Module]) -> dict[str, OperatorId]:
    """Of all parameters of these chunks, by their names in the whole model."""
    found = [
        tree.locate(name, 0) for tree, chunk in zip(trees, chunks, strict=True) for name, _ in chunk.named_parameters()
    ]
    assert len({of.name for of in found}) == len(found)
    return {of.name: of.operator for of in found}


@pytest.mark.parametrize("cut", [("ME*M", "E"), ("M", "E*ME"), ("ME*ME", ""), ("", "ME*ME"), ("ME", "*", "M", "E")])
def test_a_model_has_the_names_and_operators_of_one_stage_wherever_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, cut: tuple[str, ...]
) -> None:
    whole = hybrid("ME*ME", first=True, last=True)
    chunks = [hybrid(pattern, first=number == 0, last=number == len(cut) - 1) for number, pattern in enumerate(cut)]
    over_stages(monkeypatch, chunks[::2], chunks[1::2])
    trees = [tree for stage in (chunks[::2], chunks[1::2]) for tree in trees_of(stage)]
    assert names(trees, [*chunks[::2], *chunks[1::2]]) == names([ModuleTree(whole)], [whole])
    assert model_operators(chunks[::2]) == model_operators(chunks[1::2]) == ModuleTree(whole).operators
    kinds = [operator.kind for operator in ModuleTree(whole).operators if operator.layer == 0]
    assert kinds == [OperatorKind.NON_EXPERT], "a Mamba layer is an operator"
    of_trees = zip(trees, [*chunks[::2], *chunks[1::2]], strict=True)
    modules = ((tree, module) for tree, chunk in of_trees for module in chunk.modules())
    assert sorted(tree.layer_of(module) for tree, module in modules if isinstance(module, MoELayer)) == [1, 4]


def test_a_vision_tower_comes_before_the_language_model_wherever_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def tower() -> torch.nn.Module:
        blocks = torch.nn.ModuleList([LAYERS["*"](), LAYERS["*"]()])
        return made(torch.nn.Module, patch_embed=Linear(2, 2), blocks=blocks, merger=Linear(2, 2))

    def seeing(language: torch.nn.Module, **parts: torch.nn.Module) -> torch.nn.Module:
        model = made(torch.nn.Module, **parts, language_model=language)
        model.config.pipeline_model_parallel_size = 2
        return model

    stages = [
        [seeing(hybrid("E", first=True, kind=LanguageModule), vision_model=tower())],
        [seeing(hybrid("*E", last=True, kind=LanguageModule))],
    ]
    whole = seeing(hybrid("E*E", first=True, last=True, kind=LanguageModule), vision_model=tower())
    over_stages(monkeypatch, *stages)
    found = names([*trees_of(stages[0]), *trees_of(stages[1])], [*stages[0], *stages[1]])
    assert found == names([ModuleTree(whole)], [whole])
    assert found["vision_model.patch_embed.weight"] == OperatorId(-1, OperatorKind.EMBEDDING)
    assert found["vision_model.merger.weight"] == OperatorId(1, OperatorKind.NON_EXPERT)
    assert found["language_model.embedding.word_embeddings.weight"] == OperatorId(-1, OperatorKind.EMBEDDING)
    assert found["language_model.decoder.layers.2.mlp.router.weight"] == OperatorId(4, OperatorKind.ROUTER)


@pytest.mark.parametrize("copy", ["tied output", "layers that predict further tokens"])
def test_a_copy_of_the_embedding_is_the_embedding(monkeypatch: pytest.MonkeyPatch, copy: str) -> None:
    first, last = hybrid("M", first=True), hybrid("E", last=True, first=copy != "tied output")
    first.share_embeddings_and_output_weights = last.share_embeddings_and_output_weights = True
    over_stages(monkeypatch, [first], [last])
    name = "output_layer.weight" if copy == "tied output" else "embedding.word_embeddings.weight"
    (there,), (here,) = trees_of([first]), trees_of([last])
    assert here.locate(name, 0) == there.locate("embedding.word_embeddings.weight", 0)
    # Under tied weights core leaves the output's own beside such a copy.
    head = OperatorId(2, OperatorKind.HEAD)
    assert (here.locate("output_layer.weight", 0).operator == head) == (copy != "tied output")


def test_what_several_stages_have_under_one_name_is_refused() -> None:
    one, other = hybrid("M", first=True), hybrid("M", last=True)
    for model in (one, other):
        model.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="scale is on several pipeline stages"):
        StageLayers([chunk_parts(one), chunk_parts(other)])
    blocks = [chunk_parts(made(torch.nn.Module, block=LAYERS["*"]())) for _ in range(2)]
    with pytest.raises(UsageError, match="layer block is on several pipeline stages"):
        StageLayers(blocks)


def test_all_stages_refuse_what_one_of_them_cannot_number(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = made(torch.nn.Module, layer=made(TransformerLayer, one=moe(2), other=moe(2)))
    twice.config.pipeline_model_parallel_size = 2
    told = list[object]()

    def gather(into: list[object], own: object, **_: object) -> None:
        told.append(own)
        into[0] = told[0]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(
        parallel_state, "get_pipeline_model_parallel_group", lambda: SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    )
    for model in (twice, hybrid("M")):
        with pytest.raises(UsageError, match="layer has 2 MoE layers"):
            number_layers([model])


def test_a_model_on_several_stages_is_refused_before_its_layers_have_numbers() -> None:
    with pytest.raises(UsageError, match="HybridModel on several pipeline stages have no numbers"):
        trees_of([hybrid("M", first=True)])


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("mixer.in_proj.weight", True),
        ("mixer.conv1d.bias", True),
        ("mixer.conv1d_weight", True),
        ("self_attention.linear_qkv_down_proj.weight", True),
        ("self_attention.linear_qkv_down_proj.layer_norm_weight", False),
        ("mixer.A_log", False),
        ("linear_qkv.weight", False),
    ],
)
def test_what_joins_projections_of_different_sizes_is_known(
    monkeypatch: pytest.MonkeyPatch, name: str, fused: bool
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0)
    of = GlobalName(OperatorId(0, OperatorKind.NON_EXPERT), f"decoder.layers.0.{name}")
    monkeypatch.setattr(partitions, "names_of_parameters", lambda *_: {parameter: of})
    model = hybrid("M", first=True)
    model.config.gated_linear_unit = True
    assert partitions.tensor_grids([model], Topology(2, tp=2))[of.name].fused == fused


def test_a_parameter_that_each_tensor_rank_has_whole_ends_where_it_ends_and_not_where_a_share_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 32))
    of = GlobalName(OperatorId(0, OperatorKind.ROUTER), "decoder.layers.0.mlp.router.weight")
    monkeypatch.setattr(partitions, "names_of_parameters", lambda *_: {parameter: of})
    model = hybrid("M", first=True)
    model.config.gated_linear_unit = True
    assert partitions.tensor_grids([model], Topology(2, tp=2))[of.name].numel == 128


def layered(monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, **settings: object) -> torch.nn.Module:
    """A model of this layer, on the second of two tensor ranks."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model = made(torch.nn.Module, 2, one=layer)
    vars(model.config).update({"gated_linear_unit": True, **settings})
    return model


ROUTED = {"moe_mlp_glu_interleave_size": 1}
SHARED = {"moe_shared_expert_glu_interleave_size": 1}


@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("experts.linear_fc1.weight0", {}, 2),
        ("experts.linear_fc1.weight0", ROUTED, 1),
        ("experts.linear_fc1.weight0", SHARED | {"use_grouped_gemm_for_shared_expert": True}, 2),
        ("experts.local_experts.0.linear_fc1.weight", ROUTED, 2),  # only grouped experts look at it
        ("shared_experts.linear_fc1.weight", SHARED | {"use_grouped_gemm_for_shared_expert": True}, 1),
        ("shared_experts.linear_fc1.weight", SHARED, 2),
        ("shared_experts.linear_fc1.weight", ROUTED, 2),
    ],
)
def test_gates_between_values_stay_there_in_another_layout(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, object], rows: int
) -> None:
    at, _, last = name.rpartition(".")
    part = made(torch.nn.Module)
    part.register_parameter(last, torch.nn.Parameter(torch.ones(4, 2)))
    vars(getattr(part, last)).update(tensor_model_parallel=True, partition_dim=0)
    for outer in reversed(at.split(".")):
        part = made(torch.nn.Module, **{outer: part})
    layer = made(TransformerLayer, mlp=made(MoELayer, 2, **dict(part.named_children())))
    model = layered(monkeypatch, layer, **settings)
    (grid,) = partitions.tensor_grids([model], Topology(2, tp=2)).values()
    assert grid == Grid(rows, 16 // rows)


@pytest.mark.parametrize(("of_model", "of_tower"), [(True, False), (False, True)])
@pytest.mark.parametrize("place", ["mlp", "projection"])  # as core names a projector: `vision_projection.encoder`
def test_whether_a_tower_has_gates_is_said_by_its_own_configuration(
    monkeypatch: pytest.MonkeyPatch, of_model: bool, of_tower: bool, place: str
) -> None:
    layer = Linear(2, 4, bias=False)
    vars(layer.weight).update(tensor_model_parallel=True, partition_dim=0)
    own = made(MLP, linear_fc1=layer)
    own.config.gated_linear_unit = of_tower
    model = layered(monkeypatch, made(TransformerLayer, **{place: own}), gated_linear_unit=of_model)
    (grid,) = partitions.tensor_grids([model], Topology(2, tp=2)).values()
    assert grid == (Grid(2, 8) if of_tower else Grid(1, 16))


def test_learned_sinks_are_those_of_the_heads_of_a_tensor_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    core = made(torch.nn.Module)
    core.softmax_offset = torch.nn.Parameter(torch.ones(2))
    # As core leaves what has no attributes of tensor parallelism.
    vars(core.softmax_offset).update(tensor_model_parallel=False, partition_dim=-1)
    attention = made(torch.nn.Module, core_attention=core)
    model = layered(monkeypatch, made(TransformerLayer, self_attention=attention))
    with cpu_device.installed():
        adam = FP32Optimizer(torch.optim.AdamW(model.parameters()), OptimizerConfig(), lambda *_: None)
    (stepped,) = stepped_parameters([model], adam, Topology(2, tp=2))
    assert (stepped.shard.tp_rank, stepped.shard.tp_size) == (1, 2)
    assert partitions.tensor_grids([model], Topology(2, tp=2)) == {stepped.shard.of.name: Grid(1, 4)}
