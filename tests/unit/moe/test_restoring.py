"""How a recovery writes into live state."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state import restore
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer, level_step_counts
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.restoring import RestoreTask, _MeasuredReads
from megatron.core.dist_checkpointing.moe.recovery.sources import KeptState, RefusedCopies, keep, take
from megatron.core.dist_checkpointing.moe.types import PARKED, Part, RecoveryPlan, ReplaySegment, Scope, Tier, Topology

ALONE = SimpleNamespace(rank=0, exchange=lambda messages: (), merge=lambda value, combine: value)
"""A transport of one rank."""


def test_state_that_no_copy_gives_is_nan_after_a_recovery_and_never_what_it_was() -> None:
    live = torch.ones(8)
    restorer = LiveRestorer((), lambda recast: None, derived=[live])
    ports: Any = SimpleNamespace(transport=ALONE, restorer=restorer, kept=KeptState(), clock=None, dtypes=dict)
    plan = RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), ())
    RestoreTask(ports, plan, (), Topology(1)).restore()
    assert bool(live.isnan().all())


@pytest.mark.parametrize(("dtype", "fits"), [("float16", True), ("bfloat16", False)])
def test_state_of_another_dtype_is_refused_by_name_before_anything_is_written(dtype: str, fits: bool) -> None:
    key, did = "w[0:4]/exp_avg", list[str]()
    fields = [Field(key, "float16", (4,), Part.MOMENTS), Field("random/cpu", "uint8", (3,))]
    facts = SimpleNamespace(scalars={"timeline": []})
    reader = nullcontext(SimpleNamespace(manifest=SimpleNamespace(layout=Layout.of(fields), facts=facts)))
    found = SimpleNamespace(place=0, snapshot=SnapshotId(4, 0), tier=Tier.PERSISTENT, is_state=True, timeline=())
    need: Any = SimpleNamespace(found=found, parts=(), travels=False)
    ports: Any = SimpleNamespace(
        transport=ALONE,
        restorer=SimpleNamespace(poison=lambda: did.append("poisoned")),
        kept=KeptState(),
        clock=None,
        open=lambda snapshot, tier: reader,
        dtypes=lambda: {key: dtype, "n[0:4]/exp_avg": "float32"},
    )
    task = RestoreTask(ports, RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), ()), [[need]], Topology(1))
    with (
        nullcontext()
        if fits
        else pytest.raises(UsageError, match=r"w\[0:4\]/exp_avg in float16, .* bfloat16: .*--exp-avg")
    ):
        task.restore()
    assert did == ["poisoned"] * fits


@pytest.mark.parametrize("led", [[["a", 0]], [["b", 4, 1]], None])
def test_a_snapshot_that_another_attempt_has_replaced_since_it_was_listed_is_refused(led: Any) -> None:
    """Its bytes match the manifest that is there now, and are of another past than what is restored beside it."""
    manifest = SimpleNamespace(
        snapshot=SnapshotId(4, 0), layout=Layout.of([]), facts=SimpleNamespace(scalars={"timeline": led})
    )
    reader = nullcontext(SimpleNamespace(manifest=manifest))
    place = 0, SnapshotId(4, 0), Tier.PERSISTENT
    found = SimpleNamespace(place=place, snapshot=place[1], tier=Tier.PERSISTENT, is_state=True, timeline=(("b", 4),))
    need: Any = SimpleNamespace(found=found, parts=(), travels=False)
    restorer = SimpleNamespace(poison=lambda: None)
    ports: Any = SimpleNamespace(
        transport=ALONE, restorer=restorer, kept=KeptState(), clock=None, open=lambda *_: reader, dtypes=dict
    )
    task = RestoreTask(ports, RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), ()), [[need]], Topology(1))
    with pytest.raises(RefusedCopies) as refused:
        task.restore()
    assert list(refused.value.refused) == [place]


class LateDevice:
    """Copies what it is given when somebody waits for it, or when the third copy behind it comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        self.sizes: list[int] = []
        self.staged: list[torch.Tensor] = []
        self.is_own: list[bool] = []
        """Of each copy, whether its source is no buffer of this project."""
        copy, device = torch.Tensor.copy_, self

        def page_locked(nbytes: int) -> torch.Tensor:
            self.staged.append(torch.zeros(nbytes, dtype=torch.uint8))
            return self.staged[-1]

        def is_staged(source: torch.Tensor) -> bool:
            return any(0 <= source.data_ptr() - one.data_ptr() < one.numel() for one in self.staged)

        def queue(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            self.sizes.append(source.numel())
            self.is_own.append(not is_staged(source))
            self.queued.append((target, source))
            return target

        class Event:
            marked = 0

            def record(self) -> None:
                self.marked = len(device.queued)

            def synchronize(self) -> None:
                device.waits += 1
                for at, (target, source) in enumerate(device.queued[: self.marked]):
                    copy(target, source)
                    device.queued[at] = (torch.empty(0), torch.empty(0))

        monkeypatch.setattr(torch.Tensor, "copy_", queue)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(restore, "_page_locked", page_locked)


def test_records_go_to_a_device_through_two_locked_buffers_and_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restore, "_STAGED_BYTES", 1024)
    sizes = (10, 700, 0, 5000, 1024, 256, 3)
    records = {f"{at}": random.randbytes(size) for at, size in enumerate(sizes)}
    live = {key: torch.zeros(len(data), dtype=torch.uint8) for key, data in records.items()}
    states: Any = [
        SimpleNamespace(key=key, tensor=tensor, operator=0, serves=lambda part: True, nbytes=tensor.numel())
        for key, tensor in live.items()
    ]
    device = LateDevice(monkeypatch)
    restorer = LiveRestorer(states, lambda recast: None)
    turns = sum(sizes) // 1024
    restorer.restore(lambda key: memoryview(records[key]), {Part.MASTER: [0]})  # type: ignore[list-item]
    assert {key: tensor.numpy().tobytes() for key, tensor in live.items()} == records
    assert device.waits <= turns + 3, "once for each buffer that is filled again, and at the end"


