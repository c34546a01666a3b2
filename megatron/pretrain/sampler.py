"""The order in which data-parallel ranks read samples, resumable at any point."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.pretrain.errors import InvalidInput


class PretrainingSampler:
    """Micro-batches of sample indices for one data-parallel rank, starting behind what was consumed.

    The job reads samples in ascending order whatever its size: micro-batch k takes the next
    `micro_batch_size * data_parallel_size` samples after `consumed_samples`, and rank r reads slice r of them.
    Iterating yields lists of `micro_batch_size` indices and ends where no full micro-batch is left for every rank.

    Raises `InvalidInput` for sizes below 1, a rank outside the group, or negative counts.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise InvalidInput(
                f"micro batch size {micro_batch_size} and data-parallel size {data_parallel_size} must be at least 1"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise InvalidInput(f"data-parallel rank {data_parallel_rank} is outside 0..{data_parallel_size - 1}")
        if total_samples < 0 or consumed_samples < 0:
            raise InvalidInput(f"sample counts are negative: total {total_samples}, consumed {consumed_samples}")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    def __len__(self) -> int:
        """Micro-batches this rank still has to read."""
        left = max(0, self.total_samples - self.consumed_samples)
        return left // (self.micro_batch_size * self.data_parallel_size)

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.data_parallel_size
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for k in range(len(self)):
            start = first + k * stride
            yield list(range(start, start + self.micro_batch_size))
