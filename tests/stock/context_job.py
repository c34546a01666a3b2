"""One of two ranks that compute a sequence together, in float64, after each has computed all of it alone.

Ends with an error where logits or gradients of the two differ by more than sums in another order do.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before anything of Megatron-Core

from context_hooks import gathered_context

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.initialize import shut_down
from pretrain_gpt_moe import on_this_context_rank

TOKENS, VOCABULARY = 32, 64
BOUND = 1e-13
"""Of the largest value of a tensor. The last digit of a float64 is 2e-16 of it; of a float32, 1e-7."""


def model(context_parallel: int) -> GPTModel:
    """With the same weights each time."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_ffn_hidden_size=32,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, moe_router_topk=2,
        moe_aux_loss_coeff=1e-2, moe_router_load_balancing_type="aux_loss", moe_token_dispatcher_type="alltoall",
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=torch.float64, pipeline_dtype=torch.float64,
        moe_router_dtype="fp64", context_parallel_size=context_parallel, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    with gathered_context() if context_parallel > 1 else contextlib.nullcontext():
        layers = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
        return GPTModel(config, layers, VOCABULARY, TOKENS, position_embedding_type="rope").double()


def computed(context_parallel: int) -> dict[str, torch.Tensor]:
    """What this rank has of the logits, and the gradient of each weight by the whole sequence."""
    one = model(context_parallel)
    generator = torch.Generator().manual_seed(7)
    batch: dict[str, Any] = on_this_context_rank({
        "tokens": torch.randint(VOCABULARY, (1, TOKENS), generator=generator),
        "position_ids": torch.arange(TOKENS)[None],
        "attention_mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1),
        "weights": torch.rand(1, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64),
    })  # fmt: skip
    logits = one(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    # Core's schedule scales so, and its data-parallel wrapper averages.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(float(context_parallel)))
    (batch["weights"] * logits).mean().backward()
    gradients = {name: weight.grad for name, weight in one.named_parameters()}
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
        gradient /= torch.distributed.get_world_size()
    return {"logits": logits.detach(), **gradients}


def main() -> None:
    torch.distributed.init_process_group("gloo")
    try:
        alone, together = computed(1), computed(2)
        alone["logits"] = on_this_context_rank({"logits": alone["logits"]})["logits"]
        for name, expected in alone.items():
            apart = float((together[name] - expected).abs().max() / expected.abs().max())
            assert apart < BOUND, f"{name}: {apart} apart on rank {os.environ['RANK']}"
    finally:
        shut_down()


if __name__ == "__main__":
    main()
