"""What a stored snapshot consists of and where its bytes lie: values only, nothing that reads or writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import UsageError
from .operators import OperatorId, Part

type Json = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MANIFEST = "manifest.json"
"""In a snapshot's folder in storage, written last."""

UNSEALED = (".writing.", ".freed.")
"""What the names of folders begin with that are being written or deleted, or were when their process died."""

BUCKETS = "buckets"
"""Of a parallel layout: a digest of which elements each rank steps. Buckets of other sizes cut parameters elsewhere."""

ALIGNMENT_BYTES = 64  # a cache line, and enough for every vector instruction that copies or hashes
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    "complex128": 16,
}

_KIND = re.compile(r"[a-z]{1,16}")
# Ranks tell each other of what they list, in numbers of 64 bits: what is larger is no name of ours.
_NAME = re.compile(r"iter_(\d{7,18})-rank_(\d{5,18})-([a-z]{1,16})")


@dataclass(frozen=True, order=True, slots=True)
class SnapshotId:
    """The state that `rank` owned after `iteration`; a store holds each at most once.

    `kind` tells apart what is stored of the same iteration, such as "snapshot" and "parked": 1 to 16 letters a-z.
    Raises UsageError for values that cannot be named.
    """

    iteration: int
    rank: int
    kind: str = "snapshot"

    def __post_init__(self) -> None:
        if self.iteration < 0 or self.rank < 0 or not _KIND.fullmatch(self.kind):
            raise UsageError(
                f"a snapshot of iteration {self.iteration}, rank {self.rank}, kind {self.kind!r} cannot be named:"
                " numbers must not be negative, and a kind is 1 to 16 letters a-z"
            )

    @property
    def name(self) -> str:
        """The name in files and folders; sorts by iteration, then by rank."""
        return f"iter_{self.iteration:07d}-rank_{self.rank:05d}-{self.kind}"

    @staticmethod
    def ranks_in(names: Iterable[str]) -> frozenset[int]:
        """The ranks of the snapshots that have one of these names; any other text counts for none."""
        return frozenset(int(found[2]) for found in map(_NAME.fullmatch, names) if found)

    @classmethod
    def parse(cls, name: str) -> SnapshotId | None:
        """The snapshot of this name; None for any other text."""
        found = _NAME.fullmatch(name)
        if not found or not name.isascii():
            return None
        snapshot = cls(int(found[1]), int(found[2]), found[3])
        return snapshot if snapshot.name == name else None

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} after iteration {self.iteration}"


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor to be stored: raw bytes in C order and in the byte order of the machine.

    `key` is unique in its snapshot, such as "decoder.layers.3.mlp.router.weight/exp_avg"; `operator` is None for
    trainer state. `dtype` is PyTorch's name without the prefix, one of DTYPE_BYTES. Raises UsageError.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    part: Part = Part.NOTHING
    operator: OperatorId | None = None

    def __post_init__(self) -> None:
        if not self.key:
            raise UsageError("a record needs a key that is not empty")
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"record {self.key}: unknown dtype {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise UsageError(f"record {self.key}: shape {self.shape} has a negative size")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Where each field lies in a segment: `offsets[i]` is that of `fields[i]`, ascending, without overlap.

    The same fields give the same layout everywhere, so a layout is made once and used in every iteration.
    Raises UsageError for keys that are not unique and for offsets that overlap or are not aligned.
    """

    fields: tuple[Field, ...] = field(repr=False)
    offsets: tuple[int, ...] = field(repr=False)
    align_bytes: int = ALIGNMENT_BYTES

    def __post_init__(self) -> None:
        if self.align_bytes < 1 or self.align_bytes & (self.align_bytes - 1):
            raise UsageError(f"an alignment of {self.align_bytes} bytes is not a power of two")
        if len(self.offsets) != len(self.fields):
            raise UsageError(f"{len(self.fields)} records have {len(self.offsets)} offsets")
        end, keys = 0, set()
        for one, offset in zip(self.fields, self.offsets, strict=True):
            if one.key in keys:
                raise UsageError(f"two records have the key {one.key}")
            if offset < end or offset % self.align_bytes:
                raise UsageError(
                    f"record {one.key} is at offset {offset}, but must be at a multiple of {self.align_bytes} and not"
                    f" before {end}, where the record before it ends"
                )
            keys.add(one.key)
            end = offset + one.nbytes

    @classmethod
    def of(cls, fields: Iterable[Field], align_bytes: int = ALIGNMENT_BYTES) -> Layout:
        """Fields one behind the other in the given order, each at the next multiple of `align_bytes`.

        Args:
            fields: The fields, in the order of their bytes.
            align_bytes: The alignment of each, a power of two.
        """
        given, offsets, end = tuple(fields), [], 0
        for one in given:
            offsets.append(aligned(end, align_bytes))
            end = offsets[-1] + one.nbytes
        return cls(given, tuple(offsets), align_bytes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the start of the segment to the end of the last record, aligned."""
        end = self.offsets[-1] + self.fields[-1].nbytes if self.fields else 0
        return aligned(end, self.align_bytes)

    @cached_property
    def places(self) -> Mapping[str, tuple[Field, int]]:
        """Field and offset of each key."""
        return {one.key: (one, offset) for one, offset in zip(self.fields, self.offsets, strict=True)}


