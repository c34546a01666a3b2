"""What all ranks of another layout stored of one iteration, and what of it makes up the state of a rank of this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.lineage import Lineage
from ..policy.resharding import (
    ElementRange,
    ElementRun,
    Grid,
    ReadPlan,
    RecordKey,
    StoredRange,
    one_value,
    plan_reads,
    source_rank,
)
from ..ports import RANDOM, Facts, Field, Json, Layout, Manifest, Reader, SnapshotId
from ..types import OperatorId, OperatorKind, Part, Topology
from ..types.layout import BUCKETS, DTYPE_BYTES, Record

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray


# Trainer state that fits a rank of another layout: its parameter groups and loss scalers are others.
#
# A pipeline stage without experts has fewer parameter groups, and fewer members of the optimizer, than one with them.
# What they hold is the same on all ranks: learning rates and weight decay follow from the schedule, which is restored
# after them, and step counts and loss scales are counted alike everywhere. Without a scheduler the loop sets the rates.

_SCALERS, _GROUPS, _STEP = "grad_scalers", "param_groups", "step"
_RATES = "lr", "weight_decay"


def fitted(
    saved: Mapping[str, Any], everywhere: Sequence[Mapping[str, Any]], live: Mapping[str, Any]
) -> dict[str, Any]:
    """The trainer scalars `saved` by one rank, with as many groups and scalers as this rank has.

    Args:
        saved: What is taken but for these.
        everywhere: The same of all ranks of that layout.
        live: What this rank has before anything is restored.

    Raises:
        UnreadableCheckpoint: Ranks disagree about what is the same on all of them.
    """
    result = dict(saved)
    for name in live.keys() & {_SCALERS, _GROUPS}:
        if not all(isinstance(one, Mapping) and isinstance(one.get(name), list) for one in everywhere):
            raise UnreadableCheckpoint(f"a snapshot lacks trainer state: {name}")
    if _SCALERS in live:
        scalers = [scaler for one in everywhere for scaler in one[_SCALERS]]
        if any(scaler != scalers[0] for scaler in scalers):
            raise UnreadableCheckpoint("loss scales differ between ranks, and belong to ranks of one layout")
        result[_SCALERS] = scalers[:1] * len(live[_SCALERS])
    if _GROUPS in live:
        steps = {group[_STEP] for one in everywhere for group in one[_GROUPS] if _STEP in group}
        counted = {_STEP: max(steps)} if steps else {}
        groups: Sequence[dict[str, Any]] = live[_GROUPS]
        if not saved.get("scheduler"):
            groups = [group | rates for group, rates in zip(groups, _rates(everywhere, len(groups)), strict=True)]
        result[_GROUPS] = [group | counted for group in groups]
    return result


def _rates(everywhere: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """What schedules change of the first `count` groups: core has groups in one order on all ranks, those of experts
    last."""
    saved = [[{name: group[name] for name in _RATES if name in group} for group in one[_GROUPS]] for one in everywhere]
    longest = max(saved, key=len)
    if all(group == longest[0] for groups in saved for group in groups):
        return longest[:1] * count
    if len(longest) < count or any(groups != longest[: len(groups)] for groups in saved):
        raise UnreadableCheckpoint(
            "lr and weight_decay differ between parameter groups, which are others here, and no scheduler sets them:"
            " start with that layout again"
        )
    return longest[:count]


_QUANTIZATION = f"{RANDOM}quantization"
_CUT = OperatorKind.NON_EXPERT, OperatorKind.ROUTER
"""By these stages differ: tied embeddings may be stored by the first one alone, experts of a layer by some ranks."""
_DEGREES = ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp")


class _ForeignScalars(msgspec.Struct):
    """What is read of the scalars of a manifest; others may stand beside it."""

    operators: tuple[tuple[int, int, int, int], ...]
    timeline: Lineage = ()
    window: tuple[int, int] | None = None
    trainer: Any = None


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of state of this rank: its record, its key taken apart, and whether a forward pass reads it."""

    record: Field
    key: RecordKey
    in_forward: bool

    def serves(self, part: Part) -> bool:
        """As `megatron_state.operators.StateTensor.serves`."""
        return bool(self.record.part & part) or (self.in_forward and Part.COMPUTE in part)


