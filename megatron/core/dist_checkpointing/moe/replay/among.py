"""Agreement among some of the ranks of a job, while the others wait or agree on something of their own."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import cast

from ..errors import MoECheckpointError
from ..ports import Json, PeerLost, Transport

_SIZE = struct.Struct("<q")
_MOST_BYTES = 1 << 30


class Among:
    """Gathers values of `members` alone, over messages of a transport between all ranks.

    members: global ranks, this one among them, the same on each of them. `what` says in errors what they agree on.
    """

    def __init__(self, transport: Transport, members: Sequence[int], what: str) -> None:
        self._transport, self.members, self._what = transport, tuple(sorted(members)), what

    def gather(self, value: Json) -> list[Json]:
        """The values of all members, in the order of their ranks. Raises PeerLost that names who did not answer."""
        rank, (first, *others) = self._transport.rank, self.members
        if rank != first:
            self._send(first, value)
            return cast("list[Json]", self._receive(first))
        values = [value, *(self._receive(other) for other in others)]
        for other in others:
            self._send(other, values)
        return values

    def _send(self, to: int, value: Json) -> None:
        data = json.dumps(value).encode()
        try:
            for transfer in [self._transport.send(to, part) for part in (_SIZE.pack(len(data)), data)]:
                transfer.wait()
        except PeerLost as error:
            raise self._lost(to, error) from error

    def _receive(self, source: int) -> Json:
        size = bytearray(_SIZE.size)
        try:
            self._transport.receive(source, memoryview(size)).wait()
            (nbytes,) = _SIZE.unpack(size)
            if not 0 <= nbytes <= _MOST_BYTES:
                raise PeerLost(f"it announced {nbytes} bytes, which cannot be: the connection is bad")
            data = bytearray(nbytes)
            self._transport.receive(source, memoryview(data)).wait()
        except PeerLost as error:
            raise self._lost(source, error) from error
        try:
            return cast("Json", json.loads(data))
        except ValueError as error:
            raise self._lost(source, error) from error

    def _lost(self, other: int, error: Exception) -> PeerLost:
        why = str(error) if isinstance(error, MoECheckpointError) else f"{type(error).__name__}: {error}"
        return PeerLost(f"rank {self._transport.rank} waited for rank {other} to {self._what}: {why}")
