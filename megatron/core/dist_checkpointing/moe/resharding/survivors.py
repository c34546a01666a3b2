"""Snapshots that another layout of this job left in the memory of the nodes, as a place that all ranks can read.

A job that lost nodes, or got some back, continues in another layout. Its memory then has what the older one made:
shares of survivors, and replicas of the shares of lost ones. Ranks of one node read each other's memory in place, those
of other nodes ask for records (`record_server`). A copy that proves damaged is passed by while another is left.

A recovery finds it next to persistent storage, as snapshots of the new ranks (`store`). None of it is freed before a
snapshot of the new layout is protected (`PreviousLayout`): until then a second fault finds it again.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..policy.lineage import Lineage, newest_first
from ..ports import (
    Json,
    Listing,
    Manifest,
    MappedReader,
    MappedStore,
    OlderMemory,
    ReadableStore,
    Reader,
    SnapshotId,
    Store,
    StoreFailure,
    Transport,
)
from ..storage.filesystem import FilesystemStore
from ..storage.memory import MemoryStore
from ..storage.ownership import OWNER_FILE, SLOT, kept_free, live_owner
from ..storage.slot_reader import SlotReader
from ..types.layout import is_same_layout
from .record_server import RecordServer, RemoteRecords
from .store import AnyCopy, PreviousWindow, ReshardingStore

log = logging.getLogger(__name__)


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of another layout in the memory of a rank, or in a slot of its node that no process has."""

    snapshot: SnapshotId
    timeline: Lineage
    directory: str


class _Slot(msgspec.Struct, array_like=True):
    """What one rank tells the others: where its memory is, and what is in it."""

    node: str
    rows: tuple[_Row, ...]


class _Holder(NamedTuple):
    rank: int
    directory: str


class SurvivingMemory:
    """A place of snapshots for reading; making it is a collective over all ranks.

    Args:
        memory: This rank's slot.
        directory: Where that is on the node, in one folder with the slots of all its processes.
        node: Which all processes of the node, and no others, call it.
        is_older: Whether a manifest is of this job, and of another layout.
        transport: For what all ranks tell each other.
        address: Of this rank, for those of other nodes.
        timeout_s: How long a rank may take to answer.
    """

    def __init__(
        self,
        memory: MappedStore,
        directory: Path,
        node: str,
        is_older: Callable[[Manifest], bool],
        transport: Transport,
        address: str,
        timeout_s: float,
    ) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._server: RecordServer | None = None
        self._remote: dict[int, RemoteRecords] = {}
        self.own = _rows(memory, directory, is_older)
        self.strays = {path: _rows(SlotReader(path), path, is_older) for path in _slots_without_process(directory)}
        own = _Slot(node, (*self.own, *chain.from_iterable(self.strays.values())))
        gathered = transport.gather(msgspec.to_builtins(own))
        self._slots = msgspec.convert(gathered, list[_Slot])
        self._rank, self._places = transport.rank, [""] * transport.world_size
        self._holders = _holders(self._slots, transport.rank)
        if self._holders and len({slot.node for slot in self._slots}) > 1:
            if own.rows:
                self._server = RecordServer(self._open_own, address, timeout_s)
            place: Json = self._server.place if self._server is not None else ""
            try:
                self._places = [str(one) for one in transport.gather(place)]
            except BaseException:  # nobody else has the server, and this process may stay
                self.close()
                raise

    def __str__(self) -> str:
        holders = {one.rank for found in self._holders.values() for one in found}
        return f"memory of rank{'s' * (len(holders) > 1)} {', '.join(map(str, sorted(holders)))}"

    @property
    def is_empty(self) -> bool:
        """Whether nothing of another layout is in any memory; the same on all ranks."""
        return not self._holders

    def snapshots(self) -> Listing:
        """What there is, whoever has it."""
        return Listing(tuple(sorted(self._holders)), ())

    def open(self, snapshot: SnapshotId) -> Reader:
        """A reader of any copy that is whole. Raises UnreadableCheckpoint, PeerLost."""
        holders = self._holders.get(snapshot, ())
        if not holders:
            raise UnreadableCheckpoint(f"the {snapshot} is in no memory of this job")
        copies = ((f"of rank {one.rank}", partial(self._open_at, one, snapshot)) for one in holders)
        return AnyCopy(snapshot, copies)

    def close(self) -> None:
        """Nothing is read any more: all ranks have what they need."""
        self._holders = {}
        for records in self._remote.values():
            records.close()
        self._remote = {}
        if self._server is not None:
            self._server.close()
        self._server = None

    def _open_own(self, snapshot: SnapshotId) -> MappedReader:
        """For ranks of other nodes. Raises UnreadableCheckpoint."""
        named = (row.directory for row in self._slots[self._rank].rows if row.snapshot == snapshot)
        directory = next(named, None)
        return self._memory.open(snapshot) if directory is None else SlotReader(Path(directory)).open(snapshot)

    def _open_at(self, holder: _Holder, snapshot: SnapshotId) -> Reader:
        rank = holder.rank
        if self._slots[rank].node == self._slots[self._rank].node:
            return SlotReader(Path(holder.directory)).open(snapshot)
        if rank not in self._remote:
            self._remote[rank] = RemoteRecords(rank, self._places[rank], self._timeout_s)
        return self._remote[rank].open(snapshot)


