"""Any stored state as named values, read one at a time: what comparisons go over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Reader, Record, SnapshotId, Store
from megatron.core.dist_checkpointing.moe.types import OperatorId

from ..dense.blocks import BLOCK_ELEMENTS, Placed, blocks
from ..dense.canonical import leaves
from ..dense.chain import stacked_name, stacked_object_name
from ..dense.dense import DenseCheckpoint, open_dense
from ..dense.digest import state_entries
from ..dense.merged import ExpertTensor, MergedCheckpoint, open_merged
from .windows import StoredSnapshot, read_stored, restorable, stored_snapshots

# What a manifest has of the job that made the snapshot, and not of the state that it is a part of.
_OF_THE_JOB = frozenset({"left_out", "made_by", "operators", "strategy", "timeline", "window"})
_COMMAND = "trainer.command."
type _Stacked = tuple[OperatorId, ExpertTensor, DenseCheckpoint]
"""A tensor of one expert, and the iteration that it is loaded from."""


@dataclass(frozen=True)
class LoadedValue:
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
class StateView:
    """What of a place is compared: `what` it is, for people, and its values. is_dense: a checkpoint of Megatron's."""

    what: str
    is_dense: bool
    values: tuple[LoadedValue, ...] = field(repr=False)


def dense_view(folder: str) -> StateView:
    """An iteration, or the one that a --save folder's tracker names. One with some of the experts is put together with
    those that hold the others. Raises UnreadableCheckpoint.
    """
    merged = open_merged(folder)
    lacks_experts = merged is not None and not merged.chain.is_complete
    values = _merged_values(merged) if merged and lacks_experts else _dense_values(open_dense(folder))
    return StateView(folder, True, tuple(values))


def storage_view(place: str, store: Store) -> StateView:
    """The newest state that storage restores, with the older snapshots that it needs.

    Raises UnreadableCheckpoint, StoreFailure.

    Args:
        place: Name of the storage for titles and errors.
        store: Opens the snapshots of the storage.
    """
    found, readers = next(restorable(stored_snapshots(store)), None), _OpenReader(store)
    if found is None:
        raise UnreadableCheckpoint(f"{place} has no state that can be restored; moe-ckpt verify says what is missing")
    values = (
        value for stored in found.members for value in _snapshot_values(readers, stored, f"{stored.snapshot.name}/")
    )
    return StateView(f"{found.state} in {place}", False, tuple(values))


def snapshot_view(place: str, store: Store, snapshot: SnapshotId) -> StateView:
    """One snapshot by itself. Raises UnreadableCheckpoint, StoreFailure.

    Args:
        place: Name of the snapshot for titles and errors.
        store: Opens the snapshot.
        snapshot: Iteration, rank and kind of the snapshot.
    """
    return StateView(place, False, tuple(_snapshot_values(_OpenReader(store), read_stored(store, snapshot))))


def _dense_values(checkpoint: DenseCheckpoint) -> Iterator[LoadedValue]:
    for entry in state_entries(checkpoint):
        if entry.tensor is None:
            yield LoadedValue(entry.name, entry.read)
        else:
            yield LoadedValue(entry.name, entry.read, entry.tensor.dtype, entry.tensor.shape)


def _merged_values(merged: MergedCheckpoint) -> Iterator[LoadedValue]:
    """Those of the ordinary checkpoint that an export of it would be."""
    chain = merged.chain
    of_experts = merged.experts[chain.iteration].names
    yield from (value for value in _dense_values(merged.newest) if value.name not in of_experts)
    stacks: dict[str, list[_Stacked]] = {}
    for operator in chain.experts:
        for common, tensor, part in merged.tensors_of(operator):
            name = stacked_name(common, operator.layer, chain.stacked_layers)
            stacks.setdefault(name, []).append((operator, tensor, part))
        for common, name, part in merged.objects_of(operator):
            yield LoadedValue(stacked_object_name(chain, common, operator), partial(part.read_object, name))
    for name, experts in stacks.items():
        _, first, _ = experts[0]
        shape = (*chain.leading_axes, *first.shape)
        pieces = tuple(_pieces(merged, name, experts))
        yield LoadedValue(name, partial(blocks, shape, first.dtype, pieces, BLOCK_ELEMENTS), first.dtype, shape)


def _pieces(merged: MergedCheckpoint, name: str, experts: Iterable[_Stacked]) -> Iterator[Placed]:
    """Where each expert has its pieces in the tensor that all of them make."""
    for operator, tensor, part in experts:
        for piece, kept in merged.stacked_pieces(operator, tensor):
            yield Placed(piece.offsets, piece.sizes, partial(part.read_piece, name, tensor.dtype, kept))


def _snapshot_values(readers: _OpenReader, stored: StoredSnapshot, before: str = "") -> Iterator[LoadedValue]:
    """Records by their keys, and the trainer's state in the manifest; names begin with `before`."""
    for record in readers.open(stored.snapshot).manifest.records:
        read = partial(readers.tensor, stored.snapshot, record)
        yield LoadedValue(f"{before}{record.key}", read, getattr(torch, record.field.dtype), record.field.shape)
    of_state = {name: value for name, value in stored.facts.scalars.items() if name not in _OF_THE_JOB}
    for name, value in leaves(of_state):
        if not name.startswith(_COMMAND):
            yield LoadedValue(f"{before}{name}", partial(_same, value))


class _OpenReader:
    """Reads snapshots of a store, of which the one asked for last stays open: values are read one after the other."""

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
    """A verified record, copied out of its snapshot. Raises UnreadableCheckpoint.

    Args:
        reader: The open snapshot; it verifies the record.
        record: Key, dtype and shape of the tensor.
    """
    dtype = getattr(torch, record.field.dtype)
    # A copy: torch would warn of read-only memory, and a view would keep the snapshot from being freed.
    data = bytearray(reader.read(record.key))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(record.field.shape)


def _same(value: Any) -> Any:
    return value
