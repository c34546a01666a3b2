"""What tests of protection change inside workers: watched bytes, memory reused early, bad plans, bad disks.

Watchers leave a JSON file of facts for each rank; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from xxhash import xxh3_128_hexdigest

from megatron.core.dist_checkpointing.moe.ports import StoreFailure
from megatron.core.dist_checkpointing.moe.storage.slot_reader import written_over


@contextlib.contextmanager
def newer_core() -> Iterator[None]:
    """The session finds a Megatron-Core that came out after it."""
    from megatron.core.dist_checkpointing.moe.runtime import protected_session
    from megatron.core.dist_checkpointing.moe.versions import FoundVersion

    found = {"megatron-core": FoundVersion("0.20.0", "/image/core")}
    with mock.patch.object(protected_session, "found_versions", return_value=found):
        yield


@contextlib.contextmanager
def watching_sealed_bytes(folder: str) -> Iterator[None]:
    """Hash each sealed snapshot and replica of this slot when it is first seen, and again after every iteration.

    Facts: how often it looked, how often it saw the same own snapshot and the same replica at most, how many different
    ones of both it saw, and what had changed.
    """
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    rank = int(os.environ["RANK"])
    facts: dict[str, Any] = {"looks": 0, "own": 0, "replica": 0, "different": 0, "changed": []}
    seen: dict[str, str] = {}
    hashed: Counter[str] = Counter()
    report = ProtectedSession.report

    def watching(self: Any) -> Any:
        done = report(self)
        iteration = done.iteration
        facts["looks"] += 1
        now = _fingerprints(self.memory.store.directory)
        for name, digest in now.items():
            if seen.setdefault(name, digest) != digest:
                facts["changed"].append(f"{name} after iteration {iteration}")
            hashed[name] += 1
            whose = "own" if f"-rank_{rank:05d}-" in name else "replica"
            facts[whose] = max(facts[whose], hashed[name])
        for name in seen.keys() - now.keys():
            del seen[name]
        facts["different"] = len(hashed)
        return done

    with mock.patch.object(ProtectedSession, "report", watching):
        try:
            yield
        finally:
            Path(folder, f"watched-{rank}").write_text(json.dumps(facts))


def _fingerprints(slot: Path) -> dict[str, str]:
    """Of each manifest that is there, together with all bytes that it speaks of.

    Files are read as they are, so that looking does not pin what training would reuse. What is freed in between does
    not count.
    """
    found = {}
    for path in slot.glob("segment-*.json"):
        with contextlib.suppress(FileNotFoundError):
            manifest = written_over(path.read_bytes())
            nbytes = json.loads(manifest)["manifest"]["segment_bytes"]
            with (slot / f"{path.name[:11]}.bin").open("rb") as segment:
                data = segment.read(nbytes)
            if path.exists():
                found[path.name] = xxh3_128_hexdigest(manifest + data)
    return found


@contextlib.contextmanager
def no_joint_snapshot_after(iteration: int) -> Iterator[None]:
    """From then on one rank cannot seal its own, by turns: memory is written as ever, but an older snapshot stays.

    One iteration later all that was begun before is waited for, so that from there on it is seen at each look, however
    slowly the work beside training runs.
    """
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
    from megatron.core.dist_checkpointing.moe.snapshot.workers import ReplicationWorker

    original, report = ReplicationWorker._seal, ProtectedSession.report

    def waiting_report(self: Any) -> Any:
        done = report(self)
        if done.iteration == iteration + 1:
            self.coordinator._background.drain()
        return done

    def seal(self: Any, task: Any) -> bool:
        turn = task.plan.iteration % int(os.environ["WORLD_SIZE"])
        if task.plan.iteration > iteration and int(os.environ["RANK"]) == turn:
            task.abandon()
            raise StoreFailure(f"sealing after iteration {iteration} failed as asked")
        return bool(original(self, task))

    with (
        mock.patch.object(ReplicationWorker, "_seal", seal),
        mock.patch.object(ProtectedSession, "report", waiting_report),
    ):
        yield


@contextlib.contextmanager
def reusing_buffers_early() -> Iterator[None]:
    """A memory store that writes into segments whose snapshots nobody has freed."""
    from megatron.core.dist_checkpointing.moe.storage import memory

    original = memory.MemoryStore._free_segment

    def free_segment(self: Any, entries: Sequence[Any], nbytes: int) -> Any:
        return original(self, [], nbytes)

    with mock.patch.object(memory.MemoryStore, "_free_segment", free_segment):
        yield


@contextlib.contextmanager
def little_space(free_bytes: int, ranks: Collection[int] = range(64)) -> Iterator[None]:
    """Every file system tells these ranks that it has only this much left."""
    original = os.statvfs

    def statvfs(path: Any) -> Any:
        found = original(path)
        if int(os.environ["RANK"]) not in ranks:
            return found
        return mock.Mock(f_bavail=free_bytes, f_frsize=1, f_blocks=found.f_blocks)

    with mock.patch.object(os, "statvfs", statvfs):
        yield


@contextlib.contextmanager
def folders_of_their_own(folder: str) -> Iterator[None]:
    """Each rank works in a folder of its own, as if relative paths led to a disk of its node; nobody waits for long."""
    from megatron.core.dist_checkpointing.moe.runtime import opening

    own = Path(folder) / os.environ["RANK"]
    own.mkdir()
    with contextlib.chdir(own), mock.patch.object(opening, "SHARED_S", 0.5):
        yield


@contextlib.contextmanager
def storage_vanishes(folder: str, iteration: int) -> Iterator[None]:
    """The folder of persistent snapshots becomes a file at the end of `iteration`; retries come quickly."""
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
    from megatron.core.dist_checkpointing.moe.snapshot import persisting

    original = ProtectedSession.on_state_consistent

    def on_state_consistent(self: Any, at: int, *journal: Any) -> None:
        if at == iteration and os.environ["RANK"] == "0":
            Path(folder).rename(f"{folder}-away")
            Path(folder).write_text("not a folder")
        original(self, at, *journal)

    with (
        mock.patch.object(ProtectedSession, "on_state_consistent", on_state_consistent),
        mock.patch.object(persisting, "RETRY_PAUSES_S", (0.05, 0.2)),
    ):
        yield