def _slots_without_process(directory: Path) -> list[Path]:
    """The slots of snapshots in the folder of a claimed one that no process has; the first claimed one tells."""
    found = sorted(directory.parent.glob(f"{SLOT}-*"))
    claimed = [path for path in found if path == directory or _is_claimed(path)]
    return [path for path in found if path not in claimed] if claimed and claimed[0] == directory else []


def _is_claimed(slot: Path) -> bool:
    try:
        return live_owner(slot / OWNER_FILE) is not None
    except OSError:
        return False


def _is_of_others(slot: SlotReader) -> bool:
    """Whether a later version, or a job with another secret, may want what is there."""
    try:
        return any(torn.is_newer for torn in slot.snapshots().torn)
    except StoreFailure:
        return True


def _remove(strays: Iterable[SlotReader]) -> None:
    """Slots without a process, and its standby areas. Whoever has come since keeps its own."""
    for slot in (stray.directory for stray in strays if not _is_of_others(stray)):
        for area in slot.parent.glob(f"*{slot.name.removeprefix(SLOT)}"):
            with suppress(OSError, StoreFailure), kept_free(area):
                shutil.rmtree(area, ignore_errors=True)


def _rows(memory: MappedStore | SlotReader, directory: Path, is_older: Callable[[Manifest], bool]) -> tuple[_Row, ...]:
    rows: list[_Row] = []
    try:
        listed = memory.snapshots()
    except StoreFailure:  # whoever takes stock of it says so
        return ()
    for snapshot in listed.sealed:
        try:
            with memory.open(snapshot) as reader:
                if is_older(reader.manifest):
                    timeline = msgspec.convert(reader.manifest.facts.scalars.get("timeline"), Lineage)
                    rows.append(_Row(snapshot, timeline, str(directory)))
        except (MoECheckpointError, msgspec.ValidationError) as error:
            log.warning("skipped: %s in memory: %s", snapshot, error)
    return tuple(rows)


def _holders(slots: Sequence[_Slot], reader: int) -> Mapping[SnapshotId, tuple[_Holder, ...]]:
    """Who has each snapshot, those first that `reader` reaches best; of several pasts the newest one."""
    found: dict[SnapshotId, dict[Lineage, list[_Holder]]] = {}
    for rank, slot in enumerate(slots):
        for row in slot.rows:
            found.setdefault(row.snapshot, {}).setdefault(row.timeline, []).append(_Holder(rank, row.directory))
    here = slots[reader].node

    def nearest(holder: _Holder) -> tuple[bool, _Holder]:
        return slots[holder.rank].node != here, holder

    def newest(snapshot: SnapshotId, pasts: Iterable[Lineage]) -> Lineage:
        return newest_first((past, snapshot.iteration) for past in pasts)[0]

    return {snapshot: tuple(sorted(pasts[newest(snapshot, pasts)], key=nearest)) for snapshot, pasts in found.items()}


