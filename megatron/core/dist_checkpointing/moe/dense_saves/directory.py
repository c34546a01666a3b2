"""The layout of a `--save` directory: tracker, iteration folders, commit by rename."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing.moe.storage.system import make_folders, sync_directory, write_atomically
from moe_ckpt.dense.names import ITERATION, REPLACED, STAGED, TRACKER
from moe_ckpt.dense.went_back import left_in

Step = int | Literal["release"]


class CheckpointDirectory:
    """A folder of checkpoints as Megatron lays it out.

    An iteration is written into a hidden staging folder and published by renaming it to `iter_%07d`; Megatron-LM
    replaces the tracker afterwards, so at every moment it names a checkpoint that is complete. One job at a time writes
    here.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._private: dict[int, tuple[int, os.stat_result]] = {}  # of an iteration: its mode before, and its folder

    def folder(self, step: Step) -> Path:
        """Where the checkpoint of an iteration, or the release, is, once published."""
        return self.root / (step if isinstance(step, str) else f"iter_{step:07d}")

    def iterations(self) -> list[int]:
        """Published iterations, newest first; whether they are complete is another question."""
        if not self.root.is_dir():
            return []
        matches = (ITERATION.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def continued(self) -> list[int]:
        """The same, but for what training left when it went back with `--ckpt-step`."""
        left = left_in(self.root)
        return [iteration for iteration in self.iterations() if iteration not in left]

    def stage(self, iteration: int, keep: frozenset[int] = frozenset(), *, is_signed: bool = False) -> Path:
        """An empty hidden folder to write an iteration into. What killed saves left behind is removed.

        Args:
            iteration: The iteration that is saved.
            keep: Iterations that are still being written.
            is_signed: Whether its files will be signed: then nobody else reaches into it until they are.

        Raises:
            OSError: The folder cannot be made.
        """
        make_folders(self.root)
        self.restore_replaced(keep)
        for other in self._staged(keep):
            shutil.rmtree(other, ignore_errors=True)
        staging = self.staging(iteration)
        staging.mkdir()
        if is_signed:
            mode = stat.S_IMODE(staging.stat().st_mode)
            with suppress(OSError):  # storage that has no modes
                staging.chmod(0o700 | mode & stat.S_ISGID)  # for files in it to belong to the group of the folder
            found = staging.stat()
            if not stat.S_IMODE(found.st_mode) & 0o077:
                self._private[iteration] = mode, found
        return staging

    def require_own(self, iteration: int) -> None:
        """See that nobody has put another folder in place of one that will be signed. Raises OSError."""
        if iteration in self._private:
            was, now = self._private[iteration][1], self.staging(iteration).lstat()
            if (was.st_dev, was.st_ino, was.st_mode) != (now.st_dev, now.st_ino, now.st_mode):
                raise OSError(errno.EPERM, "another folder was put in its place", str(self.staging(iteration)))

    def staging(self, iteration: int) -> Path:
        """The hidden folder in which `iteration` is written."""
        return self.root / f".iter_{iteration:07d}.saving"

    def restore_replaced(self, keep: frozenset[int] = frozenset()) -> None:
        """Publish again what a killed save had moved out of its way, and not replaced yet. Only for who saves here.

        Args:
            keep: Iterations that are still being written.

        Raises:
            OSError: The folder cannot be read, or changed.
        """
        for entry in self._staged(keep) if self.root.is_dir() else []:
            final = entry.with_name(entry.stem.removeprefix("."))
            if entry.suffix == REPLACED and not final.exists():
                entry.rename(final)

    def place(self, iteration: int) -> None:
        """Make the staged `iteration` visible; the tracker stays as it is. Raises OSError."""
        staging, final = self.staging(iteration), self.folder(iteration)
        replaced = staging.with_suffix(REPLACED)
        if iteration in self._private:
            staging.chmod(self._private.pop(iteration)[0])
        sync_directory(staging)
        if is_there := final.exists():
            final.rename(replaced)
        try:
            os.rename(staging, final)
        except OSError:
            if is_there:
                replaced.rename(final)
            raise
        sync_directory(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def track(self, iteration: int) -> None:
        """Point the tracker at `iteration`. Raises OSError."""
        write_atomically(self.root / TRACKER, str(iteration).encode())

    def require_writable_tracker(self, iteration: int) -> None:
        """Raises OSError where nothing can be written to the tracker: the writer would find out when others wait.

        One that a killed writer has left empty, which Megatron-LM takes for damaged, names the newest checkpoint before
        `iteration` again.
        """
        tracker = self.root / TRACKER
        with suppress(FileNotFoundError):
            os.close(os.open(tracker, os.O_WRONLY | os.O_NONBLOCK))
            if not tracker.stat().st_size:
                older = next((one for one in self.continued() if one < iteration), None)
                tracker.unlink() if older is None else self.track(older)

    def discard(self, iteration: int) -> None:
        """Remove what a failed save of `iteration` left behind, as far as the file system lets us."""
        shutil.rmtree(self.staging(iteration), ignore_errors=True)

    def _staged(self, keep: frozenset[int]) -> list[Path]:
        """What saves have left, but for these iterations."""
        kept = {self.staging(iteration).stem for iteration in keep}
        return [entry for entry in self.root.iterdir() if STAGED.fullmatch(entry.name) and entry.stem not in kept]
