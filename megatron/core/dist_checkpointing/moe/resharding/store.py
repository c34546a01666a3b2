"""Storage in which snapshots of another layout look as if this job had made them.

Recovery, strategies and retention know nothing of it: they list, open and free snapshots of this rank, and those that
another layout made are put together from its ranks' shares as they are read (`ReshardedReader`). New ones are written
as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ..errors import NotAccepted, StoreFailure, UnreadableCheckpoint, UsageError, format_error, may_pass
from ..policy.lineage import Lineage, belongs, newest_first
from ..policy.resharding import freed_by
from ..ports import Json, Layout, Listing, Manifest, Reader, SnapshotId, Store, Transport, Writer
from ..types.layout import Record, is_same_layout
from .generation import (
    Assembly,
    Generation,
    LiveLayout,
    ReshardedReader,
    check_foreign,
    described,
    generations,
    snapshots_of,
    topology_of,
)

log = logging.getLogger(__name__)

# Sparse windows of another layout: no state before their iterations are run again, in the layout that made them, or,
# where losses may differ from the recorded ones (`--moe-ckpt-replay-tolerance`), in this one.


@dataclass(frozen=True)
class PreviousWindow:
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


def newest_window(
    found: Iterable[Generation], in_memory: Collection[SnapshotId], here: Mapping[str, Json]
) -> PreviousWindow | None:
    """The newest complete window of several iterations, of the newest past that has one.

    Args:
        found: All that other layouts stored.
        in_memory: Which of their snapshots lie in memory.
        here: The layout of this job.

    Returns:
        The window; None where none is complete.
    """
    windows: dict[tuple[int, int, str], dict[int, Generation]] = {}
    for one in found:
        (first, last), iteration = one.window, one.any.snapshot.iteration
        if first != last and one.is_whole:
            windows.setdefault((first, last, described(one.any.facts.topology, here)), {})[iteration] = one
    whole = {key: at for key, at in windows.items() if _is_whole(range(key[0], key[1] + 1), at)}
    pasts = newest_first((at[key[1]].timeline, key[1]) for key, at in whole.items())
    newest = [key for key, at in whole.items() if at[key[1]].timeline == pasts[0]] if pasts else []
    if not newest:
        return None
    first, last, layout = max(newest, key=lambda key: key[1])
    made = whole[first, last, layout]
    shares = (manifest.snapshot for one in made.values() for manifest in one.manifests.values())
    return PreviousWindow(first, last, layout, made[last].any.facts.job, any(share in in_memory for share in shares))


def _is_whole(iterations: range, at: Mapping[int, Generation]) -> bool:
    """Whether all iterations are there, and one led to the other: an attempt that was cut off while it stored a window
    again leaves the rest of that of an attempt before."""
    if not all(iteration in at for iteration in iterations):
        return False
    return all(belongs(at[iteration].timeline, iteration, at[iterations[-1]].timeline) for iteration in iterations)


def copy_of(reader: Reader, into: Store) -> None:
    """Store a snapshot once more, as it is.

    Args:
        reader: Of the snapshot.
        into: Does not hold it yet.

    Raises:
        UnreadableCheckpoint: It is damaged.
        StoreFailure: The store refuses.
    """
    manifest = reader.manifest
    with into.reserve(manifest.snapshot, manifest.layout) as writer:
        for field in manifest.layout.fields:
            writer.put(field.key, reader.read(field.key))
        writer.seal(manifest.facts, manifest.checksums)


type Piece = tuple[int, str]
"""Iteration and kind: what all ranks of a layout store under the same name."""


class ReadableMemory(Protocol):
    """What another layout left in memory: `survivors.SurvivingMemory`."""

    def snapshots(self) -> Listing:
        """As `ports.Store.snapshots`, of all ranks."""

    def open(self, snapshot: SnapshotId) -> Reader:
        """As `ports.Store.open`."""


class AnyCopy:
    """A `ports.Reader` of a snapshot of which there are several copies: by what they are called, how each is opened."""

    def __init__(self, snapshot: SnapshotId, copies: Iterable[tuple[str, Callable[[], Reader]]]) -> None:
        self._snapshot, self._left = snapshot, list(copies)
        self._reader = self._next("")

    @property
    def manifest(self) -> Manifest:
        """As `ports.Reader.manifest`."""
        return self._reader.manifest

    def read(self, key: str) -> memoryview:
        """As `ports.Reader.read`."""
        while True:
            try:
                return self._reader.read(key)
            except UnreadableCheckpoint as error:
                failed, expected = self._reader, self._reader.manifest.by_key[key].xxh3
                self._reader = self._next(str(error))
                failed.close()
                found = self._reader.manifest.by_key.get(key)
                if found is None or found.xxh3 != expected:
                    raise UnreadableCheckpoint(
                        f"the {self._snapshot}: two copies differ in {key}, and one of them is damaged"
                    ) from error

    def verify(self) -> tuple[Record, ...]:
        """As `ports.Reader.verify`."""
        return self._reader.verify()

    def close(self) -> None:
        """As `ports.Reader.close`."""
        self._reader.close()

    def __enter__(self) -> AnyCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, why: str) -> Reader:
        """The next copy that can be opened. Raises UnreadableCheckpoint where none is left."""
        while self._left:
            name, opened = self._left.pop(0)
            if why:
                log.warning("%s; using the copy %s", why, name)
            try:
                return opened()
            except UnreadableCheckpoint as error:
                why = str(error)
        raise UnreadableCheckpoint(why)


class ReshardingStore:
    """A `ports.Store` over another one.

    What other layouts stored is looked at once: this job adds none. Where this rank has a snapshot of its own layout of
    an iteration and kind, that is meant.

    Args:
        store: Where snapshots are.
        live: The state of this rank; asked for once, if there are snapshots of another layout at all.
        layout: The layout of this job, as manifests have it.
        rank: This rank.
        inexact: Continue also where training draws random numbers, which will be others.
        replays: Show sparse windows too: their iterations may be run again in this layout, with sums in other orders.
    """

    def __init__(
        self,
        store: Store,
        live: Callable[[], LiveLayout],
        layout: Mapping[str, Json],
        rank: int,
        *,
        inexact: bool,
        replays: bool = False,
    ) -> None:
        self._store, self._make_live, self._layout, self._rank = store, live, dict(layout), rank
        self._memory: ReadableMemory | None = None
        self._inexact, self._replays = inexact, replays
        self._live: LiveLayout | None = None
        self._foreign: dict[Piece, Generation] | None = None
        self._assembled: dict[Piece, Assembly | UnreadableCheckpoint] = {}
        self._told: set[int] = set()

    def look_together(self, transport: Transport) -> None:
        """See whether other layouts left anything at all; a collective.

        Each rank opens what a few ranks stored, where each by itself would read the manifests of all of them.

        Args:
            transport: To all ranks.
        """
        try:
            own = (rank for rank in self._store.ranks() if rank % transport.world_size == transport.rank)
            found = any(map(self._has_others, own))
        except StoreFailure:  # said by whoever lists it
            found = True
        if transport.total([int(found)]) == (0,):
            self._foreign = {}

    def _has_others(self, rank: int) -> bool:
        """Whether another layout stored any snapshot of a rank."""
        listed = self._store.snapshots(rank)
        if any(torn.may_pass for torn in listed.torn):  # it may be, and whoever looks later sees
            return True
        for snapshot in listed.sealed:
            try:
                with self._store.open(snapshot) as reader:
                    if not is_same_layout(reader.manifest.facts.topology, self._layout):
                        return True
            except UnreadableCheckpoint as error:
                if may_pass(error):
                    return True
        return False

    def use_memory(self, memory: ReadableMemory | None) -> None:
        """From here on show also what another layout left in memory, or, with None, only what is stored."""
        if memory is self._memory:
            return
        self._memory, self._foreign, self._assembled = memory, None, {}

    @property
    def timelines(self) -> frozenset[Lineage]:
        """Of all that other layouts left, whether it can be had in this one or not."""
        return frozenset(generation.timeline for generation in self._found().values())

    def previous_window(self) -> PreviousWindow | None:
        """The newest sparse window of another layout that could be run again there; None where none could, where
        training draws random numbers and that is not accepted, or where it is run again here."""
        if self._replays:
            return None
        in_memory = frozenset(self._memory.snapshots().sealed if self._memory is not None else ())
        try:
            found = [one for one in self._found().values() if not self._draws_others(one)]
            return newest_window(found, in_memory, self._layout)
        except UnreadableCheckpoint:  # told by whoever lists it
            return None

    def copy_previous(self, into: Store) -> None:
        """Store all that other layouts left once more, as it is; what is damaged is named in a warning and left out.

        Raises StoreFailure.
        """
        for generation in self._found().values():
            for snapshot in snapshots_of(generation):
                try:
                    with self._open_source(generation, snapshot) as reader:
                        copy_of(reader, into)
                except UnreadableCheckpoint as error:
                    old = described(generation.any.facts.topology, self._layout)
                    log.warning("skipped: iteration %d of layout %s: %s", snapshot.iteration, old, error)
                    break  # of no use without this share

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> Writer:
        """As `ports.Store.reserve`."""
        return self._store.reserve(snapshot, layout)

    def snapshots(self, rank: int | None = None) -> Listing:
        """As `ports.Store.snapshots`: those of other layouts as this rank's, in place of their ranks'."""
        listed = self._store.snapshots(rank)
        foreign = self._found(listed if rank is None else None)
        hidden = {snapshot for generation in foreign.values() for snapshot in snapshots_of(generation)}
        sealed = {snapshot for snapshot in listed.sealed if snapshot not in hidden}
        if rank in (None, self._rank):
            sealed |= {SnapshotId(iteration, self._rank, kind) for iteration, kind in foreign}
        return Listing(tuple(sorted(sealed)), listed.torn)

    def open(self, snapshot: SnapshotId) -> Reader:
        """As `ports.Store.open`. Raises UnreadableCheckpoint also where it cannot be had in this layout."""
        generation = self._found().get((snapshot.iteration, snapshot.kind))
        if generation is None or snapshot.rank != self._rank or self._is_own(snapshot, generation):
            return self._store.open(snapshot)
        piece = snapshot.iteration, snapshot.kind
        if piece not in self._assembled:
            self._assembled[piece] = self._assembly(generation)
        assembly = self._assembled[piece]
        if isinstance(assembly, UnreadableCheckpoint):
            raise assembly
        source = partial(self._open_source, generation)
        return ReshardedReader(assembly, source, lambda: self._tell(snapshot.iteration, generation))

    def free(self, snapshot: SnapshotId) -> None:
        """As `ports.Store.free`; of another layout's, each rank of this job removes the snapshots of some ranks."""
        generation = self._found().get((snapshot.iteration, snapshot.kind))
        if generation is None or snapshot.rank != self._rank:
            self._store.free(snapshot)
            return
        owners = sorted(generation.manifests)
        here = topology_of(replace(generation.any.facts, topology=self._layout))
        for owner in {*freed_by(self._rank, here, owners), self._rank}:
            self._store.free(SnapshotId(snapshot.iteration, owner, snapshot.kind))
        # Others remove the rest at the same time: nothing of it is looked at again.
        self._found().pop((snapshot.iteration, snapshot.kind), None)
        self._assembled.pop((snapshot.iteration, snapshot.kind), None)

    def ranks(self) -> frozenset[int]:
        """As `ports.Store.ranks`."""
        return self._store.ranks()

    def sweep(self) -> None:
        """As `ports.Store.sweep`."""
        self._store.sweep()

    def close(self) -> None:
        """As `ports.Store.close`."""
        self._store.close()

    def _found(self, listed: Listing | None = None) -> dict[Piece, Generation]:
        """What other layouts stored, the newest past of each iteration and kind."""
        if self._foreign is None:
            manifests: dict[Piece, list[Manifest]] = {}
            # What is in memory comes last: of two copies it is the one that is read.
            places: list[tuple[Store | ReadableMemory, Listing]] = [(self._store, listed or self._store.snapshots())]
            if self._memory is not None:
                places.append((self._memory, self._memory.snapshots()))
            for place, there in places:
                for snapshot in there.sealed:
                    try:
                        with place.open(snapshot) as reader:
                            manifest = reader.manifest
                        if is_same_layout(manifest.facts.topology, self._layout):
                            continue
                        check_foreign(manifest)
                    except UnreadableCheckpoint:
                        continue  # told by whoever lists it
                    manifests.setdefault((snapshot.iteration, snapshot.kind), []).append(manifest)
            self._foreign = {piece: _newest(generations(found)) for piece, found in manifests.items()}
        return self._foreign

    def _is_own(self, snapshot: SnapshotId, generation: Generation) -> bool:
        """Whether a snapshot of this very layout lies under the name."""
        try:
            with self._store.open(snapshot) as reader:
                return is_same_layout(reader.manifest.facts.topology, self._layout)
        except UnreadableCheckpoint:
            return False

    def _open_source(self, generation: Generation, snapshot: SnapshotId) -> Reader:
        """A share of a generation, in memory or in storage. Raises UnreadableCheckpoint."""
        if self._memory is not None and snapshot in self._memory.snapshots().sealed:
            places = {"in memory": self._memory, "in storage": self._store}
            reader = AnyCopy(snapshot, ((name, partial(place.open, snapshot)) for name, place in places.items()))
            if reader.manifest.checksums == generation.manifests[snapshot.rank].checksums:
                return reader
            reader.close()
        return self._store.open(snapshot)

    def _assembly(self, generation: Generation) -> Assembly | UnreadableCheckpoint:
        old = described(generation.any.facts.topology, self._layout)
        try:
            live = self._live_layout()
            if self._draws_others(generation):
                why = (
                    f"training draws random numbers ({live.draws}), which come out otherwise in another layout: give"
                    " --moe-ckpt-reshard inexact to continue with other ones"
                )
                raise NotAccepted(why) if self._is_complete(generation) else UnreadableCheckpoint(why)
            return generation.assembly(live, replays=self._replays)
        except UnreadableCheckpoint as error:
            return type(error)(f"it was made in the parallel layout {old}; {error}")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Of what its trainer state holds nothing is known before it is taken apart.
            why = f"its manifest does not fit: {format_error(error)}; something else made it"
            return UnreadableCheckpoint(f"it was made in the parallel layout {old}; {why}")

    def _is_complete(self, generation: Generation) -> bool:
        """Whether a setting is all that keeps its state from this job: a window takes all of its iterations."""
        first, last = generation.window
        whole = (one for one in self._found().values() if one.is_whole and one.window == (first, last))
        at = {one.any.snapshot.iteration: one for one in whole if one.topology == generation.topology}
        return _is_whole(range(first, last + 1), at)

    def _draws_others(self, generation: Generation) -> bool:
        """Whether training would draw other random numbers, and that is not accepted. Raises UnreadableCheckpoint."""
        live = self._live_layout()
        return bool(live.draws) and not self._inexact and generation.moves(live)

    def _tell(self, iteration: int, generation: Generation) -> None:
        if iteration not in self._told and self._rank == 0:
            then = generation.any.facts.topology
            was, now = described(then, self._layout), described(self._layout, then)
            place = "" if self._memory is None else f", from {self._memory}"
            log.info("resharding: iteration %d from layout %s to %s%s", iteration, was, now, place)
        self._told.add(iteration)

    def _live_layout(self) -> LiveLayout:
        if self._live is None:
            try:
                self._live = self._make_live()
            except UsageError as error:  # of this stage's tensors perhaps: no rank leaves the others in a collective
                raise UnreadableCheckpoint(str(error)) from error
        return self._live


