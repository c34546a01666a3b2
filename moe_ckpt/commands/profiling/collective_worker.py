"""A process of a group that times all-gathers. It is run as a file: it needs torch, and nothing of this package."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_REPEATS = 5


def main(meeting: str, rank: int, ranks: int, sizes: list[int], timeout_s: float) -> dict[int, float]:
    """Shortest seconds by gathered bytes."""
    on_gpus = torch.cuda.device_count() >= ranks
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        return {size: min(_seconds(size // ranks, ranks, on_gpus) for _ in range(_REPEATS)) for size in sizes}
    finally:
        dist.destroy_process_group()


def _seconds(share: int, ranks: int, on_gpus: bool) -> float:
    device = "cuda" if on_gpus else "cpu"
    own = torch.ones(max(1, share), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.barrier()
    started = time.perf_counter()
    dist.all_gather(gathered, own)
    if on_gpus:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    given = sys.argv
    found = main(given[1], int(given[2]), int(given[3]), [*map(int, given[4].split(","))], float(given[5]))
    sys.stdout.write(json.dumps(found))
