"""Which operator a parameter belongs to in a tree of modules that is no plain GPT."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import ModuleTree, tree_of
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, expert
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

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


def test_what_has_no_layers_of_one_kind_or_several_stages_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="different numbers of experts"):
        tree_of([staged(4, 8)])
    with pytest.raises(UsageError, match="no transformer layer"):
        tree_of([made(torch.nn.Module, stem=Linear(2, 2))])
    model = staged()
    model.config.pipeline_model_parallel_size = 2
    with pytest.raises(UsageError, match="--pipeline-model-parallel-size 1"):
        tree_of([model])
    with pytest.raises(UsageError, match="all experts in one tensor"):
        ModuleTree(staged()).locate("one.1.mlp.experts.weight1", 0)