@dataclass(frozen=True)
class LiveLayout:
    """The state of this rank, and the layout of this job.

    Attributes:
        rank: This rank.
        topology: The layout.
        facts: The same, as manifests have it.
        tensors: All state of this rank that snapshots hold.
        grids: Of parameters.
        trainer: What the trainer state of this rank says, as it is before anything is restored.
        draws: What draws random numbers in training, for people; empty if nothing does.
        tied: Whether the output reads the weights of the embedding.
    """

    rank: int
    topology: Topology
    facts: Mapping[str, Json]
    tensors: tuple[LiveTensor, ...] = field(repr=False)
    grids: Mapping[str, Grid] = field(repr=False)
    trainer: Mapping[str, Json] = field(repr=False)
    draws: str = ""
    tied: bool = False

    def grid(self, tensor: LiveTensor) -> Grid:
        """Of the whole tensor of which this is a shard."""
        return self.grids.get(tensor.key.name, Grid(1, tensor.key.elements.end))


@dataclass(frozen=True)
class Assembly:
    """How one snapshot of this rank is made of those of another layout.

    Attributes:
        manifest: What it looks like here; without checksums, which stand with the records that it is read from.
        reads: For each of its records, which records of which ranks.
        sources: The ranks that are read.
    """

    manifest: Manifest
    reads: Mapping[str, tuple[ReadPlan, ...]] = field(repr=False)

    @property
    def sources(self) -> frozenset[int]:
        """The ranks of the other layout whose snapshots are read."""
        return frozenset(plan.record.rank for plans in self.reads.values() for plan in plans)


