"""Which pipeline stages roll back together and how far, what they send each other, and which logs a replay needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..types import Direction, RecoveryPlan, ReplaySegment, Topology, boundary_key
from .checks import whole

Cost = tuple[int, int, int]
Choice = tuple[Cost, tuple["Rollback", ...]]


@dataclass(frozen=True)
class Rollback:
    """Neighbouring pipeline stages, in the order of the pipeline, that go back to `base` together."""

    stages: tuple[int, ...]
    base: int


@dataclass(frozen=True)
class Pipeline:
    """What the choice of rollbacks depends on; the sequences have one entry per stage.

    parked: whether all ranks of the stage stand at the target already.
    bases: iterations from which the stage can be rebuilt, with the iteration at which it is dense again.
    logs_since: from which iteration on the logs that the stage sent are complete, up to the target.
    journal: iterations whose global scalars are known.
    circular: the last stage feeds the first, as with virtual stages.
    tied: first and last stage share embeddings, so that they replay together or not at all.
    """

    target: int
    parked: tuple[bool, ...]
    bases: tuple[Mapping[int, int], ...]
    logs_since: Mapping[Direction, tuple[int, ...]]
    journal: frozenset[int] = frozenset()
    circular: bool = False
    tied: bool = False

    def neighbours(self, start: int, length: int) -> Iterator[tuple[int, Direction]]:
        """Stages beside a run of stages, and the direction in which they feed it.

        Args:
            start: The first stage of the run.
            length: How many stages it has.
        """
        stages = len(self.parked)
        if length < stages:
            if start > 0 or self.circular:
                yield (start - 1) % stages, Direction.FORWARD
            if start + length < stages or self.circular:
                yield (start + length) % stages, Direction.BACKWARD


def cheapest_rollbacks(pipeline: Pipeline) -> tuple[Rollback, ...] | None:
    """The rollbacks that bring all stages to the target with the least work, or None if nothing does.

    Least means: fewest replaying stages, then fewest separate segments (so contiguous failed stages recover jointly,
    MoEvement App. A), then fewest replayed iterations. Between segments, boundary logs must reach back to the base; a
    segment of all stages needs none, and needs the journal only where operators are frozen.
    """
    stages = len(pipeline.parked)
    search = _Search(pipeline)
    choices = [
        choice
        for shared in (None, *search.shared_bases())
        for first in (range(stages) if pipeline.circular else (0,))
        if (choice := search.cheapest(first, shared)) is not None
    ]
    if not choices:
        return None
    rollbacks = min(choices, key=lambda choice: (choice[0], [(run.stages, run.base) for run in choice[1]]))[1]
    return _join_tied(pipeline, rollbacks)


class _Search:
    """Dynamic programming over the cuts between runs of stages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.stages = len(pipeline.parked)
        self._common: dict[tuple[int, int], dict[int, int]] = {}
        self._bases: dict[tuple[int, int, int | None], int | None] = {}

    def shared_bases(self) -> list[int]:
        """Iterations to which tied first and last stages could roll back together."""
        if not self.pipeline.tied or self.stages == 1:
            return []
        return sorted(
            base for base in self.common(0, 1) if base in self.pipeline.bases[-1] and base < self.pipeline.target
        )

    def common(self, start: int, length: int) -> dict[int, int]:
        """Bases of all stages of a run, with the iteration at which all are dense again."""
        key = (start, length)
        if key not in self._common:
            own = self.pipeline.bases[start]
            if length == 1:
                self._common[key] = dict(own)
            else:
                others = self.common((start + 1) % self.stages, length - 1)
                self._common[key] = {base: max(own[base], others[base]) for base in own.keys() & others.keys()}
        return self._common[key]

    def base(self, start: int, length: int, shared: int | None) -> int | None:
        """The newest base to which a run of stages can roll back."""
        key = (start, length, shared)
        if key not in self._bases:
            common = self.common(start, length)
            allowed = (base for base in sorted(common, reverse=True) if self._allowed(start, length, base, shared))
            self._bases[key] = next((base for base in allowed if self._covered(start, length, base)), None)
        return self._bases[key]

    def cheapest(self, first: int, shared: int | None) -> Choice | None:
        """The best runs when the pipeline is cut before stage `first`."""
        best: list[Choice | None] = [((0, 0, 0), ())] + [None] * self.stages
        for end in range(1, self.stages + 1):
            stage = (first + end - 1) % self.stages
            options = []
            before = best[end - 1]
            if before is not None and self.pipeline.parked[stage] and not (shared is not None and self._is_end(stage)):
                options.append(before)
            for length in range(1, end + 1):
                start = (first + end - length) % self.stages
                if not self.common(start, length):
                    break
                before, base = best[end - length], self.base(start, length, shared)
                if before is not None and base is not None:
                    options.append(self._extended(before, start, length, base))
            best[end] = min(options, key=lambda option: option[0], default=None)
        return best[-1]

    def _extended(self, before: Choice, start: int, length: int, base: int) -> Choice:
        (replaying, segments, iterations), runs = before
        replayed = self.pipeline.target - base
        cost = (replaying + (length if replayed else 0), segments + 1, iterations + replayed * length)
        return cost, (*runs, Rollback(tuple((start + i) % self.stages for i in range(length)), base))

    def _is_end(self, stage: int) -> bool:
        return stage in (0, self.stages - 1)

    def _allowed(self, start: int, length: int, base: int, shared: int | None) -> bool:
        """Tied ends stand at the target both, or replay from the same base both."""
        touches_end = any(self._is_end((start + i) % self.stages) for i in range(length))
        if not (self.pipeline.tied and touches_end) or self.stages == 1:
            return True
        return base == (self.pipeline.target if shared is None else shared)

    def _covered(self, start: int, length: int, base: int) -> bool:
        """Whether logs and journal have what a replay from `base` to the target needs."""
        pipeline = self.pipeline
        if base == pipeline.target:
            return True
        whole = length == self.stages
        last = self.common(start, length)[base] if whole else pipeline.target
        if not pipeline.journal.issuperset(range(base + 1, last + 1)):
            return False
        return all(
            pipeline.logs_since[direction][stage] <= base + 1 for stage, direction in pipeline.neighbours(start, length)
        )


