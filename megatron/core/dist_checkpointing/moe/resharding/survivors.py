"""Snapshots that another layout of this job left in the memory of the nodes, as a place that all ranks can read.

A job that lost nodes, or got some back, continues in another layout. Its memory then has what the older one made:
shares of survivors, and replicas of the shares of lost ones. Ranks of one node read each other's memory in place, those
of other nodes ask for records (`RecordServer`). A copy that proves damaged is passed by while another is left.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..policy.lineage import Lineage, newest_first
from ..ports import (
    Json,
    Listing,
    Manifest,
    MappedReader,
    MappedStore,
    PeerLost,
    Reader,
    SnapshotId,
    StoreFailure,
    Transport,
)
from ..replication.connections import keep_alive, receive_over, send_over
from ..replication.interface import BACKLOG, Greeting
from ..storage.base import SnapshotReader
from ..storage.manifest import decode, encode
from ..storage.slot_reader import SlotReader
from ..types.layout import Record

log = logging.getLogger(__name__)


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of another layout in the memory of a rank."""

    snapshot: SnapshotId
    timeline: Lineage


class _Slot(msgspec.Struct, array_like=True):
    """What one rank tells the others: where its memory is, and what is in it."""

    node: str
    directory: str
    rows: tuple[_Row, ...]


