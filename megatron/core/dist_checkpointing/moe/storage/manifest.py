"""Checksums, and the file that makes raw bytes a snapshot: strict JSON that knows its own checksum.

One line, `{"xxh3":"<32 hexadecimal digits>","manifest":<body>}`, where the checksum is that of the body's bytes as they
stand. So every changed byte of the file is found before anything in it is believed. In a job with a secret the member
is called `hmac`, and it and all checksums of records are keyed (`small_files.read_secret`). `_Body` and `_Record` are
the body's members in the order in which they are written: the one description of the format for both directions.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hmac import compare_digest
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from xxhash import xxh3_128, xxh3_128_hexdigest

from ..errors import MoECheckpointError, NewerFormat, OtherSecret, UnreadableCheckpoint, UsageError, WrongSecret
from ..types import OperatorId, OperatorKind, Part
from ..types.layout import Facts, Field, Json, Layout, Manifest, Record, SnapshotId
from .small_files import DIGITS, SECRET_FILE, keyed_digest, signed

if TYPE_CHECKING:
    from collections.abc import Buffer
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

FORMAT_VERSION = 1
MOST_BYTES = 256 << 20
"""Of a manifest: one with the four records of each of 15,360 experts has 16 MB."""
_KEY = "manifest"
_UNSIGNED = "use another copy, or leave out the secret if this job once ran without one"
KEYED = b'{"hmac":'
"""How files begin that are sealed with a secret."""
_FLOAT = "$float"  # the only key of an object that stands for a float that JSON cannot write
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_PLAIN = frozenset({type(None), bool, int, str})
_KINDS = {kind.name: kind for kind in OperatorKind}


class _Job:
    """Of this process. secret: of its job, if it has one."""

    secret: bytes | None = None


def use_secret(secret: bytes | None) -> None:
    """From here on manifests and records are sealed with the job's secret, and others are refused; None: by xxh3."""
    _Job.secret = secret


def checksum(data: Buffer) -> str:
    """Of contiguous bytes: 32 hexadecimal digits, of the xxh3, or of the keyed digest where the job has a secret.

    Nothing is copied and the GIL is released.
    """
    if _Job.secret is not None:
        return signed(_Job.secret, data)
    digest = xxh3_128()
    digest.update(data)  # before 4.0 xxhash holds the GIL in functions of one call, such as `xxh3_128_hexdigest`
    digits: str = digest.hexdigest()
    return digits


def is_keyed() -> bool:
    """Whether this process has a secret, and so takes nothing that is sealed without it."""
    return _Job.secret is not None


@contextmanager
def unkeyed() -> Iterator[None]:
    """In this block of code what has no key is read and checked, as in a process without a secret."""
    secret, _Job.secret = _Job.secret, None
    try:
        yield
    finally:
        _Job.secret = secret


BODY = b'{"format":'
"""How each body begins that is sealed as a line of JSON, and no file of a checkpoint."""


class RunningChecksum:
    """`checksum` of bytes that come one block after the other."""

    def __init__(self) -> None:
        self._digest: Any = xxh3_128() if _Job.secret is None else keyed_digest(_Job.secret)

    def update(self, block: Buffer) -> None:
        """Take the next block."""
        self._digest.update(block)

    def hexdigest(self) -> str:
        """Of all blocks so far: 32 hexadecimal digits."""
        digits: str = self._digest.hexdigest()
        return digits[:DIGITS]


def framed(key: str, body: bytes) -> bytes:
    """One line of JSON that knows its own checksum: `{"xxh3":"<32 hexadecimal digits>","<key>":<body>}`.

    Args:
        key: The name of the body in the line.
        body: JSON.
    """
    return _line(b"xxh3", xxh3_128_hexdigest(body), key, body)


def unframed(key: str, content: bytes) -> bytes | None:
    """The body of what `framed` made, None for anything else: no byte of it is believed before its checksum is.

    Args:
        key: The name of the body in the line.
        content: What was read.
    """
    before = len(framed(key, b"")) - len(b"}\n")
    body = content[before : -len(b"}\n")]
    return body if framed(key, body) == content else None


