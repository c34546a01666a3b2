"""Copies the live state of a rank into snapshots, beside training.

A layout is asked for once per plan and used in every iteration that plans the same, so the work is split: `layout`
decides which records there are and which stretches of live memory are copied where (`_PreparedLayout`), and `begin`
only hands those stretches to the copy engine. Nothing is enumerated or allocated between two steps of the optimizer.

What `begin` copies falls into three classes, by what may change it before `end`:

    random states       read from the trainer on the host, before anything else
    router buffers      changed by the next forward pass: copied by `engine.now`, before `begin` returns
    all else            changed by the next optimizer step only: copied beside training, which waits in `end`
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..megatron_state.operators import StateTensor
from ..ports import RANDOM, Field, Layout, MappedWriter, Pace, TrainerState
from ..types import OperatorId, Part, SnapshotPlan
from .copy_engines import CopyEngine, Span

_REMEMBERED_LAYOUTS = 64
_TRIAL_BYTES = 64 << 20


@dataclass(frozen=True, eq=False, slots=True)
class _LiveRecord:
    """A tensor of state as a record and as bytes; `allocation` is the address of the storage that it views."""

    state: StateTensor
    record: Field
    source: torch.Tensor
    allocation: int
    address: int

    @classmethod
    def of(cls, state: StateTensor) -> _LiveRecord:
        """The tensor as it lies now."""
        tensor = state.tensor
        address: int = tensor.data_ptr()
        allocation = address - tensor.storage_offset() * tensor.element_size()
        return cls(state, state.record, tensor.view(torch.uint8), allocation, address)


@dataclass(frozen=True, eq=False)
class _PreparedLayout:
    """What to copy for a layout: spans that the next forward pass changes, the others, and random states by name."""

    layout: Layout
    changing: tuple[Span, ...]  # router buffers
    lasting: tuple[Span, ...]
    random: Mapping[str, int]  # offsets


class LiveCapturer:
    """The `ports.Capturer` of live tensors.

    Records are in the order of live memory, allocations by their first tensor: the same on each start. Where
    neighbours there are neighbours in the segment too, they are copied in one piece.

    Args:
        tensors: All state of this rank. After `load_state_dict` of an optimizer a new capturer is needed.
        trainer: Gives the random states.
        engine: Copies tensors of their device; used by nobody else.
        left_out: Of which operators peers store a snapshot's `varying` keys in place of this rank; None: of none.

    Raises:
        UsageError: Two tensors have one key.

    Attributes:
        states: As of `ports.Capturer`.
    """

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        trainer: TrainerState,
        engine: CopyEngine,
        *,
        left_out: Callable[[SnapshotPlan], frozenset[OperatorId]] | None = None,
        varying: frozenset[str] = frozenset(),
    ) -> None:
        self._left_out, self._varying = left_out, varying
        self._live = _in_memory_order(tensors)
        self._by_key = {live.record.key: live for live in self._live}
        if len(self._by_key) != len(self._live):
            raise UsageError(f"{len(self._live)} tensors of state have only {len(self._by_key)} different keys")
        self._operators = frozenset(tensor.operator for tensor in tensors)
        self._in_order = tuple(sorted(self._operators))
        self._trainer, self._engine = trainer, engine
        # Random states keep their size: their records are made once, and checked at each copy.
        self._random = tuple(
            Field(f"{RANDOM}{name}", "uint8", (value.nbytes,)) for name, value in sorted(trainer.tensors().items())
        )
        # By whether the trainer is asked for and the parts of each operator; what was asked for last comes last.
        self._prepared_by_parts: OrderedDict[tuple[object, ...], _PreparedLayout] = OrderedDict()
        self._lock = threading.Lock()  # of these: the thread that writes to storage asks for layouts, too
        self._under_way = False
        self.states: Mapping[str, memoryview] | None = None
        self._random_into: list[tuple[Mapping[str, memoryview], Mapping[str, int], memoryview]] = []
        self._trial: float | None = None

    @property
    def operators(self) -> frozenset[OperatorId]:
        """As `ports.Capturer.operators`."""
        return self._operators

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False, among: SnapshotPlan | None = None) -> Layout:
        """As `ports.Capturer.layout`; the same object for the same parts of this rank's operators."""
        # Other ranks' operators are left out: plans that differ in those alone share one layout.
        parts = tuple(plan.parts.get(operator, Part.NOTHING) for operator in self._in_order)
        left_out = self._left_out(among) if self._left_out is not None and among is not None else frozenset()
        left_out = frozenset(operator for operator in left_out if operator in plan.parts)
        key, known = (trainer, left_out, *parts), self._prepared_by_parts
        with self._lock:
            prepared = known.get(key)
        if prepared is None:
            prepared = self._prepare(self._layout(dict(zip(self._in_order, parts, strict=True)), trainer, left_out))
        with self._lock:
            prepared = known.setdefault(key, prepared)
            known.move_to_end(key)
            if len(known) > _REMEMBERED_LAYOUTS:
                known.popitem(last=False)
        return prepared.layout

    def begin(self, copies: Sequence[tuple[Layout, MappedWriter]], pace: Pace | None = None) -> None:
        """As `ports.Capturer.begin`. Raises UsageError when `end` was not called since the last `begin`."""
        if self._under_way:
            raise UsageError("a capture is under way: end it before the next begins")
        # Segments first: what can be refused is refused before anything is copied.
        work = [(self._prepared(layout), writer.whole()) for layout, writer in copies]
        # Random states and buffers come first: the next forward pass, which changes them, may begin once this returns.
        into = [(prepared.random, segment) for prepared, segment in work if prepared.random]
        self.states = self._trainer.tensors() if into else None
        self._random_into = [(self.states or {}, *one) for one in into]
        for prepared, segment in work:
            self._engine.now((prepared.changing, segment))
        self._under_way = True
        self._engine.begin([(prepared.lasting, segment) for prepared, segment in work], pace)

    def end(self, timeout_s: float) -> None:
        """As `ports.Capturer.end`; after TimeoutError it may be called again, and with nothing begun it returns."""
        self.states = None
        try:
            self._engine.wait(timeout_s)
        except TimeoutError:  # the copies continue, and so does this capture
            raise
        except BaseException:
            self._under_way, self._random_into = False, []
            raise
        into, self._under_way, self._random_into = self._random_into, False, []
        # Only now: some of them come from the device, which has come there with the copies.
        for states, offsets, segment in into:
            self._copy_random(states, offsets, segment)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """As `ports.Capturer.bandwidth_bytes_per_s`; the trial is made once, of at most 64 MiB.

        Raises UsageError where a copy is under way and none was measured before.
        """
        measured = self._engine.bandwidth_bytes_per_s
        if measured is not None:
            return measured
        if self._trial is None:
            # A trial beside the copy would measure half of the bandwidth, and the engine takes one round at a time.
            if self._under_way:
                raise UsageError("the first copy is under way: ask for the bandwidth before it begins")
            self._trial = self._engine.trial(self._trial_spans())
        return self._trial

    def _trial_spans(self) -> tuple[Span, ...]:
        """The largest tensors, as far as they go."""
        spans: list[Span] = []
        left_bytes = _TRIAL_BYTES
        for live in sorted(self._live, key=lambda live: -live.record.nbytes):
            if nbytes := min(left_bytes, live.record.nbytes):
                spans.append(Span(live.source[:nbytes], _TRIAL_BYTES - left_bytes))
                left_bytes -= nbytes
        return tuple(spans)

    def _layout(self, parts: Mapping[OperatorId, Part], trainer: bool, left_out: frozenset[OperatorId]) -> Layout:
        fields = [
            live.record
            for live in self._live
            if live.state.serves(parts[live.state.operator])
            and not (live.state.operator in left_out and live.record.key in self._varying)
        ]
        return Layout.of([*fields, *(self._random if trainer else ())])

    def _prepared(self, layout: Layout) -> _PreparedLayout:
        """What was prepared for a layout, or is prepared again if that was forgotten meanwhile.

        The cache is searched for the very object that `layout` gave out: to compare two layouts would compare the
        fields of thousands of tensors in every iteration. An equal layout that is another object is only slower. What
        is copied was mostly asked for right before, so the newest entries are looked at first.
        """
        with self._lock:
            newest_first = reversed(self._prepared_by_parts.values())
            found = next((known for known in newest_first if known.layout is layout), None)
        return found or self._prepare(layout)

    def _prepare(self, layout: Layout) -> _PreparedLayout:
        changing: list[tuple[_LiveRecord, int]] = []
        lasting: list[tuple[_LiveRecord, int]] = []
        random: dict[str, int] = {}
        for field, offset in zip(layout.fields, layout.offsets, strict=True):
            if live := self._by_key.get(field.key):
                (changing if live.state.field == "buffer" else lasting).append((live, offset))
            elif field in self._random:
                random[field.key.removeprefix(RANDOM)] = offset
            else:
                raise UsageError(f"record {field.key} of the layout is none of this rank's state")
        return _PreparedLayout(layout, _spans(changing), _spans(lasting), random)

    def _copy_random(self, states: Mapping[str, memoryview], offsets: Mapping[str, int], segment: memoryview) -> None:
        sizes = {field.key: field.nbytes for field in self._random} if offsets else {}
        for name, offset in offsets.items():
            expected_bytes = sizes[f"{RANDOM}{name}"]
            state = states.get(name)
            if state is None or state.nbytes != expected_bytes:
                raise UsageError(
                    f"random state {name} has changed its size: it had {expected_bytes} bytes at the start"
                )
            # A few KiB on the host, where the trainer has them as copies: no engine is needed.
            segment[offset : offset + expected_bytes] = state.cast("B")


