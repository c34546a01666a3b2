"""The training state of real parallel layouts, mapped to operators: complete, unambiguous, and enough to restore."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
from effort import cases
from operator_hooks import examined
from runs import Layout, flags
from world import World

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorKind

BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
SHARED = "--moe-shared-expert-intermediate-size 64"
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
GLOBAL = "--moe-router-load-balancing-type global_aux_loss"
LEARNED = (
    "--position-embedding-type learned_absolute --normalization LayerNorm --add-qkv-bias --moe-layer-freq ([0]*1+[1]*1)"
)

SIXTEEN_BITS = {"--bf16": "torch.bfloat16", "--fp16": "torch.float16"}


@dataclass(frozen=True)
class Run:
    """One job: its layout, its flags besides the common ones, and which parameters are not trained."""

    layout: Layout
    text: str
    distributed: bool = True
    frozen: str = ""


RUNS = {
    "fp32, distributed, tied, shared experts": Run(Layout(), f"{SHARED} --qk-layernorm"),
    "bf16, distributed, tied, virtual stages, overlap": Run(Layout(vpp=2), f"--bf16 {BIAS} {OVERLAP}"),
    "bf16, distributed, tensor parallel, overlap": Run(Layout(tp=2, pp=1), f"--bf16 {SHARED} {BIAS} {OVERLAP}"),
    "fp32, distributed, four-way experts": Run(Layout(pp=1, ep=4), f"{UNTIED} {GLOBAL}"),
    "bf16, distributed, experts whole on tensor ranks, some frozen": Run(
        Layout(tp=2, pp=1), f"--bf16 {UNTIED} --expert-tensor-parallel-size 1", frozen="linear_proj"
    ),
    "bf16, distributed, tensor and pipeline parallel": Run(Layout(tp=2, ep=1), f"--bf16 {BIAS}"),
    "bf16, plain, virtual stages": Run(Layout(vpp=2), f"--bf16 {SHARED}", distributed=False),
    "fp16, plain, four-way experts": Run(Layout(pp=1, ep=4), f"--fp16 {UNTIED} {BIAS}", distributed=False),
    "fp32, plain, tensor parallel, a dense layer": Run(Layout(tp=2, pp=1), LEARNED, distributed=False),
}
SAMPLE = {
    "fp32, distributed, tied, shared experts",
    "bf16, distributed, tied, virtual stages, overlap",
    "bf16, distributed, experts whole on tensor ranks, some frozen",
    "fp16, plain, four-way experts",
    "fp32, plain, tensor parallel, a dense layer",
}
"""Each precision, optimizer, kind of parallelism and of layer; the others combine them in further ways."""
FAST = ("bf16, distributed, experts whole on tensor ranks, some frozen",)
CASES = cases(RUNS, fast=FAST, full=RUNS.keys() - SAMPLE)


@dataclass
class Examination:
    """What all ranks of one run wrote down."""

    run: Run
    ranks: list[dict[str, Any]]

    @property
    def compute_dtype(self) -> str | None:
        """Of compute weights apart from the master weights; None where they are the same."""
        return next((dtype for flag, dtype in SIXTEEN_BITS.items() if flag in self.run.text), None)

    @cached_property
    def by_key(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Tensors by key and rank."""
        found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        for rank, facts in enumerate(self.ranks):
            for tensor in facts["tensors"]:
                found[tensor["key"]][rank] = tensor
        return found

    @cached_property
    def distinct(self) -> list[dict[str, Any]]:
        """One tensor of each key: what has to be stored."""
        return [next(iter(tensors.values())) for tensors in self.by_key.values()]

    def fields_of(self, rank: int) -> set[str]:
        return {left_out(tensor) for tensor in self.ranks[rank]["tensors"]}

    def shape(self) -> ModelShape:
        """The model in the words of the planning part, which counts parameters on its own."""
        run, learned = self.run, self.run.text == LEARNED
        return ModelShape(
            name="examined",
            num_layers=max(2, run.layout.pp * (run.layout.vpp or 1)),
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=self.ranks[0]["vocab"],
            ffn_hidden_size=64,
            num_experts=4,
            moe_ffn_hidden_size=32,
            moe_layer_freq=(0, 1) if learned else 1,
            moe_shared_expert_intermediate_size=64 if SHARED in run.text else 0,
            gated_linear_unit=True,
            max_position_embeddings=32 if learned else 0,
            untie_embeddings_and_output_weights=UNTIED in run.text,
            add_qkv_bias=learned,
            qk_layernorm="--qk-layernorm" in run.text,
            normalization="LayerNorm" if learned else "RMSNorm",
        )


