"""What the manifests of a rank say in each iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..policy.lineage import Lineage, past
from ..ports import Facts, Json
from ..strategies import Piece
from ..types import OperatorId


@dataclass(frozen=True)
class Identity:
    """The job, its parallel layout, which operators are the rank's, and the attempts of the job so far."""

    job: str
    topology: Mapping[str, Json]
    operators: frozenset[OperatorId]
    strategy: str = ""
    timeline: Lineage = ()

    def pieces(self, pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
        """Those that lie on this rank, with their places: the first one, and all of which it owns a part."""
        return [
            (at, piece) for at, piece in enumerate(pieces) if at == 0 or not self.operators.isdisjoint(piece.plan.parts)
        ]

    def facts(self, piece: Piece, scalars: Mapping[str, Json]) -> Facts:
        """The facts of one piece, with the parts that it holds of this rank's operators."""
        parts = piece.plan.parts
        held: list[Json] = [
            [operator.layer, operator.kind.value, operator.expert, parts[operator].value]
            for operator in sorted(self.operators)
            if operator in parts
        ]
        # What is parked may be of the very iteration that this attempt went on from.
        timeline: list[Json] = [[attempt, after] for attempt, after in past(self.timeline, piece.plan.iteration)]
        window: list[Json] = [piece.span[0], piece.span[-1]]
        own: dict[str, Json] = {
            "operators": held,
            "timeline": timeline,
            "made_by": self.strategy,
            "window": window,
        }
        return Facts(self.job, piece.plan.digest(), self.topology, {**scalars, **own})
