"""Records of one rank's memory for the ranks of other nodes that ask for them, one at a time.

    connect    16 bytes: the server's secret, which all ranks of the job were told
    ask        size as <I, then JSON: the snapshot, and a record's key, or null for the manifest
    answer     size as <q, then so many bytes; a negative size is that of a reason why there are none

Nothing is verified here: whoever asked has the manifest, and verifies what arrives.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..ports import Manifest, MappedReader, PeerLost, SnapshotId
from ..replication.connections import keep_alive, receive_over, send_over
from ..replication.interface import BACKLOG, Greeting
from ..storage.base import SnapshotReader
from ..storage.manifest import decode, encode
from ..types.layout import Record

log = logging.getLogger(__name__)

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
        with suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)

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
        with suppress(OSError):  # reaches the other side also where a forked child has the socket
            self._connection.shutdown(socket.SHUT_RDWR)
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