class SurvivingMemory:
    """A place of snapshots for reading; making it is a collective over all ranks.

    Args:
        memory: This rank's slot.
        directory: Where that is on the node.
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
        self.own = _rows(memory, is_older)
        own = _Slot(node, str(directory), self.own)
        gathered = transport.gather(msgspec.to_builtins(own))
        self._slots = msgspec.convert(gathered, list[_Slot])
        self._rank, self._places = transport.rank, [""] * transport.world_size
        self._holders = _holders(self._slots, transport.rank)
        if self._holders and len({slot.node for slot in self._slots}) > 1:
            if own.rows:
                self._server = RecordServer(memory.open, address, timeout_s)
            place: Json = self._server.place if self._server is not None else ""
            try:
                self._places = [str(one) for one in transport.gather(place)]
            except BaseException:  # nobody else has the server, and this process may stay
                self.close()
                raise

    def __str__(self) -> str:
        holders = {rank for ranks in self._holders.values() for rank in ranks}
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
        return _AnyCopy(snapshot, holders, self._open_at)

    def close(self) -> None:
        """Nothing is read any more: all ranks have what they need."""
        self._holders = {}
        for records in self._remote.values():
            records.close()
        self._remote = {}
        if self._server is not None:
            self._server.close()
        self._server = None

    def _open_at(self, rank: int, snapshot: SnapshotId) -> Reader:
        if self._slots[rank].node == self._slots[self._rank].node:
            return SlotReader(Path(self._slots[rank].directory)).open(snapshot)
        if rank not in self._remote:
            self._remote[rank] = RemoteRecords(rank, self._places[rank], self._timeout_s)
        return self._remote[rank].open(snapshot)


class _AnyCopy:
    """A `ports.Reader` of a snapshot of which several ranks have a copy."""

    def __init__(
        self, snapshot: SnapshotId, holders: Sequence[int], open_: Callable[[int, SnapshotId], Reader]
    ) -> None:
        self._snapshot, self._left, self._open = snapshot, list(holders), open_
        self._reader = self._next("")

    @property
    def manifest(self) -> Manifest:
        """As `ports.Reader.manifest`."""
        return self._reader.manifest

    def read(self, key: str) -> memoryview:
        """As `ports.Reader.read`."""
        while True:
            try:
                return self._reader.read(key)
            except UnreadableCheckpoint as error:
                expected = self._reader.manifest.by_key[key].xxh3
                self._reader.close()
                self._reader = self._next(str(error))
                if self._reader.manifest.by_key[key].xxh3 != expected:
                    raise UnreadableCheckpoint(
                        f"the {self._snapshot}: two ranks have copies that differ in {key}, and one of them is damaged"
                    ) from error

    def verify(self) -> tuple[Record, ...]:
        """As `ports.Reader.verify`."""
        return self._reader.verify()

    def close(self) -> None:
        """As `ports.Reader.close`."""
        self._reader.close()

    def __enter__(self) -> _AnyCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, why: str) -> Reader:
        """The copy of the next holder. Raises UnreadableCheckpoint where none is left."""
        while self._left:
            holder = self._left.pop(0)
            if why:
                log.warning("%s; using the copy of rank %d", why, holder)
            try:
                return self._open(holder, self._snapshot)
            except UnreadableCheckpoint as error:
                why = str(error)
        raise UnreadableCheckpoint(why)


def _rows(memory: MappedStore, is_older: Callable[[Manifest], bool]) -> tuple[_Row, ...]:
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
                    rows.append(_Row(snapshot, timeline))
        except (MoECheckpointError, msgspec.ValidationError) as error:
            log.warning("skipped: %s in memory: %s", snapshot, error)
    return tuple(rows)


def _holders(slots: Sequence[_Slot], reader: int) -> Mapping[SnapshotId, tuple[int, ...]]:
    """Who has each snapshot, those first that `reader` reaches best; of several pasts the newest one."""
    found: dict[SnapshotId, dict[Lineage, list[int]]] = {}
    for rank, slot in enumerate(slots):
        for row in slot.rows:
            found.setdefault(row.snapshot, {}).setdefault(row.timeline, []).append(rank)
    here = slots[reader].node

    def nearest(rank: int) -> tuple[bool, int]:
        return slots[rank].node != here, rank

    def newest(snapshot: SnapshotId, pasts: Iterable[Lineage]) -> Lineage:
        return newest_first((past, snapshot.iteration) for past in pasts)[0]

    return {snapshot: tuple(sorted(pasts[newest(snapshot, pasts)], key=nearest)) for snapshot, pasts in found.items()}


# Records of one rank's memory for the ranks of other nodes that ask for them, one at a time.
#
#     connect    16 bytes: the server's secret, which all ranks of the job were told     ask        size as <I, then
# JSON: the snapshot, and a record's key, or null for the manifest     answer     size as <q, then so many bytes; a
# negative size is that of a reason why there are none
#
# Nothing is verified here: whoever asked has the manifest, and verifies what arrives.

_SECRET_BYTES = 16
_ASKED, _ANSWERED = struct.Struct("<I"), struct.Struct("<q")
_LONGEST_QUESTION = 1 << 16
_LONGEST_ANSWER = 1 << 40

Open = Callable[[SnapshotId], MappedReader]


class RecordServer:
    """Serves what `open_` opens, on threads of its own, until `close`.

    Args:
        open_: Opens a snapshot; called on these threads.
        address: Of this rank, on which it listens.
        timeout_s: How long nothing may arrive from whoever is connected.

    Attributes:
        place: What `RemoteRecords` needs to reach it.
    """

    def __init__(self, open_: Open, address: str, timeout_s: float) -> None:
        self._open, self._timeout_s, self._secret = open_, timeout_s, secrets.token_bytes(_SECRET_BYTES)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.place = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}"
        greeting = Greeting("records of older layouts", self._listener, _SECRET_BYTES, self._is_known, self._arrive)
        threading.Thread(target=greeting.run, name="moe-ckpt-records", daemon=True).start()

    def close(self) -> None:
        """Take no connections any more; those that are there end with whoever asks."""
        with suppress(OSError):  # it wakes the thread that waits
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _is_known(self, hello: bytes) -> bool:
        return secrets.compare_digest(hello, self._secret)

    def _arrive(self, connection: socket.socket, _hello: bytes) -> None:
        threading.Thread(target=self._serve, args=(connection,), name="moe-ckpt-record", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Whoever asked has gone: it has learned so from its end of the connection.
        with connection, suppress(OSError, ValueError):
            connection.settimeout(self._timeout_s)
            _answer_all(connection, self._open)


class RemoteRecords:
    """The connection to the `RecordServer` of rank `rank`. Raises PeerLost."""

    def __init__(self, rank: int, place: str, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        address, port, secret = place.split()
        with _reaching(rank, timeout_s):
            self._connection = socket.create_connection((address, int(port)), timeout=timeout_s)
            keep_alive(self._connection)
            self._connection.sendall(bytes.fromhex(secret))

    def open(self, snapshot: SnapshotId) -> RemoteReader:
        """A reader of a snapshot that lies there. Raises UnreadableCheckpoint, PeerLost."""
        content = self.ask(snapshot, None)
        return RemoteReader(decode(bytes(content), f"manifest of the {snapshot} from rank {self._rank}"), self)

    def ask(self, snapshot: SnapshotId, key: str | None) -> memoryview:
        """The bytes of a record, or the manifest; not verified.

        Args:
            snapshot: Which lies there.
            key: Of the record; None asks for the manifest.

        Raises:
            UnreadableCheckpoint: The other rank cannot read it.
            PeerLost: That rank is gone, or does not answer.
        """
        question = json.dumps([snapshot.iteration, snapshot.rank, snapshot.kind, key]).encode()
        with _reaching(self._rank, self._timeout_s):
            self._connection.sendall(_ASKED.pack(len(question)) + question)
            (size,) = _ANSWERED.unpack(_received(self._connection, _ANSWERED.size))
            if abs(size) > _LONGEST_ANSWER:
                raise ConnectionError(f"it announced {size} bytes")
            answer = _received(self._connection, abs(size))
        if size < 0:
            raise UnreadableCheckpoint(f"rank {self._rank}: {bytes(answer).decode(errors='replace')}")
        return answer

    def close(self) -> None:
        """Ask no more."""
        self._connection.close()

    @property
    def where(self) -> str:
        """For people."""
        return f"memory of rank {self._rank}"


class RemoteReader(SnapshotReader):
    """A snapshot in the memory of another node: each read brings one record, and verifies it."""

    def __init__(self, manifest: Manifest, records: RemoteRecords) -> None:
        super().__init__(manifest, records.where)
        self._records = records

    def _bytes(self, record: Record) -> memoryview:
        return self._records.ask(self.manifest.snapshot, record.key)

    def _let_go(self) -> None:
        """The connection serves other readers too."""


def _answer_all(connection: socket.socket, open_: Open) -> None:
    readers: dict[SnapshotId, MappedReader] = {}
    with ExitStack() as held:
        while True:
            (size,) = _ASKED.unpack(_received(connection, _ASKED.size))
            if size > _LONGEST_QUESTION:
                return
            iteration, rank, kind, key = json.loads(bytes(_received(connection, size)))
            snapshot = SnapshotId(iteration, rank, kind)
            try:
                if snapshot not in readers:
                    readers[snapshot] = held.enter_context(open_(snapshot))
                answer, sign = _record(readers[snapshot], key), 1
            except (MoECheckpointError, KeyError) as error:
                answer, sign = memoryview(str(error).encode()), -1
            connection.sendall(_ANSWERED.pack(sign * len(answer)))
            send_over(connection, answer, lambda: None)


def _record(reader: MappedReader, key: str | None) -> memoryview:
    if key is None:
        return memoryview(encode(reader.manifest))
    record = reader.manifest.by_key[key]
    return reader.raw()[record.offset : record.offset + record.nbytes]


def _received(connection: socket.socket, nbytes: int) -> memoryview:
    """Raises OSError."""
    data = memoryview(bytearray(nbytes))
    receive_over(connection, data, lambda: None)
    return data


@contextmanager
def _reaching(rank: int, timeout_s: float) -> Iterator[None]:
    """A block in which the connection to a rank may fail. Raises PeerLost."""
    try:
        yield
    except OSError as error:
        why = f"nothing came for {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise PeerLost(f"the memory of rank {rank}, which has an older layout, cannot be read: {why}") from error
