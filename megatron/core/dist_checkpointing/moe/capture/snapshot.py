"""Copies the live state of a rank into snapshots, beside training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..ports import RANDOM, Field, Layout, MappedWriter, TrainerState
from ..snapshot.copy_engines import CopyEngine, Span
from ..types import OperatorId, Part, SnapshotPlan
from .operators import StateTensor

_REMEMBERED_LAYOUTS = 64
_TRIAL_BYTES = 64 << 20


@dataclass(frozen=True, eq=False, slots=True)
class _Live:
    """A tensor of state as a record and as bytes; `allocation` is the address of the storage that it views."""

    state: StateTensor
    record: Field
    source: torch.Tensor
    allocation: int
    address: int

    @classmethod
    def of(cls, state: StateTensor) -> _Live:
        """The tensor as it lies now."""
        tensor = state.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = Field(state.key, dtype, tuple(tensor.shape), state.part, state.operator)
        address: int = tensor.data_ptr()
        source = tensor.view(torch.uint8)
        return cls(state, record, source, address - tensor.storage_offset() * tensor.element_size(), address)


@dataclass(frozen=True, eq=False)
class _Copies:
    """What to copy for a layout: spans that the next forward pass changes, the others, and random states by name."""

    layout: Layout
    changing: tuple[Span, ...]
    lasting: tuple[Span, ...]
    random: Mapping[str, int]


class LiveCapturer:
    """The `ports.Capturer` of live tensors.

    tensors: all state of this rank. They are asked for once: after `load_state_dict` of an optimizer a new capturer is
    needed. Records are in the order of live memory, allocations by their first tensor: the same on each start. Where
    neighbours there are neighbours in the segment too, they are copied in one piece.
    Raises UsageError for two tensors of one key.
    """

    def __init__(self, tensors: Sequence[StateTensor], trainer: TrainerState, engine: CopyEngine) -> None:
        self._live = _in_memory_order(tensors)
        self._by_key = {one.record.key: one for one in self._live}
        if len(self._by_key) != len(self._live):
            raise UsageError(f"{len(self._live)} tensors of state have only {len(self._by_key)} different keys")
        self._operators = frozenset(tensor.operator for tensor in tensors)
        self._in_order = tuple(sorted(self._operators))
        self._trainer, self._engine = trainer, engine
        self._random = tuple(
            Field(f"{RANDOM}{name}", "uint8", (value.nbytes,)) for name, value in sorted(trainer.tensors().items())
        )
        self._copies: OrderedDict[tuple[object, ...], _Copies] = OrderedDict()
        self._by_layout: dict[int, _Copies] = {}
        self._under_way = False
        self._trial: float | None = None

    @property
    def operators(self) -> frozenset[OperatorId]:
        """As `ports.Capturer.operators`."""
        return self._operators

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False) -> Layout:
        """As `ports.Capturer.layout`; the same object for the same parts of this rank's operators."""
        parts = tuple(plan.parts.get(operator, Part.NOTHING) for operator in self._in_order)
        key = (trainer, *parts)
        if key not in self._copies:
            self._remember(key, self._prepared(self._layout(dict(zip(self._in_order, parts, strict=True)), trainer)))
        self._copies.move_to_end(key)
        return self._copies[key].layout

    def begin(self, copies: Sequence[tuple[Layout, MappedWriter]]) -> None:
        """As `ports.Capturer.begin`. Raises UsageError when `end` was not called since the last `begin`."""
        if self._under_way:
            raise UsageError("a capture is under way: end it before the next begins")
        work = [(self._copies_of(layout), writer.whole()) for layout, writer in copies]
        for prepared, segment in work:
            self._copy_random(prepared.random, segment)
        for prepared, segment in work:
            self._engine.now((prepared.changing, segment))
        self._under_way = True
        self._engine.begin([(prepared.lasting, segment) for prepared, segment in work])

    def end(self, timeout_s: float) -> None:
        """As `ports.Capturer.end`; after TimeoutError it may be called again, and with nothing begun it returns."""
        try:
            self._engine.wait(timeout_s)
        except TimeoutError:
            raise
        except BaseException:
            self._under_way = False
            raise
        self._under_way = False

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """As `ports.Capturer.bandwidth_bytes_per_s`; the trial is made once, of at most 64 MiB.

        Raises UsageError where a copy is under way and none was measured before.
        """
        measured = self._engine.bandwidth_bytes_per_s
        if measured is not None:
            return measured
        if self._trial is None:
            if self._under_way:
                raise UsageError("the first copy is under way: ask for the bandwidth before it begins")
            self._trial = self._engine.trial(self._trial_spans())
        return self._trial

    def _trial_spans(self) -> tuple[Span, ...]:
        """The largest tensors, as far as they go."""
        spans: list[Span] = []
        left = _TRIAL_BYTES
        for one in sorted(self._live, key=lambda one: -one.record.nbytes):
            nbytes = min(left, one.record.nbytes)
            if nbytes:
                spans.append(Span(one.source[:nbytes], _TRIAL_BYTES - left))
            left -= nbytes
        return tuple(spans)

    def _layout(self, parts: Mapping[OperatorId, Part], trainer: bool) -> Layout:
        fields = [one.record for one in self._live if one.state.serves(parts[one.state.operator])]
        return Layout.of([*fields, *(self._random if trainer else ())])

    def _remember(self, key: tuple[object, ...], copies: _Copies) -> None:
        self._copies[key] = self._by_layout[id(copies.layout)] = copies
        if len(self._copies) > _REMEMBERED_LAYOUTS:
            _, forgotten = self._copies.popitem(last=False)
            del self._by_layout[id(forgotten.layout)]

    def _copies_of(self, layout: Layout) -> _Copies:
        """What was prepared for a layout, or is prepared anew if that was forgotten meanwhile."""
        known = self._by_layout.get(id(layout))
        return known if known is not None and known.layout is layout else self._prepared(layout)

    def _prepared(self, layout: Layout) -> _Copies:
        places = list(zip(layout.fields, layout.offsets, strict=True))
        unknown = [one.key for one, _ in places if one.key not in self._by_key and one not in self._random]
        if unknown:
            raise UsageError(f"record {unknown[0]} of the layout is none of this rank's state")
        live = [(self._by_key[one.key], offset) for one, offset in places if one.key in self._by_key]
        return _Copies(
            layout,
            changing=_spans((one, offset) for one, offset in live if one.state.field == "buffer"),
            lasting=_spans((one, offset) for one, offset in live if one.state.field != "buffer"),
            random={one.key.removeprefix(RANDOM): offset for one, offset in places if one.key not in self._by_key},
        )

    def _copy_random(self, offsets: Mapping[str, int], segment: memoryview) -> None:
        if not offsets:
            return
        states, sizes = self._trainer.tensors(), {one.key: one.nbytes for one in self._random}
        for name, offset in offsets.items():
            expected_bytes = sizes[f"{RANDOM}{name}"]
            if name not in states or states[name].nbytes != expected_bytes:
                raise UsageError(
                    f"random state {name} has changed its size: it had {expected_bytes} bytes at the start"
                )
            segment[offset : offset + expected_bytes] = states[name].cast("B")


