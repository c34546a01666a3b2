"""Optimizers whose state is not enumerated are refused by name, before anything is trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_flags import judged, model_of

import pretrain_gpt_moe
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.moe import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.manager import unfit_graphs
from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import unsupported_optimizers
from megatron.core.dist_checkpointing.moe.megatron_state.partitions import draws_in, random_draws
from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState, NoLoopState
from megatron.core.dist_checkpointing.moe.replay.execution import unfreezable_settings
from megatron.core.dist_checkpointing.moe.runtime.live_state import LiveState, Training
from megatron.core.dist_checkpointing.moe.stock import flags
from megatron.core.dist_checkpointing.moe.stock.flags import refusals
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.utils import unwrap_model
from megatron.pretrain.testing import cpu_device


def layer_with(**attributes: Any) -> torch.nn.Module:
    """A layer without parameters."""
    layer = torch.nn.Module()
    vars(layer).update(attributes)
    return layer


MODEL = (
    "--device cpu --transformer-impl local --no-rope-fusion --no-persist-layer-norm --distributed-backend gloo "
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --num-experts 2 --moe-ffn-hidden-size 8 "
    "--disable-bias-linear --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 "
    "--mock-data"
)


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with cpu_device.installed():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class Lion(torch.optim.SGD):
    """In place of the one that a package beside core has: it too keeps one momentum, and no second moment."""


def offloaded(parameters: list[torch.nn.Parameter]) -> Any:
    adam = HybridDeviceOptimizer(
        parameters, offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW, gpu_optimizer_cls=torch.optim.AdamW,
        pin_cpu_grads=False, pin_cpu_params=False, overlap_cpu_optimizer_d2h_h2d=False, lr=0.1,
    )  # fmt: skip
    return wrapped(adam)


def wrapped(optimizer: torch.optim.Optimizer) -> Any:
    return FP32Optimizer(optimizer, OptimizerConfig(optimizer="adam"), lambda *_: None)


def layer_wise(parameters: list[torch.nn.Parameter]) -> Any:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    inside = LayerWiseDistributedOptimizer([wrapped(Lion(parameters[:1], momentum=0.9))], OptimizerConfig(), groups)
    return ChainedOptimizer([inside, wrapped(torch.optim.AdamW(parameters[1:]))])


def lion_and_adam(parameters: list[torch.nn.Parameter]) -> Any:
    first, *others = parameters
    return ChainedOptimizer([wrapped(Lion([first], momentum=0.9)), wrapped(torch.optim.AdamW(others))])


def built(args: Namespace) -> list[torch.nn.Module]:
    """The model of these flags, as Megatron-LM has it from the driver."""
    args.padded_vocab_size, config = 16, model_of(args)
    with mock.patch.object(pretrain_gpt_moe, "get_args", return_value=args):
        return [DistributedDataParallel(config, DistributedDataParallelConfig(), pretrain_gpt_moe.model_provider())]


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (offloaded, "an optimizer on the host without --use-precision-aware-optimizer"),
        (layer_wise, "the optimizer Lion"),
        (lion_and_adam, "the optimizer Lion"),
    ],
)
def test_their_state_is_refused_by_the_name_of_the_optimizer(
    build: Callable[[list[torch.nn.Parameter]], Any], name: str
) -> None:
    chunks = built(judged(MODEL.split(), 1))
    optimizer = build(list(chunks[0].parameters()))
    with pytest.raises(UsageError, match=f"cannot be protected with {name}: use --moe-ckpt-strategy"):
        list(state_tensors(chunks, optimizer, read_topology(8)))


def test_weights_that_are_clipped_apart_from_their_masters_are_refused_in_a_loop_of_ones_own() -> None:
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    adam = torch.optim.AdamW(chunk.parameters())
    adam.step()
    config = unwrap_model(chunk).config
    config.qk_clip = True
    for parameter in chunk.parameters():
        adam.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
    assert state_tensors(chunks, wrapped(adam), read_topology(8))
    config.bf16 = True
    with pytest.raises(UsageError, match="cannot be protected with qk_clip of weights that have masters: use"):
        state_tensors(chunks, wrapped(adam), read_topology(8))


@pytest.mark.parametrize("size", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_ranks_share_out_are_refused_in_a_loop_of_ones_own(size: str) -> None:
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    setattr(unwrap_model(chunk).config, size, 2)
    with pytest.raises(UsageError, match="cannot be protected with weights that ranks share out and gather"):
        state_tensors(chunks, wrapped(torch.optim.AdamW(chunk.parameters())), read_topology(8))


def test_a_bias_that_routers_draw_once_and_keep_is_refused_in_a_loop_of_ones_own() -> None:
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    unwrap_model(chunk).config.moe_router_force_biased = -0.1
    with pytest.raises(UsageError, match="cannot be protected with moe_router_force_biased below 0: use"):
        state_tensors(chunks, wrapped(torch.optim.AdamW(chunk.parameters())), read_topology(8))


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"fp8_quantization_recipe": "custom", "custom_recipe_factory": "own.recipe"}, "quantizers of its own"),
        ({"fp8_quantization_recipe": "blockwise", "fp8_param": True}, "weights that modules quantize by a recipe of"),
        ({"fp8_quantization_recipe": "mxfp8"}, "delayed scaling with recipes of modules"),
    ],
)
def test_recipes_of_modules_whose_state_is_not_known_are_refused(recipe: dict[str, Any], named: str) -> None:
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    config = unwrap_model(chunk).config
    config.fp8, config.fp8_recipe = "hybrid", "delayed" if "delayed" in named else "mxfp8"
    config.quant_recipe = RecipeConfig([], {"experts": {"training_recipe": recipe, "evaluation_recipe": None}})
    with pytest.raises(UsageError, match=f"cannot be protected with {named}"):
        state_tensors(chunks, wrapped(torch.optim.AdamW(chunk.parameters())), read_topology(8))


@pytest.mark.parametrize("whole", [True, False])
def test_products_in_four_bits_draw_numbers_in_the_whole_model_or_in_some_modules(whole: bool) -> None:
    config = unwrap_model(built(judged(MODEL.split(), 1))[0]).config
    config.hidden_dropout = config.attention_dropout = 0.0
    assert (random_draws(config), "products in four bits" in unfreezable_settings(config)) == ("", False)
    if whole:
        config.fp4 = "e2m1"
    else:
        four = {"training_recipe": {"fp4_quantization_recipe": "nvfp4"}}
        config.quant_recipe = RecipeConfig([], {"experts": four, "router": {"training_recipe": {}}})
    assert random_draws(config) == "products in four bits"
    assert "products in four bits" in unfreezable_settings(config)
    for impl, refused in (("local", True), ("transformer_engine", False)):
        config.cuda_graph_impl = impl
        found = " ".join(unfit_graphs(MoECheckpointConfig(strategy="full"), config))
        assert ("products in four bits" in found) == refused


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (torch.nn.Dropout(0.25), "dropout 0.25"),
        (layer_with(config=Namespace(hidden_dropout=0.1)), "hidden_dropout 0.1"),
        (layer_with(pos_dropout=0.5), "pos_dropout 0.5"),
        (layer_with(has_cpe=True, force_cpe_eval_mode=False), "has_cpe True"),
        (layer_with(has_cpe=True, force_cpe_eval_mode=True, dither=0.0), ""),
    ],
)
def test_a_tower_with_a_configuration_of_its_own_may_draw_where_the_language_model_does_not(
    part: torch.nn.Module, named: str
) -> None:
    (chunk,) = chunks = built(judged([*MODEL.split(), *"--hidden-dropout 0 --attention-dropout 0".split()], 1))
    assert not draws_in(chunks)
    unwrap_model(chunk).add_module("tower", part)
    assert draws_in(chunks) == named


def test_products_in_which_transformer_engine_reduces_something_else_are_not_left_out() -> None:
    config = unwrap_model(built(judged(MODEL.split(), 1))[0]).config
    config.tp_comm_overlap = True
    assert "gradients that Transformer Engine reduces within others" in unfreezable_settings(config)
    config.tp_comm_bulk_wgrad = False
    assert list(unfreezable_settings(config)) == []


def test_scales_of_operations_that_transformer_engine_fuses_are_refused_and_so_are_frozen_ones() -> None:
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    config = unwrap_model(chunk).config
    config.use_transformer_engine_op_fuser = True
    assert "operations that Transformer Engine fuses" in unfreezable_settings(config)
    config.use_transformer_engine_op_fuser, config.use_grouped_gemm_for_shared_expert = False, True
    assert "operations that Transformer Engine fuses" in unfreezable_settings(config)
    config.use_transformer_engine_op_fuser = True
    config.fp8, config.fp8_recipe = "hybrid", "delayed"
    with pytest.raises(UsageError, match="with operations that Transformer Engine fuses with delayed scaling: use"):
        state_tensors(chunks, wrapped(torch.optim.AdamW(chunk.parameters())), read_topology(8))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ({"optimizer": "lion"}, "--optimizer lion does not go with --moe-ckpt-strategy full"),
        ({"optimizer": "sgd"}, "--optimizer sgd does not go with"),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
            "--optimizer-offload-fraction 0.5 does not go with",
        ),
    ],
)
def test_flags_of_megatron_lm_that_build_them_are_refused_before_that(flag: dict[str, Any], said: str) -> None:
    config = MoECheckpointConfig(strategy="full")
    (line,) = refusals(config, Namespace(**flag))
    assert line.startswith(said)
    assert list(refusals(config, Namespace(optimizer="adam", optimizer_cpu_offload=False))) == []


def test_an_optimizer_on_the_host_is_refused_where_iterations_run_again() -> None:
    flags_given = Namespace(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert list(refusals(MoECheckpointConfig(strategy="full"), flags_given)) == []
    (line,) = refusals(MoECheckpointConfig(strategy="sparse"), flags_given)
    assert line.startswith("--optimizer-cpu-offload does not go with --moe-ckpt-strategy sparse: ")


def test_an_adam_on_the_device_beside_one_on_the_host_is_refused() -> None:
    class FusedAdam(torch.optim.SGD):
        """As Transformer Engine's, which counts steps in its groups."""

    member = offloaded([torch.nn.Parameter(torch.ones(2))])
    member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    member.buffers = []
    assert list(unsupported_optimizers(member, Namespace())) == []
    member.optimizer.gpu_optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))])
    (reason,) = unsupported_optimizers(member, Namespace())
    assert reason == "the optimizer FusedAdam beside one on the host (use --optimizer-offload-fraction 1.0)"


