"""A device of the CPU that is as asynchronous as a GPU.

What is launched does not run when it is launched: streams run it later, in an order that a seed draws among those that
CUDA allows. The host sees memory as it is at that moment. So whoever reads, frees or overwrites too early gets wrong
bytes, as on a GPU, but each time and without one.

Modelled: streams, events, the current stream and the device of each thread; copies that block where host memory is not
page-locked, and that are refused where it is in part; the caching allocator, which hands freed memory to the next
kernels of its stream at once unless `record_stream` says otherwise; errors that stay; kernels that spin until their
communicator is aborted (`communicators`). Not modelled: how long anything takes, CUDA graphs, limits of memory, kernels
of two streams that need each other.

With `cpu_device` installed before, whole jobs train on it. Tensors of the device answer `is_cuda` with True;
collectives are gloo's, for which the host waits, as it does where random numbers are drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.pretrain.testing.async_device.device import AsyncDevice, BlockingCopy
from megatron.pretrain.testing.async_device.operators import Operators
from megatron.pretrain.testing.async_device.schedules import SCHEDULES
from megatron.pretrain.testing.async_device.table import patches

__all__ = ["SCHEDULES", "AsyncDevice", "BlockingCopy", "installed"]


@contextlib.contextmanager
def installed(schedule: str, seed: int) -> Iterator[AsyncDevice]:
    """For the block, `torch.cuda` is a device of this rank, in this thread and those that start in it.

    Args:
        schedule: One of `SCHEDULES`.
        seed: Of its order.
    """
    device = AsyncDevice(schedule, seed)
    with contextlib.ExitStack() as undo:
        for patch in patches(device):
            patch.apply(undo)
        device.set_device(device.index)
        with Operators(device):
            yield device