def _in_memory_order(tensors: Sequence[StateTensor]) -> tuple[_Live, ...]:
    """By allocation, in the order of their first tensors, and by place in it: addresses differ from start to start."""
    allocations: dict[int, int] = {}
    found = [_Live.of(tensor) for tensor in tensors]
    for one in found:
        allocations.setdefault(one.allocation, len(allocations))
    return tuple(sorted(found, key=lambda one: (allocations[one.allocation], one.address, one.record.key)))


def _spans(places: Iterable[tuple[_Live, int]]) -> tuple[Span, ...]:
    """Pieces that are contiguous both in live memory and in the segment; small gaps are copied along."""
    pieces: list[list[tuple[_Live, int]]] = []
    for one, offset in places:
        if not one.record.nbytes:
            continue
        if pieces and _continues(pieces[-1][-1], one, offset):
            pieces[-1].append((one, offset))
        else:
            pieces.append([(one, offset)])
    return tuple(_span(piece) for piece in pieces)


def _continues(before: tuple[_Live, int], one: _Live, offset: int) -> bool:
    last, last_offset = before
    return last.allocation == one.allocation and one.address - last.address == offset - last_offset


def _span(piece: Sequence[tuple[_Live, int]]) -> Span:
    (first, offset), (last, last_offset) = piece[0], piece[-1]
    if len(piece) == 1:
        return Span(first.source, offset)
    nbytes = last_offset + last.record.nbytes - offset
    return Span(first.source.as_strided((nbytes,), (1,)), offset)
