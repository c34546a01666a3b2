"""torchrun's rendezvous of the agents of several nodes, made to survive the loss of a node half way.

Once all nodes have joined, the first of them writes where its workers will listen. If that node is lost in between, or
was so busy that the others took it for lost, torchrun's handler fails after a while, and closes the rendezvous for
everybody. Here the others join again.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from functools import partial

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

log = logging.getLogger(__name__)

BACKEND = "moe-ckpt-nodes"
HEARTBEAT_S = 1
MISSED_HEARTBEATS = 5
"""After so many a node counts as lost; on a busy machine an agent is late by seconds."""
ANSWER_S = 20
"""How long the others wait for the first node to write where to listen: it has nothing else to do."""
ATTEMPTS = 10


class NodesHandler(DynamicRendezvousHandler):
    """Torchrun's handler, but a rendezvous that fails is followed by another one, `ATTEMPTS` at most."""

    def get_backend(self) -> str:
        """As `DynamicRendezvousHandler.get_backend`."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """As `DynamicRendezvousHandler.next_rendezvous`."""
        for _ in range(ATTEMPTS - 1):
            try:
                return super().next_rendezvous()
            except DistStoreError as error:
                log.warning("a node was lost while all met (%s); meeting again", error)
        return super().next_rendezvous()


def register_backend(handler: type[NodesHandler] = NodesHandler) -> None:
    """Make `BACKEND` known to torchrun's launcher in this process. Parameters: join_timeout and is_host, as `c10d`."""
    # Ranks follow from the order of nodes: asking around for them would be one more wait for a node that may be lost.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    rendezvous_handler_registry.register(BACKEND, partial(_handler, handler))


def _handler(kind: type[NodesHandler], params: RendezvousParameters) -> NodesHandler:
    params.config.setdefault("read_timeout", ANSWER_S)
    backend, store = create_backend(params)
    timeout = RendezvousTimeout(join=timedelta(seconds=params.get_as_int("join_timeout", 600) or 600))
    handler: NodesHandler = kind.from_backend(
        params.run_id, store, backend, params.min_nodes, params.max_nodes, params.local_addr, timeout,
        keep_alive_interval=HEARTBEAT_S, keep_alive_max_attempt=MISSED_HEARTBEATS,
    )  # fmt: skip
    return handler
