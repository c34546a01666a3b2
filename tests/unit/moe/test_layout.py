"""Layouts and manifests as values: where bytes lie, and that nothing but what was written is ever accepted."""

from __future__ import annotations

import gc
import json
import math
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage import manifest
from megatron.core.dist_checkpointing.moe.storage.manifest import FORMAT_VERSION, decode, encode
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, expert
from megatron.core.dist_checkpointing.moe.types.layout import (
    DTYPE_BYTES,
    Facts,
    Field,
    Layout,
    Manifest,
    SnapshotId,
)

FIELDS = (
    Field("a/exp_avg", "float32", (3, 5), Part.MOMENTS, expert(7, 3)),
    Field("b", "bfloat16", (2,), Part.COMPUTE, OperatorId(-1, OperatorKind.EMBEDDING)),
    Field("rng", "uint8", (64,)),
)
MANIFEST = Manifest(
    SnapshotId(12, 3),
    Facts("job", "00ff", {"ep": 4}, {"samples": 7, "lr": 0.1}),
    "segment.bin",
    Layout.of(FIELDS),
    tuple(letter * 32 for letter in "abc"),
)

operators = st.builds(OperatorId, st.integers(-1, 200), st.sampled_from(OperatorKind), st.integers(-1, 500))
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
fields = st.builds(
    Field,
    st.text(min_size=1, max_size=8),
    st.sampled_from(sorted(DTYPE_BYTES)),
    shapes,
    st.integers(0, 7).map(Part),
    st.none() | operators,
)
layouts = st.builds(
    Layout.of, st.lists(fields, max_size=8, unique_by=lambda field: field.key), st.sampled_from((1, 64, 4096))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
facts = st.builds(Facts, st.text(max_size=9), st.text(max_size=9), st.just({}), st.dictionaries(st.text(), json_values))


def forged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A manifest with a valid checksum whose content was changed."""
    body = json.loads(encode(MANIFEST))["manifest"]
    return framed(json.dumps(change(body) or body))


def framed(body: str) -> bytes:
    return f'{{"xxh3":"{xxhash.xxh3_128_hexdigest(body.encode())}","manifest":{body}}}\n'.encode()


def bits(value: Any) -> Any:
    """A value that is equal only for the same types and the same bits of every float (NaN: any)."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack(">d", value)
    if isinstance(value, list):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return type(value), value


@given(layouts)
def test_records_are_aligned_ordered_and_never_overlap(layout: Layout) -> None:
    end = 0
    for field, offset in zip(layout.fields, layout.offsets, strict=True):
        assert offset % layout.align_bytes == 0
        assert end <= offset < end + layout.align_bytes
        end = offset + field.nbytes
    assert end <= layout.nbytes < end + layout.align_bytes


def test_the_same_fields_give_the_same_layout() -> None:
    assert Layout.of(FIELDS) == Layout.of(list(FIELDS))
    assert Layout.of(FIELDS).offsets == (0, 64, 128)
    assert Layout.of(FIELDS).nbytes == 192


def test_two_records_with_one_key_are_refused() -> None:
    with pytest.raises(UsageError, match="two records have the key a"):
        Layout.of([Field("a", "int8", ()), Field("a", "int8", ())])


@pytest.mark.parametrize(
    ("offsets", "complaint"),
    [((0, 0, 128), "record b is at offset 0"), ((0, 65, 128), "multiple of 64"), ((-64, 64, 128), "offset -64")],
)
def test_offsets_that_overlap_or_are_not_aligned_are_refused(offsets: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Layout(FIELDS, offsets)


@pytest.mark.parametrize("align_bytes", [0, -64, 48])
def test_an_alignment_must_be_a_power_of_two(align_bytes: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        Layout((), (), align_bytes)


@pytest.mark.parametrize("values", [("", "int8", ()), ("a", "int7", ()), ("a", "int8", (2, -1))])
def test_fields_that_no_tensor_can_have_are_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError):
        Field(*values)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.from_regex(r"[a-z]{1,16}", fullmatch=True))
def test_a_snapshot_is_found_again_by_its_name(iteration: int, rank: int, kind: str) -> None:
    snapshot = SnapshotId(iteration, rank, kind)
    assert SnapshotId.parse(snapshot.name) == snapshot


def test_names_sort_as_their_snapshots_do() -> None:
    snapshots = [SnapshotId(iteration, rank) for iteration in (9, 10, 1_000_000) for rank in (2, 10)]
    assert sorted(one.name for one in snapshots) == [one.name for one in sorted(snapshots)]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "iter_1-rank_00001-snapshot",
        "iter_00000001-rank_00001-x",
        "iter_0000001-rank_00001-X",
        "iter_000000\u0661-rank_00001-x",
    ],
)
def test_other_names_are_no_snapshots(name: str) -> None:
    assert SnapshotId.parse(name) is None


