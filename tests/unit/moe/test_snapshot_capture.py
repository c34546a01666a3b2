"""Copies of live tensors into real memory segments by a real thread, and back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, Pace, Reader, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyJob, Span, ThreadEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, SnapshotPlan, expert

PARTS = {"compute": Part.COMPUTE, "master": Part.MASTER, "buffer": Part.MASTER}
ROUTER = OperatorId(0, OperatorKind.ROUTER)
EXPERTS = [expert(0, index) for index in range(3)]
WAIT_S = 60.0


def piece(operator: OperatorId, field: str, tensor: torch.Tensor) -> StateTensor:
    shard = Shard(GlobalName(operator, f"{operator}.weight"), 0, tensor.numel(), tensor.numel())
    part = PARTS.get(field, Part.MOMENTS)
    return StateTensor(shard, field, part, tensor, (0,), in_forward=field in ("compute", "buffer"))


class Model:
    """A router with a buffer, and experts in mixed precision, whose compute weights lie in one allocation."""

    def __init__(self, numel: int = 96) -> None:
        draw = torch.Generator().manual_seed(5)
        weights = torch.randn(len(EXPERTS) * numel, generator=draw).bfloat16()
        self.bias = torch.randn(8, generator=draw)
        self.tensors = [piece(ROUTER, "buffer", self.bias), piece(ROUTER, "master", torch.randn(numel, generator=draw))]
        for at, operator in enumerate(EXPERTS):
            own = weights[at * numel : (at + 1) * numel]
            moments = {field: torch.randn(numel, generator=draw) for field in ("exp_avg", "exp_avg_sq")}
            fields = {"compute": own, "master": own.float(), **moments, "step": torch.ones(1)}
            self.tensors += [piece(operator, field, tensor) for field, tensor in fields.items()]

    def bytes(self) -> dict[str, bytes]:
        return {one.key: one.tensor.view(torch.uint8).numpy().tobytes() for one in self.tensors}

    def train(self) -> None:
        for one in self.tensors:
            one.tensor.add_(1.0)

    @property
    def operators(self) -> list[OperatorId]:
        return [ROUTER, *EXPERTS]


class Trainer:
    """Random states that change at each step."""

    def __init__(self) -> None:
        self.state = bytearray(b"0123")

    def scalars(self) -> dict[str, Json]:
        return {}

    def tensors(self) -> Mapping[str, memoryview]:
        return {"device": memoryview(bytes(self.state)), "torch": memoryview(b"abc")}

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        raise NotImplementedError


class LastMoment:
    """An engine that copies when it is waited for."""

    def __init__(self) -> None:
        self.engine, self.jobs = ThreadEngine(), list[CopyJob]()

    def now(self, job: CopyJob) -> None:
        self.engine.now(job)

    def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
        self.jobs = list(jobs)

    def wait(self, timeout_s: float) -> None:
        jobs, self.jobs = self.jobs, []
        self.engine.begin(jobs)
        self.engine.wait(timeout_s)

    def close(self) -> None:
        self.engine.close()


class HeldSpan(Span):
    """A span whose source cannot be read until `go` is set."""

    go: threading.Event

    @cached_property
    def array(self) -> np.ndarray:
        assert self.go.wait(WAIT_S)
        return self.source.numpy()


class Holding(ThreadEngine):
    """A thread that copies nothing before `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
        super().begin([([self._held(span) for span in spans], segment) for spans, segment in jobs])

    def _held(self, span: Span) -> Span:
        held = HeldSpan(span.source, span.offset)
        object.__setattr__(held, "go", self.go)
        return held


def plan(parts: Mapping[OperatorId, Part], iteration: int = 1) -> SnapshotPlan:
    return SnapshotPlan(iteration, dict(parts))


def everything(model: Model, iteration: int = 1) -> SnapshotPlan:
    return plan(dict.fromkeys(model.operators, Part.EVERYTHING), iteration)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(tmp_path, "job", 0, [1 << 16] * 2)
    yield made
    made.close()


def capture(store: MemoryStore, capturer: LiveCapturer, of: SnapshotPlan, trainer: bool = False) -> SnapshotId:
    layout = capturer.layout(of, trainer=trainer)
    snapshot = SnapshotId(of.iteration, 0)
    writer = store.reserve(snapshot, layout)
    capturer.begin([(layout, writer)])
    capturer.end(WAIT_S)
    writer.seal(Facts("job"))
    return snapshot


def stored(store: MemoryStore, snapshot: SnapshotId) -> dict[str, bytes]:
    with store.open(snapshot) as reader:
        return {record.key: bytes(reader.read(record.key)) for record in reader.manifest.records}


def test_a_snapshot_has_the_bytes_of_every_tensor(store: MemoryStore) -> None:
    model = Model()
    found = stored(store, capture(store, LiveCapturer(model.tensors, Trainer(), ThreadEngine()), everything(model)))
    assert found == model.bytes()


def test_layouts_may_be_asked_for_on_another_thread_while_snapshots_are_taken(store: MemoryStore) -> None:
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    some = Part.COMPUTE, Part.MASTER, Part.MOMENTS
    plans = [plan(dict(zip(model.operators, parts, strict=True))) for parts in itertools.product(some, repeat=4)]
    plans = plans[:64]  # all are remembered
    layouts, ended = [capturer.layout(one) for one in plans], threading.Event()

    def ask() -> int:
        count = 0
        while not ended.is_set():
            capturer.layout(plans[count % len(plans)])
            count += 1
        return count

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
            stack.callback(ended.set)
            asked = pool.submit(ask)
            for at in range(1500):
                layout = layouts[at % len(layouts)]
                with store.reserve(SnapshotId(at, 0), layout) as writer:
                    capturer.begin([(layout, writer)])
                    capturer.end(WAIT_S)
            stack.close()
            assert asked.result(WAIT_S)
    finally:
        sys.setswitchinterval(before_s)


def test_records_are_those_of_the_planned_parts(store: MemoryStore) -> None:
    model, capturer = Model(), LiveCapturer(Model().tensors, Trainer(), ThreadEngine())
    parts = {
        ROUTER: Part.COMPUTE,
        EXPERTS[0]: Part.MASTER_AND_MOMENTS,
        EXPERTS[1]: Part.COMPUTE,
        expert(9, 9): Part.MASTER_AND_MOMENTS,
    }
    fields = capturer.layout(plan(parts)).fields
    kinds = {(field.operator, field.key.rpartition("/")[2], field.part, field.dtype) for field in fields}
    moments = [(EXPERTS[0], field, Part.MOMENTS, "float32") for field in ("exp_avg", "exp_avg_sq", "step")]
    assert kinds == {
        (ROUTER, "buffer", Part.MASTER, "float32"),
        (EXPERTS[0], "master", Part.MASTER, "float32"),
        (EXPERTS[1], "compute", Part.COMPUTE, "bfloat16"),
        *moments,
    }
    assert capturer.operators == frozenset(model.operators)


def test_random_states_come_last_and_only_with_the_trainer(store: MemoryStore) -> None:
    model, trainer = Model(), Trainer()
    capturer = LiveCapturer(model.tensors, trainer, ThreadEngine())
    fields = capturer.layout(everything(model), trainer=True).fields
    assert fields[-2:] == (Field("random/device", "uint8", (4,)), Field("random/torch", "uint8", (3,)))
    assert fields[:-2] == capturer.layout(everything(model)).fields
    found = stored(store, capture(store, capturer, everything(model), trainer=True))
    assert (found["random/device"], found["random/torch"]) == (b"0123", b"abc")


def test_the_same_parts_give_the_same_layout_object_and_two_starts_equal_ones() -> None:
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    assert capturer.layout(everything(model, 1)) is capturer.layout(everything(model, 2))
    elsewhere = Model(), [torch.empty(1000) for _ in range(3)]
    again = LiveCapturer(elsewhere[0].tensors, Trainer(), ThreadEngine())
    assert again.layout(everything(model)) == capturer.layout(everything(model))


def test_layouts_that_were_forgotten_can_still_be_captured(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.snapshot.capturer._REMEMBERED_LAYOUTS", 1)
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    layout = capturer.layout(everything(model))
    capturer.layout(plan({ROUTER: Part.MASTER_AND_MOMENTS}))
    writer = store.reserve(SnapshotId(1, 0), layout)
    capturer.begin([(layout, writer)])
    capturer.end(WAIT_S)
    writer.seal(Facts("job"))
    assert stored(store, SnapshotId(1, 0)) == model.bytes()


def test_neighbours_in_memory_are_copied_in_one_piece() -> None:
    model, pieces = Model(), list[list[int]]()

    class Listening(ThreadEngine):
        def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
            pieces.extend([span.nbytes for span in spans] for spans, _ in jobs)
            super().begin([])

    class Segment:
        def whole(self) -> memoryview:
            return memoryview(bytearray(1 << 16))

    capturer = LiveCapturer(model.tensors, Trainer(), Listening())
    capturer.begin([(capturer.layout(plan(dict.fromkeys(EXPERTS, Part.COMPUTE))), Segment())])  # type: ignore[list-item]
    assert pieces == [[3 * 96 * 2]]


def test_what_a_forward_pass_changes_is_copied_before_begin_returns(store: MemoryStore) -> None:
    model, trainer = Model(), Trainer()
    capturer = LiveCapturer(model.tensors, trainer, LastMoment())
    before, layout = model.bytes(), capturer.layout(everything(model), trainer=True)
    writer = store.reserve(SnapshotId(1, 0), layout)
    capturer.begin([(layout, writer)])
    model.train()
    trainer.state[:] = b"4567"
    capturer.end(WAIT_S)
    writer.seal(Facts("job"))
    found = stored(store, SnapshotId(1, 0))
    assert found["random/device"] == b"0123"
    for one in model.tensors:
        assert found[one.key] == (before if one.field == "buffer" else model.bytes())[one.key]


def test_a_snapshot_in_several_pieces_is_begun_and_ended_at_once(store: MemoryStore) -> None:
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    plans = [plan({ROUTER: Part.MASTER_AND_MOMENTS}), plan({EXPERTS[0]: Part.EVERYTHING})]
    layouts = [capturer.layout(one, trainer=at == 0) for at, one in enumerate(plans)]
    snapshots = [SnapshotId(1, 0), SnapshotId(1, 0, "parked")]
    writers = [store.reserve(*pair) for pair in zip(snapshots, layouts, strict=True)]
    capturer.begin(list(zip(layouts, writers, strict=True)))
    capturer.end(WAIT_S)
    for writer in writers:
        writer.seal(Facts("job"))
    live = model.bytes()
    for snapshot, operators in zip(snapshots, ([ROUTER], EXPERTS[:1]), strict=True):
        found = {key: value for key, value in stored(store, snapshot).items() if not key.startswith("random/")}
        assert found == {one.key: live[one.key] for one in model.tensors if one.operator in operators}


def test_end_says_how_much_is_copied_when_time_is_up_and_can_wait_again(store: MemoryStore) -> None:
    model, engine = Model(), Holding()
    capturer = LiveCapturer(model.tensors, Trainer(), engine)
    layout = capturer.layout(everything(model))
    writer = store.reserve(SnapshotId(1, 0), layout)
    capturer.begin([(layout, writer)])
    with pytest.raises(TimeoutError, match=r"copied 0 of \d+ bytes"):
        capturer.end(0.01)
    with pytest.raises(UsageError, match="under way"):
        capturer.begin([])
    with pytest.raises(UsageError, match="still referred to"):
        writer.seal(Facts("job"))
    engine.go.set()
    capturer.end(WAIT_S)
    writer.seal(Facts("job"))
    assert stored(store, SnapshotId(1, 0)) == model.bytes()


def test_what_a_copy_raises_comes_out_of_end_and_frees_the_segment(tmp_path: Path) -> None:
    class Failing(ThreadEngine):
        def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
            super().begin([([*spans, Span(torch.zeros(8, dtype=torch.uint8), 1 << 40)], to) for spans, to in jobs])

    store = MemoryStore(tmp_path, "job", 0, [1 << 16])
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), Failing())
    for iteration in (1, 2):
        layout = capturer.layout(everything(model))
        writer = store.reserve(SnapshotId(iteration, 0), layout)
        capturer.begin([(layout, writer)])
        with pytest.raises(ValueError, match="broadcast") as caught:
            capturer.end(WAIT_S)
        assert "np.copyto" in caught.value.__notes__[0]
        writer.abandon()
    store.close()


def test_segments_are_sealed_and_reused_for_many_iterations(store: MemoryStore) -> None:
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    expected: dict[SnapshotId, dict[str, bytes]] = {}
    for iteration in range(1, 60):
        model.train()
        expected[capture(store, capturer, everything(model, iteration))] = model.bytes()
        if len(expected) == 2:
            oldest = min(expected)
            assert stored(store, oldest) == expected.pop(oldest)
            store.free(oldest)


def test_the_copy_thread_sleeps_when_there_is_nothing_to_copy_and_ends_with_its_engine() -> None:
    known = set(threading.enumerate())
    engine = ThreadEngine()
    (thread,) = set(threading.enumerate()) - known
    engine.begin([])
    engine.wait(WAIT_S)
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before_s = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before_s < 0.03
    del engine
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_the_bandwidth_is_that_of_a_trial_until_a_copy_was_made(store: MemoryStore) -> None:
    class Listening(ThreadEngine):
        tried: tuple[Span, ...] = ()

        def trial(self, spans: Sequence[Span]) -> float:
            self.tried = tuple(spans)
            return super().trial(spans)

    engine = Listening()
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), engine)
    first = capturer.bandwidth_bytes_per_s
    assert first > 0
    assert sum(span.nbytes for span in engine.tried) == sum(one.tensor.nbytes for one in model.tensors)
    assert capturer.bandwidth_bytes_per_s == first, "it is made once"
    assert engine.bandwidth_bytes_per_s is None
    capture(store, capturer, everything(model))
    assert engine.bandwidth_bytes_per_s == capturer.bandwidth_bytes_per_s


def test_the_bandwidth_is_that_of_the_bytes_that_the_last_copy_took(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, source = ThreadEngine(), torch.zeros(1000, dtype=torch.uint8)
    times = iter((10.0, 10.5))
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.snapshot.copy_engines.time", clock)
    engine.begin([((Span(source, 0),), memoryview(bytearray(1000)))])
    engine.wait(WAIT_S)
    assert engine.bandwidth_bytes_per_s == 2000.0


def test_the_bandwidth_of_the_first_copy_is_not_asked_for_while_it_is_made(store: MemoryStore) -> None:
    model = Model()
    capturer = LiveCapturer(model.tensors, Trainer(), ThreadEngine())
    layout = capturer.layout(everything(model))
    with store.reserve(SnapshotId(1, 0), layout) as writer:
        capturer.begin([(layout, writer)])
        with pytest.raises(UsageError, match="ask for the bandwidth before"):
            _ = capturer.bandwidth_bytes_per_s
        capturer.end(WAIT_S)


def test_empty_tensors_are_records_without_bytes(store: MemoryStore) -> None:
    tensors = [piece(EXPERTS[0], "master", torch.empty(0)), piece(EXPERTS[0], "step", torch.ones(1))]
    capturer = LiveCapturer(tensors, Trainer(), ThreadEngine())
    found = stored(store, capture(store, capturer, plan({EXPERTS[0]: Part.MASTER_AND_MOMENTS})))
    assert sorted(map(len, found.values())) == [0, 4]


def test_a_plan_with_nothing_of_this_rank_gives_an_empty_snapshot(store: MemoryStore) -> None:
    capturer = LiveCapturer(Model().tensors, Trainer(), ThreadEngine())
    assert stored(store, capture(store, capturer, plan({expert(7, 7): Part.MASTER_AND_MOMENTS}))) == {}


def test_layouts_and_random_states_of_others_are_refused(store: MemoryStore) -> None:
    trainer = Trainer()
    capturer = LiveCapturer(Model().tensors, trainer, ThreadEngine())
    foreign = Layout.of([Field("no such tensor", "float32", (2,))])
    with pytest.raises(UsageError, match="no such tensor"), store.reserve(SnapshotId(1, 0), foreign) as writer:
        capturer.begin([(foreign, writer)])
    layout = capturer.layout(plan({}), trainer=True)
    trainer.state += b"more"
    with store.reserve(SnapshotId(2, 0), layout) as writer:
        capturer.begin([(layout, writer)])
        with pytest.raises(UsageError, match="device"):
            capturer.end(WAIT_S)
    twice = [piece(ROUTER, "master", torch.ones(2))] * 2
    with pytest.raises(UsageError, match="different keys"):
        LiveCapturer(twice, trainer, ThreadEngine())


class Restoring:
    """A model, a snapshot of everything, and a restorer that notes how it completes."""

    def __init__(self, store: MemoryStore) -> None:
        self.model, self.calls = Model(), list[object]()
        self.live, self.others = self.model.bytes(), torch.ones(4)
        capturer = LiveCapturer(self.model.tensors, Trainer(), ThreadEngine())
        self.reader: Reader = store.open(capture(store, capturer, everything(self.model)))
        self.restorer = LiveRestorer(
            lambda: self.model.tensors,
            lambda recast: self.calls.append(recast),
            settle=lambda: self.calls.append("settled"),
            derived=[self.others],
        )

    def restore(self, parts: Mapping[Part, Sequence[OperatorId]]) -> int:
        return self.restorer.restore(self.reader.read, parts)


@pytest.fixture
def restoring(store: MemoryStore) -> Iterator[Restoring]:
    made = Restoring(store)
    yield made
    made.reader.close()


def test_poison_spares_nothing(restoring: Restoring) -> None:
    restoring.restorer.poison()
    assert restoring.calls == ["settled"]
    for tensor in (restoring.others, *(one.tensor for one in restoring.model.tensors)):
        assert torch.isnan(tensor).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int64, -1), (torch.uint8, 255), (torch.bool, True), (torch.float64, None)]
)
def test_poison_is_loud_in_every_dtype(dtype: torch.dtype, value: int | None) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    LiveRestorer([piece(ROUTER, "buffer", tensor)], lambda recast: None).poison()
    assert torch.isnan(tensor).all() if value is None else tensor.tolist() == [value] * 3


def test_of_state_that_is_kept_nothing_is_written_and_compute_weights_are_derived(restoring: Restoring) -> None:
    restoring.restorer.keep()
    restoring.restorer.complete()
    assert restoring.model.bytes() == restoring.live
    assert restoring.calls == ["settled", True]


def test_everything_comes_back_from_a_snapshot(restoring: Restoring) -> None:
    restoring.restorer.poison()
    assert restoring.restore({Part.EVERYTHING: restoring.model.operators}) == sum(map(len, restoring.live.values()))
    assert restoring.model.bytes() == restoring.live
    restoring.restorer.complete()
    assert restoring.calls == ["settled", False]


def test_parts_come_from_where_they_are_asked_for_and_are_counted(restoring: Restoring) -> None:
    restoring.restorer.poison()
    chosen = {Part.MASTER: [ROUTER], Part.COMPUTE: EXPERTS[:1], Part.MASTER_AND_MOMENTS: EXPERTS[2:]}
    written = restoring.restore(chosen)
    found = restoring.model.bytes()
    for one in restoring.model.tensors:
        asked = any(one.part & part and one.operator in operators for part, operators in chosen.items())
        assert (found[one.key] == restoring.live[one.key]) == asked
        written -= one.nbytes if asked else 0
    assert written == 0


@pytest.mark.parametrize("compute_of", [[], EXPERTS[:1]], ids=["none", "some"])
def test_compute_weights_are_derived_unless_all_were_restored(
    restoring: Restoring, compute_of: list[OperatorId]
) -> None:
    restoring.restorer.poison()
    restoring.restore({Part.MASTER_AND_MOMENTS: restoring.model.operators})
    restoring.restore({Part.COMPUTE: compute_of})
    restoring.restorer.complete()
    assert restoring.calls == ["settled", True]


def test_nothing_is_derived_when_something_was_not_restored(restoring: Restoring) -> None:
    restoring.restorer.poison()
    restoring.restore({Part.MASTER: restoring.model.operators, Part.MOMENTS: EXPERTS[1:]})
    with pytest.raises(UnreadableCheckpoint, match=r"3 tensors of .*layer0.expert0.weight.*exp_avg"):
        restoring.restorer.complete()
    assert restoring.calls == ["settled"]


def test_a_second_restore_does_not_count_what_the_first_one_wrote(restoring: Restoring) -> None:
    restoring.restorer.poison()
    restoring.restore({Part.EVERYTHING: restoring.model.operators})
    restoring.restorer.poison()
    with pytest.raises(UnreadableCheckpoint, match=r"14 tensors of"):
        restoring.restorer.complete()


def test_records_of_another_size_are_refused_by_name(restoring: Restoring) -> None:
    restoring.restorer.poison()
    with pytest.raises(UnreadableCheckpoint, match=r"has 5 bytes, but its tensor has"):
        restoring.restorer.restore(lambda key: memoryview(b"12345"), {Part.MASTER: EXPERTS})


def test_a_flipped_bit_is_not_restored(store: MemoryStore, tmp_path: Path, restoring: Restoring) -> None:
    segment = next(iter(tmp_path.rglob(f"{restoring.reader.manifest.segment}*")))
    record = restoring.reader.manifest.records[3]
    with segment.open("r+b") as file:
        file.seek(record.offset)
        byte = file.read(1)[0]
        file.seek(record.offset)
        file.write(bytes([byte ^ 1]))
    restoring.restorer.poison()
    with pytest.raises(UnreadableCheckpoint):
        restoring.restore({Part.EVERYTHING: restoring.model.operators})