def _line(scheme: bytes, digits: str, key: str, body: bytes) -> bytes:
    return b'{"%s":"%s","%s":%s}\n' % (scheme, digits.encode("ascii"), key.encode("ascii"), body)


def sealed(key: str, body: bytes) -> bytes:
    """As `framed`, or with the keyed digest under a name of its own where this process has a secret."""
    if _Job.secret is None:
        return framed(key, body)
    return _line(b"hmac", signed(_Job.secret, body), key, body)


def unsealed(key: str, content: bytes, name: str, unsigned: str) -> bytes | None:
    """The body of what `sealed` made in a process with the same secret, None where the checksum does not match.

    Args:
        key: of the body.
        content: of the file.
        name: of the file, in errors.
        unsigned: what to do about a file without a secret in a job that has one.

    Raises:
        OtherSecret: it is sealed without a secret in a process that has one, or the other way around.
    """
    has_key = content.startswith(KEYED)
    if has_key and _Job.secret is None:
        raise OtherSecret(
            f"{name}: it is sealed with the secret of its job: give that with --moe-ckpt-secret-file, or {SECRET_FILE}"
        )
    if not has_key and _Job.secret is not None:
        raise OtherSecret(f"{name}: it is not sealed with this job's secret, so anybody may have made it: {unsigned}")
    body = content[len(sealed(key, b"")) - len(b"}\n") : -len(b"}\n")]
    return body if compare_digest(sealed(key, body), content) else None


def _unsealed_manifest(content: bytes, name: str) -> bytes:
    body = unsealed(_KEY, content, name, _UNSIGNED)
    if body is None:
        has_key = content.startswith(KEYED)
        reason = ", is forged, or is of a job with another secret" if has_key else ""
        raise (WrongSecret if has_key else UnreadableCheckpoint)(
            f"{name}: the manifest of {len(content)} bytes does not match its own checksum: it is torn, or was damaged"
            f" after it was written{reason}; use another copy"
        )
    return body


def verified(data: memoryview, record: Record, where: str) -> memoryview:
    """`data`, when it is what was sealed.

    Args:
        data: The bytes that were read.
        record: What was sealed.
        where: What the error calls the snapshot.

    Raises:
        UnreadableCheckpoint: Its size or its checksum differs; names the record.
    """
    if len(data) != record.nbytes:
        raise UnreadableCheckpoint(
            f"{where}: record {record.key} has {len(data)} of its {record.nbytes} bytes: the file was truncated; use"
            " another copy"
        )
    if checksum(data) != record.xxh3:
        raise UnreadableCheckpoint(
            f"{where}: record {record.key} at offset {record.offset} does not match its checksum: its bytes changed"
            " after they were sealed; use another copy"
        )
    return data


