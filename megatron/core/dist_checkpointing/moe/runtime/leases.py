"""The places that a job writes to, of which it has a lease each; held by rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..config import ANY_JOB, MoECheckpointConfig
from ..errors import UsageError
from ..ports import Json
from ..replication.agreement import raise_on_all_ranks
from ..replication.store_gather import gathered_by_store
from ..storage.lease import STALE_S, Holder, Lease
from .process_info import ProcessInfo


class Leases:
    """Of one process: none on ranks other than 0.

    Args:
        config: The settings.
        save: Folder that the loop saves checkpoints to.
        place: Where this process runs, with the job's id.
        run: The launchers of all ranks.
    """

    def __init__(self, config: MoECheckpointConfig, save: str | None, place: ProcessInfo, run: Sequence[str]) -> None:
        self._leases: list[Lease] = []
        if torch.distributed.get_rank() == 0:
            own = Holder.here(place.job_here, place.agent, tuple(sorted(set(filter(None, run)))))
            forced = "" if config.take_over == ANY_JOB else config.take_over or ""
            wanted = dict.fromkeys(filter(None, (save, config.persist_dir)))
            self._leases = [Lease(where, own, forced) for where in wanted]

    def acquire(self) -> None:
        """Take all of them, or none. Raises UsageError where another job has one."""
        try:
            for lease in self._leases:
                lease.acquire()
        except UsageError:
            self.release()
            raise

    def check(self) -> None:
        """Raises UsageError where another job has taken a place over."""
        for lease in self._leases:
            lease.check()

    def release(self) -> None:
        """Training has ended well, or never began: others may write there."""
        for lease in self._leases:
            lease.release()

    def leave(self) -> None:
        """Leave them to the next attempt of this job."""
        for lease in self._leases:
            lease.leave()


def leases_without_session(config: MoECheckpointConfig, save: str | None, place: ProcessInfo) -> Leases:
    """Of a job without a strategy, where ranks have no connections but those of training. A collective.

    Raises UsageError on all ranks alike.
    """
    group = _ByStore(config.timeout_s + STALE_S)
    leases = Leases(config, save, place, [str(one) for one in group.gather(place.run)])
    raise_on_all_ranks(group, leases.acquire)
    return leases


class _ByStore:
    """All ranks, as they found each other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._asked = timeout_s, 0

    def gather(self, value: Json) -> list[Json]:
        self._asked += 1
        ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        name = f"moe-ckpt-leases-{self._asked}"
        return gathered_by_store(_get_default_store(), name, *ranks, value, self._timeout_s)
