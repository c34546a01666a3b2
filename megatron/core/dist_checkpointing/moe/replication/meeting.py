"""Where ranks that connect anew find each other: in a store, under a number on which all of them agree."""

from __future__ import annotations

import time

from torch.distributed import Store

from ..ports import PeerLost

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.1


class Meeting:
    """Numbers the connections of a job: all ranks that `meet` leave with the same number, larger than before.

    A rank asks for the number after its last one and marks itself there. Whoever waits at a number and sees that the
    next one was asked for goes on to it, so that ranks which notice a failure at different times, or gave up once
    already, come together at the largest. The store is polled, never waited on: a wait would keep other users of the
    same connection from it.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._number = 0

    def meet(self, timeout_s: float) -> int:
        """Wait until all ranks are here. Raises PeerLost naming those that did not come; they may be met later."""
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        self._enter()
        while True:
            # Asked for first: where the next number is wanted, somebody gave up this one, however many are here.
            if self._store.check([f"{self._number + 1}/wanted"]):
                self._leave()
                self._enter()
            elif self._store.check([f"{self._number}/all"]):
                return self._number
            elif time.monotonic() > deadline:
                missing = self._missing()
                self._leave()
                raise PeerLost(
                    f"rank {self._rank} waited {timeout_s:g} s for all {self._world_size} ranks to connect anew:"
                    f" {missing}"
                )
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _enter(self) -> None:
        self._number += 1
        self._store.set(f"{self._number}/wanted", "")
        self._store.set(self._mark(self._rank), "")
        # Counted by one atomic call, so that exactly one rank, the last, finds all there: who left is counted off.
        if self._store.add(f"{self._number}/count", 1) == self._world_size:
            self._store.set(f"{self._number}/all", "")

    def _leave(self) -> None:
        self._store.add(f"{self._number}/count", -1)

    def _mark(self, rank: int) -> str:
        return f"{self._number}/here/{rank}"

    def _missing(self) -> str:
        """Who never came to this number; marks stay when their ranks leave."""
        ranks = [str(rank) for rank in range(self._world_size) if not self._store.check([self._mark(rank)])]
        if not ranks:
            return "the last ones came when others had given up; try again"
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not come"
