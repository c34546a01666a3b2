"""A user's entry script for Megatron-Core 0.19, protected by the three lines that say `stock`."""

from functools import partial

import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.dist_checkpointing.moe import stock
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def loss_func(loss_mask, output):
    mask = loss_mask.view(-1).float()
    loss, tokens = torch.sum(output.view(-1).float() * mask), mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(loss, torch.isnan, "NaN in the loss", fatal=True)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().clone().view(1), tokens.view(1)])}


def forward_step(batches, model):
    batch = dict.fromkeys(BATCH)
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        batch |= {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items() if name in BATCH}
    loss_mask = batch.pop("loss_mask")
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, loss_mask)


def datasets_provider(samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    has_data = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, has_data, config).build()


datasets_provider.is_distributed = True

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=stock.arguments)
    pretrain = stock.protected(pretrain)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