def flat_bytes(data: Buffer, field: Field) -> memoryview:
    """The bytes of `data` without a copy.

    Args:
        data: Contiguous bytes.
        field: The tensor that they are of.

    Raises:
        UsageError: They are not contiguous, or not as many as the field has.
    """
    view = memoryview(data)
    if not view.c_contiguous or view.nbytes != field.nbytes:
        raise UsageError(
            f"record {field.key}: got {view.nbytes} {'' if view.c_contiguous else 'non-contiguous '}bytes, but"
            f" {field.dtype} of shape {list(field.shape)} has {field.nbytes} contiguous ones"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


_NAMES = {
    (part := Part(value)): "+".join(str(component.name) for component in part) or "NOTHING"
    for value in range(Part.EVERYTHING.value + 1)
}
_PARTS = {name: part for part, name in _NAMES.items()}


class _Record(Struct, forbid_unknown_fields=True):
    key: str
    operator: tuple[int, str, int] | None  # layer, name of the kind, expert
    part: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class _Body(Struct, forbid_unknown_fields=True):
    format: int
    job: str
    iteration: int
    rank: int
    kind: str
    plan_digest: str
    topology: dict[str, Any]
    scalars: dict[str, Any]
    # A file beside the manifest: the pattern keeps a forged one from leading out of the folder.
    segment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")]
    segment_bytes: int
    align_bytes: int
    records: tuple[_Record, ...]


class _Version(Struct):
    """What every format has in common: the rest of a newer one may be anything."""

    format: int


def encode(manifest: Manifest) -> bytes:
    """The manifest file's content; equal manifests give equal bytes.

    Raises UsageError for facts that are not JSON values.
    """
    facts, snapshot, layout = manifest.facts, manifest.snapshot, manifest.layout
    body = _Body(
        format=FORMAT_VERSION,
        job=facts.job,
        iteration=snapshot.iteration,
        rank=snapshot.rank,
        kind=snapshot.kind,
        plan_digest=facts.plan_digest,
        topology=_json_object(facts.topology, "topology"),
        scalars=_json_object(facts.scalars, "scalars"),
        segment=manifest.segment,
        segment_bytes=layout.nbytes,
        align_bytes=layout.align_bytes,
        records=tuple(map(_encoded, layout.fields, layout.offsets, manifest.checksums)),
    )
    # Not msgspec's own encoder: it spells floats and non-ASCII text in another way, and the bytes must never change.
    content = json.dumps(to_builtins(body), separators=(",", ":"), allow_nan=False)
    return sealed(_KEY, content.encode("ascii"))


def decode(content: bytes, name: str) -> Manifest:
    """The manifest in a file's content.

    Args:
        content: The bytes of the file.
        name: What errors call the file.

    Raises:
        UnreadableCheckpoint: Any deviation: changed bytes, a newer format, records outside of their segment.
    """
    body = _unsealed_manifest(content, name)
    try:
        return _PARSED.of(body)
    except (MoECheckpointError, ValidationError, ValueError, RecursionError, MemoryError) as error:
        kind = NewerFormat if isinstance(error, NewerFormat) else UnreadableCheckpoint
        raise kind(f"{name}: {error}") from error


class _ParsedManifests:
    """The last ones to be parsed: a round reads the same few several times, a recovery those of all ranks.

    Bounded by bytes and not by their number, for a manifest of thousands of records takes about 5 times its body.
    """

    def __init__(self, most_bytes: int) -> None:
        self._lock, self._left_bytes = threading.Lock(), most_bytes
        self._kept: dict[bytes, Manifest] = {}  # the one that was read last comes last

    def of(self, body: bytes) -> Manifest:
        with self._lock:
            if (found := self._kept.pop(body, None)) is not None:
                self._kept[body] = found
                return found
        found = _parsed(body)
        with self._lock:
            if body not in self._kept:
                self._kept[body] = found
                self._left_bytes -= len(body)
            while self._left_bytes < 0:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self._left_bytes += len(oldest)
        return found


_PARSED = _ParsedManifests(1 << 24)


def _parsed(body: bytes) -> Manifest:
    if not body.startswith(BODY):  # another spelling could be a file that was signed as such
        raise UnreadableCheckpoint("no job writes a manifest so")
    # json.loads and not msgspec's decoder: it finds members that stand twice, and reads integers of any size.
    value = json.loads(body, object_pairs_hook=_json_value, parse_constant=_refuse_constant)
    _check_version(convert(value, _Version).format)
    return _manifest(convert(value, _Body))


def _check_version(version: int) -> None:
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"written in format {version}, but this version reads up to {FORMAT_VERSION}: read it with the version of"
            " moe-ckpt that wrote it, or a newer one"
        )
    if version < 1:
        raise UnreadableCheckpoint(f"format {version} does not exist")


def _manifest(body: _Body) -> Manifest:
    fields = tuple(map(_field, body.records))
    layout = Layout(fields, tuple(record.offset for record in body.records), body.align_bytes)
    if layout.nbytes != body.segment_bytes:
        raise UnreadableCheckpoint(f"segment_bytes is {body.segment_bytes}, but the records need {layout.nbytes}")
    snapshot = SnapshotId(body.iteration, body.rank, body.kind)
    facts = Facts(body.job, body.plan_digest, body.topology, body.scalars)
    return Manifest(snapshot, facts, body.segment, layout, tuple(record.xxh3 for record in body.records))


