"""What this job left in memory in another parallel layout: read while training comes back, freed once it is protected.

A job that lost nodes for good, or got some back, has other ranks than before. Its recovery then finds in `storage` what
the older layout left in memory, beside what lies in persistent storage, as snapshots of the new ranks (`resharding`).
None of it is freed before a snapshot of the new layout is protected: until then a second fault finds it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ..config import MoECheckpointConfig
from ..errors import StoreFailure
from ..policy.lineage import Lineage
from ..ports import Json, Manifest, SnapshotId, Store, Transport
from ..resharding.generation import LiveLayout
from ..resharding.store import NoStorage, PreviousWindow, ReshardingStore
from ..resharding.survivors import SurvivingMemory
from ..storage.filesystem import FilesystemStore
from ..storage.memory import MemoryStore
from .process_info import ProcessInfo, resharding

log = logging.getLogger(__name__)


class PreviousLayout:
    """Of one rank; making it is a collective over all of them.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        memory: Its slot.
        persistent: What `open_persistent` gave.
        facts: The layout of this job, as manifests have it.
        live: The state of this rank in it.
        transport: For what all ranks tell each other.
        address: Of this rank, for those of other nodes.
    """

    def __init__(
        self,
        config: MoECheckpointConfig,
        place: ProcessInfo,
        memory: MemoryStore,
        persistent: ReshardingStore | None,
        facts: Mapping[str, Json],
        live: Callable[[], LiveLayout],
        transport: Transport,
        address: str,
    ) -> None:
        def is_older(manifest: Manifest) -> bool:
            return manifest.facts.job == place.job_id and dict(manifest.facts.topology) != dict(facts)

        waits_s = config.timeout_s
        self._memory, self._target = memory, 0
        self._surviving = SurvivingMemory(memory, memory.directory, place.node, is_older, transport, address, waits_s)
        # Taken once: what comes to this slot from here on is of this job's layout.
        self._own = frozenset(row.snapshot for row in self._surviving.own)
        self._storage = persistent
        if self._surviving.is_empty:  # the same on all ranks
            return
        if self._storage is None:
            self._storage = resharding(config, NoStorage(), live, facts, transport.rank)
        self._storage.use_memory(self._surviving)

    @property
    def window(self) -> PreviousWindow | None:
        """As `ReshardingStore.previous_window`."""
        return self._storage.previous_window() if self._storage is not None else None

    def copy_to(self, folder: Path) -> None:
        """Copy what other layouts left to a folder, as `ReshardingStore.copy_previous`. Raises StoreFailure."""
        if self._storage is not None:
            self._storage.copy_previous(FilesystemStore(folder, 0))

    @property
    def storage(self) -> Store | None:
        """Where a recovery finds what the older layout left; None where there is nothing, and no storage."""
        return self._storage

    @property
    def unusable(self) -> str:
        """Why nothing of the older layout suffices, where a recovery found that; empty if there is nothing of it."""
        listed = sorted({snapshot.iteration for snapshot in self._surviving.snapshots().sealed})
        if not listed:
            return ""
        return (
            f"{self._surviving} has shares of iteration {', '.join(map(str, listed))} in another layout, but not the"
            " others, which are nowhere: nodes are gone that had no replicas elsewhere"
        )

    def timelines(self) -> Collection[Lineage]:
        """Of what other layouts left."""
        return self._storage.timelines if self._storage is not None else ()

    def is_spared(self, snapshot: SnapshotId) -> bool:
        """Whether what lies in this rank's slot under this name is of the older layout, and still needed."""
        return snapshot in self._own

    def restored(self, target: int) -> None:
        """All ranks have restored the state after iteration `target`: nothing is read any more, and what is newer than
        that, which did not suffice, is freed."""
        # All have restored, so no other rank asks this one for records any more.
        self.close()
        self._target = target
        self._free(frozenset(snapshot for snapshot in self._own if snapshot.iteration > target))

    def protected(self, iteration: int | None) -> None:
        """The newest iteration that is protected in the layout of now: nobody comes back to an older one's."""
        if self._own and iteration is not None and iteration > self._target:
            self._free(self._own)

    def discard(self) -> None:
        """Training begins from another state."""
        self.close()
        self._free(self._own)

    def close(self) -> None:
        """Read nothing any more; what is there stays."""
        if not self._surviving.is_empty and self._storage is not None:
            self._storage.use_memory(None)
        self._surviving.close()

    def _free(self, gone: frozenset[SnapshotId]) -> None:
        # Also what cannot be freed counts as gone: it is not tried again.
        self._own -= gone
        try:
            for snapshot in gone:
                self._memory.free(snapshot)
        except StoreFailure as error:
            log.error("cannot free memory of the previous layout: %s", error)