def test_page_locked_records_go_to_a_device_from_where_they_are_and_over_no_border_of_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, piece = LateDevice(monkeypatch), 400
    segment, live = bytearray(random.randbytes(1000)), torch.zeros(900, dtype=torch.uint8)
    state: Any = SimpleNamespace(key="it", tensor=live, operator=0, serves=lambda part: True, nbytes=900)
    restorer = LiveRestorer([state], lambda recast: None)
    first = torch.frombuffer(segment, dtype=torch.uint8).data_ptr()
    # The last 200 bytes are not locked.
    restorer.locked_bytes = lambda address: piece - (address - first) % piece if address - first < 2 * piece else 0
    restorer.restore(lambda key: memoryview(segment)[100:], {Part.MASTER: [0]})  # type: ignore[list-item]
    assert live.numpy().tobytes() == segment[100:]
    assert device.sizes == [300, 400, 200]
    assert device.waits == 1
    assert device.is_own == [True, True, False]


def snapshot(kind: str = PARKED, iteration: int = 4, attempt: str = "first") -> Any:
    facts = SimpleNamespace(scalars={"timeline": [[attempt, 0]]})
    named = SimpleNamespace(kind=kind, iteration=iteration)
    return SimpleNamespace(manifest=SimpleNamespace(snapshot=named, facts=facts))


def test_state_is_kept_where_it_is_the_very_snapshot_that_would_be_copied_back() -> None:
    kept = KeptState(4, [["first", 0]])
    assert kept.is_that_of([snapshot()])
    others = [snapshot(kind="full"), snapshot(iteration=3), snapshot(attempt="second")]
    assert not any(kept.is_that_of(found) for found in ([], *([other] for other in others), [snapshot(), others[0]]))


def test_state_is_no_longer_that_of_a_snapshot_once_another_was_restored() -> None:
    kept = KeptState(4, [["first", 0]])
    kept.forget()
    assert not kept.is_that_of([snapshot()])


def test_what_a_process_kept_is_taken_once() -> None:
    optimizer, kept = type("Optimizer", (), {})(), KeptState(4, [["first", 0]])
    keep(optimizer, kept)
    assert take(optimizer) is kept
    assert take(optimizer) == KeptState()


def test_how_fast_state_was_read_counts_the_bytes_and_the_seconds_of_reads_alone() -> None:
    clock = SimpleNamespace(now_s=iter((10.0, 10.5, 40.0, 40.5)).__next__)
    reader: Any = SimpleNamespace(read=lambda key: memoryview(bytes(1_000_000_000 // 2)))
    measured = _MeasuredReads(clock)
    for key in ("one", "other"):
        measured.of(reader)(key)
    assert str(measured) == "restore: rank 0 read and verified 1 GB at 1 GB/s"


def test_step_counts_are_leveled_over_ranks_of_which_some_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()

    def all_reduce(tensor: torch.Tensor, op: object) -> None:
        tensor.copy_(reduce(torch.maximum, own.transport.together.all(own.transport.rank, tensor.clone())))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def rank(*counts: torch.Tensor) -> Any:
        def level(transport: Any) -> None:
            own.transport = transport
            level_step_counts([SimpleNamespace(field="step", tensor=count) for count in counts])  # type: ignore[misc]

        return level

    counts = [torch.full((1,), float(steps)) for steps in (3, 5, 4)]
    assert on_ranks(rank(*counts[:2]), rank(), rank(counts[2])) == [None] * 3
    assert [int(count) for count in counts] == [5, 5, 5]


def test_sinks_of_a_snapshot_before_are_read_by_the_name_that_all_tensor_ranks_shared() -> None:
    live = torch.zeros(2)
    sinks = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    state: Any = SimpleNamespace(
        key=f"{sinks}/tp1of2[0:2]/master", tensor=live, operator=0, serves=lambda part: True, nbytes=8
    )
    stored = {f"{sinks}[0:2]/master": memoryview(torch.ones(2).numpy()).cast("B")}

    def read(key: str) -> memoryview:
        if key not in stored:
            raise UsageError(f"there is no record {key}")
        return stored[key]

    restorer = LiveRestorer([state], lambda recast: None)
    restorer.restore(read, {Part.MASTER: [0]})  # type: ignore[list-item]
    assert live.tolist() == [1, 1]
    state.key = state.key.replace("softmax_offset", "linear_qkv.weight")
    with pytest.raises(UsageError, match="linear_qkv"):
        restorer.restore(read, {Part.MASTER: [0]})  # type: ignore[list-item]
