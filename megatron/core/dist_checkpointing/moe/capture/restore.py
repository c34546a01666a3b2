"""Puts the records of snapshots back into the live state of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from ..errors import UnreadableCheckpoint
from ..types import OperatorId, Part
from .operators import StateTensor

NAN = float("nan")
_NAMED = 3


class LiveRestorer:
    """The `ports.Restorer` of live tensors.

    tensors: all state of this rank, or what enumerates it; asked at each `poison`, and before the first `restore`.
    complete: makes the compute weights whole on all ranks, a collective; with True it first derives this rank's from
        its master weights. `recast_compute_weights` and `gather_compute_weights` of `runtime/megatron.py`.
    gather: as `complete` with False, for `refresh`.
    settle: waits for what may still write to live weights (`settle_gathers`), before anything is written here.
    derived: tensors that hold copies of other ranks' state, which `complete` overwrites: poisoned too.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[StateTensor]] | Sequence[StateTensor],
        complete: Callable[[bool], None],
        *,
        gather: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        derived: Sequence[torch.Tensor] = (),
    ) -> None:
        self._enumerate = tensors if callable(tensors) else lambda: tensors
        self._complete, self._gather, self._settle, self._derived = complete, gather, settle, derived
        self._tensors: tuple[StateTensor, ...] | None = None
        self._written: set[str] = set()
        self._fresh: set[str] = set()  # of these, what was written since the last refresh
        self._is_settled = False

    def poison(self) -> None:
        """As `ports.Restorer.poison`; integers get -1, or their largest value."""
        with torch.no_grad():
            for tensor in (*self._derived, *(one.tensor for one in self._begin())):
                tensor.fill_(_poison_of(tensor.dtype))

    def restore(self, read: Callable[[str], memoryview], parts: Mapping[Part, Collection[OperatorId]]) -> int:
        """As `ports.Restorer.restore`. A part of an operator is what state has any of its components."""
        tensors = self._begin() if self._tensors is None else self._tensors
        if not self._is_settled:
            self._settle()
            self._is_settled = True
        chosen = {part: frozenset(operators) for part, operators in parts.items()}
        copied_bytes = 0
        for tensor in tensors:
            if any(tensor.serves(part) and tensor.operator in operators for part, operators in chosen.items()):
                _write(tensor, read(tensor.key))
                self._fresh.add(tensor.key)
                copied_bytes += tensor.nbytes
        self._written |= self._fresh
        return copied_bytes

    def refresh(self) -> None:
        """As `ports.Restorer.refresh`: the same cast, tensor by tensor, that Megatron's optimizers end their step with.

        Tensors of which nothing was restored are not touched: a frozen operator's master weights may still be NaN.
        """
        tensors = self._begin() if self._tensors is None else self._tensors
        masters = {one.shard: one for one in tensors if one.field == "master" and one.key in self._fresh}
        with torch.no_grad():
            for one in tensors:
                if one.field == "compute" and one.key not in self._fresh and one.shard in masters:
                    one.tensor.copy_(masters[one.shard].tensor)
        self._gather()
        self._fresh, self._is_settled = set(), False

    def missing(self, frozen: Collection[OperatorId] = ()) -> str:
        """As `ports.Restorer.missing`: of operators that are trained, master weights and moments."""
        held_back = frozenset(frozen)
        required = [one.key for one in self._not_written() if _is_required(one, one.operator in held_back)]
        if not required:
            return ""
        named = ", ".join(required[:_NAMED]) + (", ..." if len(required) > _NAMED else "")
        return f"{len(required)} tensors of this rank's state were not restored from any snapshot: {named}"

    def complete(self) -> None:
        """As `ports.Restorer.complete`; compute weights that were not restored to the last one are derived anew."""
        if why := self.missing():
            raise UnreadableCheckpoint(why)
        self._complete(bool(self._not_written()))
        self._tensors = None

    def _not_written(self) -> list[StateTensor]:
        tensors = self._begin() if self._tensors is None else self._tensors
        return [one for one in tensors if one.key not in self._written]

    def _begin(self) -> tuple[StateTensor, ...]:
        self._settle()
        self._tensors, self._written, self._fresh = tuple(self._enumerate()), set(), set()
        self._is_settled = True
        return self._tensors


def _is_required(tensor: StateTensor, is_frozen: bool) -> bool:
    return tensor.serves(Part.WEIGHTS) if is_frozen else tensor.part is not Part.COMPUTE


def _write(tensor: StateTensor, data: memoryview) -> None:
    if data.nbytes != tensor.nbytes:
        raise UnreadableCheckpoint(
            f"record {tensor.key} has {data.nbytes} bytes, but its tensor has {tensor.nbytes}: the snapshot is of"
            " another model or another layout of ranks"
        )
    if not data.nbytes:
        return
    with torch.no_grad():
        live = tensor.tensor.view(torch.uint8)
        host = live if live.device.type == "cpu" else torch.empty(tensor.nbytes, dtype=torch.uint8)
        np.copyto(host.numpy(), np.frombuffer(data, np.uint8))
        if host is not live:
            live.copy_(host)


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return NAN
    if dtype is torch.bool:
        return True
    return -1 if dtype.is_signed else torch.iinfo(dtype).max