@pytest.mark.parametrize("values", [(-1, 0, "x"), (0, -1, "x"), (0, 0, ""), (0, 0, "a-b"), (0, 0, "x\n")])
def test_a_snapshot_that_cannot_be_named_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        SnapshotId(*values)


WRITTEN = (
    rb'{"xxh3":"11d392f6e6e8d9af47210d8285b129a7","manifest":{"format":1,"job":"job-\u00e9","iteration":12,"rank":3,'
    rb'"kind":"snapshot","plan_digest":"00ff","topology":{"ep":4},"scalars":{"lr":1e-05,"big":1e+22,'
    rb'"id":1180591620717411303424,"loss":[{"$float":"inf"},{"$float":"-inf"},{"$float":"nan"},-0.0],"done":true,'
    rb'"none":null},"segment":"segment.bin","segment_bytes":192,"align_bytes":64,"records":[{"key":"a/exp_avg",'
    rb'"operator":[7,"EXPERT",3],"part":"MOMENTS","dtype":"float32","shape":[3,5],"offset":0,"nbytes":60,'
    rb'"xxh3":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},{"key":"b","operator":[-1,"EMBEDDING",-1],"part":"COMPUTE",'
    rb'"dtype":"bfloat16","shape":[2],"offset":64,"nbytes":4,"xxh3":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"},{"key":"rng",'
    rb'"operator":null,"part":"NOTHING","dtype":"uint8","shape":[64],"offset":128,"nbytes":64,'
    rb'"xxh3":"cccccccccccccccccccccccccccccccc"}]}}'
) + b"\n"
"""A file that format 1's first encoder wrote; what has been stored must be read, and written the same, for ever."""


def test_a_stored_manifest_is_read_and_written_byte_for_byte() -> None:
    loss = [math.inf, -math.inf, math.nan, -0.0]
    scalars = {"lr": 1e-05, "big": 1e22, "id": 2**70, "loss": loss, "done": True, "none": None}
    found = decode(WRITTEN, "the file")
    assert encode(found) == WRITTEN
    assert bits(found.facts.scalars) == bits(scalars)
    assert replace(found, facts=MANIFEST.facts) == MANIFEST


@given(layouts, facts, st.integers(0, 10**8), st.data())
def test_a_manifest_is_read_back_exactly(layout: Layout, some: Facts, iteration: int, data: st.DataObject) -> None:
    sums = tuple(data.draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True)) for _ in layout.fields)
    manifest = Manifest(SnapshotId(iteration, 1), some, "segment-001.bin", layout, sums)
    if "$float" in repr(some):
        return
    found = decode(encode(manifest), "file")
    assert (found.snapshot, found.layout, found.checksums, found.segment) == (
        manifest.snapshot,
        manifest.layout,
        manifest.checksums,
        manifest.segment,
    )
    assert bits(found.facts.scalars) == bits(some.scalars)
    assert encode(found) == encode(manifest)


def test_a_manifest_in_a_spelling_that_no_job_writes_is_refused() -> None:
    body = manifest.unframed("manifest", encode(MANIFEST))
    assert body is not None and decode(manifest.framed("manifest", body), "file") == MANIFEST
    with pytest.raises(UnreadableCheckpoint, match="no job writes a manifest so"):
        decode(manifest.framed("manifest", b" " + body), "file")


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 2**-1074 * 3])
def test_every_float_is_read_back_with_the_same_bits(value: float) -> None:
    manifest = Manifest(MANIFEST.snapshot, Facts("job", scalars={"x": [value]}), "s", Layout.of([]), ())
    found = decode(encode(manifest), "file").facts.scalars["x"]
    assert bits(found) == bits([value])


@pytest.mark.parametrize("value", [(1,), {1: 2}, {"$float": "inf"}, b"x", 1j, {"a": {"b": {3}}}])
def test_facts_that_json_would_change_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"scalars\.x.* JSON values"):
        encode(Manifest(MANIFEST.snapshot, Facts("job", scalars={"x": value}), "s", Layout.of([]), ()))


