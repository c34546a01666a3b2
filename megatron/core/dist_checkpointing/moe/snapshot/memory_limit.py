"""What checkpoints may take of the memory of each node, and asking for less where that is too little.

Every rank takes as much as every other, so the tightest node decides for all: its ranks share what the flag allows it,
or what the memory dir has free there beside what they hold already. It is looked at before anything is taken.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter, or_
from pathlib import Path

import msgspec

from ..errors import CheckpointFailure, MoECheckpointError
from ..ports import Capturer, MappedStore, Transport
from ..replication.agreement import exchanged, merged
from ..strategies import BufferSpec, Job, Strategy
from ..strategies.memory_report import MemoryLimit, MemoryReport, memory_report, segment_bytes
from ..types import OperatorId, OperatorKind, OperatorSize, Part, full_plan
from ..types.layout import aligned
from ..types.operators import scaled

log = logging.getLogger(__name__)

# How much memory a strategy's specs take: the same segments on all ranks.


def segment_sizes(
    specs: Sequence[BufferSpec], capturer: Capturer, transport: Transport, owners: Sequence[int]
) -> list[int]:
    """Bytes of each segment: as many, and as large, as any rank needs, so that a restart may place any rank anywhere.

    Of specs that ask for as many segments a rank needs those of which it owns something, which differ from rank to
    rank: their largest ones are matched with each other, then their second largest, and so on.
    A collective over all ranks.

    Args:
        specs: What the strategy asks for, the same on all ranks.
        capturer: Gives the layouts of this rank's pieces.
        transport: To all ranks.
        owners: Ranks whose replicas this one keeps.

    Raises:
        PeerLost: A rank did not answer.
    """
    needed = [
        max(capturer.layout(plan, trainer=spec.trainer).nbytes for plan in (spec.largest, *spec.also)) for spec in specs
    ]
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for spec, nbytes in zip(specs, needed, strict=True):
        alike.setdefault((spec.own, spec.replica, bool(spec.also)), []).append(nbytes)
    # Negated, as the transport knows the least only: the least of negative sizes is the largest of any rank.
    largest = iter(transport.least([-nbytes for some in alike.values() for nbytes in sorted(some, reverse=True)]))
    sizes: list[int] = []
    for (own, replica, varies), some in alike.items():
        for at, negative in enumerate(islice(largest, len(some))):
            nbytes = segment_bytes(-negative, varies=varies)
            if nbytes or not at:
                sizes += [max(1, nbytes)] * (own + replica * len(owners))
    return sizes


def fit_memory(memory: MappedStore, sizes: Sequence[int], transport: Transport) -> tuple[bool, str]:
    """Give memory these segments; a collective over all ranks.

    Args:
        memory: Keeps snapshots.
        sizes: Bytes of each segment.
        transport: To all ranks.

    Returns:
        Whether all ranks have them, and why this one has not; empty where it has.

    Raises:
        PeerLost: A rank did not answer.
    """
    why = ""
    try:
        memory.resize(sizes)
    except MoECheckpointError as error:
        why = str(error)
    # Also a rank that was refused answers: the others wait in this collective.
    (done,) = transport.least([int(not why)])
    return bool(done), why


def gathered_sizes(
    capturer: Capturer, transport: Transport, *, of_all: bool
) -> dict[int, dict[OperatorId, OperatorSize]]:
    """What `operator_sizes` gives, by rank: here, and on the lowest of the ranks that have the same.

    Args:
        capturer: Gives the layouts of this rank.
        transport: To all ranks.
        of_all: Whether other ranks are asked, in a collective: all ranks say the same.
    """
    sizes = operator_sizes(capturer)
    if not of_all:
        return {transport.rank: sizes}
    # On its way up the tree a row stays as it was encoded: those of replicas are equal to the byte.
    own = msgspec.msgpack.encode(
        [(one.layer, one.kind.value, one.expert, size.full_bytes, size.weights_bytes) for one, size in sizes.items()]
    )
    rows = list[tuple[bytes, int]]

    def distinct(first: list[tuple[bytes, int]], second: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        return list({**dict(second), **dict(first)}.items())

    found = merged(transport, [(own, transport.rank)], rows, distinct)
    reader = msgspec.msgpack.Decoder(list[tuple[int, int, int, int, int]])
    return {
        rank: {
            OperatorId(layer, OperatorKind(kind), expert): OperatorSize(full, weights)
            for layer, kind, expert, full, weights in reader.decode(row)
        }
        for row, rank in sorted(found, key=itemgetter(1))
    } | {transport.rank: sizes}


_OWNED, _CHANGED = 1, 2


def gathered_unchanging(
    own: frozenset[OperatorId], operators: frozenset[OperatorId], model: Sequence[OperatorId], transport: Transport
) -> frozenset[OperatorId]:
    """What no rank that owns a part of it changes; a collective over all ranks.

    Experts count only where none of them changes: what strategies know of the load of layers is by expert, of all.

    Args:
        own: What this rank does not change.
        operators: What this rank owns a part of.
        model: All operators, the same on all ranks.
        transport: To all ranks.
    """
    if transport.total([len(own)]) == (0,):  # mostly
        return frozenset()
    flags = bytes((one in operators) * (_OWNED if one in own else _OWNED | _CHANGED) for one in model)

    def either(first: bytes, second: bytes) -> bytes:
        return bytes(map(or_, first, second))

    found = dict(zip(model, transport.merge(flags, either), strict=True))
    experts_stay = not any(one.is_expert and flag & _CHANGED for one, flag in found.items())
    return frozenset(one for one, flag in found.items() if flag == _OWNED and (experts_stay or not one.is_expert))


def operator_sizes(capturer: Capturer) -> dict[OperatorId, OperatorSize]:
    """Bytes of what this rank owns of each of its operators."""
    full, weights = (_bytes_by_operator(capturer, part) for part in (Part.MASTER_AND_MOMENTS, Part.COMPUTE))
    return {operator: OperatorSize(full[operator], weights[operator]) for operator in sorted(capturer.operators)}


def memory_report_of(
    specs: tuple[BufferSpec, ...], job: Job, rank: int, owners: int, log_bytes: int = 0
) -> MemoryReport | None:
    """What the buffers hold on this rank, and its boundary logs, as MoEvement Table 6 counts it.

    Args:
        specs: The buffers that are there.
        job: Has the sizes of operators, by rank.
        rank: This rank.
        owners: How many ranks' replicas it keeps.
        log_bytes: What boundary logs take besides.

    Returns:
        The report; None where the sizes of this rank are not known.
    """
    if rank not in job.sizes:
        return None
    return replace(memory_report(specs, job.sizes[rank], owners), log_bytes=log_bytes)


def _bytes_by_operator(capturer: Capturer, part: Part) -> dict[OperatorId, int]:
    found = dict.fromkeys(capturer.operators, 0)
    for field in capturer.layout(full_plan(0, capturer.operators, part)).fields:
        if field.operator is not None:
            found[field.operator] += field.nbytes
    return found


UNBOUNDED = sys.maxsize


@dataclass(frozen=True)
class MemoryBound:
    """Bytes that each rank may take in all, on the tightest node, of `ranks` ranks; why: what bounds it."""

    nbytes: int = UNBOUNDED
    ranks: int = 1
    why: str = "no limit"

    def shortage(self, nbytes: int) -> str:
        """What is wrong with taking so many bytes on each rank; empty where nothing is."""
        if nbytes <= self.nbytes:
            return ""
        taken, limit = scaled(nbytes * self.ranks), scaled(self.nbytes * self.ranks)
        return f"not enough memory: checkpoints need {taken} per node ({self.ranks} ranks), limit {limit}: {self.why}"

    def __str__(self) -> str:
        return self.why if self.nbytes == UNBOUNDED else scaled(self.nbytes * self.ranks)


def _tighter(first: MemoryBound, second: MemoryBound) -> MemoryBound:
    return second if second.nbytes < first.nbytes else first


@dataclass(frozen=True)
class NodeMemory:
    """The memory of this process's node.

    Args:
        ranks: Of this node.
        limit: Of the flag.
        total_bytes: What the node has, as far as this process's control group lets it.
        folder: The memory dir.
        held: Bytes there that this process holds already, or that an earlier one left to it.
        counts_free: Whether what the folder has free is a bound; else taking it fails where it is too little.
        counts_total: Whether `total_bytes` is one.
    """

    ranks: Sequence[int]
    limit: MemoryLimit | None
    total_bytes: int
    folder: Path
    held: Callable[[], int]
    counts_free: bool = True
    counts_total: bool = False

    def room(self, transport: Transport) -> MemoryBound:
        """For each rank on the tightest node; a collective. Raises PeerLost."""
        # A tmpfs may be larger than its control group, whose processes the kernel kills where it takes too much.
        whole = self.total_bytes if self.counts_total else UNBOUNDED
        allowed = whole if self.limit is None else self.limit.of_node(self.total_bytes)
        mine = allowed, self._free_bytes(), self.held()
        # Ranks of a node tell the first of them, so that no rank gets what all have.
        rows = [row for _, row in exchanged(transport, {min(self.ranks): mine}, tuple[int, int, int])]
        return merged(transport, self._bound(rows) if rows else MemoryBound(), MemoryBound, _tighter)

    def _bound(self, rows: Sequence[tuple[int, int, int]]) -> MemoryBound:
        # All ranks of a node see one file system, at slightly different times: the least that one saw free counts.
        # What they hold already is room too, since segments are used again or given back.
        by_flag, by_folder = min(row[0] for row in rows), min(row[1] for row in rows) + sum(row[2] for row in rows)
        why = "--moe-ckpt-memory-limit"
        if self.limit is None:
            why = "the node, or the control group of this job, has no more; give the job more, or a memory limit"
        if by_folder < by_flag:
            why = f"{self.folder} is not larger; enlarge the tmpfs (mount -o remount,size=...)"
        bound = min(by_flag, by_folder)
        return MemoryBound(bound // len(rows), len(rows), why) if bound < UNBOUNDED else MemoryBound(ranks=len(rows))

    def _free_bytes(self) -> int:
        if not self.counts_free or not self.folder.is_dir():
            return UNBOUNDED
        found = os.statvfs(self.folder)
        # A file system without a limit of its own says that it has no blocks.
        return found.f_bavail * found.f_frsize if found.f_blocks else UNBOUNDED


@dataclass(frozen=True)
class BufferAllocator:
    """With what memory for snapshots is taken.

    Args:
        room: What there is; a collective.
        standby_bytes: What logs of so many iterations, and parked state, take beside it.
        strict: Whether asking for less ends training.
    """

    memory: MappedStore
    capturer: Capturer
    control: Transport
    owners: Sequence[int]
    room: Callable[[], MemoryBound] = MemoryBound
    standby_bytes: Callable[[int], int] = lambda logged: 0
    strict: bool = False

    def fit(self, strategy: Strategy, specs: tuple[BufferSpec, ...]) -> tuple[tuple[BufferSpec, ...], bool]:
        """Give memory what a strategy asks for, or what it then asks for instead; a collective over all ranks.

        Args:
            strategy: Is asked, and gives things up where memory is too small.
            specs: The buffers that are there.

        Returns:
            The buffers that are there now, and whether anything was given up.

        Raises:
            PeerLost: A rank did not answer.
            CheckpointFailure: Memory is too small, and `strict` is set.
        """
        # The tightest node's room is the same on all ranks, and so is each answer below: all make as many turns of this
        # loop, each of which has collectives.
        room, gave_up = self.room(), False
        while (wanted := strategy.buffer_specs()) != specs:
            sizes = segment_sizes(wanted, self.capturer, self.control, self.owners)
            # Agreed on: a rank whose logs once found no room has fewer of them, and would decide by itself.
            (negative,) = self.control.least([-taken_bytes(sizes) - self.standby_bytes(strategy.logged)])
            # A strategy that gave up takes no snapshots: the little that it asks for then is tried, not measured.
            shortage = "" if strategy.gave_up else room.shortage(-negative)
            if not shortage:
                done, why = fit_memory(self.memory, sizes, self.control)
                if done:
                    return wanted, gave_up
                shortage = why or "another rank has no memory for its snapshots"
            gave_up = True
            if not ask_for_less(strategy, shortage, speaks=self.control.rank == 0, strict=self.strict):
                break
        return specs, gave_up


def taken_bytes(sizes: Sequence[int]) -> int:
    """What segments of these sizes take: whole pages."""
    return sum(aligned(size, mmap.PAGESIZE) for size in sizes)


def ask_for_less(strategy: Strategy, shortage: str, *, speaks: bool, strict: bool = False) -> bool:
    """Let a strategy give something up, and say what.

    Args:
        strategy: Of this rank; all ranks call it alike.
        shortage: Says as a sentence where memory is too small.
        speaks: Whether this rank logs it.
        strict: Whether that ends training.

    Returns:
        Whether there was anything to give up.

    Raises:
        CheckpointFailure: Where `strict`.
    """
    instead = strategy.buffers_refused()
    if strict:
        raise CheckpointFailure(f"{shortage}; training ends because of --moe-ckpt-strict")
    if instead and speaks:
        log.warning("%s; %s", shortage, instead)
    return bool(instead)
