"""When pipeline stages idle, and how much of a snapshot fits into that time."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from ...errors import UsageError
from ...policy.checks import not_negative, positive, whole


class Pass(enum.Enum):
    """The two halves of a microbatch's way through the pipeline."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one microbatch through one model chunk of a stage, in seconds since the iteration began."""

    stage: int
    chunk: int
    microbatch: int
    direction: Pass
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Bubbles:
    """When one stage idles between the start of an iteration and the time at which all stages are done.

    `intervals` are (start, end) in seconds since the iteration began, ascending and disjoint; `span_s` is the length of
    the forward and backward passes of the whole pipeline, which the optimizer step follows. Schedules that are not
    simulated here can be profiled into this type (MOETION 5.3). Raises UsageError for intervals that are no such thing.
    """

    intervals: tuple[tuple[float, float], ...]
    span_s: float

    def __post_init__(self) -> None:
        positive("span_s", self.span_s)
        previous_s = 0.0
        for start_s, end_s in self.intervals:
            if not previous_s <= start_s < end_s <= self.span_s:
                raise UsageError(
                    f"bubble ({start_s}, {end_s}) must be ascending, after {previous_s} s and within {self.span_s} s"
                )
            previous_s = end_s

    @cached_property
    def idle_s(self) -> float:
        """t_bubble of MOETION Alg. 4: the sum of all bubbles."""
        return math.fsum(end_s - start_s for start_s, end_s in self.intervals)

    @property
    def busy_s(self) -> float:
        """Time in which the stage computes."""
        return self.span_s - self.idle_s


@dataclass(frozen=True)
class PipelineSchedule:
    """Which stage computes what when, in one iteration: the operations of each stage in their order."""

    operations: tuple[tuple[Operation, ...], ...] = field(repr=False)

    @cached_property
    def span_s(self) -> float:
        """Seconds from the first operation to the end of the last one of all stages."""
        return max(stage[-1].end_s for stage in self.operations)

    def bubbles(self, stage: int) -> Bubbles:
        """When the stage idles. Raises IndexError for a stage that does not exist."""
        edges = [0.0]
        for operation in self.operations[stage]:
            edges += operation.start_s, operation.end_s
        edges.append(self.span_s)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return Bubbles(tuple((start_s, end_s) for start_s, end_s in gaps if end_s > start_s), self.span_s)

    def waits(self, stage: int) -> Bubbles:
        """The bubbles of a stage up to its last operation, which is when it waits for what others send.

        Raises IndexError for a stage that does not exist.
        """
        end_s = self.operations[stage][-1].end_s
        return Bubbles(tuple(one for one in self.bubbles(stage).intervals if one[1] <= end_s), end_s)


Times = float | Sequence[float]
_Step = tuple[Pass, int, int]  # direction, chunk, microbatch
_Place = tuple[int, _Step]


def schedule_1f1b(
    stages: int,
    microbatches: int,
    forward_s: Times,
    backward_s: Times,
    chunks: int = 1,
    *,
    communication_s: float = 0.0,
) -> PipelineSchedule:
    """One iteration of Megatron's 1F1B pipeline, or with virtual stages of its interleaved one.

    From it follow the bubbles of MOETION Alg. 4, line 3, which the paper estimates for 1F1B alone. The order within a
    stage is Megatron-Core's: microbatches in groups of `stages`, warm-up of (stages - stage - 1) * 2 + (chunks - 1) *
    stages forward passes with interleaving, stages - stage - 1 without. Fewer microbatches than stages are allowed
    without. Operations start as soon as their stage and their input are there; times are exact, so that no bubble comes
    from rounding.

    Args:
        stages: Pipeline stages.
        microbatches: Microbatches of an iteration.
        forward_s: Seconds of a microbatch's forward pass on a whole stage, all its chunks together; one number, or one
            per stage.
        backward_s: The same of the backward pass.
        chunks: Virtual stages of each stage.
        communication_s: Seconds that a tensor travels to the next stage, while both may compute.

    Raises:
        UsageError: Counts below 1, times that are not finite or not greater than 0 (communication: negative), chunks
            with a single stage, and interleaved microbatches that are no multiple of stages.
    """
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        whole(name, value, 1)
    if chunks > 1 and (stages == 1 or microbatches % stages):
        raise UsageError(
            f"microbatches is {microbatches} with {chunks} chunks, but interleaving needs at least 2 stages and a"
            f" multiple of them (stages is {stages})"
        )
    seconds = {
        Pass.FORWARD: _per_stage("forward_s", forward_s, stages),
        Pass.BACKWARD: _per_stage("backward_s", backward_s, stages),
    }
    orders = [list(_steps(stage, stages, microbatches, chunks)) for stage in range(stages)]
    return _timed(orders, chunks, seconds, not_negative("communication_s", communication_s))