def test_manifests_that_were_read_long_ago_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of records takes megabytes, and training reads one in each round."""
    layout, read = Layout.of([Field(f"w/{at}", "float32", (4,)) for at in range(100)]), list[weakref.ref[Manifest]]()
    contents = [
        encode(Manifest(SnapshotId(at, 0), Facts("job"), "segment-000.bin", layout, ("0" * 32,) * 100))
        for at in range(40)
    ]
    monkeypatch.setattr(manifest, "_PARSED", vars(manifest)["_ParsedManifests"](4 * len(contents[0])))
    for content in contents:
        read.append(weakref.ref(decode(content, "it")))
        assert decode(content, "it") is read[-1](), "a round reads the same one several times"
    gc.collect()
    assert [one() is not None for one in read[-5:]] == [False, True, True, True, True]
    assert not any(one() for one in read[:-4])


def test_a_manifest_is_one_line_of_valid_json() -> None:
    content = encode(MANIFEST)
    assert content.count(b"\n") == 1
    assert json.loads(content)["manifest"]["records"][0]["operator"] == [7, "EXPERT", 3]


def test_every_changed_byte_is_found() -> None:
    content = encode(MANIFEST)
    for at in range(len(content)):
        for flip in (1, 0x20, 0x80, 0xFF):
            changed = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            with pytest.raises(UnreadableCheckpoint, match="the file"):
                decode(changed, "the file")


def test_every_truncated_or_extended_manifest_is_found() -> None:
    content = encode(MANIFEST)
    for other in (*(content[:size] for size in range(len(content))), content + b"\n", b" " + content, content * 2):
        with pytest.raises(UnreadableCheckpoint, match="the file"):
            decode(other, "the file")


def test_a_newer_format_is_refused_with_what_to_do() -> None:
    newer = forged(lambda body: body | {"format": FORMAT_VERSION + 1, "something": "new"})
    with pytest.raises(UnreadableCheckpoint, match=r"written in format 2, .* reads up to 1: .* newer one"):
        decode(newer, "the file")


def record(at: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["records"][at].update(values)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda body: body.update(extra=1), "unknown field `extra`"),
        (lambda body: body.pop("job"), "missing required field `job`"),
        (lambda body: body.update(rank="3"), r"Expected `int`, got `str` - at `\$\.rank`"),
        (lambda body: body.update(rank=True), r"Expected `int`, got `bool` - at `\$\.rank`"),
        (lambda body: body.update(rank=-1), "cannot be named"),
        (lambda body: body.update(format=0), "format 0 does not exist"),
        (lambda body: body.update(segment="../other.bin"), r"matching regex .* at `\$\.segment`"),
        (lambda body: body.update(segment="/etc/passwd"), r"matching regex .* at `\$\.segment`"),
        (lambda body: body.update(segment_bytes=10**12), "segment_bytes is"),
        (lambda body: body.update(align_bytes=0), "power of two"),
        (lambda body: body.update(records={}), r"Expected `array`, got `object` - at `\$\.records`"),
        (lambda body: body["records"].append(None), r"Expected `object`, got `null` - at `\$\.records\[3\]`"),
        (lambda body: body["records"].reverse(), "offset"),
        (lambda body: body.update(scalars={"x": {"$float": "1"}}), "is no float"),
        (lambda body: body.update(scalars={"x": {"$float": []}}), "is no float"),
        (lambda body: body.update(iteration={"$float": "inf"}), r"Expected `int`, got `float` - at `\$\.iteration`"),
        (record(0, offset=64), "record b is at offset 64"),
        (record(2, offset=1 << 40), "segment_bytes is"),
        (record(0, offset=-64), "offset -64"),
        (record(0, nbytes=61), "nbytes is 61"),
        (record(0, shape=[3, 6]), "its shape needs 72"),
        (record(0, shape=[3.0, 5]), r"Expected `int`, got `float` - at `\$\.records\[0\]\.shape\[0\]`"),
        (record(0, shape=[-3, -5]), "negative"),
        (record(0, dtype="float31"), "unknown dtype"),
        (record(0, part="SOME"), "unknown part"),
        (record(0, operator=[1, "EXPERT"]), r"length 3, got 2 - at `\$\.records\[0\]\.operator`"),
        (record(0, operator=[1, "EXPORT", 2]), "no operator"),
        (record(0, operator=0), r"got `int` - at `\$\.records\[0\]\.operator`"),
        (record(0, xxh3="A" * 32), r"matching regex .* at `\$\.records\[0\]\.xxh3`"),
        (record(0, xxh3="a" * 31), r"matching regex .* at `\$\.records\[0\]\.xxh3`"),
        (record(0, key="b"), "two records have the key b"),
        (record(0, key=""), "not empty"),
        (record(0, colour="red"), r"unknown field `colour` - at `\$\.records\[0\]`"),
    ],
)
def test_content_that_no_store_writes_is_refused(change: Callable[[dict[str, Any]], Any], complaint: str) -> None:
    def only_change(body: dict[str, Any]) -> None:
        change(body)

    with pytest.raises(UnreadableCheckpoint, match=rf"the file: .*{complaint}"):
        decode(forged(only_change), "the file")


@pytest.mark.parametrize(
    "body", ["[]", "nul", "", '{"format":1,"format":1}', '{"format":NaN}', "[" * 100_000, "9" * 9999]
)
def test_bodies_that_are_no_strict_json_object_are_refused(body: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match="the file"):
        decode(framed(body), "the file")
