"""Word for nodes that wait for a place in a job: that its script takes slots.

A spare node waits in the rendezvous, and so does one that has come for a lost node, whose end the others have not
noticed yet. Meanwhile either can start standbys; but a script that takes no slots would train by itself if it were
started without a rank. So agents whose ranks have taken slots leave word in the store of the rendezvous.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler

log = logging.getLogger(__name__)

KEY = "moe-ckpt/slots/{}"
"""In the store of the rendezvous, with the id of the job."""
LOOK_S = 0.5
"""How often a node that waits looks for it."""


class StandbyNotice:
    """Of one job."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._store = getattr(handler, "_store", None)  # none where a single node meets itself
        self._key, self._told = KEY.format(handler.get_run_id()), False

    def tell(self) -> None:
        """The ranks of this node take slots. Raises DistError."""
        if self._store is not None and not self._told:
            self._store.set(self._key, "taken")
            self._told = True

    def heard(self) -> bool:
        """Whether somebody has said that the script of the job takes slots. Raises DistError."""
        return self._store is not None and self._store.check([self._key])

    @contextmanager
    def heeded(self, refill: Callable[[], None]) -> Iterator[None]:
        """In this block another thread calls `refill` again and again once the script is known to take slots.

        Where that fails a line says so, and standbys are started once training continues.
        """
        is_over = threading.Event()

        def look() -> None:
            try:
                while not is_over.wait(LOOK_S):
                    if self.heard():
                        refill()
            except (DistError, OSError) as error:
                log.warning("no standby while this node waits: %s", error)

        thread = threading.Thread(target=look, name="moe-ckpt-standbys", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
