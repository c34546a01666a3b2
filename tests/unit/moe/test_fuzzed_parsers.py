"""Whatever bytes somebody puts before a parser, it reads them or says the named error, in bounded time and memory.

Inputs are seeded: pure noise, and valid files with bytes changed, cut out, repeated, or numbers replaced by extreme
ones. Where a file carries a checksum, half of the changed ones carry the right one, so that what is behind it is met.
`make test-full` takes 10,000 of each. Metrics and the status of jobs are fuzzed in `tests/unit/runs`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from effort import examples
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, save
from xxhash import xxh3_64_intdigest

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.replication import messages
from megatron.core.dist_checkpointing.moe.standby.heartbeat import read_beat
from megatron.core.dist_checkpointing.moe.storage import manifest
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotEntry
from megatron.core.dist_checkpointing.moe.storage.small_files import signed
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part
from megatron.core.dist_checkpointing.moe.types.layout import Manifest
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.indexed_corpus import open_corpus
from moe_ckpt.dense import chain, integrity
from moe_ckpt.dense.dcp_metadata import parse_index
from moe_ckpt.hugging_face.folder import INDEX, SINGLE, Folder

INPUTS = examples(10_000)
MOST_S_EACH, MOST_BYTES = 2.0, 512 << 20
EXTREME = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**64 - 1)
NUMBERS = ("0", "-1", "1e999", "NaN", str(2**63), "9" * 400, "true", "null", '"x"', "[]", "{}", "[" * 2000)

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A parser, what it may raise, files that it reads, and what makes a changed body's checksum right again."""

    parse: Parse
    raises: type[Exception]
    valid: tuple[bytes, ...]
    resealed: Callable[[bytes], bytes] = lambda content: content


def changed(content: bytes, chance: random.Random) -> bytes:
    """A neighbour of a valid file, or noise."""
    data = bytearray(content if chance.random() > 0.05 else chance.randbytes(chance.randrange(200)))
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        at, end = sorted((chance.randrange(len(data) + 1), min(len(data), chance.randrange(len(data) + 1))))
        match chance.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end][:1000]
            case 3:
                data[at:at] = chance.randbytes(chance.randrange(9))
            case 4:
                size = chance.choice((1, 2, 4, 8))
                data[at : at + size] = (chance.choice(EXTREME) % (1 << 8 * size)).to_bytes(size, "little")
            case 5:
                digits = [i for i in range(at, len(data)) if 48 <= data[i] <= 57][:1]
                if digits:
                    data[digits[0] : digits[0] + 1] = chance.choice(NUMBERS).encode()
            case _:
                data = data[:at]
    return bytes(data)


def inputs_of(target: Target) -> Iterator[bytes]:
    chance = random.Random(20_261_123)
    for number in range(INPUTS):
        content = changed(chance.choice(target.valid), chance)
        yield target.resealed(content) if number % 2 else content


def layout() -> Layout:
    expert = OperatorId(1, OperatorKind.EXPERT, 3)
    return Layout.of([
        Field("layers.1.experts.3/w", "bfloat16", (4, 8), Part.COMPUTE, expert),
        Field("rng", "uint8", (100,)),
    ])  # fmt: skip


def a_manifest() -> bytes:
    facts = Facts("job-1", "d" * 8, {"tp": 1, "pp": 2}, {"lr": 1e-3, "scale": float("inf"), "deep": [[1], {"a": None}]})
    return manifest.encode(Manifest(SnapshotId(12, 3), facts, "segment-001.bin", layout(), ("0" * 32, "f" * 32)))


def reframed(key: str, content: bytes) -> bytes:
    start = len(manifest.framed(key, b"")) - 2
    return manifest.framed(key, content[start:-2])


def table() -> tuple[messages.Header, bytes]:
    pieces = [messages.ReplicaPiece("iter_12/slot", a_manifest(), 164, 20), messages.ReplicaPiece("x" * 40, b"", 0)]
    data = messages.encode_table(pieces)
    return messages.decode_header(messages.encode_header(12, len(pieces), data)), data


