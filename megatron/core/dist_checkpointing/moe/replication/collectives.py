"""What all ranks have to know, made on the way, and what each rank has for a few others; typed, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ..ports import PeerLost, Transport


def merged[T](transport: Transport, own: T, kind: type[T], combine: Callable[[T, T], T]) -> T:
    """The values of all ranks as one, on all of them; a collective.

    Args:
        transport: To all ranks.
        own: The value of this rank.
        kind: Its type, as msgspec reads it.
        combine: Of two values, the first one of lower ranks; which neighbours are combined first must not matter.

    Raises:
        PeerLost: A rank did not answer, or not with such a value.
    """
    decoder = msgspec.msgpack.Decoder(kind)

    def bytes_of(one: bytes, other: bytes) -> bytes:
        return msgspec.msgpack.encode(combine(decoder.decode(one), decoder.decode(other)))

    return _read(decoder, transport.merge(msgspec.msgpack.encode(own), bytes_of))


def exchanged[T](transport: Transport, outgoing: Mapping[int, T], kind: type[T]) -> list[tuple[int, T]]:
    """What each rank has for this one, by the rank that it comes from, ascending; a collective.

    Args:
        transport: To all ranks.
        outgoing: What this rank has, by the rank that it is for.
        kind: The type of the values, as msgspec reads it.

    Raises:
        PeerLost: A rank did not answer, or not with such values.
    """
    came = transport.exchange({to: msgspec.msgpack.encode(value) for to, value in outgoing.items()})
    decoder = msgspec.msgpack.Decoder(kind)
    return [(source, _read(decoder, data)) for source, data in came]


def _read[T](decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerLost(f"what came from other ranks cannot be read: {error}") from None
