"""Small real checkpoints and snapshots of every kind, with contents drawn from a seed, and ways to damage them."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.slot_reader import written_over
from megatron.core.dist_checkpointing.moe.types import expert
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.pretrain.testing import cpu_device
from moe_ckpt.dense import chain, integrity
from moe_ckpt.dense.names import COMMON, FORMAT, TRACKER

WORLD_SIZE = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
LAYERS, EXPERTS = (0, 1), 3


def dense(root: Path, seed: int) -> Path:
    """A --save folder with two iterations, as the driver leaves it."""
    draw = random.Random(seed)
    for iteration in (12, 24):
        save(root, iteration, drawn(draw), pieces=draw.choice((1, 2, 3)))
    (root / TRACKER).write_text("24")
    return root


def chained(root: Path, seed: int) -> Path:
    """A --save folder with a complete iteration and two with one expert of each layer."""
    draw = random.Random(seed)
    whole = {f"decoder.layers.{layer}.mlp.experts.experts.w": tensor(draw, EXPERTS, 4) for layer in LAYERS}
    save(root, 12, {**drawn(draw), **whole}, pieces=EXPERTS, seal=False)
    holders = {layer: (12,) * EXPERTS for layer in LAYERS}
    newest = chain.Chain(12, holders, {12: f"{draw.getrandbits(64):016x}"}, 0, None, "fp32")
    finish(root, newest)
    for at, iteration in enumerate((24, 36)):
        own = {f"decoder.layers.{layer}.mlp.experts.experts.{at}.w": tensor(draw, 4) for layer in LAYERS}
        save(root, iteration, {**drawn(draw), **own}, seal=False)
        chosen = [expert(layer, at) for layer in LAYERS]
        newest = newest.followed_by(iteration, f"{draw.getrandbits(64):016x}", chosen, at + 1)
        finish(root, newest)
    (root / TRACKER).write_text("36")
    return root


def storage(root: Path, seed: int) -> Path:
    """Snapshots of two windows of a random length, of two ranks."""
    draw = random.Random(seed)
    length = draw.choice((1, 2, 3))
    for rank in range(WORLD_SIZE):
        with closing(FilesystemStore(root, rank)) as store:
            for iteration in range(1, 2 * length + 1):
                write(store, draw, SnapshotId(iteration, rank), length)
    settled(root)
    return root


def memory(root: Path, seed: int) -> Path:
    """A memory dir with two slots, each with snapshots of two iterations and a segment that is free."""
    draw = random.Random(seed)
    (root / "node").mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        with closing(MemoryStore(root / "node", "job", rank, (1 << 14,) * 3)) as store:
            for iteration in (1, 2):
                write(store, draw, SnapshotId(iteration, rank), 1)
    return root


def settled(root: Path) -> None:
    """As if all of it had been written two hours ago, so that no job can be about to complete it."""
    for path in root.rglob("*"):
        os.utime(path, (time.time() - 7200,) * 2)


PLACES: dict[str, Callable[[Path, int], Path]] = {
    "dense": dense,
    "chain": chained,
    "storage": storage,
    "memory": memory,
}


def tensor(draw: random.Random, *shape: int) -> torch.Tensor:
    return 100 * torch.randn(*shape, generator=torch.Generator().manual_seed(draw.getrandbits(32)))


def drawn(draw: random.Random) -> dict[str, torch.Tensor]:
    """Tensors of no expert, of random shapes."""
    shapes = [
        tuple(draw.choice((1, 2, 6, 9)) for _ in range(draw.choice((1, 2, 3)))) for _ in range(draw.randint(1, 3))
    ]
    named = {f"decoder.layers.part{at}.weight": shape for at, shape in enumerate(shapes)}
    return {name: tensor(draw, *shape).to(draw.choice(DTYPES)) for name, shape in named.items()}


def save(root: Path, iteration: int, tensors: dict[str, torch.Tensor], *, pieces: int = 1, seal: bool = True) -> Path:
    """An iteration as Megatron-Core up to 0.18 writes it, that says that it has an integrity file.

    pieces: of each tensor whose first axis can be cut into so many. seal: make the file.
    """
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    state: dict[str, Any] = {"rng": ShardedObject("rng_state", torch.arange(iteration), (1,), (0,))}
    for name, value in tensors.items():
        count = pieces if value.shape[0] % pieces == 0 else 1
        for at, piece in enumerate(value.chunk(count)):
            state[f"{name}#{at}"] = ShardedTensor.from_rank_offsets(name, piece.clone(), (0, at, count))
    with cpu_device.installed():
        TorchDistSaveShardedStrategy(thread_count=2).save(state, folder)
    marked = {integrity.MARK: integrity.FORMAT_VERSION}
    torch.save({"iteration": iteration, "checkpoint_version": 3.0, "content_metadata": marked}, folder / COMMON)
    (folder / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if seal:
        integrity.seal(folder)
    return folder


def finish(root: Path, newest: chain.Chain) -> None:
    """What makes an iteration one of a chain."""
    folder = root / f"iter_{newest.iteration:07d}"
    (folder / chain.MANIFEST).write_bytes(chain.encode(newest))
    if not newest.is_complete:
        marker = json.loads((folder / FORMAT).read_text())
        (folder / FORMAT).write_text(json.dumps(marker | {"sharded_backend_version": chain.PARTIAL_BACKEND_VERSION}))
    integrity.seal(folder)


def facts(iteration: int, length: int = 1, timeline: tuple[tuple[str, int], ...] = (("first", 0),)) -> Facts:
    """What a manifest says of a snapshot in a window of `length` iterations."""
    first = (iteration - 1) // length * length + 1
    scalars: dict[str, Json] = {
        "operators": [],
        "timeline": list(map(list, timeline)),
        "window": [first, first + length - 1],
        "trainer": {"iteration": iteration},
    }
    return Facts("job", f"plan of {iteration}", {"world_size": WORLD_SIZE}, scalars)


def write(store: Any, draw: random.Random, snapshot: SnapshotId, length: int, **said: Any) -> None:
    """A snapshot with records of random sizes."""
    sizes = [draw.choice((1, 63, 64, 200, 1000)) for _ in range(draw.randint(1, 4))]
    layout = Layout.of([Field(f"weight {at}", "uint8", (size,)) for at, size in enumerate(sizes)])
    with store.reserve(snapshot, layout) as writer:
        for field in layout.fields:
            writer.put(field.key, draw.randbytes(field.nbytes))
        writer.seal(facts(snapshot.iteration, length, **said))


Harm = Callable[[random.Random, Path, list[Path]], str]
"""Damages one of these files, and says what it did."""


def flip(draw: random.Random, root: Path, files: list[Path]) -> str:
    path = draw.choice([one for one in files if one.stat().st_size])
    at = draw.randrange(whole_bytes(path))
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ draw.randint(1, 255)]))
    return f"byte {at} of {path} flipped"


def truncate(draw: random.Random, root: Path, files: list[Path]) -> str:
    path = draw.choice([one for one in files if one.stat().st_size])
    length = draw.randrange(whole_bytes(path))
    os.truncate(path, length)
    return f"{path} truncated to {length}"


def extend(draw: random.Random, root: Path, files: list[Path]) -> str:
    path = draw.choice([one for one in files if not is_memory_segment(one)])
    with path.open("ab") as file:
        file.write(b"\xff" * draw.randint(1, 100))
    return f"{path} extended"


def delete(draw: random.Random, root: Path, files: list[Path]) -> str:
    # Without its manifest a segment in memory is free, as after a snapshot was given up.
    path = draw.choice([one for one in files if "slot-" not in one.parent.name or is_memory_segment(one)])
    path.unlink()
    return f"{path} deleted"


def swap(draw: random.Random, root: Path, files: list[Path]) -> str:
    suffix = draw.choice(suffixes(files))
    one, other = draw.sample([path for path in files if path.suffix == suffix], 2)
    content = one.read_bytes(), other.read_bytes()
    if content[0] == content[1]:
        return flip(draw, root, [one])
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    return f"{one} and {other} swapped"


def rename(draw: random.Random, root: Path, files: list[Path]) -> str:
    path = draw.choice([one for one in files if "slot-" not in one.parent.name or is_memory_segment(one)])
    path.rename(path.with_name(f"{path.name}.old"))
    return f"{path} renamed"


def half_write(draw: random.Random, root: Path, files: list[Path]) -> str:
    path = draw.choice([one for one in files if one.stat().st_size > 1])
    content, length = path.read_bytes(), whole_bytes(path) // 2
    if not any(content[length : 2 * length]):
        return flip(draw, root, [path])
    path.write_bytes(content[:length] + bytes(len(content) - length))
    return f"{path} half-written"


def move_folder(draw: random.Random, root: Path, files: list[Path]) -> str:
    """Rename or remove an iteration that is needed, or a snapshot."""
    folders = sorted({one.parent for one in files if one.parent != root})
    if any("slot-" in folder.name for folder in folders):
        return flip(draw, root, files)
    needed = [folder for folder in folders if (folder / chain.MANIFEST).exists()] or folders[-1:]
    folder = draw.choice(needed if (root / TRACKER).exists() else folders)
    if draw.random() < 0.5:
        shutil.rmtree(folder)
        return f"{folder} removed"
    folder.rename(folder.with_name(f"{folder.name}-old"))
    return f"{folder} renamed"


HARMS: tuple[Harm, ...] = (flip, flip, flip, truncate, extend, delete, swap, rename, half_write, move_folder)


def damaged_files(root: Path) -> list[Path]:
    """Files that hold state or say where it is, ascending: not who owns memory, nor memory that is free."""
    sealed = {path.name.partition(".")[0] for path in root.rglob("segment-*.json")}
    return [path for path in sorted(root.rglob("*")) if path.is_file() and is_state(path, sealed)]


def is_state(path: Path, sealed: set[str]) -> bool:
    if path.name == "owner.json" or path.suffix == ".room":
        return False
    return not is_memory_segment(path) or any(path.parent.glob(f"{path.stem}.*.json"))


def is_memory_segment(path: Path) -> bool:
    return path.name.startswith("segment-") and path.suffix == ".bin"


def whole_bytes(path: Path) -> int:
    """The length of a file; of a manifest in memory, without the zeros behind it; of a segment there, of the records
    that are sealed in it without gaps between them."""
    if not is_memory_segment(path):
        return len(written_over(path.read_bytes())) if path.suffix == ".json" else path.stat().st_size
    (manifest,) = path.parent.glob(f"{path.stem}.*.json")
    return int(json.loads(written_over(manifest.read_bytes()))["manifest"]["records"][0]["nbytes"])


def suffixes(files: list[Path]) -> list[str]:
    names = [path.suffix for path in files]
    return sorted({name for name in names if names.count(name) > 1})


def harmed(root: Path, seed: int) -> str:
    """Damage what lies at `root` in a way that the seed says; returns what was done."""
    draw = random.Random(seed)
    return HARMS[seed % len(HARMS)](draw, root, damaged_files(root))


def copies(original: Path, folder: Path, count: int) -> Iterator[tuple[int, Path]]:
    """So many copies of a place, one after the other, each with a number."""
    for seed in range(count):
        place = folder / "copy"
        shutil.copytree(original, place)
        yield seed, place
        shutil.rmtree(place)
