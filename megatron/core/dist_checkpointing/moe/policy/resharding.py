"""Which stored bytes of one parallel layout make up a tensor of another one.

A snapshot names elements of the flattened partition that a tensor rank has of a tensor of the model. Partitions cut
columns: every tensor that is cut is a matrix of `rows` x `width`, whose columns are shared out evenly.

    column parallel, vocabulary    1 x all elements
    gated first layer of an FFN    2 x half of them: each rank has a part of the gates and one of the values
    row parallel                   rows x columns, as it is

So what two stretches of two partitions have in common is a number of equal runs, one for each row, but for the first
and last row of either stretch. Data-parallel shards are the stretches; pipeline stages, virtual stages and experts need
nothing here: layers and experts are numbered over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UnreadableCheckpoint
from ..types import Topology

_KEY = re.compile(
    r"(?P<name>[^\[]+?)(?:/tp(?P<part>\d+)of(?P<parts>\d+))?(?:/rank(?P<own_of>\d+))?"
    r"\[(?P<start>\d+):(?P<end>\d+)\]/(?P<field>[^/\[\]]+)"
)

_OF_THE_VOCABULARY = ("embedding.word_embeddings.", "output_layer.")
_PADDED = "the vocabulary is padded to another number (--make-vocab-size-divisible-by)"


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor of the whole model as a matrix of which tensor ranks have equal shares of the columns, in elements.

    fused: whether it joins several matrices of different sizes, of each of which a rank has a share.
    """

    rows: int
    width: int
    fused: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements `start` to `end` of the flattened partition `part` of `parts`."""

    start: int
    end: int
    part: int = 0
    parts: int = 1

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RecordKey:
    """What the key of a record says: `megatron_state.operators.Shard.key`, taken apart.

    own_of: the rank for a tensor in which every rank has values of its own, else None.
    """

    name: str
    field: str
    elements: ElementRange
    own_of: int | None = None

    @classmethod
    def parse(cls, key: str) -> RecordKey:
        """Raises UnreadableCheckpoint for a key that names no elements of a tensor."""
        found = _KEY.fullmatch(key)
        if found is None:
            raise UnreadableCheckpoint(
                f"record {key} names no elements of a tensor of the model: something else made it"
            )
        elements = ElementRange(
            int(found["start"]), int(found["end"]), int(found["part"] or 0), int(found["parts"] or 1)
        )
        own_of = None if found["own_of"] is None else int(found["own_of"])
        return cls(found["name"], found["field"], elements, own_of)

    @property
    def tensor(self) -> str:
        """The tensor and the field, without the elements: the same in all layouts."""
        return f"{self.name}/{self.field}"


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A record that is stored: by which rank, of which pipeline stage, which elements, and their checksum."""

    rank: int
    stage: int
    key: str
    elements: ElementRange
    xxh3: str


