"""What `moe-ckpt convert` does: finds the newest whole window in storage, and starts its job once more to replay it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fsspec  # type: ignore[import-untyped]

from ..errors import UnreadableCheckpoint, UsageError
from ..examine.windows import Restorable, State, on, restorable, states, stored, timelines
from ..ports import Listing, SnapshotId, Store
from ..store.objects import remote

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
    snapshots = stored(store)
    found = next(restorable(snapshots), None)
    if found is None:
        newest_state = next((one for line in timelines(snapshots) for one in states(on(line, snapshots))), None)
        problem = _lacking(newest_state) if newest_state else _nothing(store.snapshots())
        raise UnreadableCheckpoint(f"{place} has {problem}; is it a --moe-ckpt-persist-dir?")
    return _source(found, place)


def densified(source: Source, storage: str, out: Path, flags: Sequence[str]) -> int:
    """Starts the job and lets it write the checkpoint into `out`; the exit code with which it ended."""
    script = importlib.util.find_spec(DRIVER)
    if script is None or script.origin is None:
        raise UsageError(f"{DRIVER} is missing: install this package with its training driver")
    shared = Path("/dev/shm")
    folder = source.folder if _is_folder(source.folder) else Path.cwd()
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-", dir=shared if shared.is_dir() else None) as memory,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-") as view,
    ):
        own = ["--device", "cpu", "--save", str(out.absolute()), "--moe-ckpt-replicas", "0"]
        own += ["--moe-ckpt-memory-dir", memory, "--moe-ckpt-persist-dir", _shown(source, storage, Path(view))]
        command = [sys.executable, "-m", LAUNCHER, "--nproc-per-node", str(source.world_size), "--max-restarts", "0"]
        command += [script.origin, *recorded(source.flags), *own, *flags]
        # Standard output is for what the command itself has to say.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, env=environment, stdout=2, check=False).returncode


def _is_folder(path: Path) -> bool:
    """Whether a folder is there that may be entered."""
    with suppress(OSError):
        return path.is_dir() and os.access(path, os.X_OK)
    return False


def _shown(source: Source, storage: str, view: Path) -> str:
    """The snapshots of the source alone, so that nothing is tidied up in a storage that a job may still write to."""
    if "://" in storage:
        with remote(storage):
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


def _lacking(state: State) -> str:
    if not state.lacking:
        return f"no complete state: older snapshots with what {state} needs are missing or torn on some ranks"
    iteration, rank = state.lacking[0]
    return (
        f"no complete state: of iterations {state.span[0]} to {state.span[-1]} the snapshot of rank {rank} after"
        f" iteration {iteration} is missing or torn"
    )


def _source(found: Restorable, place: str) -> Source:
    span, leading = found.state.span, found.state.leading
    trainer = cast("Mapping[str, Any]", leading.facts.scalars["trainer"])
    command = trainer.get("command")
    if command is None:
        raise UsageError(f"{place}: the {leading.snapshot} does not say with which flags its job was started")
    members = tuple(one.snapshot for one in found.members)
    return Source(members, span[0], span[-1], leading.world_size, tuple(command["flags"]), Path(command["folder"]))


def _nothing(listed: Listing) -> str:
    if listed.torn:
        return f"nothing that is whole: {listed.torn[0].why}"
    return "no snapshots"