def _join_tied(pipeline: Pipeline, rollbacks: tuple[Rollback, ...]) -> tuple[Rollback, ...]:
    """One rollback for the two runs at the tied ends of the pipeline, if they replay."""
    last = len(pipeline.parked) - 1
    ends = [run for run in rollbacks if {0, last} & set(run.stages)]
    if not pipeline.tied or len(ends) < 2 or ends[0].base == pipeline.target:
        return tuple(sorted(rollbacks, key=lambda run: run.stages))
    joined = Rollback(tuple(sorted(stage for run in ends for stage in run.stages)), ends[0].base)
    return tuple(sorted([joined, *(run for run in rollbacks if run not in ends)], key=lambda run: run.stages))


# Who takes part in which segment of a recovery, where each rank begins, and what reaches a segment from outside.


def ranks_of(segment: ReplaySegment, topology: Topology) -> tuple[int, ...]:
    """The ranks of all stages of a segment, ascending.

    Args:
        segment: The stages that replay together.
        topology: The rank layout.
    """
    return tuple(rank for stage in sorted(segment.stages) for rank in topology.stage_ranks(stage))


def segment_of(plan: RecoveryPlan, rank: int, topology: Topology) -> ReplaySegment | None:
    """The segment that a rank restores, with or without a replay; None where it resumes from its parked state.

    Args:
        plan: The plan of the recovery.
        rank: The rank to look for.
        topology: The rank layout.
    """
    return next((segment for segment in plan.segments if topology.stage(rank) in segment.stages), None)


def base_for(plan: RecoveryPlan, rank: int, topology: Topology) -> int:
    """The iteration whose state a rank restores at first.

    Args:
        plan: The plan of the recovery.
        rank: The rank that restores.
        topology: The rank layout.
    """
    segment = segment_of(plan, rank, topology)
    if segment is not None:
        return segment.base
    return plan.target - (rank in plan.roll_forward)


