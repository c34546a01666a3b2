"""Who sits where: ranks, their coordinates in Megatron's parallel dimensions, and nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's position. Non-experts use (tp, cp, dp, pp); experts use (etp, ep, edp, pp); both share `pp`."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    node: int


@dataclass(frozen=True)
class Topology:
    """Rank layout of a job, in Megatron-Core's default order: tp fastest, then cp, then dp (ep, edp), then pp.

    Degrees are Megatron's: `tp` tensor, `pp` pipeline, `vpp` virtual stages per pipeline rank, `cp` context, `ep`
    expert, `etp` expert-tensor parallelism (None: as `tp`). `nodes` gives the node of each rank where it is not
    `rank // ranks_per_node`, as after a spare has replaced a node; `units` the allocation unit of each rank's node,
    such as a rack, where several nodes are lost as one. `instances` is `--num-distributed-optimizer-instances`: so many
    sets of data-parallel ranks each have the whole optimizer state.
    Raises UsageError for degrees that do not divide the world.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    ranks_per_node: int = 8
    nodes: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, but must be at least 1")
        for dense, product in (("tp x cp x pp", self.tp * self.cp * self.pp), ("etp x ep x pp", self._expert_block)):
            if self.world_size % product:
                raise UsageError(
                    f"world_size {self.world_size} is not a multiple of {dense} = {product}: choose degrees whose"
                    " product divides it"
                )
        for data, ranks in (("cp x dp", self.cp * self.dp), ("data-parallel ranks of experts", self.edp)):
            if ranks % self.instances:
                raise UsageError(f"{data} = {ranks} is not a multiple of instances {self.instances}: choose a divisor")
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp is {self.vpp} with pp 1: virtual stages need at least 2 pipeline stages")
        if self.nodes is not None and len(self.nodes) != self.world_size:
            raise UsageError(f"nodes names {len(self.nodes)} ranks, but world_size is {self.world_size}")

    @property
    def _expert_block(self) -> int:
        return self.expert_tp * self.ep * self.pp

    @property
    def expert_tp(self) -> int:
        """Expert-tensor-parallel degree with its default filled in."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel degree of non-experts, without context parallelism."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel degree of experts: how many ranks hold the same expert (per expert-tensor rank)."""
        return self.world_size // self._expert_block

    @property
    def ranks_per_stage(self) -> int:
        """Ranks with the same pipeline rank."""
        return self.world_size // self.pp

    def shard_of(self, at: Coordinates, *, is_expert: bool) -> int:
        """Which shard of the distributed optimizer's state a rank has.

        Args:
            at: Its position.
            is_expert: Of the state of experts, else of the rest.
        """
        position, ranks = (at.edp, self.edp) if is_expert else (at.dp * self.cp + at.cp, self.dp * self.cp)
        return position % (ranks // self.instances)

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank`. Raises IndexError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        pp, within = divmod(rank, self.ranks_per_stage)
        rest, tp = divmod(within, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(within, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(tp, cp, dp, pp, etp, ep, edp, self.node(rank))

    def stage(self, rank: int) -> int:
        """Pipeline rank of `rank`."""
        return rank // self.ranks_per_stage

    def stage_ranks(self, stage: int) -> range:
        """All ranks of a pipeline stage."""
        return range(stage * self.ranks_per_stage, (stage + 1) * self.ranks_per_stage)

    def node(self, rank: int) -> int:
        """Node (failure domain) of `rank`."""
        return rank // self.ranks_per_node if self.nodes is None else self.nodes[rank]

    @cached_property
    def ranks_by_node(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each node."""
        found: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self.node(rank), []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def ranks_on(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """All ranks of the given nodes, ascending."""
        return tuple(sorted(rank for node in nodes for rank in self.ranks_by_node.get(node, ())))

    def data_parallel_peers(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same tp and pp coordinates, `rank` among them: they share its non-expert state."""
        stage = self.stage_ranks(self.stage(rank))
        return tuple(range(stage.start + (rank - stage.start) % self.tp, stage.stop, self.tp))

    def expert_data_parallel_peers(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same etp, ep and pp coordinates, `rank` among them: they share its experts."""
        stage, step = self.stage_ranks(self.stage(rank)), self.expert_tp * self.ep
        return tuple(range(stage.start + (rank - stage.start) % step, stage.stop, step))

    def layers_of_stages(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Layers of each pipeline rank, its virtual stages together, in ascending order.

        Equal numbers per (virtual) stage as Megatron-Core lays them out; where they do not divide evenly, the first
        stages get one more. Raises UsageError when a (virtual) stage would be empty.
        """
        chunks = self.pp * self.vpp
        if num_layers < chunks:
            raise UsageError(f"{num_layers} layers cannot fill pp x vpp = {chunks} stages: lower pp or vpp")
        share, extra = divmod(num_layers, chunks)
        stages: list[list[int]] = [[] for _ in range(self.pp)]
        first = 0
        for chunk in range(chunks):
            count = share + (chunk < extra)
            stages[chunk % self.pp] += range(first, first + count)
            first += count
        return tuple(map(tuple, stages))
