"""The file that makes raw bytes a snapshot: strict JSON that knows its own checksum.

One line, `{"xxh3":"<32 hexadecimal digits>","manifest":<body>}`, where the checksum is that of the body's bytes as they
stand. So every changed byte of the file is found before anything in it is believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import MoECheckpointError, NewerFormat, UnreadableCheckpoint, UsageError
from ..types import OperatorId, OperatorKind, Part
from ..types.layout import Facts, Field, Json, Layout, Manifest, SnapshotId
from .checksums import checksum

FORMAT_VERSION = 1

_BEFORE, _BETWEEN, _AFTER = b'{"xxh3":"', b'","manifest":', b"}\n"
_DIGITS = 32
_FLOAT = "$float"  # the only key of an object that stands for a float that JSON cannot write
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_XXH3 = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _name_of_part(part: Part) -> str:
    return "+".join(str(one.name) for one in part) or "NOTHING"


_PARTS = {_name_of_part(Part(value)): Part(value) for value in range(Part.EVERYTHING.value + 1)}
_KINDS = {kind.name: kind for kind in OperatorKind}


def encode(manifest: Manifest) -> bytes:
    """The manifest file's content; equal manifests give equal bytes.

    Raises UsageError for facts that are not JSON values.
    """
    body = {
        "format": FORMAT_VERSION,
        "job": manifest.facts.job,
        "iteration": manifest.snapshot.iteration,
        "rank": manifest.snapshot.rank,
        "kind": manifest.snapshot.kind,
        "plan_digest": manifest.facts.plan_digest,
        "topology": _plain(manifest.facts.topology, "topology"),
        "scalars": _plain(manifest.facts.scalars, "scalars"),
        "segment": manifest.segment,
        "segment_bytes": manifest.layout.nbytes,
        "align_bytes": manifest.layout.align_bytes,
        "records": [
            {
                "key": record.key,
                "operator": record.operator
                and [record.operator.layer, record.operator.kind.name, record.operator.expert],
                "part": _name_of_part(record.field.part),
                "dtype": record.field.dtype,
                "shape": list(record.field.shape),
                "offset": record.offset,
                "nbytes": record.nbytes,
                "xxh3": record.xxh3,
            }
            for record in manifest.records
        ],
    }
    content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    return b"".join((_BEFORE, checksum(content).encode("ascii"), _BETWEEN, content, _AFTER))


def decode(content: bytes, name: str) -> Manifest:
    """The manifest in a file's content; `name` is what errors call the file.

    Raises UnreadableCheckpoint for any deviation: changed bytes, a newer format, records outside of their segment.
    """
    body = _unframed(content, name)
    try:
        return _manifest(_Reader(json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant), ""))
    except (MoECheckpointError, ValueError, RecursionError) as error:
        kind = NewerFormat if isinstance(error, NewerFormat) else UnreadableCheckpoint
        raise kind(f"{name}: {error}") from error


def _unframed(content: bytes, name: str) -> bytes:
    start = len(_BEFORE) + _DIGITS
    body = content[start + len(_BETWEEN) : -len(_AFTER)]
    framed = content.startswith(_BEFORE) and content[start:].startswith(_BETWEEN) and content.endswith(_AFTER)
    if not framed:
        raise UnreadableCheckpoint(
            f"{name}: not a whole manifest of a snapshot ({len(content)} bytes); use another copy"
        )
    if checksum(body).encode("ascii") != content[len(_BEFORE) : start]:
        raise UnreadableCheckpoint(
            f"{name}: the manifest does not match its own checksum: it was damaged after it was written; use"
            " another copy"
        )
    return body


class _Reader:
    """One JSON object whose members are taken out by name and type; what is missing or left over is an error."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UnreadableCheckpoint(f"{where or 'the manifest '}is not an object")
        self._values, self._where = dict(value), where

    def take(self, name: str, *types: type) -> Any:
        value = self._values.pop(name, _Reader)
        if type(value) not in types:
            found = "missing" if value is _Reader else f"{type(value).__name__} {value!r:.60}"
            wanted = " or ".join(one.__name__ for one in types)
            raise UnreadableCheckpoint(f"{self._where}{name} is {found}, but must be {wanted}")
        return value

    def take_match(self, name: str, pattern: re.Pattern[str]) -> str:
        value: str = self.take(name, str)
        if not pattern.fullmatch(value):
            raise UnreadableCheckpoint(f"{self._where}{name} is {value!r:.60}, which is not allowed here")
        return value

    def end(self) -> None:
        if self._values:
            raise UnreadableCheckpoint(f"{self._where}unknown members {', '.join(sorted(self._values))}")


