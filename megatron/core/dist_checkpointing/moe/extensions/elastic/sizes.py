"""How many data-parallel replicas a job may continue with, of those that whole nodes can make."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...config import MoECheckpointConfig
from ...errors import UsageError
from ...runtime.faults import check_fault_ranks, parse_fault

UNIT_NODES = "MOE_CKPT_UNIT_NODES"
"""Environment variable with the nodes that join and leave together, from `moe-ckpt-run`."""

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


def not_elastic(given: MoECheckpointConfig) -> Iterator[str]:
    """A sentence for each setting with which a job cannot continue in another layout."""
    try:
        allowed = ElasticRange.parse(given.elastic or "")
    except UsageError as error:
        yield str(error)
        return
    if given.interval == "auto":
        yield f"--moe-ckpt-elastic {allowed} needs a fixed interval: give --moe-ckpt-interval N, not auto"
    if given.interval_policy != "fixed":
        yield (
            f"--moe-ckpt-elastic {allowed} needs a fixed interval: give --moe-ckpt-interval-policy fixed, not"
            f" {given.interval_policy}"
        )
    if given.replicas == 0 and given.persist_dir is None:
        yield (
            f"--moe-ckpt-elastic {allowed} continues without lost nodes, whose state is then nowhere: give"
            " --moe-ckpt-replicas 1, or --moe-ckpt-persist-dir"
        )


def inelastic(
    given: MoECheckpointConfig,
    *,
    world_size: int,
    replica_ranks: int,
    node_ranks: int,
    expert_ranks: int,
    global_batch: int,
    micro_batch: int,
) -> Iterator[str]:
    """A sentence for each reason why a job cannot shrink or grow as `--moe-ckpt-elastic` allows.

    Args:
        given: The settings.
        world_size: Ranks that the job has now.
        replica_ranks: Those of one data-parallel replica: TP x PP x CP.
        node_ranks: Those of one node.
        expert_ranks: ETP x EP x PP, which have to divide the ranks of a job.
        global_batch: Samples of an iteration.
        micro_batch: Samples of a microbatch.
    """
    try:
        allowed = ElasticRange.parse(given.elastic or "")
    except UsageError as error:
        yield str(error)
        return
    flag, now = f"--moe-ckpt-elastic {allowed}", world_size // replica_ranks
    if not allowed.least <= now <= allowed.most:
        yield f"{flag}: {world_size} ranks make {now} data-parallel replicas; start as many nodes as it allows"
    sizes = allowed.sizes(replica_ranks, node_ranks)
    if not sizes:
        yield f"{flag}: nodes of {node_ranks} ranks make none of these numbers of replicas of {replica_ranks} ranks"
    # A node of one rank is also what there is where no launcher says how many it has.
    spanned = replica_ranks // node_ranks if node_ranks > 1 else 1
    unit = os.environ.get(UNIT_NODES, "")
    if spanned > 1 and (not unit.isdecimal() or int(unit) % spanned):
        yield (
            f"{flag}: a replica spans {spanned} nodes, without one of which the others cannot train: start the job by"
            f" moe-ckpt-run with --moe-ckpt-unit-nodes {spanned}"
        )
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
    most = allowed.most * replica_ranks
    if given.replicas is not None and given.replicas >= most:
        yield (
            f"--moe-ckpt-replicas {given.replicas} needs as many peers, but with --moe-ckpt-elastic {allowed} the job"
            f" has {most} ranks at most: at most {most - 1} are possible"
        )
    try:
        check_fault_ranks([parse_fault(text) for text in given.inject_fault], most)
    except UsageError as error:
        yield f"--moe-ckpt-inject-fault: {error}"
