"""How snapshots travel between the memories of ranks in a recovery.

Whoever found a snapshot that another rank needs is asked for it (`sources.requested`), and sends its manifest and
bytes; that rank receives them, verifies every checksum, and refuses what is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from ..ports import MappedStore, NoRoom, PeerLost, Reader, SnapshotId, StoreFailure, Transport
from ..replication.receiver import StoreReplica
from ..storage.base import HostBuffer
from ..storage.manifest import decode, encode
from ..types import GRADIENTS, LOG
from .inventory import CopyLocation
from .sources import SnapshotRequest, Travels

_SIZES = struct.Struct("<qq")
_MOST_BYTES = 1 << 40

Landing = StoreReplica | HostBuffer
"""Where a snapshot that travels arrives."""


@dataclass(frozen=True)
class SnapshotFetcher:
    """Carries them from the memory of one rank to that of another.

    transport: used by nobody else meanwhile. store_of: the part of this rank's memory in which such a snapshot lies.
    """

    transport: Transport
    store_of: Callable[[SnapshotId], MappedStore]

    def carry(self, travels: Iterable[Travels]) -> tuple[dict[CopyLocation, Reader], dict[CopyLocation, str]]:
        """Send and receive, in this order.

        Returns readers of what arrived here, verified, and the reasons for what did not. Raises PeerLost.
        """
        arrived: dict[CopyLocation, Reader] = {}
        refused: dict[CopyLocation, str] = {}
        for step in travels:
            if (need := step.need) is None:
                self._send(step.to, step.snapshot)
                continue
            try:
                arrived[need.found.place] = self._receive(need)
            except (UnreadableCheckpoint, StoreFailure) as error:
                refused[need.found.place] = str(error)
        return arrived, refused

    def _send(self, to: int, snapshot: SnapshotId) -> None:
        try:
            reader = self.store_of(snapshot).open(snapshot)
        except (UnreadableCheckpoint, StoreFailure):
            self.transport.send(to, _SIZES.pack(-1, 0)).wait()
            return
        with reader:
            manifest, raw = encode(reader.manifest), reader.raw()
            messages = (_SIZES.pack(len(manifest), len(raw)), manifest, raw)
            for transfer in [self.transport.send(to, message) for message in messages]:
                transfer.wait()

    def _receive(self, need: SnapshotRequest) -> Reader:
        transport, source = self.transport, need.found.finder
        sizes = bytearray(_SIZES.size)
        transport.receive(source, memoryview(sizes)).wait()
        manifest_bytes, raw_bytes = _SIZES.unpack(sizes)
        if manifest_bytes < 0:
            raise UnreadableCheckpoint(f"rank {source} could not open the {need.found.snapshot}")
        manifest = _memory(manifest_bytes, source)
        transport.receive(source, memoryview(manifest)).wait()
        landing, problem = self._landing(source, bytes(manifest), raw_bytes)
        try:
            transport.receive(source, landing.buffer if landing else memoryview(_memory(raw_bytes, source))).wait()
            if landing is None:
                raise UnreadableCheckpoint(problem)
            landing.seal()
        except MoECheckpointError:
            if landing is not None:
                landing.abandon()
            raise
        return landing.reader()

    def _landing(self, source: int, manifest: bytes, raw_bytes: int) -> tuple[Landing | None, str]:
        """A place for what comes; without one the bytes are still taken off the wire."""
        try:
            landing = self._land(source, manifest)
        except (UnreadableCheckpoint, StoreFailure) as error:
            return None, str(error)
        if len(landing.buffer) != raw_bytes:
            landing.abandon()
            return None, f"rank {source} sends {raw_bytes} bytes, but its manifest has {len(landing.buffer)}"
        return landing, ""

    def _land(self, source: int, manifest: bytes) -> Landing:
        """State lands in the store where it belongs, or in host memory where that has no room; what only this recovery
        needs in host memory. Raises UnreadableCheckpoint, StoreFailure."""
        wanted = decode(manifest, f"manifest from rank {source}")
        if wanted.snapshot.kind in (LOG, GRADIENTS):
            return HostBuffer(source, wanted)
        store = self.store_of(wanted.snapshot)
        store.free(wanted.snapshot)  # a copy that is here already has proved damaged, or it would not be fetched
        try:
            return StoreReplica(store, store.reserve(wanted.snapshot, wanted.layout), wanted)
        except (NoRoom, UsageError):  # segments are too small until the strategy knows how large its snapshots are
            return HostBuffer(source, wanted)


def _memory(nbytes: int, source: int) -> bytearray:
    """Raises PeerLost for a size that cannot be meant: whatever comes next on this connection is not understood."""
    try:
        if nbytes > _MOST_BYTES:
            raise OverflowError
        return bytearray(nbytes)
    except (MemoryError, ValueError, OverflowError) as error:
        raise PeerLost(f"rank {source} announced {nbytes} bytes, which cannot be: the connection is bad") from error
