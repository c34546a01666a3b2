"""Pretrain a GPT, dense or with Mixture-of-Experts layers, in Megatron-LM's training loop, protected against faults.

An entry script like Megatron-LM's `pretrain_gpt.py`: start it with torchrun, with `moe-ckpt-run` for standbys, or with
`scripts/train_cpu.sh`, which plays a job on the CPU. Flags are Megatron-LM's and `--moe-ckpt-*`. What protects training
is in `main` and `train`.
"""

import megatron.pretrain.core_import  # noqa: F401  # says what is missing or too old, before torch is imported

# isort: split

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.dist_checkpointing.moe import wait_for_rank
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import layers as core_layers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.pretrain.exit_noise import end_failed_rank
from megatron.pretrain.loop import Parts, run
from megatron.pretrain.model_options import freeze_experts, fuse_weight_gradients, with_local_norms
from megatron.pretrain.warm_up import warm_up
from megatron.training import arguments, get_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def model_provider(
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
        # A stage may have them and no other layer: they are as the last one of the model.
        like = layers if layers.layer_specs else get_gpt_decoder_layer_specs(config, engine, args.normalization)[-1]
        ahead = get_gpt_mtp_block_spec(config, like, use_transformer_engine=engine, vp_stage=vp_stage)
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
        fuse_weight_gradients(model)
    if args.freeze_experts:
        freeze_experts(model, args)
    return model


def forward_step(
    batches: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run a microbatch.

    Args:
        batches: What to read.
        model: The chunk that runs it.
        return_schedule_plan: Plan it only: core runs it together with another one's backward pass.

    Returns:
        The output, or the plan, and what makes the loss of the output.
    """
    batch: dict[str, Any] = dict.fromkeys(BATCH)
    if has_data(get_attr_wrapped_model(model, "vp_stage")):
        found = next(batches)
        batch |= {name: found[name].cuda(non_blocking=True) for name in BATCH if found.get(name) is not None}
    batch = on_this_context_rank(batch)
    options = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], batch["attention_mask"], **options)
    return output, partial(loss_func, batch["loss_mask"])


def on_this_context_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """What of each sequence this rank of context parallelism computes: a stretch from its front and one from its back.

    Cut as attention in core expects it. Core's own function takes other arguments from release to release.
    """
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def own(name: str, whole: torch.Tensor) -> torch.Tensor:
        axis = 2 if name == "attention_mask" else 1  # queries are cut, keys are not
        stretches = whole.chunk(2 * ranks, dim=axis)
        return torch.cat((stretches[rank], stretches[-1 - rank]), dim=axis)

    if ranks == 1:
        return batch
    return {name: None if whole is None else own(name, whole) for name, whole in batch.items()}


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses, number of tokens, and both as they are reported."""
    mask = loss_mask.view(-1).float()
    loss, tokens = torch.sum(output.view(-1).float() * mask), mask.sum().detach().to(torch.int)
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        machine.validate_result(loss, torch.isnan, "NaN in the loss", fatal=True)
    if args.check_for_spiky_loss:  # ten times the largest of the first ones, as in Megatron-LM
        is_spiky = partial(machine.is_unexpectedly_large, threshold=10, context="loss")
        machine.validate_result(loss, is_spiky, "spiky loss", fatal=False)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().clone().view(1), tokens.view(1)])}


def datasets_provider(samples: Any, vp_stage: int | None = None) -> Any:
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
    return BlendedMegatronDatasetBuilder(kind, samples, partial(has_data, vp_stage), config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def has_data(vp_stage: int | None) -> bool:
    """Whether a chunk reads tokens or labels."""
    return bool(is_first_or_last_pipeline_stage(vp_stage))


def main(argv: Sequence[str]) -> int:
    """Exit code, see `train`."""
    wait_for_rank(partial(warm_up, argv))  # a standby waits here until a rank is lost
    return train(argv)


def train(argv: Sequence[str], *, recover_only: bool = False) -> int:
    """Train with these flags; exit code: 0 done or left as asked, 1 failed, 2 flags or inputs that cannot work.

    recover_only: whether training ends, with a checkpoint, once it has come back to where it continues.
    """
    return run(argv, parts(), recover_only=recover_only)


def parts() -> Parts:
    """What this script gives to Megatron-LM's `pretrain`."""
    return Parts(datasets_provider, model_provider, forward_step)


def command() -> None:
    """`moe-ckpt-pretrain`, which torchrun starts with `--no-python`."""
    if code := main(sys.argv[1:]):
        end_failed_rank(code)


if __name__ == "__main__":
    command()