def _in_memory_order(tensors: Sequence[StateTensor]) -> tuple[_LiveRecord, ...]:
    """By allocation, in the order of their first tensors, and by place in it."""
    allocations: dict[int, int] = {}
    found = [_LiveRecord.of(tensor) for tensor in tensors]
    for live in found:
        allocations.setdefault(live.allocation, len(allocations))
    # Not by the addresses of allocations, which differ from start to start, or a restart would change all layouts.
    return tuple(sorted(found, key=lambda live: (allocations[live.allocation], live.address, live.record.key)))


def _spans(placed: Iterable[tuple[_LiveRecord, int]]) -> tuple[Span, ...]:
    """Pieces that are contiguous both in live memory and in the segment, from records and their offsets.

    A model has thousands of small tensors, and each copy has a fixed price. Gaps between neighbours, which alignment
    leaves in both places alike, are copied along; readers never look at them.
    """
    pieces: list[list[tuple[_LiveRecord, int]]] = []
    for live, offset in placed:
        if not live.record.nbytes:
            continue
        if pieces and _continues(*pieces[-1][-1], live, offset):
            pieces[-1].append((live, offset))
        else:
            pieces.append([(live, offset)])
    return tuple(_span(piece) for piece in pieces)


def _continues(last: _LiveRecord, last_offset: int, live: _LiveRecord, offset: int) -> bool:
    return last.allocation == live.allocation and live.address - last.address == offset - last_offset


def _span(piece: Sequence[tuple[_LiveRecord, int]]) -> Span:
    (first, offset), (last, last_offset) = piece[0], piece[-1]
    nbytes = last_offset + last.record.nbytes - offset
    # Reaches past the end of the first tensor, to the end of the last one in the same allocation.
    return Span(first.source.as_strided((nbytes,), (1,)), offset)
