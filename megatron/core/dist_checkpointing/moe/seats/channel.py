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
    """One end. Raises ConnectionError from any call once the other end is gone.

    Attributes:
        descriptors: Those that came with messages, oldest first; whoever takes one out closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._text = connection, b""
        self.descriptors: list[int] = []
        connection.setblocking(False)
        self._poll = select.poll()  # `select` takes no descriptor from 1024 on
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send without waiting; messages are far smaller than what a socket holds. Raises ConnectionError.

        descriptor: One that the other process gets a copy of.
        """
        text = json.dumps(message).encode() + b"\n"
        if descriptor is None:
            self._connection.sendall(text)
        else:
            socket.send_fds(self._connection, [text], [descriptor])

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """What has come, oldest first; waits for it `timeout_s` at most. Raises ConnectionError."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        while self._poll.poll(0):
            part, descriptors, *_ = socket.recv_fds(self._connection, 65536, 8, socket.MSG_CMSG_CLOEXEC)
            self.descriptors += descriptors
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
