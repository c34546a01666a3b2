"""What a rank sends over stage boundaries, how many bytes that is, and which of its logs a replay needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from ..errors import UsageError
from ..types import Direction, Topology, boundary_key
from .checks import whole


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
