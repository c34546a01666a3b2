"""How protected a rank is just now, where `moe-ckpt status` finds it while the job runs.

Each rank writes it beside its snapshots, for who looks on its node, and into the store at which all ranks have met, for
who looks from anywhere. Neither may slow or end training: both are done by a thread of their own, and what fails is
left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from ..ports import Json
from ..snapshot.coordinator import ProtectionReport

STATUS_VERSION = 1
STATUS_FILE = "status.json"
"""In the folder of the rank's slot."""
STATUS_KEY = "moe-ckpt/status/{}"
"""In the store, with the rank's number."""
INTERVAL_S = 2.0
"""At most so often, whatever an iteration takes."""


class StatusBoard:
    """The status of one rank, from the first report to `close`.

    Args:
        folder: Of the rank's slot.
        store: At which all ranks have met, over a connection on which nobody waits; only a TCPStore is written to.
        facts: What does not change.
    """

    def __init__(self, folder: Path, store: Store, facts: Mapping[str, Json]) -> None:
        self._folder, self._store = folder, readable(store)
        where = None if self._store is None else f"{self._store.host}:{self._store.port}"
        self._facts = {"version": STATUS_VERSION, **facts, "store": where}
        self._report: ProtectionReport | None = None
        self._news, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="moe-ckpt-status", daemon=True).start()

    def show(self, report: ProtectionReport) -> None:
        """The newest report of an iteration."""
        # One reference is set, so the thread reads the one report or the other: no lock is needed.
        self._report = report
        self._news.set()

    def close(self) -> None:
        """Nothing more is written."""
        self._closed.set()
        self._news.set()

    def _run(self) -> None:
        while self._news.wait() and not self._closed.is_set():
            self._news.clear()  # before the report is read: one that comes in between wakes this thread again
            assert self._report is not None
            text = json.dumps(self._facts | facts_of(self._report) | _memory_left(self._folder))
            # By one rename, so that nobody reads half of it. Not synced: it means nothing once the node is down.
            with suppress(OSError):
                aside = self._folder / f".{STATUS_FILE}.{os.getpid()}"
                aside.write_text(text)
                aside.replace(self._folder / STATUS_FILE)
            with suppress(RuntimeError, OSError):
                self._publish(text)
            self._closed.wait(INTERVAL_S)  # not `sleep`: `close` ends it

    def _publish(self, text: str) -> None:
        if self._store is not None:
            self._store.set(STATUS_KEY.format(self._facts["rank"]), text)


def facts_of(report: ProtectionReport) -> dict[str, Any]:
    """What a report says of the moment, as JSON values."""
    persistent = report.persistent
    return {
        "at_s": time.time(),
        "iteration": report.iteration,
        "protection": report.protection.state.name.lower(),
        "protection_since": report.protection.since_iteration,
        "protected_iteration": report.protected_iteration,
        "persistence": None if persistent is None else persistent.state.name.lower(),
        "persistence_since": None if persistent is None else persistent.since_iteration,
        "persisted_iteration": report.persisted_iteration,
        "reason": report.reason,
        "memory": asdict(report.memory) if report.memory else None,
    }


def readable(store: Store) -> TCPStore | None:
    """The TCPStore at the bottom of this one, in which others can read; None where there is none."""
    # Whoever asks from outside of the job does not know the prefixes.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _memory_left(folder: Path) -> dict[str, Json]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    return {"memory_free_bytes": found.f_bavail * found.f_frsize, "memory_total_bytes": found.f_blocks * found.f_frsize}
