"""Any stored state as named values, read one at a time: what comparisons go over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from ..errors import UnreadableCheckpoint, UsageError
from ..ports import Reader, Record, SnapshotId, Store
from ..store.blocks import BLOCK_ELEMENTS, Placed, blocks
from ..store.canonical import leaves
from ..store.chain import stacked_name, stacked_object_name
from ..store.dense import DenseCheckpoint, open_dense
from ..store.digest import state_entries
from ..store.merged import ExpertTensor, MergedCheckpoint, open_merged
from ..types import OperatorId, expert
from .recognition import Content, Recognized
from .storage import open_storage, snapshot_at
from .windows import Stored, read_stored, restorable, stored

# What a snapshot says of the job that made it, and not of the state that it is a part of.
_SAID_OF_THE_JOB = frozenset({"made_by", "operators", "strategy", "timeline", "window"})
_COMMAND = "trainer.command."


@dataclass(frozen=True)
class Value:
    """One named value: a tensor of `dtype` and `shape`, or anything else, which has neither.

    read: gives it, on the CPU; of a tensor the elements in row-major order, flat, in blocks that are the same for all
    tensors of one shape. Raises UnreadableCheckpoint.
    """

    name: str
    read: Callable[[], Any] = field(repr=False)
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 for anything else."""
        return prod(self.shape) * self.dtype.itemsize if self.dtype else 0


@dataclass(frozen=True)
class View:
    """What of a place is compared: `what` it is, for people, and its values. is_dense: a checkpoint of Megatron's."""

    what: str
    is_dense: bool
    values: tuple[Value, ...] = field(repr=False)


def view(place: Recognized) -> View:
    """The state at a place: an iteration, the one that a --save folder's tracker names, a snapshot, or the newest state
    that storage restores, with the older snapshots that it needs. A checkpoint with some of the experts is put together
    with those that hold the others.

    Raises UsageError for the memory tier, which holds no single state; UnreadableCheckpoint, StoreFailure.
    """
    if place.content in (Content.ITERATION, Content.SAVES):
        merged = open_merged(place.path)
        whole = merged is None or merged.chain.is_complete
        values = _dense_values(open_dense(place.path)) if whole else _merged_values(merged)
        return View(place.place, True, tuple(values))
    if place.content is Content.STORAGE:
        return _of_storage(place)
    if place.content is Content.SNAPSHOT:
        return _of_snapshot(place)
    raise UsageError(
        f"{place.place} is the {place.content.value}, which holds no single state: give a checkpoint, or a"
        " --moe-ckpt-persist-dir"
    )


def _of_storage(place: Recognized) -> View:
    store = open_storage(place.place)
    found, snapshots = next(restorable(stored(store)), None), _Snapshots(store)
    if found is None:
        raise UnreadableCheckpoint(
            f"{place.place} has no state that can be restored; moe-ckpt verify says what is missing"
        )
    values = (value for one in found.members for value in _snapshot_values(snapshots, one, f"{one.snapshot.name}/"))
    return View(f"{found.state} in {place.place}", False, tuple(values))


def _of_snapshot(place: Recognized) -> View:
    storage, snapshot = snapshot_at(place.place)
    store = open_storage(storage)
    return View(place.place, False, tuple(_snapshot_values(_Snapshots(store), read_stored(store, snapshot))))


def _dense_values(checkpoint: DenseCheckpoint) -> Iterator[Value]:
    for entry in state_entries(checkpoint):
        if entry.tensor is None:
            yield Value(entry.name, entry.read)
        else:
            yield Value(entry.name, entry.read, entry.tensor.dtype, entry.tensor.shape)


def _merged_values(merged: MergedCheckpoint) -> Iterator[Value]:
    """Those of the ordinary checkpoint that an export of it would be."""
    chain = merged.chain
    of_experts = merged.experts[chain.iteration].names
    yield from (value for value in _dense_values(merged.newest) if value.name not in of_experts)
    stacks: dict[str, dict[OperatorId, ExpertTensor]] = {}
    for operator in (expert(layer, index) for layer, row in chain.holders.items() for index in range(len(row))):
        held, part = merged.experts[chain.holder(operator)], merged.parts[chain.holder(operator)]
        for common, tensor in held.tensors.get(operator, {}).items():
            stacks.setdefault(stacked_name(common, operator.layer, chain.stacked_layers), {})[operator] = tensor
        for common, name in held.objects.get(operator, {}).items():
            yield Value(stacked_object_name(chain, common, operator), partial(part.read_object, name))
    for name, experts in stacks.items():
        first = next(iter(experts.values()))
        shape = (*chain.leading_axes, *first.shape)
        pieces = tuple(_pieces(merged, name, experts))
        yield Value(name, partial(blocks, shape, first.dtype, pieces, BLOCK_ELEMENTS), first.dtype, shape)


def _pieces(merged: MergedCheckpoint, name: str, experts: Mapping[OperatorId, ExpertTensor]) -> Iterator[Placed]:
    """Where each expert has its pieces in the tensor that all of them make."""
    for operator, tensor in experts.items():
        part = merged.parts[merged.chain.holder(operator)]
        for piece, kept in merged.stacked_pieces(operator, tensor):
            yield Placed(piece.offsets, piece.sizes, partial(part.read_piece, name, tensor.dtype, kept))


def _snapshot_values(snapshots: _Snapshots, one: Stored, before: str = "") -> Iterator[Value]:
    """Records by their keys, and what a snapshot says of the trainer; names begin with `before`."""
    for record in snapshots.open(one.snapshot).manifest.records:
        read = partial(snapshots.tensor, one.snapshot, record)
        yield Value(f"{before}{record.key}", read, getattr(torch, record.field.dtype), record.field.shape)
    said = {name: value for name, value in one.facts.scalars.items() if name not in _SAID_OF_THE_JOB}
    for name, value in leaves(said):
        if not name.startswith(_COMMAND):
            yield Value(f"{before}{name}", partial(_same, value))


class _Snapshots:
    """Snapshots of a store, of which the one asked for last stays open: values are read one after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: tuple[SnapshotId, Reader] | None = None

    def open(self, snapshot: SnapshotId) -> Reader:
        if self._last is None or self._last[0] != snapshot:
            if self._last is not None:
                self._last[1].close()
            self._last = snapshot, self._store.open(snapshot)
        return self._last[1]

    def tensor(self, snapshot: SnapshotId, record: Record) -> Iterator[torch.Tensor]:
        """A verified record, which is one block. Raises UnreadableCheckpoint."""
        yield read_tensor(self.open(snapshot), record).reshape(-1)


def read_tensor(reader: Reader, record: Record) -> torch.Tensor:
    """A verified record, copied out of its snapshot. Raises UnreadableCheckpoint."""
    dtype = getattr(torch, record.field.dtype)
    # A copy: torch would warn of read-only memory, and a view would keep the snapshot from being freed.
    data = bytearray(reader.read(record.key))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(record.field.shape)


def _same(value: Any) -> Any:
    return value
