"""A hybrid of Mamba, delta-net, attention and MoE layers in place of the driver's GPT, also behind a vision tower.

Layers, stack, model and their cut over stages are Megatron-Core's. On the CPU its gated delta-net runs as in
deterministic mode. Its Mamba mixer and norms need CUDA kernels: the first is a causal convolution and a gate here, and
norms are torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from stock_jobs import Shape
from world import Hook


class Mixer(torch.nn.Module):
    """Of a Mamba layer: mixes along the sequence, and has a parameter as the real one's that no matrix is."""

    def __init__(self, config: Any, d_model: int, **_: Any) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(d_model, 2 * d_model, bias=False)
        self.conv1d = torch.nn.Conv1d(d_model, d_model, 4, padding=3, groups=d_model)
        self.A_log = torch.nn.Parameter(torch.zeros(d_model))
        self.out_proj = torch.nn.Linear(d_model, d_model, bias=False)
        self.to(config.params_dtype)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Of [sequence, batch, hidden]; without a bias."""
        mixed, gate = self.in_proj(hidden).chunk(2, dim=-1)
        mixed = self.conv1d(mixed.permute(1, 2, 0))[..., : hidden.shape[0]].permute(2, 0, 1)
        return self.out_proj(mixed * self.A_log.exp() * torch.nn.functional.silu(gate)), None


def layers() -> Any:
    """The specification of each kind."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.training import get_args

    args = get_args()
    whole = get_gpt_layer_local_submodules(args.num_experts, normalization=args.normalization)

    def part(*names: str) -> ModuleSpec:
        submodules = TransformerLayerSubmodules(**{name: getattr(whole, name) for name in names})
        return ModuleSpec(TransformerLayer, submodules=submodules)

    parts_of_net = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    delta = part("input_layernorm", "self_attn_bda")
    delta.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts_of_net)
    mamba = MambaLayerSubmodules(norm=Norm, mixer=ModuleSpec(Mixer), mamba_bda=get_bias_dropout_add)
    ahead = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, layer_norm=Norm
    )
    of_block = mtp.MultiTokenPredictionBlockSubmodules([ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=ahead)])
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        gdn_layer=delta,
        attention_layer=part("input_layernorm", "self_attention", "self_attn_bda"),
        moe_layer=part("pre_mlp_layernorm", "mlp", "mlp_bda"),
        mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=of_block),
    )


def build(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **options: Any) -> Any:
    """The part of the model that this chunk of a stage has."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training import arguments, get_args

    args = get_args()
    config = options.get("config") or arguments.core_transformer_config_from_args(args)
    config.gradient_accumulation_fusion, config.deterministic_mode = False, "G" in args.hybrid_layer_pattern
    return HybridModel(
        config,
        ModuleSpec(HybridStack, submodules=layers()),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=options.get("pg_collection"),
        vp_stage=vp_stage,
    )


def build_seeing(**options: Any) -> Any:
    """It with a vision tower, where the first stage is; what is seen is made of the tokens."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import build_module

    class Tower(torch.nn.Module):
        def __init__(self, config: Any, groups: Any) -> None:
            super().__init__()
            self.patch_embed = torch.nn.Embedding(128, config.hidden_size)
            blocks = [
                build_module(layers().attention_layer, config=config, layer_number=number + 1, pg_collection=groups)
                for number in range(2)
            ]
            self.blocks = torch.nn.ModuleList(blocks)
            self.merger = torch.nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen = self.patch_embed(tokens).transpose(0, 1)
            for block in self.blocks:
                seen, _ = block(seen, attention_mask=mask)
            return self.merger(seen)

    class Seeing(MegatronModule):
        def __init__(self) -> None:
            language = build(**options)
            super().__init__(language.config)
            self.pre_process, self.post_process = language.pre_process, language.post_process
            self.share_embeddings_and_output_weights, self.vp_stage = False, language.vp_stage
            if self.pre_process:
                groups = options.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
                self.vision_model = Tower(language.config, groups)
            self.language_model, self.pg_collection = language, language.pg_collection
            self.set_input_tensor = language.set_input_tensor
            self.shared_embedding_or_output_weight = language.shared_embedding_or_output_weight

        def forward(self, tokens: Any, positions: Any, mask: Any, **labels: Any) -> torch.Tensor:
            joined = None
            if self.pre_process:
                joined = self.language_model.embedding(tokens, positions) + self.vision_model(tokens, mask)
            return self.language_model(tokens, positions, mask, joined, **labels)

    return Seeing()


@contextlib.contextmanager
def hybrid(*, sees: bool = False) -> Iterator[None]:
    """Train it in place of the driver's model."""
    import pretrain_gpt_moe
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    normalized = partial(torch.nn.functional.normalize, dim=-1)  # as the package does that is said to be there
    with (
        mock.patch.multiple(common, HAVE_FLA=True, l2norm=normalized),
        mock.patch.object(pretrain_gpt_moe, "model_provider", build_seeing if sees else build),
        mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm),
    ):
        yield


seeing = partial(hybrid, sees=True)


def hybrid_shape(pattern: str, ranks: int = 2, ep: int = 1, more: tuple[str, ...] = (), hook: Hook = hybrid) -> Shape:
    """A job of two stages.

    Args:
        pattern: Of its layers, as Megatron-LM takes it.
        ranks: Processes.
        ep: Expert-parallel ranks.
        more: Flags.
        hook: Puts the model in place of the driver's.
    """
    return Shape(ranks, 2, ep, more=("--hybrid-layer-pattern", pattern, *more), hooks=(hook,))
