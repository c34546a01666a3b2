"""What a recovery did, for people: what came from where, as of which iteration, and what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..types import OperatorId, Part, RecoveryPlan

_PARTS = {Part.FULL: "full state", Part.MASTER: "master weights", Part.MOMENTS: "moments", Part.WEIGHTS: "weights"}


@dataclass(frozen=True)
class RecoveryTable:
    """A recovery plan that was carried out; `nodes[rank]` is the node of each rank, `damaged` tells refused copies.

    plt: the share of tokens that all faults so far have cost; None where nothing can be lost. window: the iterations
    whose snapshots restore the target together.
    """

    plan: RecoveryPlan
    nodes: tuple[int, ...]
    damaged: tuple[str, ...] = ()
    duration_s: float = 0.0
    plt: float | None = None
    window: range = range(0)

    def lines(self) -> Iterator[str]:
        """The table, one line each."""
        plan = self.plan
        exact = "exactly" if not plan.lost_tokens else "with lost tokens"
        yield f"recovered iteration {plan.target} {exact} in {self.duration_s:.2f} s ({plan.scope.value} rollback):"
        for segment in plan.segments:
            if segment.replayed:
                yield (
                    f"  window {_span(self.window)}: restored iteration {segment.base}, then replayed"
                    f" {_span(segment.replayed)} with up to {max(map(len, segment.frozen))} operators frozen"
                )
        groups: dict[tuple[str, int, str], tuple[set[int], set[OperatorId]]] = {}
        for source in plan.sources:
            holder = "" if source.holder is None else f" of node {source.holder}"
            key = f"{source.tier.name.lower().replace('_', ' ')}{holder}", source.iteration, _PARTS[source.part]
            ranks, operators = groups.setdefault(key, (set(), set()))
            ranks.add(source.rank)
            operators |= source.operators
        yield f"  {'from':<26} {'iteration':>9}  {'what':<15} {'operators':>9}  ranks"
        for (place, iteration, part), (ranks, operators) in sorted(groups.items(), key=lambda group: group[0]):
            yield f"  {place:<26} {iteration:>9}  {part:<15} {len(operators):>9}  {_spans(ranks)}"
        yield from sorted({f"  not used: {refusal}" for refusal in plan.refusals})
        for text in self.damaged:
            yield f"  refused: {text}"
        yield from self._losses()

    def _losses(self) -> Iterator[str]:
        by_layer: dict[int, list[int]] = {}
        for operator, tokens in self.plan.lost_tokens.items():
            by_layer.setdefault(operator.layer, []).append(tokens)
        for layer, lost in sorted(by_layer.items()):
            yield f"  lost in layer {layer}: the updates of {sum(lost)} routed tokens, of {len(lost)} experts"
        if self.plt is not None:
            yield f"  proportion of lost tokens, all faults so far: {100 * self.plt:.4f} %"


def _span(iterations: range) -> str:
    return f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else "".join(map(str, iterations))


def _spans(ranks: set[int]) -> str:
    """Ranks as ranges: 0-3,6."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