def _manifest(body: _Reader) -> Manifest:
    version = body.take("format", int)
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"written in format {version}, but this version reads up to {FORMAT_VERSION}: read it with the version of"
            " moe-ckpt that wrote it, or a newer one"
        )
    if version < 1:
        raise UnreadableCheckpoint(f"format {version} does not exist")
    snapshot = SnapshotId(body.take("iteration", int), body.take("rank", int), body.take("kind", str))
    facts = Facts(
        body.take("job", str),
        body.take("plan_digest", str),
        _restored(body.take("topology", dict)),
        _restored(body.take("scalars", dict)),
    )
    segment, segment_bytes = body.take_match("segment", _FILE_NAME), body.take("segment_bytes", int)
    align_bytes = body.take("align_bytes", int)
    rows = [_record(_Reader(row, f"record {at}: ")) for at, row in enumerate(body.take("records", list))]
    body.end()
    layout = Layout(tuple(row[0] for row in rows), tuple(row[1] for row in rows), align_bytes)
    if layout.nbytes != segment_bytes:
        raise UnreadableCheckpoint(f"segment_bytes is {segment_bytes}, but the records need {layout.nbytes}")
    return Manifest(snapshot, facts, segment, layout, tuple(row[2] for row in rows))


def _record(row: _Reader) -> tuple[Field, int, str]:
    shape = row.take("shape", list)
    if any(type(size) is not int for size in shape):
        raise UnreadableCheckpoint(f"shape {shape!r:.60} has sizes that are no integers")
    part = row.take("part", str)
    if part not in _PARTS:
        raise UnreadableCheckpoint(f"unknown part {part!r:.60}")
    operator = _operator(row.take("operator", list, type(None)))
    field = Field(row.take("key", str), row.take("dtype", str), tuple(shape), _PARTS[part], operator)
    nbytes: int = row.take("nbytes", int)
    if nbytes != field.nbytes:
        raise UnreadableCheckpoint(f"record {field.key}: nbytes is {nbytes}, but its shape needs {field.nbytes}")
    offset, xxh3 = row.take("offset", int), row.take_match("xxh3", _XXH3)
    row.end()
    return field, offset, xxh3


def _operator(value: list[Any] | None) -> OperatorId | None:
    if value is None:
        return None
    if list(map(type, value)) != [int, str, int] or value[1] not in _KINDS:
        raise UnreadableCheckpoint(f"{value!r:.60} is no operator")
    return OperatorId(value[0], _KINDS[value[1]], value[2])


def _plain(value: object, where: str) -> Json:
    """`value` as strict JSON, with floats that JSON cannot write spelled out."""
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if type(value) is list:
        return [_plain(one, f"{where}[{at}]") for at, one in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str and key != _FLOAT for key in value):
        return {key: _plain(one, f"{where}.{key}") for key, one in value.items()}
    raise UsageError(f"{where} is a {type(value).__name__} or has such keys, but a manifest takes only JSON values")


def _restored(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, list):
        return [_restored(one) for one in value]
    if isinstance(value, dict):
        if _FLOAT in value:
            return _special_float(value)
        return {key: _restored(one) for key, one in value.items()}
    return value


def _special_float(value: dict[str, Any]) -> float:
    if len(value) != 1 or value[_FLOAT] not in _FLOATS:
        raise UnreadableCheckpoint(f"{value!r:.60} is no float")
    return _FLOATS[value[_FLOAT]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise UnreadableCheckpoint("an object has the same member twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise UnreadableCheckpoint(f"{name} is no number in JSON")
