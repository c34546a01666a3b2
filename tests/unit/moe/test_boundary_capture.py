"""What is sent over stage boundaries, copied by a real thread into real memory segments."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import (
    BoundaryFailure,
    BoundaryRecorder,
    fingerprint,
)
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, NoRoom, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyJob, Span, ThreadEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import LOG, Direction, boundary_key, received_key

WAIT_S = 60.0
SHAPE = (16, 2, 8)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SENDS = [(FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (BACKWARD, 0), (BACKWARD, 1), (BACKWARD, 2)]
LAYOUT = Layout.of(Field(boundary_key(way, 0, at), "bfloat16", SHAPE) for way, at in SENDS)
ONE = SnapshotId(5, 2, LOG)


@dataclass(frozen=True, eq=False)
class HeldSpan(Span):
    """One that the copy thread can only read once it is let go."""

    go: threading.Event

    @cached_property
    def array(self) -> np.ndarray:
        assert self.go.wait(WAIT_S)
        numbers: np.ndarray = self.source.numpy()
        return numbers


class HeldEngine(ThreadEngine):
    """A thread that copies nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def add(self, job: CopyJob) -> None:
        spans, segment = job
        super().add(([HeldSpan(span.source, span.offset, self.go) for span in spans], segment))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(tmp_path, "job", 0, [LAYOUT.nbytes] * 2, area="standby")
    yield made
    made.close()


@pytest.fixture
def recorder() -> Iterator[BoundaryRecorder]:
    made = BoundaryRecorder(ThreadEngine("boundary-copy"))
    yield made
    made.close()


def tensors() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=draw).bfloat16() for _ in SENDS]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sealed(store: MemoryStore, writer: object, snapshot: SnapshotId = ONE) -> list[bytes]:
    writer.seal(Facts("job"))  # type: ignore[attr-defined]
    with store.open(snapshot) as reader:
        return [bytes(reader.read(field.key)) for field in LAYOUT.fields]


