"""The iterations in a --save folder, judged by names and sizes of their files. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MoECheckpointError, NewerFormat, UnreadableCheckpoint
from ..store import integrity
from ..store.chain import read_chain, says_partial
from ..store.integrity import NAME as INTEGRITY
from ..store.names import FORMAT, INDEX, ITERATION, STAGED, TRACKER
from .recognition import recognized


@dataclass(frozen=True)
class SavedIteration:
    """One folder of a --save folder.

    iteration: None for a release, which has none. written_s: when its last file was, in seconds since 1970.
    state: "complete" as far as names say, or what is wrong with it. needs: older iterations that hold experts for it.
    """

    folder: Path
    iteration: int | None
    nbytes: int
    written_s: float
    state: str
    needs: tuple[int, ...]
    tracked: bool
    has_integrity: bool

    @property
    def is_complete(self) -> bool:
        """Whether names say that it is whole."""
        return self.state == COMPLETE


COMPLETE = "complete"


def saved_iterations(root: Path) -> tuple[SavedIteration, ...]:
    """All iterations in `root`, oldest first, half-written ones among them. Raises OSError."""
    tracker = tracked(root)
    found = []
    for path in sorted(root.iterdir()):
        match = ITERATION.fullmatch(path.name) or STAGED.fullmatch(path.name)
        if path.is_dir() and (match or path.name == "release"):
            found.append(saved_iteration(path, path.name == tracker))
    return tuple(sorted(found, key=lambda one: (one.iteration or 0, one.folder.name)))


def saved_iteration(folder: Path, is_tracked: bool = False) -> SavedIteration:
    """One iteration's folder. Raises OSError."""
    match = ITERATION.fullmatch(folder.name) or STAGED.fullmatch(folder.name)
    iteration = int(match[1]) if match else None
    stats = {entry.name: entry.stat() for entry in os.scandir(folder) if entry.is_file()}
    state, needs = _judged(folder, list(stats))
    written_s = max((one.st_mtime for one in stats.values()), default=folder.stat().st_mtime)
    nbytes = sum(one.st_size for one in stats.values())
    return SavedIteration(folder, iteration, nbytes, written_s, state, needs, is_tracked, INTEGRITY in stats)


def unjudged(folder: Path) -> str:
    """Why an iteration may be sound although it looks otherwise: a later version wrote it, or its small files cannot be
    read now. Empty for one that can be judged."""
    try:
        recognized(str(folder))
    except MoECheckpointError as error:
        if _says_nothing(error):
            return _why(error)
    for read in (read_chain, integrity.read):
        try:
            read(folder)
        except UnreadableCheckpoint as error:
            if _says_nothing(error):
                return _why(error)
    return ""


def _says_nothing(error: MoECheckpointError) -> bool:
    return isinstance(error, NewerFormat) or isinstance(error.__cause__, OSError)


def _why(error: MoECheckpointError) -> str:
    return (
        "a later version of moe-ckpt wrote it" if isinstance(error, NewerFormat) else f"it cannot be read now: {error}"
    )


def tracked(root: Path) -> str:
    """The name of the folder that the tracker names, whether it is there or not; empty without a usable tracker."""
    try:
        text = (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if text == "release":
        return text
    return f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else ""


def _judged(folder: Path, names: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    staged = STAGED.fullmatch(folder.name)
    if staged:
        return "half-written" if staged[2] == "saving" else "half-removed", ()
    missing = [name for name in (INDEX, FORMAT) if name not in names]
    if missing:
        return f"not whole: no {' and no '.join(missing)}", ()
    try:
        chain = read_chain(folder)
    except NewerFormat:
        return "a later version of moe-ckpt wrote the manifest of its experts", ()
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError):
            return f"not readable now: {error}", ()
        return "damaged: the manifest of its experts cannot be read", ()
    if chain is None:
        return ("not whole: the manifest of its experts is missing", ()) if says_partial(folder) else (COMPLETE, ())
    needs = tuple(sorted(chain.iterations - {chain.iteration}))
    gone = [one for one in needs if not (folder.parent / f"iter_{one:07d}").is_dir()]
    return (f"not whole: needs iteration {gone[0]}, which is missing" if gone else COMPLETE), needs
