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

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Listing, SnapshotId
from moe_ckpt.checkpoints.persist_dir import PersistDir

from ..checkpoints.windows import (
    RestorableState,
    StoredState,
    on_timeline,
    restorable,
    states,
    stored_snapshots,
    timelines,
)

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
class ConversionSource:
    """What is converted: snapshots of the iterations `first` to `last` of all ranks, and the job that made them.

    flags: of the driver, as they were given in `folder`.
    """

    snapshots: tuple[SnapshotId, ...] = field(repr=False)
    first: int
    last: int
    world_size: int
    flags: tuple[str, ...] = field(repr=False)
    folder: Path


def newest(persist_dir: PersistDir) -> ConversionSource:
    """The newest complete window in storage; a snapshot of everything is a window of one iteration.

    Raises UnreadableCheckpoint when there is none, UsageError when the one there does not say how its job was started.
    """
    place, snapshots = persist_dir.place, stored_snapshots(persist_dir.store)
    found = next(restorable(snapshots), None)
    if found is None:
        newest_state = next(
            (state for line in timelines(snapshots) for state in states(on_timeline(line, snapshots))), None
        )
        problem = _lacking(newest_state) if newest_state else _nothing(persist_dir.store.snapshots())
        raise UnreadableCheckpoint(f"{place} has {problem}; is it a --moe-ckpt-persist-dir?")
    return _source(found, place)


def densified(source: ConversionSource, persist_dir: PersistDir, out: Path, flags: Sequence[str]) -> int:
    """Starts the job once more and lets it write the checkpoint.

    Args:
        source: what to convert, see `newest`.
        persist_dir: the storage that it is in; nothing there is changed.
        out: the --save folder of the new checkpoint.
        flags: given after the recorded ones, and so winning over them.

    Returns:
        The exit code with which the job ended.
    """
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
        # The snapshots of the source alone, so that nothing is tidied up in a storage that a job may still write to.
        alone = persist_dir.copied_to(Path(view), source.snapshots)
        own += ["--moe-ckpt-memory-dir", memory, "--moe-ckpt-persist-dir", alone]
        # Not from the folder of the job: a checkout of another version may lie there.
        command = [
            sys.executable,
            "-P",
            "-m",
            LAUNCHER,
            "--nproc-per-node",
            str(source.world_size),
            "--max-restarts",
            "0",
        ]
        command += [script.origin, *recorded(source.flags), *own, *flags]
        # Standard output is for what the command itself has to say.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, env=environment, stdout=2, check=False).returncode


def _is_folder(path: Path) -> bool:
    """Whether a folder is there that may be entered."""
    with suppress(OSError):
        return path.is_dir() and os.access(path, os.X_OK)
    return False


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


def _lacking(state: StoredState) -> str:
    if not state.lacking:
        return f"no complete state: older snapshots with what {state} needs are missing or torn on some ranks"
    iteration, rank = state.lacking[0]
    return (
        f"no complete state: of iterations {state.span[0]} to {state.span[-1]} the snapshot of rank {rank} after"
        f" iteration {iteration} is missing or torn"
    )


def _source(found: RestorableState, place: str) -> ConversionSource:
    span, leading = found.state.span, found.state.leading
    trainer = cast("Mapping[str, Any]", leading.facts.scalars["trainer"])
    command = trainer.get("command")
    if command is None:
        raise UsageError(f"{place}: the {leading.snapshot} does not say with which flags its job was started")
    members = tuple(stored.snapshot for stored in found.members)
    return ConversionSource(
        members, span[0], span[-1], leading.world_size, tuple(command["flags"]), Path(command["folder"])
    )


def _nothing(listed: Listing) -> str:
    if listed.torn:
        return f"nothing that is whole: {listed.torn[0].why}"
    return "no snapshots"
