"""The flags of checkpoints with some of the experts, and with which of Megatron-LM's flags they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...config import flag
from ...policy.partial import BOTH, OPTIMIZER, PEC_SCOPES, SELECTIONS


@dataclass(frozen=True)
class ExpertSaveFlags:
    """`--save-experts` and what goes with it."""

    save_experts: int | None = flag(
        None,
        "experts per MoE layer in each checkpoint; the others stay in older ones (default: all)",
        metavar="K",
        minimum=1,
    )
    save_experts_selection: str = flag(
        SELECTIONS[0],
        "with --save-experts: experts round-robin, or the experts with the most tokens since they were last saved",
        choices=SELECTIONS,
    )
    save_experts_scope: str = flag(
        BOTH.name,
        "with --save-experts: state omitted for the other experts: their weights, of all precisions; the moments of "
        "the optimizer; or both",
        choices=tuple(PEC_SCOPES),
    )


_DEFAULTS = ExpertSaveFlags()


def unfit_expert_saves(args: Any, strategy: str) -> Iterator[str]:
    """A sentence for each reason why the experts of this job cannot be saved in part.

    Args:
        args: Of Megatron-LM, with `ExpertSaveFlags` among them.
        strategy: The value of `--moe-ckpt-strategy`.
    """
    if getattr(args, "save_experts", None) is not None:
        yield from _unfit_experts(args, strategy)
        return
    for name in ("save_experts_selection", "save_experts_scope"):
        value = getattr(args, name, None)
        if value not in (None, getattr(_DEFAULTS, name)):
            yield f"--{name.replace('_', '-')} {value} needs --save-experts"


def _unfit_experts(args: Any, strategy: str) -> Iterator[str]:
    """The same of a job with `--save-experts`."""
    k = args.save_experts
    told = f"--save-experts {k}"
    if strategy == "none":
        yield f"{told} needs a --moe-ckpt-strategy, under which checkpoints are published whole and verified"
    if not args.save:
        yield f"{told} needs --save"
    if k < 1:
        yield f"{told} must be at least 1"
    if not args.num_experts:
        yield f"{told} needs --num-experts"
    elif isinstance(args.moe_layer_freq, list) and not any(args.moe_layer_freq):
        yield f"{told}: --moe-layer-freq {args.moe_layer_freq} has no layer with experts"
    elif k > args.num_experts:
        yield f"{told} must be at most --num-experts {args.num_experts}"
    if args.ckpt_format != "torch_dist":
        yield f"{told} needs --ckpt-format torch_dist, not {args.ckpt_format}"
    if (cause := _low_precision(args)) and not args.dist_ckpt_optim_fully_reshardable:
        yield (
            f"--save-experts {k} does not go with {cause}: such state comes back to the bit only if it is saved as it"
            " is, with all experts; leave one of the two out"
        )
    elif args.use_distributed_optimizer and not args.no_save_optim and not args.dist_ckpt_optim_fully_reshardable:
        yield (
            f"{told}: the distributed optimizer is saved in buckets that many parameters share, from which no expert"
            " can be left out; add --dist-ckpt-optim-fully-reshardable"
        )
    if args.save_experts_scope == OPTIMIZER.name and args.no_save_optim:
        yield "--save-experts-scope optimizer and --no-save-optim exclude each other: nothing would be left out"
    if getattr(args, "ckpt_assume_constant_structure", False):
        yield f"{told} does not go with --ckpt-assume-constant-structure: each checkpoint holds other experts"
    if getattr(args, "save_retain_interval", None):
        yield (
            f"{told} does not go with --save-retain-interval {args.save_retain_interval}: it would remove checkpoints"
            " that hold experts of newer ones"
        )
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        yield f"{told} does not go with --non-persistent-ckpt-type global, which keeps one checkpoint only"


def _low_precision(args: Any) -> str:
    """The flags for which `stock.dense.saves_raw` saves state as it is; empty without any."""
    if getattr(args, "use_precision_aware_optimizer", False):
        return "--use-precision-aware-optimizer"
    if getattr(args, "fp4_param_gather", False):
        return "--fp4-param-gather"
    if not getattr(args, "fp8", None):
        return ""
    if args.fp8_param_gather:
        return "--fp8-param-gather"
    return f"--fp8-format {args.fp8} with --fp8-recipe delayed" if args.fp8_recipe == "delayed" else ""
