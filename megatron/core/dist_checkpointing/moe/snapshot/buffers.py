"""How much memory a strategy's specs take: the same segments on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

from ..errors import MoECheckpointError
from ..ports import Capturer, Json, MappedStore, Transport
from ..strategies import BufferSpec, Job
from ..strategies.memory_report import MemoryReport, memory_report, segment_bytes
from ..types import OperatorId, OperatorKind, OperatorSize, Part, full_plan


def segment_sizes(
    specs: Sequence[BufferSpec], capturer: Capturer, transport: Transport, owners: Sequence[int]
) -> list[int]:
    """Bytes of each segment: as many, and as large, as any rank needs, so that a restart may place any rank anywhere.

    Of specs that ask for as many segments a rank needs those of which it owns something, which differ from rank to
    rank: their largest ones are matched with each other, then their second largest, and so on.
    A collective over all ranks. Raises PeerLost.
    """
    needed = [
        max(capturer.layout(plan, trainer=spec.trainer).nbytes for plan in (spec.largest, *spec.also)) for spec in specs
    ]
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for spec, nbytes in zip(specs, needed, strict=True):
        alike.setdefault((spec.own, spec.replica, bool(spec.also)), []).append(nbytes)
    largest = iter(transport.least([-nbytes for some in alike.values() for nbytes in sorted(some, reverse=True)]))
    sizes: list[int] = []
    for (own, replica, varies), some in alike.items():
        for at, negative in enumerate(islice(largest, len(some))):
            nbytes = segment_bytes(-negative, varies=varies)
            if nbytes or not at:
                sizes += [max(1, nbytes)] * (own + replica * len(owners))
    return sizes


def fit_memory(
    memory: MappedStore, sizes: Sequence[int], transport: Transport, before: Callable[[], None] = lambda: None
) -> tuple[bool, str]:
    """Give memory these segments; whether all ranks have them, and why this one has not, if so.

    before: called first where segments may go. A collective over all ranks. Raises PeerLost.
    """
    why = ""
    try:
        memory.resize(sizes, before)
    except MoECheckpointError as error:
        why = str(error)
    (done,) = transport.least([int(not why)])
    return bool(done), why


def gathered_sizes(capturer: Capturer, transport: Transport) -> dict[int, dict[OperatorId, OperatorSize]]:
    """What `operator_sizes` gives on each rank, by rank; a collective over all ranks."""
    mine: list[Json] = [
        [operator.layer, operator.kind.value, operator.expert, size.full_bytes, size.weights_bytes]
        for operator, size in operator_sizes(capturer).items()
    ]
    gathered = cast("list[list[list[int]]]", transport.gather(mine))
    return {
        rank: {OperatorId(row[0], OperatorKind(row[1]), row[2]): OperatorSize(row[3], row[4]) for row in rows}
        for rank, rows in enumerate(gathered)
    }


def gathered_unchanging(
    own: frozenset[OperatorId], operators: frozenset[OperatorId], transport: Transport
) -> frozenset[OperatorId]:
    """What no rank that owns a part of it changes; a collective over all ranks.

    Experts count only where none of them changes: what strategies know of the load of layers is by expert, of all.

    Args:
        own: What this rank does not change.
        operators: What this rank owns a part of.
    """
    rows: list[Json] = [[one.layer, one.kind.value, one.expert, int(one in own)] for one in sorted(operators)]
    found: dict[OperatorId, bool] = {}
    for of_rank in cast("list[list[list[int]]]", transport.gather(rows)):
        for layer, kind, expert, stays in of_rank:
            operator = OperatorId(layer, OperatorKind(kind), expert)
            found[operator] = found.get(operator, True) and bool(stays)
    experts_stay = all(stays for operator, stays in found.items() if operator.is_expert)
    return frozenset(one for one, stays in found.items() if stays and (experts_stay or not one.is_expert))


def operator_sizes(capturer: Capturer) -> dict[OperatorId, OperatorSize]:
    """Bytes of what this rank owns of each of its operators."""
    full, weights = (_bytes_by_operator(capturer, part) for part in (Part.MASTER_AND_MOMENTS, Part.COMPUTE))
    return {operator: OperatorSize(full[operator], weights[operator]) for operator in sorted(capturer.operators)}


def memory_report_of(
    specs: tuple[BufferSpec, ...], job: Job, rank: int, owners: int, log_bytes: int = 0
) -> MemoryReport | None:
    """What the buffers hold on this rank, and its boundary logs beside them, as MoEvement Table 6 counts it; None
    where the sizes are not known."""
    if rank not in job.sizes:
        return None
    return replace(memory_report(specs, job.sizes[rank], owners), log_bytes=log_bytes)


def _bytes_by_operator(capturer: Capturer, part: Part) -> dict[OperatorId, int]:
    found = dict.fromkeys(capturer.operators, 0)
    for field in capturer.layout(full_plan(0, capturer.operators, part)).fields:
        if field.operator is not None:
            found[field.operator] += field.nbytes
    return found
