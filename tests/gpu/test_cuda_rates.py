"""What copies of snapshots reach of the link, and what they cost training."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_place import (
    DEVICE,
    REHEARSED,
    copy_engine,
    needs_cuda,
    needs_device,
    pinned_bytes_per_s,
    seconds,
    settle,
    sized,
)

from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder, fingerprint
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import Span, Throttle
from megatron.core.dist_checkpointing.moe.snapshot.iteration_message import CudaStopwatch
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import LOG, Direction, Part, boundary_key, expert

pytestmark = needs_device

Record = Callable[..., None]
NBYTES = sized(2 << 30, 4 << 20)
WAIT_S = 60.0


@pytest.mark.takes(25)
def test_segments_are_written_at_the_rate_of_the_link(shm: Path, record: Record) -> None:
    source = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=DEVICE)
    store, locks = MemoryStore(shm, "job", 0, [NBYTES]), PageLocks()
    engine = copy_engine(locks)
    engine.prepare(store.views())
    locks.settle(WAIT_S)

    def copy() -> None:
        engine.begin([([Span(source, 0)], store.views()[0])])
        engine.wait(WAIT_S)

    rates = [NBYTES / seconds(copy) for _ in range(3)]
    assert bytes(store.views()[0][-64:]) == source[-64:].cpu().numpy().tobytes()
    pinned = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=not REHEARSED)
    down, up = pinned_bytes_per_s(source, pinned), pinned_bytes_per_s(pinned, source)
    record("links", bytes=NBYTES, pinned_to_host_per_s=down, pinned_to_device_per_s=up, segment_to_host_per_s=rates)
    engine.close()
    store.close()
    assert REHEARSED or max(rates) >= 0.8 * down


@needs_cuda("kernels beside copies were")
@pytest.mark.takes(25)
@pytest.mark.parametrize("rate", [10e9, None], ids=["10 GB/s", "as fast as it goes"])
def test_a_copy_that_is_held_back_keeps_to_its_rate_and_hardly_slows_kernels(
    rate: float | None, shm: Path, record: Record
) -> None:
    source = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    store, engine, watch = MemoryStore(shm, "job", 0, [NBYTES]), StreamEngine(), CudaStopwatch()
    engine.begin([([Span(source, 0)], store.views()[0])])  # locks the pages
    engine.wait(WAIT_S)

    def passes_s(*, copied: bool) -> float:
        for _ in range(200):  # after a pause the clocks are higher, and the first kernels faster
            torch.mm(square, square)
        watch.resume()
        if copied:
            engine.begin([([Span(source, 0)], store.views()[0])], Throttle(rate))
        for _ in range(400):
            torch.mm(square, square)
        lap = watch.pause()
        torch.cuda.synchronize()
        engine.wait(WAIT_S)
        lap_s = lap()
        assert lap_s is not None
        return lap_s

    passes_s(copied=False)
    pairs = [(passes_s(copied=False), passes_s(copied=True)) for _ in range(5)]
    slowed = statistics.median(beside / alone for alone, beside in pairs)
    record("kernels while copying", bytes_per_s=rate, slowed=slowed, pairs_s=pairs)
    engine.close()
    store.close()
    assert rate is None or slowed < 1.1


@needs_cuda("locking pages was")
@pytest.mark.takes(40)
@pytest.mark.parametrize("gib", [1, 8, 32])
def test_pages_are_locked_beside_kernels(gib: int, shm: Path, record: Record) -> None:
    if shutil.disk_usage("/dev/shm").free < 1.1 * (gib << 30):
        pytest.skip(f"/dev/shm has no {gib} GiB free: locking so much was not timed")
    store, square = MemoryStore(shm, "job", 0, [gib << 30]), torch.randn(4096, 4096, device="cuda")
    (segment,) = store.views()
    segment[:: 1 << 12] = bytes(len(segment[:: 1 << 12]))  # pages are there, as in a segment that was written before

    def kernels() -> None:
        for _ in range(200):
            torch.mm(square, square)

    alone_s, locks = [seconds(kernels) for _ in range(3)][-1], PageLocks()
    locks.begin([segment])
    beside_s, begun_s = seconds(kernels), time.monotonic()
    locks.settle(WAIT_S)
    waited_s = time.monotonic() - begun_s
    record(
        "page-locks", bytes=gib << 30, seconds=beside_s + waited_s, kernels_alone_s=alone_s, kernels_beside_s=beside_s
    )
    locks.release()
    del segment
    store.close()


@pytest.mark.takes(20)
@pytest.mark.parametrize("locked", [True, False], ids=["page-locked", "not locked"])
def test_a_snapshot_is_restored(locked: bool, shm: Path, record: Record) -> None:
    owner, numel = expert(0, 0), NBYTES // 4
    tensors = [torch.randn(numel, device=DEVICE) for _ in range(2)]
    pieces = [
        StateTensor(Shard(GlobalName(owner, name), 0, numel, numel), "master", Part.MASTER, tensor, (0,))
        for name, tensor in zip(("first", "second"), tensors, strict=True)
    ]
    store, locks = MemoryStore(shm, "job", 0, [NBYTES] * 2), PageLocks()
    kept = {one.key: segment for one, segment in zip(pieces, store.views(), strict=True)}
    for one in pieces:
        kept[one.key][:] = one.tensor.cpu().numpy().tobytes()
    was = [tensor.clone() for tensor in tensors]
    restorer = LiveRestorer(pieces, lambda recast: None)
    if locked and not REHEARSED:
        locks.begin(store.views())
        locks.settle(WAIT_S)
        restorer.locked_bytes = locks.reach
    restorer.poison()
    took_s = seconds(lambda: restorer.restore(kept.__getitem__, {Part.MASTER: [owner]}))
    restorer.complete()
    record("restore", locked=locked, bytes=2 * NBYTES, bytes_per_s=2 * NBYTES / took_s)
    assert all(torch.equal(one, value) for one, value in zip(tensors, was, strict=True))
    locks.release()
    kept.clear()
    store.close()


@pytest.mark.takes(15)
@pytest.mark.parametrize("locked", [True, False], ids=["page-locked", "not locked"])
def test_what_is_sent_is_recorded_while_the_host_goes_ahead(locked: bool, shm: Path, record: Record) -> None:
    shape, sends = (sized(4096, 64), 1, 7168), 8
    keys = [boundary_key(Direction.FORWARD, 0, microbatch) for microbatch in range(sends)]
    layout = Layout.of(Field(key, "bfloat16", shape) for key in keys)
    store, locks = MemoryStore(shm, "job", 0, [layout.nbytes] * 2), PageLocks()
    engine = copy_engine(locks)
    if locked:
        engine.prepare(store.views())
        locks.settle(WAIT_S)
    recorder, tensor = BoundaryRecorder(engine), torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
    calls_s = []
    with store.reserve(SnapshotId(1, 0, LOG), layout) as writer:
        recorder.arm(layout, writer)
        for _ in range(sends):
            settle()
            begun_s = time.perf_counter()
            recorder.sent(Direction.FORWARD, tensor)
            calls_s.append(time.perf_counter() - begun_s)
        recorder.end(WAIT_S)
    record("sent()", locked=locked, bytes=tensor.nbytes, host_s=calls_s)
    recorder.close()
    store.close()


@pytest.mark.takes(10)
def test_what_is_received_is_fingerprinted(record: Record) -> None:
    tensor = torch.randn(sized(58 << 20, 1 << 20) // 2, device=DEVICE).bfloat16()
    took_s = [seconds(lambda: fingerprint(tensor)) for _ in range(5)]
    record("fingerprint", bytes=tensor.nbytes, seconds=took_s[1:])
    assert int(fingerprint(tensor)) == int(fingerprint(tensor.cpu()))


@needs_cuda("the stopwatch of events was")
@pytest.mark.takes(10)
def test_a_stopwatch_tells_what_the_device_waited() -> None:
    watch, square = CudaStopwatch(), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(square, square)
    torch.cuda.synchronize()
    watch.pause()
    torch.cuda.synchronize()
    time.sleep(0.2)
    assert watch.resume() == pytest.approx(0.2, abs=0.05)
    for _ in range(1000):  # about a second
        torch.mm(square, square)
    watch.pause()
    time.sleep(0.2)
    assert watch.resume() == 0.0, "the device had work all the time"