def restored(segment: ReplaySegment) -> range:
    """The iterations whose snapshots make a segment's state dense."""
    return range(segment.base, segment.base + sum(map(bool, segment.frozen)) + 1)


def sends_all(segment: ReplaySegment, iteration: int, topology: Topology) -> bool:
    """Whether a replay of an iteration sends over all its stage boundaries what the iteration sent when it ran first.

    Gradients flow down to the lowest layer that is active anywhere; stages outside count as active for this. A stage
    with none of them in front of it may send zeros back, which the neighbour that is frozen does not need.

    Args:
        segment: The stages that replay together.
        iteration: The iteration that is replayed.
        topology: The rank layout.
    """
    if not segment.frozen[iteration - segment.base - 1]:
        return True
    return 0 not in segment.stages or (1 not in segment.stages and topology.vpp == 1)


def feeds(segment: ReplaySegment, rank: int, topology: Topology) -> Iterator[tuple[int, Direction]]:
    """The ranks outside a segment that sent to one of its ranks, each with the direction.

    With virtual stages the last stage is beside the first one, and with two of them each is on both sides of the other.

    Args:
        segment: The stages that replay together.
        rank: Of any stage.
        topology: The rank layout.
    """
    stage = topology.stage(rank)
    for step, way in ((-1, Direction.FORWARD), (1, Direction.BACKWARD)) if stage in segment.stages else ():
        other = stage + step
        if topology.vpp > 1:
            other %= topology.pp
        if other in range(topology.pp) and other not in segment.stages:
            yield rank + (other - stage) * topology.ranks_per_stage, way


# What a rank sends over stage boundaries, how many bytes that is, and which of its logs a replay needs.


def sends(
    topology: Topology, stage: int, microbatches: int, direction: Direction, group: int | None = None
) -> tuple[tuple[int, int], ...]:
    """What a rank of `stage` sends in one iteration in this direction, as (model chunk, microbatch), in order.

    That is the order of Megatron-Core's 1F1B schedule, and of the interleaved one where there are virtual stages. There
    the chunks take turns by groups of microbatches, and what the last stage sends forward goes to the first one, except
    from the last chunk, and what the first one sends backward to the last.

    Args:
        topology: The rank layout, with the numbers of pipeline and virtual stages.
        stage: The pipeline rank that sends.
        microbatches: Microbatches of an iteration.
        direction: Forward for activations, backward for gradients.
        group: Microbatches that a chunk takes at a time, Megatron-Core's `microbatch_group_size_per_vp_stage`; None:
            its default, the number of stages.

    Raises:
        UsageError: The stage does not exist, or a number is below 1.
    """
    whole("microbatches", microbatches, 1)
    if not 0 <= stage < topology.pp:
        raise UsageError(f"stage {stage} does not exist: the pipeline has stages 0 to {topology.pp - 1}")
    at_a_time = whole("group", topology.pp if group is None else group, 1)
    forward = direction is Direction.FORWARD
    silent = (topology.vpp - 1 if forward else 0) if stage == (topology.pp - 1 if forward else 0) else None
    chunks = range(topology.vpp) if forward else range(topology.vpp)[::-1]
    return tuple(
        (chunk, microbatch)
        for first in range(0, microbatches, at_a_time)
        for chunk in chunks
        if chunk != silent
        for microbatch in range(first, min(first + at_a_time, microbatches))
    )


def log_keys(topology: Topology, stage: int, microbatches: int, group: int | None = None) -> tuple[str, ...]:
    """The keys of all records of a log, those of each direction in the order of sending; see `sends`.

    Args:
        topology: The rank layout.
        stage: The pipeline rank that sends.
        microbatches: Microbatches of an iteration.
        group: Microbatches that a chunk takes at a time, as in `sends`.
    """
    return tuple(
        boundary_key(direction, chunk, microbatch)
        for direction in Direction
        for chunk, microbatch in sends(topology, stage, microbatches, direction, group)
    )


