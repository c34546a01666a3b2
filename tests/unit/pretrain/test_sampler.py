"""The sampler: one global order, whoever reads it and wherever it starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.sampler import PretrainingSampler

sizes = st.integers(1, 5)


def global_stream(total: int, consumed: int, micro_batch: int, ranks: int) -> list[int]:
    """The job's samples in the order of micro-batches, ranks beside each other."""
    per_rank = [list(PretrainingSampler(total, consumed, micro_batch, rank, ranks)) for rank in range(ranks)]
    return [i for micro_batches in zip(*per_rank, strict=True) for indices in micro_batches for i in indices]


@given(st.integers(0, 200), st.integers(0, 200), sizes, sizes)
def test_all_ranks_together_read_every_sample_once_and_in_order(
    total: int, consumed: int, micro_batch: int, ranks: int
) -> None:
    stream = global_stream(total, consumed, micro_batch, ranks)
    assert stream == list(range(consumed, consumed + len(stream)))
    left = max(0, total - consumed)
    assert left - len(stream) in range(micro_batch * ranks)


@given(st.integers(0, 200), sizes, sizes, st.data())
def test_resuming_at_any_micro_batch_continues_the_stream(
    total: int, micro_batch: int, ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    whole = list(PretrainingSampler(total, 0, micro_batch, rank, ranks))
    done = data.draw(st.integers(0, len(whole)))
    resumed = list(PretrainingSampler(total, done * micro_batch * ranks, micro_batch, rank, ranks))
    assert resumed == whole[done:]


@given(sizes, sizes, sizes, sizes, st.integers(0, 10))
def test_changing_the_data_parallel_size_midway_keeps_the_global_order(
    batch_before: int, ranks_before: int, batch_after: int, ranks_after: int, done: int
) -> None:
    consumed = done * batch_before * ranks_before
    before = global_stream(500, 0, batch_before, ranks_before)[:consumed]
    after = global_stream(500, consumed, batch_after, ranks_after)
    assert before + after == list(range(len(before) + len(after)))


@given(st.integers(0, 200), st.integers(0, 250), sizes, sizes)
def test_its_length_is_the_number_of_micro_batches_it_yields(
    total: int, consumed: int, micro_batch: int, ranks: int
) -> None:
    sampler = PretrainingSampler(total, consumed, micro_batch, ranks - 1, ranks)
    assert len(sampler) == len(list(sampler))


def test_iterating_twice_starts_again_behind_what_was_consumed() -> None:
    sampler = PretrainingSampler(10, 4, 1, 1, 2)
    assert list(sampler) == list(sampler) == [[5], [7], [9]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 0, 0, 1), "micro batch size 0"),
        ((10, 0, 1, 0, 0), "data-parallel size 0"),
        ((10, 0, 1, 2, 2), "rank 2 is outside 0..1"),
        ((10, 0, 1, -1, 2), "rank -1"),
        ((10, -1, 1, 0, 1), "consumed -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PretrainingSampler(*arguments)
