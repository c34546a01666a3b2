"""What tests of transports change inside workers, and what these note: chunks over process groups, and sockets."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

LEAST_BYTES, CHUNK_BYTES = 1000, 50_000


@contextlib.contextmanager
def bulk_noted(folder: str) -> Iterator[None]:
    """The models of tests are small: bulk begins at LEAST_BYTES. Each call of a process group leaves a line."""
    from megatron.core.dist_checkpointing.moe.replication import staged

    rank = int(os.environ["RANK"])
    original = staged.BulkWay.launch

    def launch(self: Any, call: str, other: int, buffer: Any, tag: int) -> Any:
        with (Path(folder) / f"calls-{rank}").open("a") as file:
            file.write(f"{call} {buffer.numel()}\n")
        return original(self, call, other, buffer, tag)

    with (
        mock.patch.object(staged, "LEAST_BYTES", LEAST_BYTES),
        mock.patch.object(staged, "CHUNK_BYTES", CHUNK_BYTES),
        mock.patch.object(staged.BulkWay, "launch", launch),
    ):
        yield


@contextlib.contextmanager
def sockets_counted(folder: str) -> Iterator[None]:
    """How many sockets links and transports have when training ends."""
    from megatron.core.dist_checkpointing.moe.replication import connections
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    original = ProtectedSession.shutdown

    def shutdown(self: Any, **options: Any) -> None:
        counts = Counter(links=len(self.links.sockets))
        for transport in (self.control, self.data):
            counts["transports"] += len(transport.connections.sockets)
        (Path(folder) / f"sockets-{os.environ['RANK']}.json").write_text(json.dumps(counts))
        original(self, **options)

    with (
        mock.patch.object(ProtectedSession, "shutdown", shutdown),
        mock.patch.object(connections, "PROBE_AFTER_S", 30.0),
    ):
        yield
