"""What a process that stays forgets of the passes and of the ranks of an attempt that was interrupted."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import torch

from ..core_versions.training import drop_auxiliary_losses, forget_offloading, forget_pages


def as_in_new_process(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Let model and optimizer forget what they learned from the ranks of an attempt that was interrupted.

    Nothing is under way in the groups of gradient buckets, and none knows yet in which order gradients become ready:
    ranks that reduce gradients together have to do it in one order, and the first iteration of a new process has
    another one. What the first step asks all ranks (from 0.19 on) is asked again, and which activations are offloaded.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Theirs, chained or alone.
    """
    for group in (group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)):
        vars(group).update(
            grad_reduce_handle=None,
            param_gather_handle=None,
            param_gather_dispatched=False,
            is_first_batch=True,
            is_last_microbatch=True,
            per_param_grad_ready_counts={},
            golden_per_param_grad_ready_counts={},
        )
    for member in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        vars(member).pop("_has_grad_norm_group_cache", None)
    for chunk in chunks:
        for module in chunk.modules():
            _forget_passes(vars(module))
    forget_offloading()
    forget_pages()
    drop_auxiliary_losses()


_FUSED = {"_fused_ops", "_fused_impl", "_fused_grouped_swiglu_ops"}
_DISPATCHED = {"handle", "num_permuted_tokens", "_original_num_tokens", "_padded_num_tokens"}
_CAPACITY = "moe_expert_rank_capacity_factor"
_OF_SHARED_EXPERTS = {"cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score"}


def _forget_passes(module: dict[str, Any]) -> None:
    """Drop what passes that a lost peer ended half-way left in the attributes of a module for what follows them."""
    # Weight gradients that are computed later (`--delay-wgrad-compute`, `--defer-embedding-wgrad-compute`), first in,
    # first out: of one entry too many each later gradient would be that of an earlier microbatch.
    if getattr(module.get("wgrad_store"), "context", None) is not None:
        module["wgrad_store"].context = queue.Queue()
    for name in ("embedding_activation_buffer", "grad_output_buffer"):
        if module.get(name):
            module[name].clear()
    # The largest logits since the last step, by which `--qk-clip` scales weights.
    if "current_max_attn_logits" in module:
        module["current_max_attn_logits"] = None
    # `--moe-shared-expert-overlap` computes in steps between those of the dispatcher, and insists on their order.
    if "_overlap_state" in module:  # since core 0.18
        module["_overlap_state"] = type(module["_overlap_state"]).IDLE
    module.update(dict.fromkeys(module.keys() & _OF_SHARED_EXPERTS))
    # Operations that Transformer Engine fuses are in no list of modules, have such queues of their own, and are made
    # again in the next forward pass.
    module.update(dict.fromkeys(module.keys() & _FUSED))
    # What routers hand over to the dispatcher behind a CUDA graph: a layer that finds some does not route.
    if "cudagraph_tensor_store" in module:
        module["cudagraph_tensor_store"].clear()
    # How many tokens a flexible dispatcher has to combine: from those of before the next ones would be cut.
    if (manager := getattr(module.get("token_dispatcher"), "_comm_manager", None)) is not None:
        vars(manager).update(dict.fromkeys(vars(manager).keys() & _DISPATCHED))
        if hasattr(manager, _CAPACITY):  # core takes it away while it runs passes again
            setattr(manager, _CAPACITY, getattr(module["token_dispatcher"].config, _CAPACITY))
        if getattr(manager, "over_budget", None) is not None:
            manager.over_budget.zero_()