def test_each_tensor_is_under_its_key_whatever_the_directions_order(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    writer, sent = store.reserve(ONE, LAYOUT), tensors()
    recorder.arm(LAYOUT, writer)
    for at in (3, 0, 4, 1, 2, 5):  # 1F1B mixes the directions; in each the order stays
        recorder.sent(SENDS[at][0], sent[at])
    recorder.end(WAIT_S)
    assert sealed(store, writer) == [raw(tensor) for tensor in sent]


def test_what_a_schedule_gives_up_after_sending_is_recorded_all_the_same(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    writer, sent = store.reserve(ONE, LAYOUT), tensors()
    expected = [raw(tensor) for tensor in sent]
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
        tensor.data = torch.empty(1, dtype=tensor.dtype)  # as schedules do with outputs
    recorder.end(WAIT_S)
    assert sealed(store, writer) == expected


def test_nothing_keeps_what_was_sent_alive_after_the_end(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    writer, sent = store.reserve(ONE, LAYOUT), tensors()
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in sent]
    recorder.end(WAIT_S)
    del sent, tensor
    gc.collect()
    assert not [one for one in storages if one() is not None]
    writer.seal(Facts("job"))  # refuses while anything refers to its memory


def test_a_tensor_that_is_a_view_of_other_memory_is_recorded_in_the_order_of_its_elements(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    writer, sent = store.reserve(ONE, LAYOUT), [one.transpose(0, 2).contiguous().transpose(0, 2) for one in tensors()]
    assert not sent[0].is_contiguous()
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
    recorder.end(WAIT_S)
    assert sealed(store, writer) == [raw(tensor) for tensor in sent]


def test_fingerprints_are_in_the_order_of_asking_whatever_is_waited_for_first(
    tmp_path: Path, recorder: BoundaryRecorder
) -> None:
    key, came = received_key(BACKWARD), tensors()[:3]
    layout = Layout.of([*LAYOUT.fields, Field(key, "int64", (len(came),))])
    with closing(MemoryStore(tmp_path, "job", 0, [layout.nbytes], area="standby")) as store:
        with store.reserve(ONE, layout) as writer:
            recorder.arm(layout, writer)
            asked = [recorder.receiving(BACKWARD) for _ in came]
            for at in (0, 2, 1):  # as an interleaved schedule with larger groups does
                asked[at](came[at])
            for (way, _), tensor in zip(SENDS, tensors(), strict=True):
                recorder.sent(way, tensor)
            recorder.end(WAIT_S)
            writer.seal(Facts("job"))
        with store.open(ONE) as reader:
            kept = memoryview(bytes(reader.read(key))).cast("q").tolist()
    assert kept == [int(fingerprint(tensor)) for tensor in came]


def test_an_evaluation_between_iterations_leaves_no_trace(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    recorder.sent(FORWARD, torch.zeros(3))
    recorder.end(WAIT_S)
    writer, sent = store.reserve(ONE, LAYOUT), tensors()
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
    recorder.passed()
    recorder.sent(FORWARD, torch.zeros(SHAPE))
    recorder.end(WAIT_S)
    recorder.sent(FORWARD, torch.zeros(SHAPE))
    assert sealed(store, writer) == [raw(tensor) for tensor in sent]


def test_it_is_complete_once_the_last_planned_tensor_was_sent(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    assert not recorder.complete
    recorder.arm(LAYOUT, store.reserve(ONE, LAYOUT))
    for (way, _), tensor in zip(SENDS, tensors(), strict=True):
        assert not recorder.complete
        recorder.sent(way, tensor)
    assert recorder.complete


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(SHAPE), "forward/chunk0/microbatch0 was planned as bfloat16 .16, 2, 8., but float32 .16, 2, 8."),
        (torch.zeros(2, 16, 8).bfloat16(), "but bfloat16 .2, 16, 8. was sent"),
        (None, "AttributeError"),
    ],
    ids=["dtype", "shape", "no-tensor"],
)
def test_what_does_not_fit_the_plan_is_told_at_the_end_and_never_raised_into_the_schedule(
    store: MemoryStore, recorder: BoundaryRecorder, tensor: torch.Tensor | None, told: str
) -> None:
    writer = store.reserve(ONE, LAYOUT)
    recorder.arm(LAYOUT, writer)
    recorder.sent(FORWARD, tensor)
    for way, _ in SENDS:
        recorder.sent(way, torch.zeros(SHAPE).bfloat16())
    assert not recorder.complete
    with pytest.raises(BoundaryFailure, match=told):
        recorder.end(WAIT_S)
    writer.abandon()
    assert store.snapshots().sealed == ()


def test_a_tensor_more_than_planned_makes_no_log(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    recorder.arm(LAYOUT, store.reserve(ONE, LAYOUT))
    for (way, _), tensor in zip([*SENDS, (BACKWARD, 3)], [*tensors(), torch.zeros(SHAPE).bfloat16()], strict=True):
        recorder.sent(way, tensor)
    with pytest.raises(BoundaryFailure, match="more than the 3 planned tensors were sent backward"):
        recorder.end(WAIT_S)


def test_a_tensor_less_than_planned_makes_no_log(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    recorder.arm(LAYOUT, store.reserve(ONE, LAYOUT))
    for (way, _), tensor in zip(SENDS[:-1], tensors()[:-1], strict=True):
        recorder.sent(way, tensor)
    with pytest.raises(BoundaryFailure, match="3 of 3 forward, 2 of 3 backward"):
        recorder.end(WAIT_S)


def test_a_copy_that_fails_is_told_at_the_end_and_lets_go_of_the_memory(tmp_path: Path) -> None:
    small = Layout.of(LAYOUT.fields[:2])
    store, recorder = (
        MemoryStore(tmp_path, "job", 0, [small.nbytes], area="standby"),
        BoundaryRecorder(ThreadEngine("boundary-copy")),
    )
    writer = store.reserve(ONE, small)
    recorder.arm(LAYOUT, SimpleNamespace(whole=lambda: writer.whole()[: small.nbytes]))  # type: ignore[arg-type]
    for (way, _), tensor in zip(SENDS, tensors(), strict=True):
        recorder.sent(way, tensor)
    with pytest.raises(BoundaryFailure, match="could not be copied"):
        recorder.end(WAIT_S)
    writer.abandon()
    store.reserve(SnapshotId(6, 2, LOG), small).abandon()
    store.close()
    recorder.close()


def test_a_copy_whose_failure_comes_out_between_iterations_makes_no_log_either(
    store: MemoryStore, recorder: BoundaryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.arm(LAYOUT, store.reserve(ONE, LAYOUT))
    for (way, _), tensor in zip(SENDS, tensors(), strict=True):
        recorder.sent(way, tensor)

    def fails(_: object, timeout_s: float) -> None:
        raise OSError("no such memory")

    with monkeypatch.context() as patched:
        patched.setattr(ThreadEngine, "wait", fails)
        with pytest.raises(BoundaryFailure, match="could not be copied: no such memory"):
            recorder.settle()
    with pytest.raises(BoundaryFailure, match="could not be copied: no such memory"):
        recorder.end(WAIT_S)


def test_after_a_failed_iteration_the_next_one_is_recorded(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    first = store.reserve(ONE, LAYOUT)
    recorder.arm(LAYOUT, first)
    recorder.sent(FORWARD, torch.zeros(1))
    with pytest.raises(BoundaryFailure):
        recorder.end(WAIT_S)
    first.abandon()
    following = SnapshotId(6, 2, LOG)
    writer, sent = store.reserve(following, LAYOUT), tensors()
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
    recorder.end(WAIT_S)
    assert sealed(store, writer, following) == [raw(tensor) for tensor in sent]


def test_it_is_armed_for_one_iteration_at_a_time(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    recorder.arm(LAYOUT, store.reserve(ONE, LAYOUT))
    with pytest.raises(UsageError, match="end that before"):
        recorder.arm(LAYOUT, store.reserve(SnapshotId(6, 2, LOG), LAYOUT))


def test_a_layout_of_something_else_is_refused(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    layout = Layout.of([Field("router.weight", "float32", (4,))])
    with pytest.raises(UsageError, match=r"router\.weight is no boundary tensor"):
        recorder.arm(layout, store.reserve(ONE, layout))


def test_an_end_in_time_names_how_far_the_copies_are_and_may_be_called_again(store: MemoryStore) -> None:
    engine = HeldEngine()
    recorder, writer, sent = BoundaryRecorder(engine), store.reserve(ONE, LAYOUT), tensors()
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, sent, strict=True):
        recorder.sent(way, tensor)
    with pytest.raises(TimeoutError, match=f"copied 0 of {6 * 512} bytes"):
        recorder.end(0.01)
    engine.go.set()
    recorder.end(WAIT_S)
    assert sealed(store, writer) == [raw(tensor) for tensor in sent]


def test_memory_of_a_copy_that_is_given_up_late_is_not_used_again_before_it_has_ended(tmp_path: Path) -> None:
    store, engine = MemoryStore(tmp_path, "job", 0, [LAYOUT.nbytes], area="standby"), HeldEngine()
    recorder, writer = BoundaryRecorder(engine), store.reserve(ONE, LAYOUT)
    recorder.arm(LAYOUT, writer)
    for (way, _), tensor in zip(SENDS, tensors(), strict=True):
        recorder.sent(way, tensor)
    with pytest.raises(TimeoutError):
        recorder.end(0.01)
    recorder.disarm()
    writer.abandon()
    with pytest.raises(NoRoom):
        store.reserve(SnapshotId(6, 2, LOG), LAYOUT)
    engine.go.set()
    engine.begin([])
    engine.wait(WAIT_S)  # the thread has come past what was dropped
    (segment,) = store.directory.glob("*.bin")
    assert not any(segment.read_bytes()[LAYOUT.offsets[1] :]), "what had not begun is not copied any more"
    store.reserve(SnapshotId(6, 2, LOG), LAYOUT).abandon()
    store.close()


def test_the_copy_thread_ends_with_the_recorder() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "boundary-copy"}
    recorder = BoundaryRecorder(ThreadEngine("boundary-copy"))
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "boundary-copy"} - before
    recorder.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
