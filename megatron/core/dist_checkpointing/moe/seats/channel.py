"""Messages between a launcher and one of its workers: a line of JSON each, over a pair of sockets."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

VERSION = 2
"""Of the messages; a launcher does not seat a worker that speaks another."""
DESCRIPTOR = "MOE_CKPT_SEAT"
"""Environment variable with the number of the worker's descriptor."""
LAUNCHER_VERSION = "MOE_CKPT_SEAT_VERSION"
"""Environment variable with the version that the launcher speaks."""

Message = dict[str, Any]


class Channel:
    """One end. Raises ConnectionError from any call once the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._text = connection, b""
        connection.setblocking(False)
        self._poll = select.poll()  # `select` takes no descriptor from 1024 on
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send without waiting; messages are far smaller than what a socket holds. Raises ConnectionError."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """What has come, oldest first; waits for it `timeout_s` at most. Raises ConnectionError."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        while self._poll.poll(0):
            part = self._connection.recv(65536)
            if not part:
                if b"\n" in self._text:
                    break  # first what was said
                raise ConnectionResetError("the other end of the seat's socket is closed")
            self._text += part
        *lines, self._text = self._text.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