@dataclass(frozen=True)
class Generation:
    """The manifests that ranks of one layout stored of one iteration and kind, on one timeline, by rank."""

    manifests: Mapping[int, Manifest] = field(repr=False)

    @property
    def any(self) -> Manifest:
        """That of the lowest rank: what all of them say alike is taken from it."""
        return self.manifests[min(self.manifests)]

    @property
    def timeline(self) -> Lineage:
        """The attempts that led to it."""
        return _scalars(self.any).timeline

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last iteration of the window that it belongs to; a whole state is one of one iteration."""
        alone = self.any.snapshot.iteration
        return _scalars(self.any).window or (alone, alone)

    @property
    def topology(self) -> Topology:
        """The layout. Raises UnreadableCheckpoint."""
        return topology_of(self.any.facts)

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the layout has stored its share."""
        ranks = self.topology.world_size
        # By their number: nobody knows how large a number a manifest claims.
        return sum(rank < ranks for rank in self.manifests) == ranks

    def assembly(self, live: LiveLayout, *, replays: bool = False) -> Assembly:
        """What a rank of this job reads of it.

        Args:
            live: The state of that rank.
            replays: Whether iterations may be run again in another layout than they were run in.

        Raises:
            UnreadableCheckpoint: Says what cannot be had.
        """
        old, moves = self.topology, self.moves(live)
        first, last = self.window
        if first != last and not replays:
            raise UnreadableCheckpoint(
                f"iterations {first} to {last} have to be run again in the layout that they were run in,"
                f" {described(self.any.facts.topology, live.facts)}: moe-ckpt convert --to dense does that on a CPU,"
                " and makes a checkpoint for --load; --moe-ckpt-replay-tolerance allows another layout"
            )
        parts = self._parts()
        wanted = [one for one in live.tensors if one.record.operator in parts]
        wanted = [one for one in wanted if one.record.operator and one.serves(parts[one.record.operator])]
        tensors = {one.key.tensor for one in wanted}
        stored, dtypes = self._stored(old, tensors | set(map(_tied, tensors)))
        for tensor in tensors - stored.keys() if live.tied else ():
            # With layers that predict further tokens core keeps it on several stages only, idle: any values serve.
            if (embedding := _tied(tensor)) in stored:
                stored[tensor], dtypes[tensor] = stored[embedding], dtypes[embedding]
        if any(dtypes.get(one.key.tensor, one.record.dtype) != one.record.dtype for one in wanted):
            # By these a restore refuses it, so it is shown, without tensors that are stored in other dtypes only.
            wanted = [one for one in wanted if one.key.tensor in stored]
        reads = {one.record.key: _reads(one, live, stored.get(one.key.tensor, ()), moves) for one in wanted}
        random, facts = self._trainer(live, old, parts, moves)
        reads |= {record.key: (_whole(record, at),) for at, record in random}
        own = (replace(one.record, dtype=dtypes[one.key.tensor]) for one in wanted)
        fields = [*own, *(record.field for _, record in random)]
        snapshot = replace(self.any.snapshot, rank=live.rank)
        layout = Layout.of(fields)
        return Assembly(Manifest(snapshot, facts, "", layout, ("",) * len(fields)), reads)

    def moves(self, live: LiveLayout) -> bool:
        """Whether ranks compute something else here than they did, and draw other random numbers for it.

        It takes other degrees, or other layers on stages: of gradient buckets they depend on nothing.
        """
        old = self.topology
        if old != topology_of(replace(self.any.facts, topology=live.facts)):
            return True
        here, everywhere = set[str](), set[str]()
        for rank, manifest in self.manifests.items():
            keys = (RecordKey.parse(one.key) for one in manifest.records if one.operator and one.operator.kind in _CUT)
            names = {key.name for key in keys if key.field != "buffer"}
            everywhere |= names
            here |= names if old.stage(rank) == old.stage(live.rank) else set()
        return here != everywhere & live.grids.keys()

    def _parts(self) -> dict[OperatorId, Part]:
        held = (row for manifest in self.manifests.values() for row in _scalars(manifest).operators)
        return {OperatorId(layer, OperatorKind(kind), expert): Part(part) for layer, kind, expert, part in held}

    def _stored(self, old: Topology, tensors: Collection[str]) -> tuple[dict[str, list[StoredRange]], dict[str, str]]:
        """All records of these tensors, and the dtype of each."""
        found, dtypes = dict[str, list[StoredRange]](), dict[str, str]()
        for rank, manifest in self.manifests.items():
            for record in manifest.records:
                if record.operator is not None and (key := RecordKey.parse(record.key)).tensor in tensors:
                    elements = StoredRange(rank, old.stage(rank), record.key, key.elements, record.xxh3)
                    found.setdefault(key.tensor, []).append(elements)
                    if (dtype := dtypes.setdefault(key.tensor, record.field.dtype)) != record.field.dtype:
                        raise UnreadableCheckpoint(f"{key.tensor} is stored as {dtype} and as {record.field.dtype}")
        return found, dtypes

    def _trainer(
        self, live: LiveLayout, old: Topology, parts: Mapping[OperatorId, Part], moves: bool
    ) -> tuple[list[tuple[int, Record]], Facts]:
        """The random states that this rank takes, with the rank that stored them, and the facts of its snapshot."""
        source = source_rank(live.rank, old, live.topology)
        held = _scalars(self.any).trainer is not None
        if held and source not in self.manifests:
            raise UnreadableCheckpoint(f"the share of rank {source} is missing, whose random states are needed")
        manifest = self.manifests[source] if held else self.any
        random = [(source, record) for record in manifest.records if record.operator is None]
        if moves and any(record.key == _QUANTIZATION for _, record in random):
            raise UnreadableCheckpoint(
                "scales of eight-bit training belong to the modules of one layout, "
                f"{described(manifest.facts.topology, live.facts)}: start with that layout again"
            )
        own = {one.record.operator for one in live.tensors}
        rows: list[Json] = [
            [one.layer, one.kind.value, one.expert, part.value] for one, part in sorted(parts.items()) if one in own
        ]
        scalars = {**manifest.facts.scalars, "operators": rows}
        if moves and isinstance(journal := scalars.get("journal"), Mapping):
            scalars["journal"] = {**journal, "lm_loss": None}  # the mean of samples that other ranks have now
        if held:
            everywhere = [_scalars(one).trainer for one in self.manifests.values()]
            scalars["trainer"] = fitted(_scalars(manifest).trainer, everywhere, live.trainer)
        return random, replace(manifest.facts, topology=live.facts, scalars=scalars)