@dataclass(frozen=True, slots=True)
class Record:
    """A field that is stored: where its bytes begin in the segment, and their xxh3 (128 bits, hexadecimal)."""

    field: Field
    offset: int
    xxh3: str

    @property
    def key(self) -> str:
        """The field's key."""
        return self.field.key

    @property
    def operator(self) -> OperatorId | None:
        """The operator whose state this is, None for trainer state."""
        return self.field.operator

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.field.nbytes


@dataclass(frozen=True)
class Facts:
    """What a manifest says beside its records; equal for the original and for every copy of it.

    job: the job that made the snapshot. plan_digest: that of the SnapshotPlan.
    topology: the parallel layout it was made in. scalars: trainer state that is no tensor (consumed samples, journal).
    Both are JSON values; every float, infinities and NaN included, is read back exactly.
    """

    job: str
    plan_digest: str = ""
    topology: Mapping[str, Json] = field(default_factory=dict, repr=False)
    scalars: Mapping[str, Json] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Manifest:
    """What makes raw bytes a snapshot: who, when, which records, and where they are in which segment.

    `segment` names the file that has the bytes, beside the manifest; `layout` has as many fields as `checksums` has
    items.
    """

    snapshot: SnapshotId
    facts: Facts
    segment: str
    layout: Layout
    checksums: tuple[str, ...] = field(repr=False)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """All records in the order of their bytes."""
        triples = zip(self.layout.fields, self.layout.offsets, self.checksums, strict=True)
        return tuple(Record(*triple) for triple in triples)

    @cached_property
    def by_key(self) -> Mapping[str, Record]:
        """Records by their key."""
        return {record.key: record for record in self.records}


@dataclass(frozen=True, slots=True)
class Torn:
    """A snapshot that began to be stored but cannot be used, at `path`, and why; nobody ever reads from it.

    unsealed: it never was sealed, or is being written, where the path does not say so; else it may be damaged.
    is_newer: a later version sealed it, in memory, or a process that had a secret and this one has none.
    may_pass: its storage did not answer, so that another look may find it sealed.
    """

    snapshot: SnapshotId
    path: str
    why: str
    unsealed: bool = False
    is_newer: bool = False
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store holds, both in ascending order. Sealed snapshots have an intact manifest; their bytes are checked
    when they are read."""

    sealed: tuple[SnapshotId, ...]
    torn: tuple[Torn, ...]

    def __bool__(self) -> bool:
        """Whether anything lies there, of a format that this version reads or not."""
        return bool(self.sealed or self.torn)


def aligned(offset: int, align_bytes: int) -> int:
    """The first multiple of `align_bytes` that is not below `offset`.

    Args:
        offset: Bytes from the start of the segment.
        align_bytes: The alignment, above 0.
    """
    return -(-offset // align_bytes) * align_bytes


def suffice(segments: Iterable[int], wanted: Iterable[int]) -> bool:
    """Whether each of the wanted sizes finds a segment of its own that is large enough.

    Args:
        segments: Bytes of each segment that is there.
        wanted: Bytes of each segment that is needed.
    """
    have, need = sorted(segments, reverse=True), sorted(wanted, reverse=True)
    return len(have) >= len(need) and all(one >= other for one, other in zip(have, need, strict=False))


def is_same_layout(stored: Mapping[str, Json], here: Mapping[str, Json]) -> bool:
    """Whether a rank reads its own records as they are.

    Args:
        stored: The layout of a snapshot, as its manifest has it; earlier versions did not tell the buckets.
        here: That of this job.
    """
    return dict(stored) == {name: value for name, value in here.items() if name != BUCKETS or name in stored}