def bytes_in_bubbles(bubbles: Bubbles, checkpoint_bytes: int, bandwidth_bytes_per_s: float) -> int:
    """SplitParameter of MOETION Alg. 4: floor(n t_bubble / t_ss) bytes go into the bubbles, or all n if those are
    longer; t_ss is the time of the whole snapshot. The rest runs beside computation.

    Args:
        bubbles: The bubbles of the passes, t_bubble in all.
        checkpoint_bytes: n, bytes of the snapshot.
        bandwidth_bytes_per_s: Of the link.

    Raises:
        UsageError: Negative bytes, and a bandwidth that is not finite and greater than 0.
    """
    bandwidth, nbytes = positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s), checkpoint_bytes
    idle = sum((Fraction(str(end_s)) - Fraction(str(start_s)) for start_s, end_s in bubbles.intervals), Fraction(0))
    return min(whole("checkpoint_bytes", nbytes, 0), math.floor(idle * bandwidth))


def _per_stage(name: str, seconds: Times, stages: int) -> list[Fraction]:
    if isinstance(seconds, Sequence):
        if len(seconds) != stages:
            raise UsageError(f"{name} has {len(seconds)} values, but must be one number or one per stage ({stages})")
        return [positive(f"{name} of stage {stage}", value) for stage, value in enumerate(seconds)]
    return [positive(name, seconds)] * stages


def _steps(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[_Step]:
    """The operations of a stage in Megatron-Core's order."""
    total = microbatches * chunks
    warmup = min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages if chunks > 1 else stages - stage - 1)
    table = [
        (chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]
    forward: Iterator[_Step] = ((Pass.FORWARD, chunk, microbatch) for chunk, microbatch in table)
    backward: Iterator[_Step] = ((Pass.BACKWARD, chunks - 1 - chunk, microbatch) for chunk, microbatch in table)
    for _ in range(warmup):
        yield next(forward)
    for _ in range(total - warmup):
        yield next(forward)
        yield next(backward)
    yield from backward


def _input(place: _Place, stages: int, chunks: int) -> _Place | None:
    """What must have ended, and its result arrived, before an operation starts.

    None for the first forward pass, which reads data, and the first backward pass, which follows its own forward pass.
    """
    stage, (direction, chunk, microbatch) = place
    onward = 1 if direction is Pass.BACKWARD else -1
    neighbour = stage + onward
    if not 0 <= neighbour < stages:
        neighbour, chunk = neighbour % stages, chunk + onward
        if not 0 <= chunk < chunks:
            return None
    return neighbour, (direction, chunk, microbatch)


def _timed(
    orders: list[list[_Step]], chunks: int, seconds: dict[Pass, list[Fraction]], communication: Fraction
) -> PipelineSchedule:
    # Whole ticks, so that what ends when another begins does so exactly.
    times = [communication, *seconds[Pass.FORWARD], *seconds[Pass.BACKWARD]]
    ticks_per_s = chunks * math.lcm(*(time.denominator for time in times))
    ticks = {direction: [int(time * ticks_per_s) // chunks for time in each] for direction, each in seconds.items()}
    ends = _simulate(orders, chunks, ticks, int(communication * ticks_per_s))

    def operation(stage: int, step: _Step, end: int) -> Operation:
        direction, chunk, microbatch = step
        start_s, end_s = (end - ticks[direction][stage]) / ticks_per_s, end / ticks_per_s
        return Operation(stage, chunk, microbatch, direction, start_s, end_s)

    return PipelineSchedule(
        tuple(
            tuple(operation(stage, step, end) for step, end in zip(order, ends[stage], strict=True))
            for stage, order in enumerate(orders)
        )
    )


def _simulate(
    orders: list[list[_Step]], chunks: int, ticks: dict[Pass, list[int]], communication: int
) -> list[list[int]]:
    """When each operation ends, in ticks, by stage and in the order of its operations."""
    stages = len(orders)
    ends: dict[_Place, int] = {}
    ended: list[list[int]] = [[] for _ in orders]
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        before = len(ended[stage])
        while len(ended[stage]) < len(orders[stage]):
            step = orders[stage][len(ended[stage])]
            source = _input((stage, step), stages, chunks)
            if source is not None and source not in ends:
                break
            arrived = 0 if source is None else ends[source] + communication
            end = max(arrived, ended[stage][-1] if ended[stage] else 0) + ticks[step[0]][stage]
            ends[stage, step] = end
            ended[stage].append(end)
        if len(ended[stage]) > before:
            ready += {(stage + 1) % stages, (stage - 1) % stages}
    return ended