def generations(manifests: Sequence[Manifest]) -> list[Generation]:
    """The manifests of one iteration and kind, by the layout, the plan and the past that they were made in."""
    groups: dict[tuple[object, ...], dict[int, Manifest]] = {}
    for manifest in manifests:
        facts = manifest.facts
        key = facts.job, facts.plan_digest, repr(sorted(facts.topology.items())), _scalars(manifest).timeline
        groups.setdefault(key, {})[manifest.snapshot.rank] = manifest
    return [Generation(group) for group in groups.values()]


def check_foreign(manifest: Manifest) -> None:
    """Raises UnreadableCheckpoint for a manifest that no job of ours can have made, in whatever layout."""
    topology_of(manifest.facts)
    scalars = _scalars(manifest)
    try:
        for kind, part in {(kind, part) for _, kind, _, part in scalars.operators}:
            OperatorKind(kind), Part(part)
    except ValueError as error:
        raise UnreadableCheckpoint(f"its manifest does not fit: {error}; something else made it") from error


def topology_of(facts: Facts) -> Topology:
    """The layout that a manifest says. Raises UnreadableCheckpoint."""
    try:
        world_size, tp, pp, vpp, cp, ep, etp = (int(facts.topology[name]) for name in _DEGREES)  # type: ignore[arg-type]
        return Topology(world_size, tp, pp, vpp, cp, ep, etp)
    except (KeyError, TypeError, ValueError, OverflowError, UsageError) as error:
        raise UnreadableCheckpoint(f"{dict(facts.topology)} is no parallel layout: something else made it") from error


def described(layout: Mapping[str, Json], other: Mapping[str, Json]) -> str:
    """A layout in a few words: world_size 8, tp 2, pp 2.

    Args:
        layout: As manifests have it.
        other: From which it differs; its buckets are named where all else is the same.
    """
    alike = all(layout.get(name) == other.get(name) for name in {*layout, *other} - {BUCKETS})
    shown = [name for name in layout if name == "world_size" or layout[name] != 1]
    return ", ".join(f"{name} {layout[name]}" for name in shown if alike or name != BUCKETS)


def _scalars(manifest: Manifest) -> _ForeignScalars:
    try:
        return msgspec.convert(manifest.facts.scalars, _ForeignScalars)
    except msgspec.ValidationError as error:
        raise UnreadableCheckpoint(f"its manifest does not fit: {error}; something else made it") from error


def _reads(tensor: LiveTensor, live: LiveLayout, stored: Sequence[StoredRange], moves: bool) -> tuple[ReadPlan, ...]:
    key, record = tensor.key, tensor.record
    counts = key.own_of is not None or key.field == _STEP or key.field.endswith("_scale")
    if not counts and record.shape == (key.elements.numel,):
        return plan_reads(key.tensor, live.grid(tensor), stored, key.elements, live.rank)
    # Step counts, scales, and what each rank counts for itself: right only where all stored the same.
    numel = record.shape[0]
    if key.own_of is not None and not moves:
        stored = [one for one in stored if one.rank == live.rank]
    elif not counts and stored:  # of a shard as a whole, as Muon's mean squares of rows: nothing cuts or joins them
        stored = [one for one in stored if one.elements == key.elements]
        if not stored:
            raise UnreadableCheckpoint(
                f"{key.tensor} has {numel} elements for the {key.elements.numel} of a shard, and no rank stored that"
                " shard: start with that layout again"
            )
    value = replace(one_value(key.tensor, stored, live.rank), elements=ElementRange(0, numel))
    return (ReadPlan(value, (ElementRun(0, 0, numel),)),)


def _tied(tensor: str) -> str:
    return tensor.replace("output_layer.weight/", "embedding.word_embeddings.weight/")


def _whole(record: Record, rank: int) -> ReadPlan:
    whole = ElementRange(0, record.nbytes)
    return ReadPlan(StoredRange(rank, 0, record.key, whole, record.xxh3), (ElementRun(0, 0, record.nbytes),))