def header_again(content: bytes) -> bytes:
    packed = content[: messages.HEADER_BYTES - 8].ljust(messages.HEADER_BYTES - 8, b"\0")
    return packed + struct.pack("<Q", xxh3_64_intdigest(packed))


def a_header(content: bytes) -> object:
    if len(content) != messages.HEADER_BYTES:  # the transport delivers as many bytes as were asked for
        content = content[: messages.HEADER_BYTES].ljust(messages.HEADER_BYTES, b"\0")
    return messages.decode_header(content)


def a_table(content: bytes) -> object:
    count = table()[0].pieces
    return messages.decode_table(messages.Header(12, count, len(content), xxh3_64_intdigest(content)), content)


def answers(content: bytes) -> object:
    rows = content[: 2 * messages.ANSWER_BYTES].ljust(2 * messages.ANSWER_BYTES, b"\0")
    replies, counts = messages.decode_answers(rows)
    behind = content[len(rows) :][: sum(counts) * messages.RANGE_BYTES]
    if len(behind) < sum(counts) * messages.RANGE_BYTES:
        return replies
    return messages.decode_ranges(behind, counts, [164, 20])


def an_index(folder: Path) -> bytes:
    """The index of a checkpoint of torch, as torch writes it."""
    state = {f"layer.{at}.w": torch.zeros(3, 4 + at) for at in range(3)} | {"args": {"a": 1}}
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


def a_corpus(folder: Path) -> bytes:
    lengths, pointers = np.array([3, 4, 5], np.int32), np.array([0, 6, 14], np.int64)
    (folder / "corpus.bin").write_bytes(bytes(24))
    return struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4) + b"".join(
        part.tobytes() for part in (lengths, pointers, np.array([0, 1, 2, 3], np.int64))
    )


def opened_corpus(folder: Path, content: bytes) -> object:
    (folder / "corpus.idx").write_bytes(content)
    return open_corpus(str(folder / "corpus")).tokens


def beat(folder: Path, content: bytes) -> object:
    (folder / "7").write_bytes(content)
    return read_beat(folder, 7)


def names(content: bytes) -> object:
    return SlotEntry.parse(content.decode(errors="surrogateescape"))


def keyed(content: bytes) -> object:
    manifest.use_secret(b"a secret of some bytes")
    try:
        return manifest.decode(content, "it")
    finally:
        manifest.use_secret(None)


def keyed_again(content: bytes) -> bytes:
    start = len(manifest.framed("manifest", b"")) - 2
    body = content[start:-2]
    return b'{"hmac":"%s","manifest":%s}\n' % (signed(b"a secret of some bytes", body).encode(), body)