def _encoded(field: Field, offset: int, xxh3: str) -> _Record:
    unit, part = field.operator, _NAMES[field.part]
    operator = None if unit is None else (unit.layer, unit.kind.name, unit.expert)
    return _Record(field.key, operator, part, field.dtype, field.shape, offset, field.nbytes, xxh3)


def _field(record: _Record) -> Field:
    if record.part not in _PARTS:
        raise UnreadableCheckpoint(f"record {record.key}: unknown part {record.part!r:.60}")
    operator = None
    if record.operator is not None:
        layer, kind, expert = record.operator
        if kind not in _KINDS:
            raise UnreadableCheckpoint(f"record {record.key}: {record.operator!r:.60} is no operator")
        operator = OperatorId(layer, _KINDS[kind], expert)
    field = Field(record.key, record.dtype, record.shape, _PARTS[record.part], operator)
    if field.nbytes != record.nbytes:
        raise UnreadableCheckpoint(f"record {field.key}: nbytes is {record.nbytes}, but its shape needs {field.nbytes}")
    return field


def _json_object(value: Mapping[str, Json], where: str) -> dict[str, Any]:
    if not all(type(key) is str and key != _FLOAT for key in value):
        raise UsageError(f"{where} has keys that are no text or {_FLOAT!r}, but a manifest takes only JSON values")
    return {key: inner if type(inner) in _PLAIN else _plain(inner, f"{where}.{key}") for key, inner in value.items()}


def _plain(value: object, where: str) -> Json:
    """A value that is not `_PLAIN` as strict JSON, with floats that JSON cannot write spelled out."""
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if type(value) is list:
        return [inner if type(inner) in _PLAIN else _plain(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
    if isinstance(value, Mapping):
        return _json_object(value, where)
    raise UsageError(f"{where} is a {type(value).__name__}, but a manifest takes only JSON values")


def _json_value(pairs: list[tuple[str, Any]]) -> Any:
    """One JSON object, or the float that it stands for: the inverse of `_plain`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise UnreadableCheckpoint("an object has the same member twice")
    if _FLOAT not in found:
        return found
    if len(found) != 1 or not isinstance(found[_FLOAT], str) or found[_FLOAT] not in _FLOATS:
        raise UnreadableCheckpoint(f"{found!r:.60} is no float")
    return _FLOATS[found[_FLOAT]]


def _refuse_constant(name: str) -> NoReturn:
    raise UnreadableCheckpoint(f"{name} is no number in JSON")


# Checksums of many records at once: one thread does about 10 GB/s, less than a GPU copies in the same time.

HURRIED_THREADS = min(4, os.cpu_count() or 1)
"""For what has to be sealed before a launcher loses its patience."""

_WORTH_BYTES = 32 << 20
_TRIAL_BYTES, _TRIAL_PARTS = 64 << 20, 16


def checksums(records: Sequence[memoryview], threads: int) -> tuple[str, ...]:
    """Of each record, in their order.

    Args:
        records: The bytes of each record.
        threads: Threads that may sum; below 2, or for little data, this one does.
    """
    if threads < 2 or sum(record.nbytes for record in records) < _WORTH_BYTES:
        return tuple(map(checksum, records))
    with ThreadPoolExecutor(threads, "checksums") as pool:
        return tuple(pool.map(checksum, records))


def checksum_bytes_per_s(threads: int) -> float:
    """How fast that is here, by a trial of a few milliseconds."""
    part = _TRIAL_BYTES // _TRIAL_PARTS
    whole = memoryview(bytearray(_TRIAL_BYTES))
    parts = [whole[at * part : (at + 1) * part] for at in range(_TRIAL_PARTS)]
    begun_s = time.perf_counter()
    checksums(parts, threads)
    return _TRIAL_BYTES / max(time.perf_counter() - begun_s, 1e-6)