def snapshots_of(generation: Generation) -> list[SnapshotId]:
    """Under which names they are stored."""
    return sorted(manifest.snapshot for manifest in generation.manifests.values())


# One snapshot of this rank, read from the records of another layout.

_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class ReshardedReader:
    """The `ports.Reader` of a snapshot that is put together as it is read.

    Every record that is read is verified by its checksum before a byte of it is taken. Of memory that takes one record
    of the other layout beside the one that is made up; no record is read twice.

    Args:
        assembly: What is read, from where.
        open_: Opens a snapshot of the other layout.
        begun: Called before the first record is read.
    """

    def __init__(
        self, assembly: Assembly, open_: Callable[[SnapshotId], Reader], begun: Callable[[], None] = lambda: None
    ) -> None:
        self._assembly, self._open, self._begun = assembly, open_, begun
        self._readers: dict[int, Reader] = {}
        self._is_closed = False

    @property
    def manifest(self) -> Manifest:
        """What the snapshot looks like in this job's layout; its records have no checksums of their own."""
        return self._assembly.manifest

    def read(self, key: str) -> memoryview:
        """As `ports.Reader.read`."""
        if self._is_closed:
            raise UsageError(f"the reader of the {self.manifest.snapshot} was closed")
        record = self.manifest.by_key.get(key)
        if record is None:
            raise UsageError(f"the {self.manifest.snapshot}: there is no record {key}")
        self._begun()
        plans = self._assembly.reads[key]
        if len(plans) == 1 and _is_all(plans[0].runs, record.field):
            data = self._source(plans[0])
            if data.nbytes == record.nbytes:
                return data
        unit = _UNITS[DTYPE_BYTES[record.field.dtype]]
        made: NDArray[np.generic] = np.empty(record.nbytes // np.dtype(unit).itemsize, unit)
        for plan in plans:
            _copy(np.frombuffer(self._source(plan), unit), made, plan.runs)
        whole: memoryview = made.view(np.uint8).data
        return whole.toreadonly()

    def verify(self) -> tuple[Record, ...]:
        """As `ports.Reader.verify`: of the records as this job has them."""
        return tuple(record for record in self.manifest.records if not self._intact(record.key))

    def close(self) -> None:
        """As `ports.Reader.close`."""
        self._is_closed = True
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _source(self, plan: ReadPlan) -> memoryview:
        """The verified bytes of a record of the other layout. Raises UnreadableCheckpoint."""
        rank, snapshot = plan.record.rank, self.manifest.snapshot
        if rank not in self._readers:
            self._readers[rank] = self._open(SnapshotId(snapshot.iteration, rank, snapshot.kind))
        reader = self._readers[rank]
        found = reader.manifest.by_key.get(plan.record.key)
        if found is None or found.xxh3 != plan.record.xxh3:
            raise UnreadableCheckpoint(f"the {reader.manifest.snapshot} was replaced while it was read; start again")
        stored, wanted = prod(found.field.shape), plan.record.elements.numel
        if stored != wanted:
            raise UnreadableCheckpoint(
                f"{plan.record.key} has {stored} elements in the {reader.manifest.snapshot}, and {wanted} are wanted:"
                " it is of another model or optimizer; start with that one"
            )
        return reader.read(plan.record.key)

    def _intact(self, key: str) -> bool:
        try:
            self.read(key)
        except UnreadableCheckpoint:
            return False
        return True


def _is_all(runs: tuple[ElementRun, ...], field: Field) -> bool:
    return runs == (ElementRun(0, 0, field.nbytes // DTYPE_BYTES[field.dtype]),)


def _copy(source: NDArray[np.generic], target: NDArray[np.generic], runs: tuple[ElementRun, ...]) -> None:
    for run in runs:
        pairs = ((source, run.source, run.source_step), (target, run.target, run.target_step))
        one, other = (
            as_strided(array[at:], (run.count, run.length), (step * array.itemsize, array.itemsize))
            for array, at, step in pairs
        )
        other[:] = one
