"""What `moe-ckpt convert` does: finds the newest whole window in storage, and starts its job once more to replay it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fsspec  # type: ignore[import-untyped]

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.timelines import Timeline, belongs, newest_first
from ..ports import Facts, Listing, SnapshotId, Store
from ..store.filesystem import FilesystemStore
from ..store.objects import ObjectStore

LAUNCHER, DRIVER = "megatron.pretrain.launch", "megatron.pretrain.densify"

# What the recorded flags say of how the job was run and not of what it trained, with how many values each takes.
_DROPPED = {
    "--save": 1,
    "--save-interval": 1,
    "--save-experts": 1,
    "--keep-last": 1,
    "--async-save": 0,
    "--load": 1,
    "--ckpt-step": 1,
    "--finetune": 0,
    "--no-load-optim": 0,
    "--no-load-rng": 0,
    "--exit-on-missing-checkpoint": 0,
    "--exit-interval": 1,
    "--exit-duration-in-mins": 1,
    "--exit-signal-handler": 0,
    "--log-progress": 0,
    "--tensorboard-dir": 1,
    "--metrics-jsonl": 1,
    "--moe-ckpt-memory-dir": 1,
    "--moe-ckpt-persist-dir": 1,
    "--moe-ckpt-replicas": 1,
    "--moe-ckpt-inject-fault": 1,
}


@dataclass(frozen=True)
class Source:
    """What is converted: snapshots of the iterations `first` to `last` of all ranks, and the job that made them.

    flags: of the driver, as they were given in `folder`.
    """

    snapshots: tuple[SnapshotId, ...] = field(repr=False)
    first: int
    last: int
    world_size: int
    flags: tuple[str, ...] = field(repr=False)
    folder: Path


def newest(store: Store, place: str) -> Source:
    """The newest complete window in `store`; a snapshot of everything is a window of one iteration.

    Raises UnreadableCheckpoint when there is none, UsageError when the one there does not say how its job was started.
    """
    listed = store.snapshots()
    everything = {snapshot: _facts(store, snapshot) for snapshot in listed.sealed}
    problem = ""
    # What a job left behind when it went back to an older state is no part of what it came to.
    for timeline in newest_first(map(_timeline, everything.values())):
        facts = {one: said for one, said in everything.items() if belongs(_timeline(said), one.iteration, timeline)}
        leading = [snapshot for snapshot in facts if "trainer" in facts[snapshot].scalars]
        for snapshot in sorted(leading, key=lambda one: (-one.iteration, one.rank)):
            lacking = _lacking(snapshot, facts)
            if not lacking:
                return _source(snapshot, facts, place)
            problem = problem or lacking
    raise UnreadableCheckpoint(f"{place} has {problem or _nothing(listed)}; is it a --moe-ckpt-persist-dir?")


def densified(source: Source, storage: str, out: Path, flags: Sequence[str]) -> int:
    """Starts the job and lets it write the checkpoint into `out`; the exit code with which it ended."""
    script = importlib.util.find_spec(DRIVER)
    if script is None or script.origin is None:
        raise UsageError(f"{DRIVER} is missing: install this package with its training driver")
    shared = Path("/dev/shm")
    folder = source.folder if source.folder.is_dir() else Path.cwd()
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-", dir=shared if shared.is_dir() else None) as memory,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-") as view,
    ):
        own = ["--device", "cpu", "--save", str(out.absolute()), "--moe-ckpt-replicas", "0"]
        own += ["--moe-ckpt-memory-dir", memory, "--moe-ckpt-persist-dir", _shown(source, storage, Path(view))]
        command = [sys.executable, "-m", LAUNCHER, "--nproc-per-node", str(source.world_size), "--max-restarts", "0"]
        command += [script.origin, *recorded(source.flags), *own, *flags]
        return subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def _shown(source: Source, storage: str, view: Path) -> str:
    """The snapshots of the source alone, so that nothing is tidied up in a storage that a job may still write to."""
    if "://" in storage:
        files, root = fsspec.core.url_to_fs(storage)
        for snapshot in source.snapshots:
            files.get(f"{root}/{snapshot.name}", str(view / snapshot.name), recursive=True)
        return f"file://{view}"
    for snapshot in source.snapshots:
        (view / snapshot.name).symlink_to(Path(storage).absolute() / snapshot.name)
    return str(view)


def recorded(flags: Sequence[str]) -> list[str]:
    """The flags of a job that say what it trains: without where it saved, what it logged and how it was to end."""
    kept, skip = [], 0
    for flag in flags:
        if flag.startswith("--"):
            name, given, _ = flag.partition("=")
            skip = _DROPPED[name] + 1 - bool(given) * _DROPPED[name] if name in _DROPPED else 0
        if skip:
            skip -= 1
        else:
            kept.append(flag)
    return kept


def opened(place: str) -> Store:
    if "://" in place:
        return ObjectStore(place, 0)
    if not Path(place).is_dir():
        raise UsageError(f"{place} is no folder; give what the job had as --moe-ckpt-persist-dir")
    return FilesystemStore(Path(place), 0)


def _facts(store: Store, snapshot: SnapshotId) -> Facts:
    with store.open(snapshot) as reader:
        return reader.manifest.facts


def _timeline(facts: Facts) -> Timeline:
    rows = cast("Sequence[tuple[str, int]]", facts.scalars.get("timeline", ()))
    return tuple((name, after) for name, after in rows)


def _span(snapshot: SnapshotId, facts: Facts) -> tuple[int, int]:
    first, last = cast("Sequence[int]", facts.scalars.get("window", (snapshot.iteration, snapshot.iteration)))
    return first, last


def _window(snapshot: SnapshotId, facts: Mapping[SnapshotId, Facts]) -> list[SnapshotId]:
    """All snapshots, of all ranks, of the window that `snapshot` belongs to."""
    key = facts[snapshot].job, _span(snapshot, facts[snapshot])
    return [one for one, said in facts.items() if (said.job, _span(one, said)) == key]


def _lacking(snapshot: SnapshotId, facts: Mapping[SnapshotId, Facts]) -> str:
    """Which snapshot misses in the window that `snapshot` belongs to; empty if it is whole."""
    first, last = _span(snapshot, facts[snapshot])
    there = {(one.iteration, one.rank) for one in _window(snapshot, facts)}
    for iteration in range(first, last + 1):
        for rank in range(cast("int", facts[snapshot].topology["world_size"])):
            if (iteration, rank) not in there:
                return (
                    f"no complete state: of iterations {first} to {last} the snapshot of rank {rank} after iteration "
                    f"{iteration} is missing or torn"
                )
    return ""


def _source(snapshot: SnapshotId, facts: Mapping[SnapshotId, Facts], place: str) -> Source:
    first, last = _span(snapshot, facts[snapshot])
    trainer = cast("Mapping[str, Any]", facts[snapshot].scalars["trainer"])
    command = trainer.get("command")
    if command is None:
        raise UsageError(f"{place}: the {snapshot} does not say with which flags its job was started")
    world_size = cast("int", facts[snapshot].topology["world_size"])
    snapshots = tuple(_window(snapshot, facts))
    return Source(snapshots, first, last, world_size, tuple(command["flags"]), Path(command["folder"]))


def _nothing(listed: Listing) -> str:
    if listed.torn:
        return f"nothing that is whole: {listed.torn[0].why}"
    return "no snapshots"
