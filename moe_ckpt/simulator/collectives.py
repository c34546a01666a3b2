"""Seconds of collectives over groups of ranks, by the affine law of a latency and a rate (MoEvement App. C)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupSpread:
    """How a group lies over nodes: `inside` of its `ranks` on each of them.

    copies: of what a rank sends in an all-to-all, the share that crosses between nodes; None: as evenly over all ranks.
    """

    ranks: int
    inside: int
    copies: float | None = None

    @classmethod
    def of(cls, ranks: int, distance: int, ranks_per_node: int) -> GroupSpread:
        """The spread of a group of ranks at equal distances.

        Args:
            ranks: Size of the group.
            distance: Distance of neighbours in the group, in the order of all ranks.
            ranks_per_node: Ranks on each node.
        """
        return cls(ranks, max(1, min(ranks, ranks_per_node // distance)))

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return -(-self.ranks // self.inside)


@dataclass(frozen=True)
class Links:
    """Bytes per second that one rank reaches within its node and to others, and seconds per step of a collective."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float

    def ring_s(self, size: float, spread: GroupSpread) -> float:
        """Seconds of a reduce-scatter or an all-gather: within nodes first, then each rank's part between them.

        Args:
            size: Bytes of the whole buffer.
            spread: Where the ranks of the group lie.
        """
        steps = spread.inside - 1 + spread.nodes - 1
        local_s = (spread.inside - 1) / spread.inside * size / self.intra_bytes_per_s
        return steps * self.latency_s + local_s + self.ring_network_s(size, spread)

    def ring_network_s(self, size: float, spread: GroupSpread) -> float:
        """The seconds of `ring_s` in which the NIC is busy, without latency.

        Args:
            size: Bytes of the whole buffer.
            spread: Where the ranks of the group lie.
        """
        return (spread.nodes - 1) / spread.nodes * size / spread.inside / self.inter_bytes_per_s

    def all_to_all_s(self, size: float, spread: GroupSpread) -> float:
        """Seconds of an all-to-all, within the node and to other nodes at once.

        Args:
            size: Bytes that each rank sends, evenly over the group.
            spread: Where the ranks of the group lie.
        """
        # What comes to a node once continues from there to all ranks of it that have experts for it.
        within = spread.ranks if spread.copies is None else spread.inside
        local_s = (spread.inside - 1) / within * size / self.intra_bytes_per_s
        return (spread.ranks - 1) * self.latency_s + max(local_s, self.all_to_all_network_s(size, spread))

    def all_to_all_network_s(self, size: float, spread: GroupSpread) -> float:
        """The seconds of `all_to_all_s` in which the NIC is busy, without latency.

        Args:
            size: Bytes that each rank sends, evenly over the group.
            spread: Where the ranks of the group lie.
        """
        crossing = (spread.ranks - spread.inside) / spread.ranks if spread.copies is None else spread.copies
        return crossing * size / self.inter_bytes_per_s
