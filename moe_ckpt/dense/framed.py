"""Small files beside dense checkpoints that know their own checksum."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, UsageError


def decoded[T](
    content: bytes,
    name: str,
    *,
    body: bytes | None,
    newest: int,
    make: Callable[[Any], T],
    encode: Callable[[T], bytes],
) -> T:
    """The value in a file with a checksum.

    Raises UnreadableCheckpoint for any deviation from what `encode` writes, NewerFormat for a format above `newest`.

    Args:
        content: Bytes of the whole file.
        name: Name of the file in errors.
        body: Bytes that the file's checksum covers, as JSON; None: the checksum does not match.
        newest: The newest format that this version reads.
        make: Makes the value of the parsed JSON object.
        encode: Writes the file of a value.
    """
    if body is None:
        raise UnreadableCheckpoint(f"{name} is damaged: it does not match its checksum; take another iteration")
    try:
        found = json.loads(body)
        if type(found["format"]) is int and found["format"] > newest:
            raise NewerFormat(
                f"{name} is written in format {found['format']}, this version reads up to {newest}: use the version"
                " that wrote it, or a newer one"
            )
        value = make(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError, UsageError) as error:
        raise UnreadableCheckpoint(f"{name} is damaged ({error!r:.120}); take another iteration") from error
    # What is believed is exactly what is written: another spelling of it is of no save.
    if encode(value) != content:
        raise UnreadableCheckpoint(f"{name} is damaged: no save writes it so; take another iteration")
    return value
