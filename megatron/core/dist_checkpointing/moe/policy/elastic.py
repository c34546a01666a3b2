"""How many data-parallel replicas a job may continue with, of those that whole nodes can make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UsageError

_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class ElasticRange:
    """`--moe-ckpt-elastic`: the fewest and the most data-parallel replicas, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ElasticRange:
        """Raises UsageError for a text that is no such range."""
        found = _RANGE.fullmatch(text)
        least, most = map(int, found.groups()) if found else (0, 0)
        if not 1 <= least <= most:
            raise UsageError(
                f"--moe-ckpt-elastic {text} must be MIN:MAX data-parallel replicas, such as 2:4, with 1 <= MIN <= MAX"
            )
        return cls(least, most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"

    def sizes(self, replica_ranks: int, node_ranks: int = 1) -> tuple[int, ...]:
        """The numbers of replicas that whole nodes can make.

        Args:
            replica_ranks: Ranks of one data-parallel replica.
            node_ranks: Ranks of one node.
        """
        every = range(self.least, self.most + 1)
        return tuple(size for size in every if size * replica_ranks % node_ranks == 0)


def unfit(
    allowed: ElasticRange,
    *,
    world_size: int,
    replica_ranks: int,
    node_ranks: int,
    expert_ranks: int,
    global_batch: int,
    micro_batch: int,
) -> Iterator[str]:
    """A sentence for each reason why a job cannot shrink or grow as it is allowed to.

    Args:
        allowed: The numbers of replicas.
        world_size: Ranks that the job has now.
        replica_ranks: Those of one data-parallel replica: TP x PP x CP.
        node_ranks: Those of one node.
        expert_ranks: ETP x EP x PP, which have to divide the ranks of a job.
        global_batch: Samples of an iteration.
        micro_batch: Samples of a microbatch.
    """
    flag, now = f"--moe-ckpt-elastic {allowed}", world_size // replica_ranks
    if not allowed.least <= now <= allowed.most:
        yield f"{flag}: {world_size} ranks make {now} data-parallel replicas; start as many nodes as it allows"
    sizes = allowed.sizes(replica_ranks, node_ranks)
    if not sizes:
        yield f"{flag}: nodes of {node_ranks} ranks make none of these numbers of replicas of {replica_ranks} ranks"
    for size in sizes:
        ranks = size * replica_ranks
        if ranks % expert_ranks:
            yield (
                f"{flag}: {size} replicas have {ranks} ranks, which do not divide by ETP x EP x PP = {expert_ranks}:"
                " choose a smaller --expert-model-parallel-size, or more replicas at least"
            )
        if global_batch % (size * micro_batch):
            yield (
                f"{flag}: --global-batch-size {global_batch} does not divide by --micro-batch-size {micro_batch} x"
                f" {size} replicas: the batch stays as it is when the job shrinks, so choose one that all divide"
            )
