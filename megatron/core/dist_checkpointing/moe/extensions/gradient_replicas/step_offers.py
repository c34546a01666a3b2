"""Which replicas go to peers as the step that led to them, in place of their state (MOETION Alg. 3)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...ports import Manifest, MappedReader, RecordedStep
from ...replication.replicator import Exchange
from ...strategies import Piece
from ...types import OperatorId
from .recomputation import encode, follow, gradient_bytes, made_by_step
from .transfer import TransferChoice, TransferCost, transfer

log = logging.getLogger(__name__)

PATIENCE = 3
"""So many exchanges in a row in which peers got other bits, and state is sent from then on."""


class StepOffers:
    """What peers of one rank have confirmed, and so can follow from. Used by the thread that replicates alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._iteration, self._confirmed = -1, frozenset[OperatorId]()
        self._futile = 0

    follow = staticmethod(follow)

    def steps(
        self, iteration: int, pieces: Sequence[Piece], readers: Sequence[MappedReader], step: RecordedStep | None
    ) -> list[memoryview]:
        """For each piece what a peer can make it from.

        Args:
            iteration: The iteration of the snapshot.
            pieces: The pieces of it that are sent.
            readers: An open reader of each piece.
            step: The step of the iteration; None: it was not recorded.

        Returns:
            One for each piece; empty where its state has to be sent.
        """
        interval = iteration - self._iteration
        if self._confirmed and (interval != 1 or step is None):
            why = "its step was not recorded" if interval == 1 else f"peers confirmed iteration {self._iteration} last"
            log.warning("rank %d sends full state of iteration %d to its peers: %s", self._rank, iteration, why)
        if step is None or interval < 1 or self._futile == PATIENCE:
            return [memoryview(b"")] * len(pieces)
        return [
            self._step(reader.manifest, reader.raw(), interval, frozenset(piece.plan.parts), step)
            for piece, reader in zip(pieces, readers, strict=True)
        ]

    def exchanged(self, pieces: Sequence[Piece], done: Exchange, *, offered: bool) -> None:
        """An exchange has ended: what all peers have now is what they can follow from.

        Args:
            pieces: The pieces that were sent.
            done: How it went.
            offered: Whether peers were offered steps.
        """
        everywhere = bool(pieces) and all(done.acknowledged.values())
        self._iteration = done.iteration
        self._confirmed = frozenset(one for piece in pieces for one in piece.plan.parts) if everywhere else frozenset()
        if done.not_followed:
            log.warning("rank %d: %s", self._rank, "; ".join(done.not_followed))
        if offered:
            self._futile = self._futile + 1 if done.not_followed else 0
            if self._futile == PATIENCE:
                log.warning(
                    "rank %d: gradient replication disabled, peers cannot repeat steps: sending state", self._rank
                )

    def _step(
        self, manifest: Manifest, raw: memoryview, interval: int, operators: frozenset[OperatorId], step: RecordedStep
    ) -> memoryview:
        costs = step_costs(manifest, step)
        chosen = transfer(self._confirmed, operators & costs.keys(), interval, self._confirmed, costs)
        followed = {one for one, choice in chosen.items() if choice is TransferChoice.GRADIENTS}
        prefixes = {one.prefix for one in step.shards if one.operator in followed}
        return encode(manifest, raw, step, prefixes) if prefixes else memoryview(b"")


def step_costs(manifest: Manifest, step: RecordedStep) -> Mapping[OperatorId, TransferCost]:
    """Of each operator with stepped weights in this snapshot: bytes that its step makes, and those of its gradients.

    Args:
        manifest: The snapshot.
        step: The step that was recorded.
    """
    prefixes = {one.prefix for one in step.shards}
    made: dict[OperatorId, int] = defaultdict(int)
    sent: dict[OperatorId, int] = defaultdict(int)
    for record in manifest.records:
        if record.operator is not None and made_by_step(record.key, prefixes):
            made[record.operator] += record.nbytes
    for one in step.shards:
        sent[one.operator] += gradient_bytes(one) if one.group is not None else 0
    return {operator: TransferCost(nbytes, sent[operator]) for operator, nbytes in made.items()}
