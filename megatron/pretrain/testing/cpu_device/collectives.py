"""What has to be different where gloo moves the tokens. Each function here makes one replacement."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, distributed_c10d


def splits_as_integers(original: Any) -> Any:
    """For `maybe_move_tensor_to_cpu`: what all-to-all splits by as integers, though it is on the CPU already."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def gather_uneven(original: Any) -> Any:
    """For `_gather_along_first_dim`: gather a different number of rows from each rank."""

    @functools.wraps(original)
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        ranks = group.size()
        if output_split_sizes is None or ranks == 1:
            return original(input_, group, None, use_global_buffer)
        output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        for_each_rank, split_sizes = torch.cat([input_] * ranks), [len(input_)] * ranks
        torch.distributed.all_to_all_single(output, for_each_rank, output_split_sizes, split_sizes, group=group)
        return output

    return gather


def one_dtype_at_a_time(original: Any) -> Any:
    """For `_coalescing_manager`: gathers of several dtypes as several coalesced ones.

    gloo (torch 2.13) takes all tensors of a coalesced gather for tensors of the first one's dtype, and corrupts them.
    """

    @contextlib.contextmanager
    def coalesced(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with original(group, device, async_ops) as manager:
            yield manager
            waiting = distributed_c10d._world.pg_coalesce_state[group or distributed_c10d._get_default_group()]
            others = [call for call in waiting if call.tensor.dtype != waiting[0].tensor.dtype]
            waiting[:] = [call for call in waiting if call.tensor.dtype == waiting[0].tensor.dtype]
        for dtype in dict.fromkeys(call.tensor.dtype for call in others):
            with original(group, device, async_ops) as more:
                for call in others:
                    if call.tensor.dtype is dtype:
                        call.op(call.dst_tensor, call.tensor, group=group, async_op=async_ops)
            if async_ops:
                manager.append(more)

    return coalesced


def one_thread(original: Any) -> Any:
    """For `ProcessGroupGloo.__init__`: run a group's collectives on one thread; who passes options decides alone."""

    @functools.wraps(original)
    def initialize(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta | None = None,
        **others: Any,
    ) -> None:
        if options is None or isinstance(options, timedelta):
            options = _one_thread_options(options or timeout)
        for name, value in others.items():  # torch 2.15 passes `enable_reconfigure`, a field of the options
            setattr(options, name, value)
        original(self, store, rank, size, options)

    return initialize


def _one_thread_options(timeout: timedelta | None) -> Any:
    """What torch would choose, from the same environment variable, but for the number of threads."""
    options = ProcessGroupGloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = (
        [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [ProcessGroupGloo.create_default_device()]
    )
    options._threads = 1
    if timeout is not None:
        options._timeout = timeout
    return options