class PreviousLayout(OlderMemory):
    """Of one rank; making it is a collective over all of them.

    Args:
        job: The job's id.
        node: The name of this rank's.
        memory: The slot of this process.
        persistent: Storage that shows other layouts; None where the job has none.
        without_storage: Makes such a one of `NoStorage`.
        facts: The layout of this job, as manifests have it.
        transport: For what all ranks tell each other.
        address: Of this rank, for those of other nodes.
        waits_s: How long a record of another node may take.
    """

    def __init__(
        self,
        job: str,
        node: str,
        memory: MemoryStore,
        persistent: ReshardingStore | None,
        without_storage: Callable[[], ReshardingStore],
        facts: Mapping[str, Json],
        transport: Transport,
        address: str,
        waits_s: float,
    ) -> None:
        def is_older(manifest: Manifest) -> bool:
            return manifest.facts.job == job and not is_same_layout(manifest.facts.topology, facts)

        self._memory, self._target = memory, 0
        self._surviving = SurvivingMemory(memory, memory.directory, node, is_older, transport, address, waits_s)
        # Taken once: what comes to this slot from here on is of this job's layout.
        self._own = frozenset(row.snapshot for row in self._surviving.own)
        self._strays = tuple(map(SlotReader, self._surviving.strays))
        self._storage = persistent
        if self._surviving.is_empty:  # the same on all ranks
            if persistent is not None:
                persistent.look_together(transport)
            return
        if self._storage is None:
            self._storage = without_storage()
        self._storage.use_memory(self._surviving)

    @property
    def window(self) -> PreviousWindow | None:
        """As `ReshardingStore.previous_window`."""
        return self._storage.previous_window() if self._storage is not None else None

    def copy_to(self, folder: Path) -> None:
        """Copy what other layouts left to a folder, as `ReshardingStore.copy_previous`. Raises StoreFailure."""
        if self._storage is not None:
            self._storage.copy_previous(FilesystemStore(folder, 0))

    @property
    def storage(self) -> Store | None:
        """Where a recovery finds what the older layout left; None where there is nothing, and no storage."""
        return self._storage

    @property
    def unusable(self) -> str:
        """Why nothing of the older layout suffices, where a recovery found that; empty if there is nothing of it."""
        listed = sorted({snapshot.iteration for snapshot in self._surviving.snapshots().sealed})
        if not listed:
            return ""
        return (
            f"{self._surviving} has shares of iteration {', '.join(map(str, listed))} in another layout, but not the"
            " others, which are nowhere: nodes are gone that had no replicas elsewhere"
        )

    def strays(self) -> Sequence[ReadableStore]:
        """As `OlderMemory.strays`, for the first process of a node."""
        return self._strays

    def timelines(self) -> Collection[Lineage]:
        """Of what other layouts left."""
        return self._storage.timelines if self._storage is not None else ()

    def is_shown(self, snapshot: SnapshotId) -> bool:
        """As `OlderMemory.is_shown`, of `storage`."""
        return (snapshot.iteration, snapshot.kind) in {
            (one.iteration, one.kind) for one in self._surviving.snapshots().sealed
        }

    def is_spared(self, snapshot: SnapshotId) -> bool:
        """Whether what lies in this rank's slot under this name is of the older layout, and still needed."""
        return snapshot in self._own

    def restored(self, target: int) -> None:
        """All ranks have restored the state after iteration `target`: nothing is read any more, and what is newer than
        that, which did not suffice, is freed."""
        # All have restored, so no other rank asks this one for records any more.
        self.close()
        self._target = target
        self._free(frozenset(snapshot for snapshot in self._own if snapshot.iteration > target))

    def protected(self, iteration: int | None) -> None:
        """The newest iteration that is protected in the layout of now: nobody comes back to an older one's."""
        if (self._own or self._strays) and iteration is not None and iteration > self._target:
            self._free(self._own)
            strays, self._strays = self._strays, ()
            if strays:  # a whole node's memory takes seconds, for which training's thread does not wait
                threading.Thread(target=_remove, args=(strays,), name="moe-ckpt-strays", daemon=True).start()

    def discard(self) -> None:
        """Training begins from another state."""
        self.close()
        self._free(self._own)
        _remove(self._strays)
        self._strays = ()

    def close(self) -> None:
        """Read nothing any more; what is there stays."""
        if not self._surviving.is_empty and self._storage is not None:
            self._storage.use_memory(None)
        self._surviving.close()

    def _free(self, gone: frozenset[SnapshotId]) -> None:
        # Also what cannot be freed counts as gone: it is not tried again.
        self._own -= gone
        for snapshot in gone:
            try:
                self._memory.free(snapshot)
            except StoreFailure as error:
                log.error("cannot free memory of the previous layout: %s", error)
