"""What a recovery did, for people: what came from where, as of which iteration, and what was lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from ..types import MANY_NODES, NO_NODE, OperatorId, Part, RecoveryPlan, RefusedGroup, ReplaySegment, Taken
from ..types.recovery import spans
from .exactness import Exactness

_PARTS = {
    Part.MASTER_AND_MOMENTS: "full state",
    Part.MASTER: "master weights",
    Part.MOMENTS: "moments",
    Part.COMPUTE: "weights",
}


@dataclass(frozen=True)
class RecoveryTable:
    """A recovery plan that was carried out; `nodes[rank]` is the node of each rank, `damaged` are refused copies.

    plt, plt_pec, mlt: the share of tokens that all faults so far have cost (MoC eq. 7, PEC eq. 4, MOETION eq. 6); None
    where nothing can be lost. windows: by iteration, the iterations whose snapshots restore a state together with its
    own. wider: why more stages rolled back than had lost their state; empty if they did not. stages: of the pipeline.
    exactness: what was compared, and how. diverged: replays of earlier attempts that came out otherwise, for which this
    one was taken; then `again` are the iterations that had been trained and are trained again.
    """

    plan: RecoveryPlan
    nodes: tuple[int, ...]
    damaged: tuple[str, ...] = ()
    duration_s: float = 0.0
    plt: float | None = None
    mlt: float | None = None
    windows: Mapping[int, range] = field(default_factory=dict)
    wider: str = ""
    stages: int = 1
    exactness: Exactness = field(default_factory=Exactness)
    diverged: tuple[str, ...] = ()
    again: range = range(0)
    plt_pec: float | None = None

    @property
    def came_out(self) -> str:
        """How the recovered state compares with the one that was lost, in a few words."""
        return "with lost tokens" if self.plan.lost_tokens else str(self.exactness)

    def lines(self) -> Iterator[str]:
        """The table, one line each."""
        plan = self.plan
        how = f"{self.duration_s:.2f} s ({plan.scope.value} rollback)"
        yield f"recovered iteration {plan.target} {self.came_out} in {how}:"
        for text in self.diverged:
            yield f"  diverged before: {text}"
        if self.diverged and self.again:
            yield f"  trained again: iteration{'s' if len(self.again) > 1 else ''} {_span(self.again)}"
        if self.wider and self.wider not in self.diverged:
            yield f"  not local: {self.wider}"
        for one in self.exactness.unverified:
            yield (
                f"  not verified: {self._named(one.stages)}, iterations {spans(set(one.iterations))}: nothing is"
                " recorded with which their replay can be compared"
            )
        for segment in plan.segments:
            if segment.replayed:
                yield self._replay(segment)
        yield from self._waiting()
        yield f"  {'from':<26} {'iteration':>9}  {'what':<15} {'operators':>9}  ranks"
        rows = ((_place(taken), taken.iteration, _PARTS[taken.part], taken) for taken in plan.taken)
        for place, iteration, part, taken in sorted(rows, key=itemgetter(0, 1, 2)):
            yield f"  {place:<26} {iteration:>9}  {part:<15} {len(taken.operators):>9}  {taken.ranks}"
        yield from _refusals(plan.refused)
        for text in self.damaged:
            yield f"  refused: {text}"
        yield from self._losses()

    def _kept_by(self, experts: Collection[OperatorId]) -> str:
        """What these experts have lost nothing of, where only one part of their state came back older."""
        older = {part: set[OperatorId]() for part in (Part.MASTER, Part.MOMENTS)}
        for source in self.plan.taken:
            for part, found in older.items():
                if part in source.part and source.iteration < self.plan.target:
                    found |= source.operators
        for part, other in ((Part.MASTER, Part.MOMENTS), (Part.MOMENTS, Part.MASTER)):
            if older[part].issuperset(experts) and older[other].isdisjoint(experts):
                return (
                    f", in their {_PARTS[part]} only; their {_PARTS[other]} are those of iteration {self.plan.target}"
                )
        return ""

    def _replay(self, segment: ReplaySegment) -> str:
        window = self.windows.get(segment.base, range(segment.base, segment.base + 1))
        who = "" if len(segment.stages) == self.stages else f"{self._named(segment.stages)}, "
        fed = f", fed from the logs of {_stages(segment.logs_from)}" if segment.logs_from else ""
        return (
            f"  {who}window {_span(window)}: restored iteration {segment.base}, then replayed"
            f" {_span(segment.replayed)} with up to {max(map(len, segment.frozen))} operators frozen{fed}"
        )

    def _waiting(self) -> Iterator[str]:
        """The stages that kept their state, where others did not."""
        moved = {stage for segment in self.plan.segments for stage in segment.stages}
        kept = [stage for stage in range(self.stages) if stage not in moved]
        if kept and self.stages > 1:
            yield f"  {self._named(kept)}: resumed from parked state, ran nothing again"
        if self.plan.roll_forward:
            ranks = spans(set(self.plan.roll_forward))
            yield f"  ranks {ranks}: made the step of iteration {self.plan.target} with the gradients they had kept"

    def _named(self, stages: Collection[int]) -> str:
        each = len(self.nodes) // self.stages
        ranks = {rank for stage in stages for rank in range(stage * each, (stage + 1) * each)}
        return f"{_stages(stages)} (ranks {spans(ranks)})"

    def _losses(self) -> Iterator[str]:
        by_layer: dict[int, dict[OperatorId, int]] = {}
        for operator, tokens in self.plan.lost_tokens.items():
            by_layer.setdefault(operator.layer, {})[operator] = tokens
        for layer, lost in sorted(by_layer.items()):
            updates = f"the updates of {sum(lost.values())} routed tokens, of {len(lost)} experts"
            yield f"  lost in layer {layer}: {updates}{self._kept_by(lost)}"
        if self.plt is not None:
            yield f"  proportion of lost tokens, all faults so far: {100 * self.plt:.4f} %"
        if self.plt_pec is not None:
            yield f"  portion of lost tokens by PEC eq. 4, all faults so far: {100 * self.plt_pec:.4f} %"
        if self.mlt is not None:
            yield f"  momentary lost tokens (MLT), all faults so far: {100 * self.mlt:.4f} %"


def _place(one: Taken) -> str:
    nodes = {NO_NODE: "", MANY_NODES: " of many nodes"}
    return one.tier.name.lower().replace("_", " ") + nodes.get(one.holder, f" of node {one.holder}")


def _refusals(refused: Collection[RefusedGroup]) -> Iterator[str]:
    """One line for each reason and tier."""
    for one in sorted(refused, key=lambda one: (one.tier, one.reason.value)):
        copies = f"{one.copies} copies" if one.copies > 1 else "1 copy"
        yield (
            f"  skipped: {copies} in {one.tier.name.lower().replace('_', ' ')} of ranks {one.ranks},"
            f" iterations {spans(set(one.iterations))}: {one.reason.value}"
        )


def _stages(stages: Collection[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {spans(set(stages))}"


def _span(iterations: range) -> str:
    return f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else "".join(map(str, iterations))