def receives(topology: Topology, stage: int, microbatches: int, direction: Direction, group: int | None = None) -> int:
    """How many tensors of this direction reach a rank of `stage` in one iteration: as many as its neighbour sends.

    Args:
        topology: The rank layout.
        stage: The pipeline rank that receives.
        microbatches: Microbatches of an iteration.
        direction: Forward for activations, backward for gradients.
        group: Microbatches that a chunk takes at a time, as in `sends`.
    """
    sender = stage + (-1 if direction is Direction.FORWARD else 1)
    if topology.vpp > 1:
        sender %= topology.pp
    return len(sends(topology, sender, microbatches, direction, group)) if sender in range(topology.pp) else 0


def tensor_shape(
    topology: Topology, seq_length: int, micro_batch_size: int, hidden_size: int, *, sequence_parallel: bool
) -> tuple[int, int, int]:
    """The shape of each tensor that goes over a stage boundary: sequence, microbatch, hidden size.

    The sequence is split over context-parallel ranks, and with sequence parallelism over tensor-parallel ones.

    Args:
        topology: The rank layout, with the context- and tensor-parallel degrees.
        seq_length: Tokens of a sequence.
        micro_batch_size: Samples of a microbatch.
        hidden_size: Elements of a token's hidden state.
        sequence_parallel: Whether tensor-parallel ranks split the sequence too.
    """
    ways = topology.cp * (topology.tp if sequence_parallel else 1)
    return seq_length // ways, micro_batch_size, hidden_size


def sent_bytes(topology: Topology, stage: int, microbatches: int, shape: Iterable[int], element_bytes: int) -> int:
    """Bytes that a rank of `stage` sends over stage boundaries in an iteration, and so those of its log.

    Args:
        topology: The rank layout.
        stage: The pipeline rank that sends.
        microbatches: Microbatches of an iteration.
        shape: The shape of each tensor, from `tensor_shape`.
        element_bytes: Bytes per element.
    """
    count = sum(len(sends(topology, stage, microbatches, direction)) for direction in Direction)
    return count * math.prod(shape) * element_bytes


def kept(held: Iterable[int], oldest_base: int | None, newest: int, lookback: int) -> frozenset[int]:
    """The iterations, of those `held`, whose logs stay when iteration `newest` is committed (MoEvement 3.4).

    Of the `lookback` newest iterations, those after `oldest_base` stay.

    Args:
        held: The iterations of which there are logs.
        oldest_base: The first iteration of the oldest window that is kept, from whose state the earliest replay starts;
            None: there is no window.
        newest: The iteration that is committed.
        lookback: How many of the newest iterations may keep their logs.
    """
    last_unneeded = newest - lookback if oldest_base is None else max(oldest_base, newest - lookback)
    return frozenset(iteration for iteration in held if iteration > last_unneeded)


def covers(logs: Collection[int], oldest_base: int, newest: int) -> str:
    """What a replay from the state after `oldest_base` up to `newest` lacks, in words; empty where logs are all there.

    Args:
        logs: The iterations of which there are logs.
        oldest_base: The iteration from whose state the replay starts.
        newest: The last iteration that is replayed.
    """
    missing = [iteration for iteration in range(oldest_base + 1, newest + 1) if iteration not in logs]
    if not missing:
        return ""
    return f"no boundary logs of {_in_words(missing)}, needed to replay from iteration {oldest_base} to {newest}"


def covered_since(logs: Collection[int], newest: int) -> int | None:
    """The first iteration of the unbroken row of logs that ends with `newest`; None where that has none.

    Args:
        logs: The iterations of which there are logs.
        newest: The last iteration of the row.
    """
    first = newest
    while first in logs:
        first -= 1
    return first + 1 if first < newest else None


def _in_words(iterations: list[int]) -> str:
    """Ascending numbers, neighbours together: "iterations 3, 5 to 8"; of many rows only the first ones."""
    rows: list[list[int]] = []
    for iteration in iterations:
        if rows and rows[-1][-1] == iteration - 1:
            rows[-1].append(iteration)
        else:
            rows.append([iteration])
    named = ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 1 else str(row[0]) for row in rows[:_ROWS])
    more = f" and {sum(map(len, rows[_ROWS:]))} more" if len(rows) > _ROWS else ""
    return f"{'iterations' if len(iterations) > 1 else 'iteration'} {named}{more}"


_ROWS = 4