def left_out(tensor: dict[str, Any]) -> str:
    """The kind of a tensor, as `operator_hooks.kind` has it."""
    return tensor["name"].rpartition(".")[2] if tensor["field"] == "buffer" else tensor["field"]


def operator_of(tensor: dict[str, Any]) -> OperatorId:
    layer, kind, expert = tensor["operator"]
    return OperatorId(layer, OperatorKind(kind), expert)


@pytest.fixture(scope="module", params=CASES)
def seen(
    request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Examination:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("examined")
    argv = flags(corpus, run.layout, *run.text.split(), distributed=run.distributed)
    outcome = world.run(argv, run.layout.ranks, [partial(examined, str(folder), run.frozen)])
    assert set(outcome.codes) == {0}, outcome.said
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(run.layout.ranks)]
    return Examination(run, ranks)


def test_every_byte_of_training_state_belongs_to_one_operator(seen: Examination) -> None:
    assert [facts["verdicts"]["as it is"] for facts in seen.ranks] == [""] * len(seen.ranks)


def test_tables_that_an_optimizer_keeps_beside_its_state_are_no_state(seen: Examination) -> None:
    assert [facts["verdicts"]["tables of the inner optimizer"] for facts in seen.ranks] == [""] * len(seen.ranks)


def test_whatever_is_left_out_or_added_is_noticed_and_named(seen: Examination) -> None:
    for rank, facts in enumerate(seen.ranks):
        verdicts = facts["verdicts"]
        for field in seen.fields_of(rank):
            said = verdicts[f"without {field}"]
            named = {"compute": "compute weights of ", "master": " weights of "}.get(field, field)
            assert named in said
            assert "belongs to no operator" in said
        for operator in {operator_of(tensor) for tensor in facts["tensors"]}:
            assert "belongs to no operator" in verdicts[f"without {operator}"]
        assert "covered twice" in verdicts["one tensor twice"]
        assert "of its" in verdicts["one element short"]
        assert "exp_avg of " in verdicts["a copy instead of a view"]
        assert "new_moment of " in verdicts["a new kind of moment"]
        assert "averages[0], 3 elements" in verdicts["averages in the optimizer"]
        assert "router.history" in verdicts["a new buffer"]
        assert "router.gain" in verdicts["a new parameter"]


def test_what_cannot_be_protected_is_refused_with_the_reason(seen: Examination) -> None:
    for facts in seen.ranks:
        assert "UnknownOptimizer" in facts["refusals"]["UnknownOptimizer"]
        assert "no state for" in facts["refusals"]["no state"]


def test_views_taken_before_training_show_the_state_after_it(seen: Examination) -> None:
    assert all(facts["views_from_before_training_are_live"] for facts in seen.ranks)


def test_a_poisoned_state_restored_from_copies_is_the_old_one_to_the_last_bit(seen: Examination) -> None:
    for facts in seen.ranks:
        assert facts["differences"]["trained on"]
        assert facts["differences"]["nothing"]
        assert facts["differences"]["everything"] == []


def test_compute_weights_come_back_from_the_master_weights(seen: Examination) -> None:
    assert [facts["differences"]["full parts, recast"] for facts in seen.ranks] == [[]] * len(seen.ranks)


def test_no_kind_of_tensor_can_be_left_out_of_a_restore(seen: Examination) -> None:
    for rank, facts in enumerate(seen.ranks):
        spoilt = {field for field in seen.fields_of(rank) if facts["differences"][f"without {field}"]}
        assert spoilt == seen.fields_of(rank)


