"""Memory of the device, as CUDA's caching allocator gives and takes it back, and page-locked memory of the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from megatron.pretrain.testing.async_device.streams import QueuedWork, Stream

POISON = 0xDB
"""What memory holds that nobody has written, or that was freed: others may have it by then."""
_ALIGNMENT = 64
"""As torch aligns memory of the CPU: results of matrix products depend on it."""


class Block:
    """Device memory of one storage.

    Kernels do not keep the storage alive, as those of a GPU do not; what they see of a freed block is `POISON`. The
    bytes themselves stay allocated as long as some work was given them, so that an error is seen and does not crash.

    Args:
        nbytes: Its size.
        stream: The current one when it was allocated: the next kernels of that one may have it once it is freed.
    """

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.stream, self.is_freed = stream, False
        self.used_by: set[Stream] = set()  # as `record_stream` has named them
        self.last_work: dict[Stream, QueuedWork] = {}  # that looks at it or writes it
        whole: np.ndarray = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -whole.__array_interface__["data"][0] % _ALIGNMENT
        self.array = whole[start : start + nbytes]
        self.array.fill(POISON)
        self.storage = torch.from_numpy(self.array).untyped_storage()
        self.owner: weakref.ref[np.ndarray] | None = None

    def poison(self) -> None:
        """The allocator has given it to somebody else."""
        self.is_freed = True
        self.array.fill(POISON)


class Memory:
    """Which storages are on the device, and which pages of the host are locked.

    Args:
        hand_out_freed: Gives the stream that memory is allocated for, which may get what was freed on it.
        reclaim: Gives the memory of a block to others, after the last work of streams that it was recorded for.
    """

    def __init__(
        self,
        hand_out_freed: Callable[[], Stream],
        reclaim: Callable[[Block, Sequence[QueuedWork]], None],
    ) -> None:
        self._hand_out_freed, self._reclaim = hand_out_freed, reclaim
        self._blocks: dict[int, Block] = {}  # by address
        self._locked: dict[int, int] = {}  # bytes by address
        self._pinned: dict[int, weakref.ref[np.ndarray]] = {}

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor is in; None for one on the host."""
        try:
            return self._blocks.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # without a storage, or without memory
            return None

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device.

        Args:
            size: Its shape.
            stride: Of its dimensions.
            dtype: Of its elements.
        """
        block = Block(max(1, nbytes_of(size, stride, dtype)), self._hand_out_freed())
        owner = block.array[:]
        storage = torch.from_numpy(owner).untyped_storage()
        address = storage.data_ptr()
        block.owner = weakref.ref(owner, lambda _: self._free(address))
        self._blocks[address] = block
        return _tensor_in(storage, size, stride, dtype)

    def _free(self, address: int) -> None:
        block = self._blocks.pop(address)
        # The allocator knows the stream that memory was allocated on, and what `record_stream` has said.
        after = [stream.last for stream in block.used_by if stream.last is not None]
        self._reclaim(block, after)

    def without_reference(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """The same memory, as a kernel sees it: the storage may go away meanwhile.

        Args:
            tensor: On the device.
            block: Where it is.
        """
        return _tensor_in(block.storage, tensor.size(), tensor.stride(), tensor.dtype, tensor.storage_offset())

    def allocate_pinned(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape and content in page-locked memory of the host."""
        owner = np.empty(max(1, like.numel() * like.element_size()), np.uint8)
        tensor = _tensor_in(torch.from_numpy(owner).untyped_storage(), like.size(), like.stride(), like.dtype)
        address = tensor.untyped_storage().data_ptr()
        self.lock_pages(address, owner.nbytes)
        self._pinned[address] = weakref.ref(owner, lambda _: self._unpin(address))
        return tensor.copy_(like)

    def _unpin(self, address: int) -> None:
        self._pinned.pop(address, None)
        self._locked.pop(address, None)

    def lock_pages(self, address: int, nbytes: int) -> None:
        """As `cudaHostRegister`.

        Args:
            address: Of the first byte.
            nbytes: How many.
        """
        self._locked[address] = nbytes

    def unlock_pages(self, address: int) -> bool:
        """As `cudaHostUnregister`; whether it was locked."""
        return self._locked.pop(address, None) is not None

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether the device reads and writes all of a host tensor by itself."""
        return self.holds(tensor.data_ptr(), nbytes_of(tensor.size(), tensor.stride(), tensor.dtype))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of this host memory is page-locked.

        Args:
            address: Of the first byte.
            nbytes: How many.
        """
        end = address + nbytes
        return any(at <= address and end <= at + size for at, size in list(self._locked.items()))

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether any of this host memory is page-locked.

        Args:
            address: Of the first byte.
            nbytes: How many.
        """
        return any(at < address + nbytes and address < at + size for at, size in list(self._locked.items()))

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether a locked host tensor was not allocated as such: nobody keeps its memory until copies have ended."""
        return tensor.untyped_storage().data_ptr() not in self._pinned


def nbytes_of(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element to the end of the last.

    Args:
        size: Of a tensor.
        stride: Of its dimensions.
        dtype: Of its elements.
    """
    if not math.prod(size):
        return 0
    return int(1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * int(dtype.itemsize)


def _tensor_in(
    storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
