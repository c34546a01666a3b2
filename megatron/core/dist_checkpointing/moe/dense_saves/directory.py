"""The layout of a `--save` directory: tracker, iteration folders, commit by rename, retention."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.atomic import sync_directory, write_atomically
from moe_ckpt.dense.chain import read_chain
from moe_ckpt.dense.names import ITERATION, RELEASE, STAGED, TRACKER, condemned, read_tracker

Step = int | Literal["release"]


class CheckpointDirectory:
    """A folder of checkpoints as Megatron lays it out.

    An iteration is written into a hidden staging folder and published by renaming it to `iter_%07d`; the tracker
    is replaced afterwards, so at every moment it names a checkpoint that is complete. One job at a time writes here.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def folder(self, step: Step) -> Path:
        """Where the checkpoint of an iteration, or the release, is, once published."""
        return self.root / (step if isinstance(step, str) else f"iter_{step:07d}")

    def iterations(self) -> list[int]:
        """Published iterations, newest first; whether they are complete is another question."""
        if not self.root.is_dir():
            return []
        matches = (ITERATION.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def tracked(self) -> Step | None:
        """What the tracker names, or None without a tracker. Raises UnreadableCheckpoint if it names nothing."""
        named = read_tracker(self.root)
        if named is None:
            return None
        return RELEASE if named == RELEASE else int(named.removeprefix("iter_"))

    def candidates(self) -> list[Step]:
        """What to try when resuming, best first: the tracked iteration, then older ones; of a release only itself.

        Without a tracker every published iteration counts, newest first. Newer iterations than the tracked one were
        never announced as complete, so they are not candidates.
        """
        tracked = self.tracked()
        if tracked is None:
            return [*self.iterations()]
        if isinstance(tracked, str):
            return [tracked]
        older = [iteration for iteration in self.iterations() if iteration < tracked]
        return [tracked, *older]

    def stage(self, iteration: int, keep: frozenset[int] = frozenset()) -> Path:
        """An empty hidden folder to write `iteration` into. Raises OSError.

        What killed saves left behind is removed; keep: iterations that are still being written.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep(frozenset(self.staging(other).name for other in keep))
        staging = self.staging(iteration)
        staging.mkdir()
        return staging

    def staging(self, iteration: int) -> Path:
        """The hidden folder in which `iteration` is written."""
        return self.root / f".iter_{iteration:07d}.saving"

    def publish(self, iteration: int) -> None:
        """Make the staged `iteration` visible and point the tracker at it. Raises OSError."""
        replaced = self._placed(iteration)
        self.track(iteration)
        shutil.rmtree(replaced, ignore_errors=True)

    def place(self, iteration: int) -> None:
        """Make the staged `iteration` visible; the tracker stays as it is. Raises OSError."""
        shutil.rmtree(self._placed(iteration), ignore_errors=True)

    def track(self, iteration: int) -> None:
        """Point the tracker at `iteration`. Raises OSError."""
        write_atomically(self.root / TRACKER, str(iteration).encode())

    def _placed(self, iteration: int) -> Path:
        """Publish `iteration`; where the one that it replaces is now."""
        staging, final = self.staging(iteration), self.folder(iteration)
        replaced = self._condemned(iteration)
        sync_directory(staging)
        if final.exists():
            final.rename(replaced)
        os.rename(staging, final)
        sync_directory(self.root)
        return replaced

    def discard(self, iteration: int) -> None:
        """Remove what a failed save of `iteration` left behind, as far as the file system lets us."""
        shutil.rmtree(self.staging(iteration), ignore_errors=True)

    def retain(self, keep_last: int, in_use: frozenset[int] = frozenset()) -> list[int]:
        """Remove all but the newest `keep_last` iterations and those that hold experts for what stays; returns them.

        Those `in_use` stay as well, until a later call.

        The tracked iteration always stays. Raises OSError, and UnreadableCheckpoint while it is not known what a kept
        one needs.
        """
        tracked = self.tracked()
        # Iterations past the tracked one are of a run that was left; they cannot be loaded and are not ours to remove.
        loadable = [iteration for iteration in self.iterations() if isinstance(tracked, int) and iteration <= tracked]
        older = [iteration for iteration in loadable[keep_last:] if not self.folder(iteration).is_symlink()]
        needed = self._needed(loadable[:keep_last])
        for iteration in self.iterations() if older else ():
            if iteration not in loadable:
                needed |= self._needed_if_whole(iteration)
        surplus = [iteration for iteration in older if iteration not in needed | in_use]
        for iteration in surplus:
            condemned(self.folder(iteration))
        self._sweep()
        return surplus

    def _needed(self, kept: list[int]) -> set[int]:
        """Older iterations that hold experts of `kept` ones, as their manifests name them."""
        try:
            chains = [read_chain(self.folder(iteration)) for iteration in kept]
        except UnreadableCheckpoint as error:
            raise UnreadableCheckpoint(f"what else has to stay is not known: {error}") from error
        return {iteration for chain in chains if chain is not None for iteration in chain.iterations}

    def _needed_if_whole(self, iteration: int) -> set[int]:
        """As `_needed` for one that was not announced: nothing if its manifest is damaged, for then it is lost."""
        try:
            return self._needed([iteration])
        except UnreadableCheckpoint as error:
            unreadable = error.__cause__
            if isinstance(unreadable, NewerFormat) or isinstance(getattr(unreadable, "__cause__", None), OSError):
                raise
            return set()

    def _condemned(self, iteration: int) -> Path:
        return self.root / f".iter_{iteration:07d}.removing"

    def _sweep(self, keep: frozenset[str] = frozenset()) -> None:
        for entry in self.root.iterdir():
            if STAGED.fullmatch(entry.name) and entry.name not in keep:
                shutil.rmtree(entry, ignore_errors=True)