def test_shards_of_other_ranks_arrive_only_with_the_gather(seen: Examination) -> None:
    run, ranks = seen.run, len(seen.ranks)
    has_shards = run.distributed and ranks > run.layout.tp * run.layout.pp
    assert [bool(facts["differences"]["not gathered"]) for facts in seen.ranks] == [has_shards] * ranks


def test_no_two_tensors_of_a_rank_have_the_same_key(seen: Examination) -> None:
    for facts in seen.ranks:
        keys = [tensor["key"] for tensor in facts["tensors"]]
        assert len(keys) == len(set(keys))


def test_each_tensor_names_all_ranks_that_hold_the_same_bytes(seen: Examination) -> None:
    for key, tensors in seen.by_key.items():
        assert {tuple(tensor["holders"]) for tensor in tensors.values()} == {tuple(tensors)}, key
        assert len({(tensor["hash"], tensor["nbytes"]) for tensor in tensors.values()}) == 1, key


def test_the_shards_of_all_ranks_tile_every_parameter(seen: Examination) -> None:
    tiles: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for tensor in seen.distinct:
        if tensor["field"] not in ("step", "buffer"):
            parameter = tensor["name"], tensor["field"]
            tiles[parameter].append((tensor["tp"][0], *tensor["range"]))
            sizes[parameter].add((tensor["numel"], tensor["tp"][1]))
            assert tensor["elements"] == tensor["range"][1] - tensor["range"][0]
    for parameter, shards in tiles.items():
        ((numel, partitions),) = sizes[parameter]
        for partition in range(partitions):
            ends = [0, *(end for rank, _, end in sorted(shards) if rank == partition)]
            starts = [*(start for rank, start, _ in sorted(shards) if rank == partition), numel]
            assert starts == ends, parameter


def test_operators_have_as_many_parameters_as_the_planner_counts(seen: Examination) -> None:
    counted: dict[tuple[OperatorId, str], int] = defaultdict(int)
    for tensor in seen.distinct:
        counted[operator_of(tensor), tensor["field"]] += tensor["elements"]
    for operator, parameters in seen.shape().parameters.items():
        assert counted[operator, "master"] == parameters, str(operator)
        if not seen.run.frozen:
            assert counted[operator, "exp_avg"] == counted[operator, "exp_avg_sq"] == parameters, str(operator)
            assert counted[operator, "compute"] == (parameters if seen.compute_dtype else 0), str(operator)


def test_parts_and_precisions_are_those_of_the_optimizer(seen: Examination) -> None:
    parts = {"compute": "COMPUTE", "master": "MASTER", "buffer": "MASTER"}
    for tensor in seen.distinct:
        field, frozen = tensor["field"], seen.run.frozen and seen.run.frozen in tensor["name"]
        assert tensor["part"] == parts.get(field, "MOMENTS")
        is_master_alone = field == "master" and (frozen or seen.compute_dtype is None)
        assert tensor["in_forward"] == (field in ("compute", "buffer") or is_master_alone)
        if field != "buffer":
            low = field == "compute" or frozen
            assert tensor["dtype"] == (seen.compute_dtype if low else "torch.float32")


def test_frozen_parameters_have_weights_and_nothing_else(seen: Examination) -> None:
    frozen = [tensor for tensor in seen.distinct if seen.run.frozen and seen.run.frozen in tensor["name"]]
    assert {tensor["field"] for tensor in frozen} == ({"master"} if seen.run.frozen else set())


def test_tied_word_embeddings_are_held_by_the_first_and_the_last_stage(seen: Examination) -> None:
    stages = {
        rank // (len(seen.ranks) // seen.run.layout.pp)
        for tensor in seen.distinct
        if tensor["name"] == "embedding.word_embeddings.weight"
        for rank in tensor["holders"]
    }
    assert stages == ({0} if UNTIED in seen.run.text else {0, seen.run.layout.pp - 1})
