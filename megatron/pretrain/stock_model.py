"""What an entry script gives to the loop of Megatron-LM: model, data, the forward step and its loss.

For every release that has the loop. Import it once the device is chosen: Megatron-LM looks at it while it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import layers as core_layers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.model import with_local_norms
from megatron.training import arguments, get_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The part of the model that this chunk of a stage has, as the flags say."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    # Of Megatron-Core's own layers, which fail without the kernel of Apex.
    config.gradient_accumulation_fusion &= core_layers._grad_accum_fusion_available
    engine = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(config, engine, normalization=args.normalization, vp_stage=vp_stage)
    if config.sequence_parallel and not engine:
        layers = with_local_norms(layers)
    ahead = None
    if config.mtp_num_layers:
        ahead = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=vp_stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=ahead,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    if args.gradient_accumulation_fusion:
        _fuse_weight_gradients(model)
    if getattr(args, "freeze_experts", False):
        _freeze_experts(model, args)
    return model


def _fuse_weight_gradients(model: GPTModel) -> None:
    """Let the layers of Transformer Engine add to the gradient buffers themselves, for which they need no Apex."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _freeze_experts(model: GPTModel, args: Any) -> None:
    """Before gradients and the optimizer's state are laid out, which is done for what is trained.

    Raises InvalidInput for a model without experts.
    """
    pattern = args.moe_layer_freq
    if not args.num_experts or (isinstance(pattern, list) and not any(pattern)):
        raise InvalidInput(
            "--freeze-experts needs --num-experts and a layer that has them: a dense model has no experts"
        )
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.experts.requires_grad_(False)


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """Run a microbatch; the output, and what makes its loss."""
    batch: dict[str, Any] = dict.fromkeys(_BATCH)
    if _has_data(get_attr_wrapped_model(model, "vp_stage")):
        found = next(batches)
        batch |= {name: found[name].cuda(non_blocking=True) for name in _BATCH if found.get(name) is not None}
    options = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], **options)
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses, number of tokens, and both as they are reported."""
    mask = loss_mask.view(-1).float()
    loss, tokens = torch.sum(output.view(-1).float() * mask), mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(loss, torch.isnan, "NaN in the loss", fatal=True)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().clone().view(1), tokens.view(1)])}


def build_datasets(samples: Any, vp_stage: int | None = None) -> Any:
    """Train, validation and test data, on each rank that reads any."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    # Ranks of tensor parallelism read the same, each for itself: no release broadcasts it as the one before.
    return BlendedMegatronDatasetBuilder(kind, samples, partial(_has_data, vp_stage), config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]


def _has_data(vp_stage: int | None) -> bool:
    return bool(is_first_or_last_pipeline_stage(vp_stage))
