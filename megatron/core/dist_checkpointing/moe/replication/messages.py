"""The messages of replication: a header, a table of the pieces offered, and a reply about each.

Fixed binary layouts of `struct`, little-endian: the receiver of a header must know its size before it arrives.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Buffer

MAGIC = b"moe-repl"
VERSION = 2

_HEADER = struct.Struct("<8sIqiQQ")  # magic, version, iteration, pieces, bytes of the table, its xxh3
_CHECK = struct.Struct("<Q")  # xxh3 of the header
_ROW = struct.Struct("<HIQQ")  # bytes of a piece's name, of its manifest, of its raw bytes, of its step
_ANSWER = struct.Struct("<BI")  # reply to a piece, number of ranges that are wanted of it
_RANGE = struct.Struct("<QQ")  # its first byte, and the one past its last
_NOTHING = -1
_MOST_TABLE_BYTES = 1 << 28
_MOST_RANGES = 1 << 20

HEADER_BYTES = _HEADER.size + _CHECK.size


class MalformedMessage(Exception):
    """A message that no rank of this version sends; the text says in what way."""


class Reply(IntEnum):
    """What a peer replies about a piece, one byte: before any of its bytes are sent, or after that.

    FOLLOWS: the step that led to it is wanted in place of it, because the state before it is held. PARTLY: ranges of it
    are wanted, because the rest is held in the peer's own snapshot.
    """

    WANTED = 1
    HELD = 2
    REFUSED = 3
    SEALED = 4
    DAMAGED = 5
    FAILED = 6
    FOLLOWS = 7
    PARTLY = 8


ANSWER_BYTES, RANGE_BYTES = _ANSWER.size, _RANGE.size

Ranges = tuple[tuple[int, int], ...]
"""Of the bytes of a piece: first byte and one past the last, ascending and apart."""

BEFORE = frozenset({Reply.WANTED, Reply.HELD, Reply.REFUSED, Reply.FOLLOWS, Reply.PARTLY})
AFTER = frozenset({Reply.SEALED, Reply.DAMAGED, Reply.FAILED})


@dataclass(frozen=True, slots=True)
class ReplicaPiece:
    """One piece as the peer that shall keep it learns of it.

    Attributes:
        name: Of the piece.
        manifest: As it is stored.
        raw_bytes: So many come when it is wanted.
        step_bytes: So many come instead when the peer can follow the step that led to it; 0: none is offered.
    """

    name: str
    manifest: bytes = field(repr=False)
    raw_bytes: int
    step_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """Which round an owner is in, how many pieces it offers (None: it has nothing to give), and the table that
    follows."""

    iteration: int
    pieces: int | None
    table_bytes: int
    table_xxh3: int


def encode_table(pieces: Sequence[ReplicaPiece]) -> bytes:
    """All rows, then all names and manifests."""
    names = [piece.name.encode() for piece in pieces]
    rows = [
        _ROW.pack(len(name), len(one.manifest), one.raw_bytes, one.step_bytes)
        for name, one in zip(names, pieces, strict=True)
    ]
    texts = [part for name, one in zip(names, pieces, strict=True) for part in (name, one.manifest)]
    return b"".join([*rows, *texts])


def encode_header(iteration: int, pieces: int | None, table: bytes) -> bytes:
    """A header, of HEADER_BYTES bytes.

    Args:
        iteration: Of the round.
        pieces: How many the table lists; None where the owner has nothing to give.
        table: What follows the header.
    """
    count = _NOTHING if pieces is None else pieces
    packed = _HEADER.pack(MAGIC, VERSION, iteration, count, len(table), xxh3_64_intdigest(table))
    return packed + _CHECK.pack(xxh3_64_intdigest(packed))


def decode_header(data: Buffer) -> Header:
    """The header in HEADER_BYTES bytes. Raises Garbled."""
    packed = bytes(memoryview(data)[: _HEADER.size])
    magic, version, iteration, pieces, table_bytes, table_xxh3 = _HEADER.unpack(packed)
    if magic != MAGIC:
        raise MalformedMessage(f"a header begins with {magic!r} instead of {MAGIC!r}")
    # Before the checksum, which another version may have in another place, or not at all.
    if version != VERSION:
        raise MalformedMessage(
            f"a header has version {version}, but this rank speaks {VERSION}: run one version on all ranks"
        )
    # Before any size is used: as many bytes as a damaged header announces would be waited for.
    if _CHECK.unpack_from(data, _HEADER.size) != (xxh3_64_intdigest(packed),):
        raise MalformedMessage("a header does not match its checksum")
    if pieces < _NOTHING or max(pieces, 0) * _ROW.size > table_bytes or table_bytes > _MOST_TABLE_BYTES:
        raise MalformedMessage(f"a header announces a table of {pieces} pieces in {table_bytes} bytes")
    return Header(iteration, None if pieces == _NOTHING else pieces, table_bytes, table_xxh3)


def decode_table(header: Header, data: bytes) -> tuple[ReplicaPiece, ...]:
    """The pieces that a table lists.

    Args:
        header: Which announced the table.
        data: The bytes of the table.

    Raises:
        Garbled: They are not what the header announced.
    """
    if len(data) != header.table_bytes or xxh3_64_intdigest(data) != header.table_xxh3:
        raise MalformedMessage(f"a table of {header.pieces} pieces does not match its checksum")
    count = header.pieces or 0
    at, pieces = count * _ROW.size, []
    if at > len(data):
        raise MalformedMessage(f"a table of {count} pieces has only {len(data)} bytes")
    rows = tuple(_ROW.iter_unpack(data[:at]))
    # All sizes before the first slice: one that reaches past the end would be shorter, without an error.
    if at + sum(name_bytes + manifest_bytes for name_bytes, manifest_bytes, *_ in rows) != len(data):
        raise MalformedMessage(f"a table of {count} pieces has another size than its {len(data)} bytes")
    for name_bytes, manifest_bytes, raw_bytes, step_bytes in rows:
        end = at + name_bytes
        try:
            name = data[at:end].decode()
        except UnicodeDecodeError as error:
            raise MalformedMessage(f"the name of a piece is no text: {error.reason}") from None
        pieces.append(ReplicaPiece(name, data[end : end + manifest_bytes], raw_bytes, step_bytes))
        at = end + manifest_bytes
    return tuple(pieces)


def encode_answers(answers: Sequence[tuple[Reply, Ranges]]) -> tuple[bytes, bytes]:
    """ANSWER_BYTES for each piece, and then all ranges."""
    rows = b"".join(_ANSWER.pack(reply, len(ranges)) for reply, ranges in answers)
    return rows, b"".join(_RANGE.pack(*one) for _, ranges in answers for one in ranges)


def decode_answers(rows: Buffer) -> tuple[list[Reply], list[int]]:
    """The reply to each piece, and how many ranges are wanted of it. Raises Garbled."""
    found = list(_ANSWER.iter_unpack(rows))
    if (most := max((count for _, count in found), default=0)) > _MOST_RANGES:
        raise MalformedMessage(f"{most} ranges are wanted of one piece, where {_MOST_RANGES} is the most")
    return decode_replies(bytes(reply for reply, _ in found), BEFORE), [count for _, count in found]


def decode_ranges(data: Buffer, counts: Sequence[int], sizes: Sequence[int]) -> list[Ranges]:
    """The ranges that are wanted of each piece.

    Args:
        data: All ranges, RANGE_BYTES each, piece after piece.
        counts: How many ranges each piece has.
        sizes: Bytes of each piece.

    Raises:
        Garbled: Ranges lie outside of their piece, or are not ascending and apart.
    """
    at, found = 0, list[Ranges]()
    for count, nbytes in zip(counts, sizes, strict=True):
        end = at + count * _RANGE.size
        ranges = tuple(_RANGE.iter_unpack(memoryview(data)[at:end]))
        edges = [0, *(edge for one in ranges for edge in one), nbytes]
        # One comparison for all: within the piece, ascending, and none over another.
        if edges != sorted(edges):
            raise MalformedMessage(f"ranges {ranges} are wanted of a piece of {nbytes} bytes")
        found.append(ranges)
        at = end
    return found


def decode_replies(data: Buffer, allowed: frozenset[Reply]) -> list[Reply]:
    """One reply for each byte.

    Args:
        data: A byte for each piece.
        allowed: The replies that make sense at this point.

    Raises:
        Garbled: Another one is among them.
    """
    received = bytes(data)
    unknown = [byte for byte in received if byte not in allowed]
    if unknown:
        raise MalformedMessage(f"an answer has the value {unknown[0]}, which means nothing at this point")
    return list(map(Reply, received))
