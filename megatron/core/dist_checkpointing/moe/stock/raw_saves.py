"""Checkpoints of the stock loop with state of few bits as it is, which Megatron-Core would save in fp32.

The loop's `generate_state_dict` asks each model chunk, and then the optimizer, for its `sharded_state_dict`; what was
loaded goes to the optimizer's `load_state_dict`. In the blocks below these do as `megatron_state.raw_state` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..megatron_state import raw_state
from ..replay.patches import replaced

_TYPE = "distrib_optim_sharding_type"
_FIXED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size"),
    *("use_precision_aware_optimizer", "bf16", "fp16", "main_params_dtype", "fp8_main_params", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_amax_history_len"),
)
"""Arguments under which alone such state loads: to cast it, or to cut it elsewhere, gives it other scales."""


def saves_raw(args: Any, optimizer: Any) -> bool:
    """Whether what Megatron-Core saves of a job would not come back to the bit.

    Args:
        args: Of Megatron-LM.
        optimizer: Of the loop; None where nothing is trained.
    """
    scaled = getattr(args, "fp8", None) and (args.fp8_recipe == "delayed" or args.fp8_param_gather)
    if optimizer is None or not (scaled or getattr(args, "use_precision_aware_optimizer", False)):
        return False
    return args.ckpt_format == "torch_dist" and not args.dist_ckpt_optim_fully_reshardable


@contextlib.contextmanager
def generating(chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """A block in which the loop saves a checkpoint of this state."""

    def of_optimizer(*unused: Any, is_loading: bool = False, **options: Any) -> dict[str, Any]:
        return raw_state.raw_state_dict(chunks, optimizer, is_loading=is_loading)

    with _silent_modules(chunks), replaced(optimizer, sharded_state_dict=of_optimizer):
        yield


def content_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the checkpoint says of its layout, with that of the optimizer as it is."""
    return {**(metadata or {}), _TYPE: raw_state.SHARDING}


@contextlib.contextmanager
def loading(args: Any, chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """A block in which the loop loads a checkpoint into this state, whichever way it was saved.

    Raises UsageError in the block for state that is another layout's, or in other dtypes.
    """
    read_metadata = dist_checkpointing.load_content_metadata

    with contextlib.ExitStack() as stack:

        def read(*given: Any, **options: Any) -> Any:
            found = read_metadata(*given, **options)
            if (found or {}).get(_TYPE) == raw_state.SHARDING:
                saved = (options.get("preloaded_state_dict") or {}).get("args")
                if not (args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False)):
                    _refuse_others(saved, args)
                load_state = partial(raw_state.load_raw_state_dict, chunks, optimizer)
                stack.enter_context(generating(chunks, optimizer))
                stack.enter_context(replaced(optimizer, load_state_dict=load_state))
            return found

        stack.enter_context(replaced(dist_checkpointing, load_content_metadata=read))
        if getattr(args, "use_precision_aware_optimizer", False):
            reload = partial(_reload_weights_and_masters, optimizer.reload_model_params, optimizer)
            stack.enter_context(replaced(optimizer, reload_model_params=reload))
        yield


def _reload_weights_and_masters(reload: Callable[..., None], optimizer: Any, *given: Any, **options: Any) -> None:
    reload(*given, **options)
    raw_state.reload_masters_of(optimizer)


@contextlib.contextmanager
def _silent_modules(chunks: Sequence[Any]) -> Iterator[None]:
    """Let chunks leave out what modules of Transformer Engine would pickle, while they are asked for their state."""

    def of_chunk(generate: Callable[..., Any], *given: Any, **options: Any) -> Any:
        with raw_state.without_module_scales(chunks):
            return generate(*given, **options)

    with contextlib.ExitStack() as stack:
        for chunk in unwrap_model(list(chunks)):
            stack.enter_context(replaced(chunk, sharded_state_dict=partial(of_chunk, chunk.sharded_state_dict)))
        yield


def _refuse_others(saved: Any, args: Any) -> None:
    for name in _FIXED:
        before, now = getattr(saved, name, None), getattr(args, name, None)
        if before != now:
            raise UsageError(
                f"--load {args.load}: it holds state of few bits as it was on each rank, but {name} was {before} and is"
                f" {now}; train with the same, or pass --no-load-optim"
            )
