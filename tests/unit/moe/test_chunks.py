"""Copies are cut into chunks and held back to a rate, on the CPU by the same code as on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.snapshot import copy_engines
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import (
    CHUNK_BYTES,
    Span,
    ThreadEngine,
    Throttle,
    chunked,
)
from megatron.core.dist_checkpointing.moe.strategies.memory_report import HEADROOM, CopyRate


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), max_size=6), st.integers(1, 90), st.integers(1, 70)
)
@settings(max_examples=examples(80), deadline=None)
def test_chunks_are_the_spans_in_order_and_none_is_too_large_or_over_a_border(
    places: list[tuple[int, int]], chunk_bytes: int, lock_bytes: int
) -> None:
    spans = [Span(torch.zeros(nbytes, dtype=torch.uint8), offset) for offset, nbytes in places]
    found = list(chunked(spans, chunk_bytes, lock_bytes))
    for span in spans:
        pieces = [(start, end) for of, start, end in found if of is span]
        assert [byte for start, end in pieces for byte in range(start, end)] == list(range(span.nbytes))
    for span, start, end in found:
        assert 0 < end - start <= chunk_bytes
        assert (span.offset + start) // lock_bytes == (span.offset + end - 1) // lock_bytes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_chunks_are_due_at_their_rate_after_those_that_are_free() -> None:
    throttle = Throttle(1e9, free_bytes=20, clock=(clock := Clock()))
    assert [throttle.take(10) for _ in range(2)] == [0.0, 0.0]
    clock.now_s = 1.0  # late: nothing is held back
    assert throttle.take(10) == 0.0


def test_what_is_held_back_continues_when_it_is_due_or_somebody_is_in_a_hurry() -> None:
    begun_s, throttle = time.perf_counter(), Throttle(1000.0)
    throttle.take(50)
    throttle.take(50)
    assert time.perf_counter() - begun_s >= 0.045
    throttle = Throttle(0.001)
    throttle.take(50)
    throttle.hurry()
    assert throttle.take(50) == 0.0


def test_a_round_on_the_cpu_is_held_back_until_its_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(copy_engines.np, "copyto", lambda into, source: sizes.append(into.nbytes))
    source = np.arange(2 * CHUNK_BYTES + 5, dtype=np.uint8)
    engine = ThreadEngine()
    engine.begin([([Span(torch.from_numpy(source), 0)], memoryview(bytearray(source.nbytes)))], Throttle(1.0))
    deadline = time.monotonic() + 5
    while not sizes and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert sizes == [CHUNK_BYTES]
    engine.wait(5.0)
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES, 5]
    engine.close()


def test_pauses_do_not_count_as_slowness_of_the_link() -> None:
    source = torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8)
    engine = ThreadEngine()
    engine.begin([([Span(source, 0)], memoryview(bytearray(source.numel())))], Throttle(CHUNK_BYTES / 5.0))
    time.sleep(1.0)
    engine.wait(5.0)
    assert engine.bandwidth_bytes_per_s is not None and engine.bandwidth_bytes_per_s > 2 * CHUNK_BYTES / 0.8
    engine.close()


def test_an_automatic_rate_ends_a_copy_within_the_passes() -> None:
    rate = CopyRate.parse("auto")
    assert rate.of(1000, 2.0) == pytest.approx(1000 / (2.0 * HEADROOM))
    assert rate.of(1000, None) is None
    assert CopyRate.parse("max").of(1000, 2.0) is None
    assert CopyRate.parse("12.5").of(1000, 2.0) == 12.5e9


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan", ""])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--moe-ckpt-copy-rate"):
        CopyRate.parse(text)