def some_weights(folder: Path) -> bytes:
    folder.mkdir()
    save_file({"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16)}, folder / SINGLE)
    return (folder / SINGLE).read_bytes()


def read_weights(folder: Path, content: bytes) -> object:
    (folder / SINGLE).write_bytes(content)
    found = Folder(folder)
    return [found.read(name) for name in found.tensors]


def a_weight_map(folder: Path) -> bytes:
    some_weights(folder)
    return json.dumps({"metadata": {"total_size": 32}, "weight_map": {"a.weight": SINGLE, "b.weight": SINGLE}}).encode()


def read_weight_maps(folder: Path, content: bytes) -> object:
    (folder / INDEX).write_bytes(content)
    return Folder(folder).tensors


def targets(folder: Path) -> dict[str, Target]:
    sums = {Path("__0_0.distcp"): integrity.FileSum(12, "0" * 32), Path("common.pt"): integrity.FileSum(5, "a" * 32)}
    saved = integrity.encode({str(path): one for path, one in sums.items()})  # type: ignore[arg-type]
    holders = {1: (2, 4), 2: (4, 4)}
    wanted = b"".join(messages.encode_answers([(messages.Reply.PARTLY, ((0, 3), (5, 9))), (messages.Reply.HELD, ())]))
    one = chain.encode(chain.Chain(4, holders, {2: "0" * 16, 4: "a" * 16}, 1, None, "all"))
    return {
        "manifest": Target(
            lambda content: manifest.decode(content, "it"), UnreadableCheckpoint, (a_manifest(),),
            partial(reframed, "manifest"),
        ),
        "manifest with a key": Target(keyed, UnreadableCheckpoint, (keyed_again(a_manifest()),), keyed_again),
        "message header": Target(
            a_header, messages.MalformedMessage,
            (messages.encode_header(12, 2, bytes(100)), messages.encode_header(0, None, b"")), header_again,
        ),
        "message table": Target(a_table, messages.MalformedMessage, (table()[1],)),
        "message answers": Target(answers, messages.MalformedMessage, (wanted,)),
        "index of a dense checkpoint": Target(parse_index, UnreadableCheckpoint, (an_index(folder / "dense"),)),
        "checksums of a dense checkpoint": Target(
            lambda content: integrity.decode(content, "it"), UnreadableCheckpoint, (saved,),
            partial(reframed, "integrity"),
        ),
        "chain of partial saves": Target(
            lambda content: chain.decode(content, "it"), UnreadableCheckpoint, (one,), partial(reframed, "chain")
        ),
        "index of a corpus": Target(partial(opened_corpus, folder), InvalidInput, (a_corpus(folder),)),
        "weights of Hugging Face": Target(
            partial(read_weights, folder / "hf"), MoECheckpointError, (some_weights(folder / "hf"),)
        ),
        "index of Hugging Face": Target(
            partial(read_weight_maps, folder / "sharded"), MoECheckpointError, (a_weight_map(folder / "sharded"),)
        ),
        "heartbeat": Target(partial(beat, folder), NotImplementedError, (struct.pack("<qqq", 1, 2, 1),)),
        "names of files in memory": Target(
            names, NotImplementedError, (b"segment-002.iter_0000012-rank_00003-snapshot.json",)
        ),
    }  # fmt: skip


NAMES = (
    "manifest", "manifest with a key", "message header", "message table", "message answers",
    "index of a dense checkpoint", "checksums of a dense checkpoint",
    "chain of partial saves", "index of a corpus", "weights of Hugging Face", "index of Hugging Face", "heartbeat",
    "names of files in memory",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_targets() -> Iterator[dict[str, Target]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield targets(Path(folder))


def refusal(target: Target, content: bytes) -> str | None:
    """What the parser says where it refuses; lets all but its own error through."""
    try:
        target.parse(content)
    except target.raises as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_parser_reads_what_it_is_given_or_says_its_own_error(
    name: str, all_targets: dict[str, Target], record_property: Callable[[str, object], None]
) -> None:
    target, refused, longest_s = all_targets[name], 0, 0.0
    most_before, begun_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert [refusal(target, content) for content in target.valid] == [None] * len(target.valid)
    for content in inputs_of(target):
        started_s = time.process_time()
        said = refusal(target, content)
        longest_s = max(longest_s, time.process_time() - started_s)
        refused += said is not None
        assert "\n" not in (said or ""), content
    taken_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_before) << 10
    total_s = time.process_time() - begun_s
    record_property("fuzzed", f"{name}: {INPUTS} inputs, {refused} refused, {total_s:.1f} s, {taken_bytes >> 20} MiB")
    assert longest_s < MOST_S_EACH
    assert taken_bytes < MOST_BYTES
    assert refused > INPUTS // 10 or target.raises is NotImplementedError


def test_all_parsers_are_fuzzed(all_targets: dict[str, Target]) -> None:
    assert set(all_targets) == set(NAMES)


@pytest.mark.parametrize("bomb", [b"\x80\x04Nr\xff\xff\xff\x0f.", b"\x80\x02Np9999999999\n."])
def test_an_index_that_would_fill_the_memory_is_refused(bomb: bytes) -> None:
    with pytest.raises(UnreadableCheckpoint, match=r"remembers object \d+ in \d+ bytes"):
        parse_index(bomb)