@dataclass(frozen=True, slots=True)
class ElementRun:
    """`count` times `length` elements: the first at `source` of a record and `target` of what is put together, each
    next one a step farther in both."""

    source: int
    target: int
    length: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.length * self.count


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read of one record, and where it goes."""

    record: StoredRange
    runs: tuple[ElementRun, ...]


def plan_reads(
    tensor: str, grid: Grid, stored: Sequence[StoredRange], wanted: ElementRange, reader: int = 0
) -> tuple[ReadPlan, ...]:
    """The records that make up `wanted`: each element exactly once.

    Copies of the same elements must have the same checksum, and are read by different ranks where there are several.
    Of a tensor that two pipeline stages have (tied embeddings), each cut in its own way, one stage's shares are taken.

    Args:
        tensor: For people.
        grid: The whole tensor, as this job has it.
        stored: All records of the tensor.
        wanted: What is to be made up.
        reader: The rank that reads it.

    Raises:
        UnreadableCheckpoint: Elements are missing, there twice, or beyond the tensor; copies differ; the tensor cannot
            be cut otherwise.
    """
    if grid.fused and any(record.elements.parts != wanted.parts for record in stored):
        raise UnreadableCheckpoint(
            f"{tensor} joins several projections, each of which is cut by itself: start with the tensor-parallel size"
            f" of before, {stored[0].elements.parts}, and load a checkpoint into another one"
        )
    whole = _share(tensor, grid, wanted)
    if wanted.end > whole:
        raise UnreadableCheckpoint(f"{tensor}: elements up to {wanted.end} are wanted of a partition of {whole}")
    problem = f"{tensor} is in none of the snapshots"
    for stage in sorted({record.stage for record in stored}):
        records = [record for record in stored if record.stage == stage]
        _check(tensor, grid, records)
        plans = [
            ReadPlan(replicas[reader % len(replicas)], runs)
            for replicas in _replicas(tensor, records)
            if (runs := common(grid, replicas[0].elements, wanted))
        ]
        found = sum(run.numel for plan in plans for run in plan.runs)
        if found == wanted.numel:
            return tuple(plans)
        first = _first_gap(wanted, plans)
        problem = f"{tensor}: elements from {first} of the {wanted.numel} that this rank needs are in no snapshot"
    padding = f", or {_PADDED}" if tensor.startswith(_OF_THE_VOCABULARY) else ""
    raise UnreadableCheckpoint(f"{problem}; a rank's share is missing, or it is of another model{padding}")


def one_value(tensor: str, stored: Sequence[StoredRange], reader: int = 0) -> StoredRange:
    """A record of a tensor of which all ranks must have stored the same values, as a step count.

    Args:
        tensor: The tensor's name, for the error.
        stored: All records of the tensor.
        reader: The rank that reads it, by which one of equal records is chosen.

    Raises:
        UnreadableCheckpoint: Ranks have stored different values, or there is no record.
    """
    if not stored:
        raise UnreadableCheckpoint(f"{tensor} is in none of the snapshots; a rank's share is missing")
    other = next((record for record in stored if record.xxh3 != stored[0].xxh3), None)
    if other is not None:
        raise UnreadableCheckpoint(
            f"{tensor} has one value on rank {stored[0].rank} and another on rank {other.rank}, and belongs to ranks of"
            " the layout that it was made in: start with that layout again"
        )
    return stored[reader % len(stored)]


def common(grid: Grid, one: ElementRange, other: ElementRange) -> tuple[ElementRun, ...]:
    """The elements that two stretches have in common, as places in both.

    Args:
        grid: The whole tensor.
        one: The stretch that places count from as sources.
        other: The stretch that places count from as targets.

    Raises:
        UnreadableCheckpoint: The columns cannot be shared out evenly.
    """
    width, wide = _columns("", grid, one), _columns("", grid, other)
    first, last = max(one.part * width, other.part * wide), min((one.part + 1) * width, (other.part + 1) * wide)
    if first >= last:
        return ()
    if width == wide:  # the same partition
        start, end = max(one.start, other.start), min(one.end, other.end)
        return (ElementRun(start - one.start, start - other.start, end - start),) if start < end else ()
    lanes = (one, width, first - one.part * width), (other, wide, first - other.part * wide)
    length = last - first
    # Rows of which both have all: their first elements lie a row apart in each.
    begin = max(0, *(-((at - of.start) // row) for of, row, at in lanes))
    end = min(grid.rows, *((of.end - length - at) // row + 1 for of, row, at in lanes))
    edges = {place // row for of, row, _ in lanes for place in (of.start, of.end - 1)}
    runs = [_in_row(row, lanes, length) for row in sorted(edges) if not begin <= row < end and row < grid.rows]
    if begin < end:
        (source, target) = (begin * row + at - of.start for of, row, at in lanes)
        runs.append(ElementRun(source, target, length, end - begin, width, wide))
    return tuple(run for run in runs if run.length > 0)


def source_rank(rank: int, old: Topology, new: Topology) -> int:
    """The rank of the old layout whose random states a rank of the new one takes.

    That at the same tensor, context, data-parallel and pipeline coordinates, each counted modulo the old degree: so
    ranks of which some states have to be equal (the tensor ranks of a replica, the replicas of a tensor rank) take them
    from ranks whose states were.

    Args:
        rank: A rank of the new layout.
        old: The layout that the checkpoint was made in.
        new: The layout of this job.
    """
    here = new.coordinates(rank)
    tp, cp, dp, pp = here.tp % old.tp, here.cp % old.cp, here.dp % old.dp, here.pp % old.pp
    return pp * old.ranks_per_stage + (dp * old.cp + cp) * old.tp + tp


def freed_by(rank: int, new: Topology, stored: Iterable[int]) -> Iterator[int]:
    """The ranks of an older layout whose snapshots `rank` removes when they are superseded: each by exactly one.

    Args:
        rank: A rank of this job.
        new: The layout of this job.
        stored: The ranks of the older layout.
    """
    return (owner for owner in stored if owner % new.world_size == rank)


def _in_row(row: int, lanes: Sequence[tuple[ElementRange, int, int]], length: int) -> ElementRun:
    """What both have of one row, of which one of them has a part only; of no length where that is nothing."""
    begin, end = 0, length
    for of, width, at in lanes:
        begin = max(begin, of.start - row * width - at)
        end = min(end, of.end - row * width - at)
    source, target = (row * width + at + begin - of.start for of, width, at in lanes)
    return ElementRun(source, target, end - begin)


def _columns(tensor: str, grid: Grid, of: ElementRange) -> int:
    if grid.width % of.parts:
        raise UnreadableCheckpoint(f"{tensor}: {grid.width} columns cannot be shared out evenly to {of.parts} ranks")
    return grid.width // of.parts


def _share(tensor: str, grid: Grid, of: ElementRange) -> int:
    return grid.rows * _columns(tensor, grid, of)


def _check(tensor: str, grid: Grid, records: Sequence[StoredRange]) -> None:
    parts = {record.elements.parts for record in records}
    if len(parts) > 1:
        raise UnreadableCheckpoint(
            f"{tensor} is cut into {min(parts)} partitions on some ranks, {max(parts)} on others"
        )
    for record in records:
        share = _share(tensor, grid, record.elements)
        if record.elements.end > share:
            raise UnreadableCheckpoint(
                f"{tensor}: rank {record.rank} stored elements up to {record.elements.end} of a partition, which has"
                f" {share} in this job: it is of another model, or {_PADDED}"
            )


def _replicas(tensor: str, records: Sequence[StoredRange]) -> list[list[StoredRange]]:
    """The records by their elements. Raises UnreadableCheckpoint for copies that differ, and for other overlaps."""
    by_place: dict[ElementRange, list[StoredRange]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        copies = by_place.setdefault(record.elements, [])
        copies.append(record)
        if record.xxh3 != copies[0].xxh3:
            raise UnreadableCheckpoint(
                f"{tensor}: ranks {copies[0].rank} and {record.rank} stored different values of the same elements"
            )
    places = sorted(by_place, key=lambda place: (place.part, place.start, place.end))
    for one, other in pairwise(places):
        if one.part == other.part and other.start < one.end:
            ranks = by_place[one][0].rank, by_place[other][0].rank
            raise UnreadableCheckpoint(f"{tensor}: ranks {ranks[0]} and {ranks[1]} both stored element {other.start}")
    return [by_place[place] for place in places]


def _first_gap(wanted: ElementRange, plans: Sequence[ReadPlan]) -> int:
    """The first element of what is wanted that no run brings."""
    rows = (
        range(run.target + at * run.target_step, run.target + at * run.target_step + run.length)
        for plan in plans
        for run in plan.runs
        for at in range(run.count)
    )
    end = 0
    for row in sorted(rows, key=lambda row: row.start):
        if row.start > end:
            break
        end = max(end, row.stop)
    return end
