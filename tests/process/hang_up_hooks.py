"""What tests of hanging up do inside workers: a chain of ranks, each waiting in a collective for the next one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from stock_trainer import instead_of_training

BUSY_S = 8.0


@contextlib.contextmanager
def chained(folder: str, hangs_up: bool) -> Iterator[None]:
    """Instead of training: rank 0 ends, rank 1 notices and is busy for a while, rank 2 waits for rank 1."""
    with instead_of_training(lambda trainer: waited(hangs_up), folder):
        yield


def waited(hangs_up: bool) -> dict[str, object]:
    """How long this rank waited for the one before it, and what it heard then."""
    from megatron.core.dist_checkpointing.moe.runtime.peer_links import close_connections, is_lost_peer

    rank, heard, is_peer = torch.distributed.get_rank(), "", False
    # Pairs that share nothing but rank 1: rank 2 cannot hear of rank 0 by itself.
    pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    for group, members in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if rank in members:
            torch.distributed.all_reduce(torch.ones(4), group=group)
    torch.distributed.barrier()
    begun_s = time.monotonic()
    try:
        if rank == 0:
            return {"closed": close_connections()}
        torch.distributed.all_reduce(torch.ones(4), group=pairs[rank - 1])
    except RuntimeError as error:
        heard, is_peer = str(error), is_lost_peer(error)
    waited_s = time.monotonic() - begun_s
    closed = close_connections() if hangs_up else 0
    if rank == 1:
        time.sleep(BUSY_S)
    return {"heard": heard, "is_peer": is_peer, "waited_s": waited_s, "closed": closed}
