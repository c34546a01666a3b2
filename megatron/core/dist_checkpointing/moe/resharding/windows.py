"""Sparse windows of another layout: no state before their iterations are run again, in the layout that made them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..policy.lineage import belongs, newest_first
from ..ports import Reader, SnapshotId, Store
from .generation import Generation, described


@dataclass(frozen=True)
class OlderWindow:
    """A window of which all ranks of another layout left all snapshots.

    Attributes:
        first, last: Its iterations; run again from the first one, they give the state after the last one.
        layout: What it was made in, for people.
        job: The job that made it.
        in_memory: Whether any of it lies in memory, not in storage.
    """

    first: int
    last: int
    layout: str
    job: str
    in_memory: bool

    def __str__(self) -> str:
        return f"iterations {self.first} to {self.last} of the layout {self.layout}"


def newest_window(found: Iterable[Generation], in_memory: Collection[SnapshotId]) -> OlderWindow | None:
    """The newest complete one of several iterations, of the newest past that has one."""
    windows: dict[tuple[int, int, str], dict[int, Generation]] = {}
    for one in found:
        (first, last), iteration = one.window, one.any.snapshot.iteration
        if first != last and one.manifests.keys() >= set(range(one.topology.world_size)):
            windows.setdefault((first, last, described(one.any.facts.topology)), {})[iteration] = one
    whole = {key: at for key, at in windows.items() if _is_whole(range(key[0], key[1] + 1), at)}
    pasts = newest_first((at[key[1]].timeline, key[1]) for key, at in whole.items())
    newest = [key for key, at in whole.items() if at[key[1]].timeline == pasts[0]] if pasts else []
    if not newest:
        return None
    first, last, layout = max(newest, key=lambda key: key[1])
    made = whole[first, last, layout]
    shares = (manifest.snapshot for one in made.values() for manifest in one.manifests.values())
    return OlderWindow(first, last, layout, made[last].any.facts.job, any(share in in_memory for share in shares))


def _is_whole(iterations: range, at: Mapping[int, Generation]) -> bool:
    """Whether all iterations are there, and one led to the other: an attempt that was cut off while it stored a window
    anew leaves the rest of that of an attempt before."""
    if not at.keys() >= set(iterations):
        return False
    return all(belongs(at[iteration].timeline, iteration, at[iterations[-1]].timeline) for iteration in iterations)


def copy_of(reader: Reader, into: Store) -> None:
    """Store a snapshot once more, as it is. Raises UnreadableCheckpoint, StoreFailure."""
    manifest = reader.manifest
    with into.reserve(manifest.snapshot, manifest.layout) as writer:
        for field in manifest.layout.fields:
            writer.put(field.key, reader.read(field.key))
        writer.seal(manifest.facts, manifest.checksums)