@pytest.mark.parametrize(
    ("tp_only", "held", "quantized"),
    [(True, True, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_largest_values_that_stay_apart_are_refused_where_the_optimizer_casts_eight_bit_weights(
    tp_only: bool, held: bool, quantized: bool
) -> None:
    """Each data-parallel rank would scale the part that it steps by the largest value of that part."""
    weights = torch.nn.Parameter(torch.ones(2))
    if quantized:
        vars(weights).update(_data=weights.data, _scale_inv=torch.ones(1))
    member = wrapped(torch.optim.AdamW([weights]))
    member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = held
    member.buffers = [Namespace(params=[weights])]
    refused = ["tp_only_amax_red and eight-bit weights whose masters FusedAdam keeps"]
    found = list(unsupported_optimizers(member, Namespace(tp_only_amax_red=tp_only)))
    assert found == refused * (tp_only and held and quantized)


@pytest.mark.parametrize(
    ("strategy", "is_there", "said"),
    [
        ("full", True, ""),
        ("pec", True, ""),
        ("sparse", True, ""),
        (
            "full",
            False,
            "--optimizer muon does not go with --moe-ckpt-strategy full: a package is missing: pip install ",
        ),
    ],
)
def test_muon_is_taken_where_its_package_is_there(strategy: str, is_there: bool, said: str) -> None:
    with mock.patch.object(flags, "find_spec", return_value=object() if is_there else None):
        found = list(refusals(MoECheckpointConfig(strategy=strategy), Namespace(optimizer="muon")))
    assert len(found) == bool(said)
    assert all(line.startswith(said) for line in found)


def test_where_all_copies_were_damaged_tables_are_again_what_a_constructor_made_of_them() -> None:
    """No checkpoint that is loaded instead has them."""
    (chunk,) = chunks = built(judged(MODEL.split(), 1))
    layer = unwrap_model(chunk).decoder.layers[0]
    layer.self_attention.register_buffer("angles", torch.arange(3.0), persistent=False)
    layer.mlp.router.register_buffer("counted", torch.arange(3.0), persistent=False)
    optimizer = wrapped(torch.optim.AdamW(chunk.parameters()))
    trainer = LiveTrainerState(optimizer, None, NoLoopState(), chunks)
    state = LiveState(Training(chunks, optimizer, trainer, 1, 1), read_topology(1), 0)
    state.restorer.poison()
    assert layer.self_attention.angles.isnan().all()
    state.clear_counters()
    assert layer.self_attention.angles.tolist() == [0, 1, 2]
    assert layer.mlp.router.counted.tolist() == [0, 0, 0]