def _newest(found: list[Generation]) -> Generation:
    """Of the newest past, and of its plans one that all ranks stored: what was being persisted is in parts."""
    timelines = newest_first((one.timeline, one.any.snapshot.iteration) for one in found)
    whole_first = sorted(found, key=lambda one: not one.is_whole)
    return next((one for timeline in timelines for one in whole_first if one.timeline == timeline), found[0])


class NoStorage:
    """A `ports.Store` of a job without storage: nothing is in it, and nothing can be kept there."""

    def reserve(self, snapshot: SnapshotId, _: Layout) -> Writer:
        """As `ports.Store.reserve`."""
        raise UsageError(f"the {snapshot} cannot be stored: this job has no storage (--moe-ckpt-persist-dir)")

    def snapshots(self, rank: int | None = None) -> Listing:
        """As `ports.Store.snapshots`."""
        return Listing((), ())

    def open(self, snapshot: SnapshotId) -> Reader:
        """As `ports.Store.open`."""
        raise UnreadableCheckpoint(f"the {snapshot} is not stored: this job has no storage")

    def free(self, _: SnapshotId) -> None:
        """As `ports.Store.free`."""

    def ranks(self) -> frozenset[int]:
        """As `ports.Store.ranks`."""
        return frozenset()

    def sweep(self) -> None:
        """As `ports.Store.sweep`."""

    def close(self) -> None:
        """As `ports.Store.close`."""
