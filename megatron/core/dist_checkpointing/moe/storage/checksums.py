"""Checksums of raw bytes: xxh3 with 128 bits, computed in place while other threads run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from xxhash import xxh3_128_hexdigest

from ..errors import NewerFormat, UnreadableCheckpoint, UsageError
from ..types.layout import Field, Record

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


def checksum(data: Buffer) -> str:
    """The xxh3 of contiguous bytes: 32 hexadecimal digits. Nothing is copied and the GIL is released."""
    return xxh3_128_hexdigest(data)


def framed(key: str, body: bytes) -> bytes:
    """One line of JSON that knows its own checksum: `{"xxh3":"<32 hexadecimal digits>","<key>":<body>}`."""
    return b'{"xxh3":"%s","%s":%s}\n' % (checksum(body).encode("ascii"), key.encode("ascii"), body)


def unframed(key: str, content: bytes) -> bytes | None:
    """The body of what `framed` made, None for anything else: no byte of it is believed before its checksum is."""
    before = len(framed(key, b"")) - len(b"}\n")
    body = content[before : -len(b"}\n")]
    return body if framed(key, body) == content else None


def decoded(
    content: bytes,
    name: str,
    *,
    key: str,
    newest: int,
    make: Callable[[Any], T],
    encode: Callable[[T], bytes],
) -> T:
    """What `make` makes of the body of a framed file, called `name` in errors; `encode` writes the file of a value.

    Raises UnreadableCheckpoint for any deviation from what `encode` writes, NewerFormat for a format above `newest`.
    """
    written = unframed(key, content)
    if written is None:
        raise UnreadableCheckpoint(f"{name} is damaged: it does not match its checksum; take another iteration")
    try:
        body = json.loads(written)
        if type(body["format"]) is int and body["format"] > newest:
            raise NewerFormat(
                f"{name} is written in format {body['format']}, this version reads up to {newest}: use the version"
                " that wrote it, or a newer one"
            )
        value = make(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise UnreadableCheckpoint(f"{name} is damaged ({error!r:.120}); take another iteration") from error
    # What is believed is exactly what is written: another spelling of it is of no save.
    if encode(value) != content:
        raise UnreadableCheckpoint(f"{name} is damaged: no save writes it so; take another iteration")
    return value


def verified(data: memoryview, record: Record, where: str) -> memoryview:
    """`data`, when it is what was sealed as `record`. Raises UnreadableCheckpoint, which names the record."""
    if len(data) != record.nbytes:
        raise UnreadableCheckpoint(
            f"{where}: record {record.key} has {len(data)} of its {record.nbytes} bytes: the file was truncated; use"
            " another copy"
        )
    if checksum(data) != record.xxh3:
        raise UnreadableCheckpoint(
            f"{where}: record {record.key} at offset {record.offset} does not match its checksum: its bytes changed"
            " after they were sealed; use another copy"
        )
    return data


def flat_bytes(data: Buffer, field: Field) -> memoryview:
    """The bytes of `data` without a copy. Raises UsageError when they are not contiguous or not as many as `field`."""
    view = memoryview(data)
    if not view.c_contiguous or view.nbytes != field.nbytes:
        raise UsageError(
            f"record {field.key}: got {view.nbytes} {'' if view.c_contiguous else 'non-contiguous '}bytes, but"
            f" {field.dtype} of shape {list(field.shape)} has {field.nbytes} contiguous ones"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")
