"""The names of Megatron-Core that a replay of iterations replaces or calls in its own way, and what they have to take.

`sparse` runs core's own passes and steps with some operators frozen (`replay`), with what neighbouring stages sent
taken from logs (`local_recovery`), and follows how far a step came. Each name below is one of those it holds on to:
where the installed core lacks one, or has it with other parameters, nothing can be said about what a replay would
compute, so `sparse` is refused. `full` and `pec` copy state between steps and need none of them.

The parameters are the same in all releases from 0.17.1 to 0.19.2; what differs behind them, and was read in each
release, is pinned by digest in `tests/unit/moe/test_frozen_upstream.py` and `test_boundary_upstream.py`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch

from megatron.core.fp8_utils import quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.package_info import __version__ as core_version

from ..errors import UsageError

SEAMS: dict[str, dict[str, str]] = {
    "optimizer.optimizer": {
        "MegatronOptimizer.get_parameters": "self",
        "MegatronOptimizer.get_grad_stats_parallel_group": "self",
        "ChainedOptimizer.step": "self",
        "ChainedOptimizer.prepare_grads": "self",
        "ChainedOptimizer.get_grad_norm": "self",
        "ChainedOptimizer.count_zeros": "self",
        "ChainedOptimizer.step_with_ready_grads": "self",
        "MixedPrecisionOptimizer.prepare_grads": "self",
        "MixedPrecisionOptimizer.step_with_ready_grads": "self",
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "self",
        "Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling": "self",
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params": "self",
        "FP32Optimizer.prepare_grads": "self",
        "FP32Optimizer.step_with_ready_grads": "self",
    },
    "optimizer.distrib_optimizer": {
        "DistributedOptimizer._collect_main_grad_data_for_unscaling": "self",
        "DistributedOptimizer._copy_main_params_to_model_params": "self",
        "DistributedOptimizer._copy_main_params_to_param_buffer": "self",
        "DistributedOptimizer._copy_model_grads_to_main_grads": "self",
        "DistributedOptimizer._get_fp8_params_and_shard_fp32_from_fp8": "self",
    },
    "fp8_utils": {
        "quantize_param_shard": "model_params main_params start_offsets data_parallel_group fsdp_shard_model_params",
        "post_all_gather_processing": "model_params",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel.disable_forward_pre_hook": "self param_sync",
        "DistributedDataParallel.enable_forward_pre_hook": "self",
        "DistributedDataParallel.start_param_sync": "self unused force_sync force_dispatch",
        "DistributedDataParallel.scale_gradients": "self scaling_factor",
    },
    "distributed.param_and_grad_buffer": {
        "_ParamAndGradBucketGroup.start_grad_sync": "self force_all_reduce",
        "_ParamAndGradBucketGroup.start_param_sync": "self force_sync",
    },
    "distributed.finalize_model_grads": {
        "finalize_model_grads": "model num_tokens pg_collection force_all_reduce",
    },
    "full_cuda_graph": {
        "FullCudaGraphWrapper.__call__": "self args kwargs",
    },
    "transformer.module": {
        "GraphableMegatronModule._should_call_te_cudagraph": "self args kwargs",
    },
    "transformer.moe.moe_utils": {
        "RouterGatingLinearFunction.forward": "ctx inp weight bias router_dtype",
        "RouterGatingLinearFunction.backward": "ctx grad_output",
    },
    "transformer.moe.router": {
        "Router.gating": "self input",
    },
    "pipeline_parallel.p2p_communication": {
        "P2PCommunicator.__init__": "self pp_group config",
        "P2PCommunicator._communicate": "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape"
        " wait_on_reqs",
    },
    "utils": {
        "make_viewless_tensor": "inp requires_grad keep_graph",
        "unwrap_model": "model module_instances",
    },
}
"""By module of `megatron.core` and name: the parameters, in their order."""


def changed_seams() -> tuple[str, ...]:
    """What of SEAMS the installed Megatron-Core does not have as it is written there, one phrase for each name."""
    found = (_difference(module, name, expected) for module, names in SEAMS.items() for name, expected in names.items())
    return tuple(difference for difference in found if difference)


def require_seams() -> None:
    """Refuse to replay on a Megatron-Core whose names are not those of SEAMS.

    Raises:
        UsageError: Names the first that differs, and how.
    """
    changed = changed_seams()
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UsageError(
            f"iterations cannot be replayed on megatron-core {core_version}: {changed[0]}{others}: use"
            " --moe-ckpt-strategy full or pec, or a megatron-core of docs/compatibility.md"
        )


def _difference(module: str, name: str, expected: str) -> str | None:
    place = f"megatron.core.{module}.{name}"
    try:
        seam = attrgetter(name)(importlib.import_module(f"megatron.core.{module}"))
    except (ImportError, AttributeError):
        return f"there is no {place}"
    parameters = " ".join(inspect.signature(seam).parameters)
    return None if parameters == expected else f"{place} takes ({parameters}), not ({expected})"


# How Megatron-Core casts master weights to weights of eight bits: together on all data-parallel ranks.
#
# Whoever casts only some of them has to choose the same ones on all of these ranks. Checked against 0.17.1 and 0.19.2.

Rows = tuple[list[Any], list[Any], list[Any]]


def casts_itself(member: Any) -> bool:
    """Whether core casts the weights that this optimizer steps, and not `FusedAdam` in its step."""
    held_by_fused = getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return isinstance(member, DistributedOptimizer) and not held_by_fused


def quantized_rows(member: DistributedOptimizer, wanted: Callable[[torch.nn.Parameter], bool]) -> Rows:
    """Weights of eight bits of all data-parallel ranks of an optimizer.

    Args:
        member: The optimizer.
        wanted: Chooses among its parameters, alike on all of these ranks.

    Returns:
        The weights, in the order that all of these ranks have; this rank's master weights of each; and the element of
        the weight at which these begin. The last two are None where this rank has none.
    """
    every = zip(*member._get_fp8_params_and_shard_fp32_from_fp8(), strict=True)
    rows = [row for row in every if wanted(row[0])]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def cast_rows(member: DistributedOptimizer, rows: Rows) -> None:
    """Cast master weights to weights of eight bits, and take the scales that follow; a collective.

    Args:
        member: The optimizer, over whose data-parallel ranks it is a collective.
        rows: As `quantized_rows` gives them.
    """
    quantize_param_shard(*rows, member.data_parallel_group)


def stage_masters(member: DistributedOptimizer, chosen: Collection[torch.nn.Parameter]) -> None:
    """Put master weights where core gathers weights of MXFP8 from: as bf16 into the buffer of gradients.

    Args:
        member: The optimizer.
        chosen: Of its parameters those that are staged; what others have in buffers stays.
    """
    narrowed = copy.copy(member)
    groups = zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
    rows = [[row for row in zip(*group, strict=True) if row[0] in chosen] for group in groups]
    narrowed.model_float16_groups = [[weight for weight, _ in group] for group in rows]
    narrowed.shard_fp32_from_float16_groups = [[master for _, master in group] for group in rows]
    narrowed._copy_main_params_to_param_buffer()


@contextlib.contextmanager
def scales_kept(weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """For a step: those of eight bits among these weights, which are not cast, keep the scale they have."""
    scales = [scale for one in weights if (scale := getattr(one, "_scale_inv", None)) is not None]
    before = [scale.clone() for scale in scales]
    try:
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale.copy_(value)
