"""How a running job stands, on all its nodes: what each rank last said of itself.

Ranks write it beside their snapshots, and into the store at which they met (`runtime/status.py` of the engine). From
any node of the job the store is found by what lies there; from elsewhere it has to be named. Without the store there is
what lies on this node, and the job's log.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import INFORMING_BYTES, read_small
from moe_ckpt.checkpoints.location import age_of
from moe_ckpt.checkpoints.slots import slots
from moe_ckpt.report import Fact, Report, table

from .run_log import LEVELS, number, read_run

STATUS_FILE = "status.json"
STATUS_KEY = "moe-ckpt/status/{}"
CONNECT_S = 5.0
"""Until it is known whether anybody listens."""
ANSWER_S = 60.0
"""Where somebody does. Torch (2.13) has the address looked up by name before it takes a connection as made: one lost
answer of a name server takes 5 s."""
MOST_RANKS = 2**17
SEARCHED = 256
"""Ranks that are looked for before any has said how many there are."""


@dataclass(frozen=True)
class RankStatus:
    """What one rank last said. at_s: when, in seconds since 1970. protected, persisted: newest iterations, -1 if none
    are known. persistence: None without storage. free_bytes: of the memory dir of its node, -1 if not known."""

    rank: int
    job: str
    node: str
    strategy: str
    at_s: float
    iteration: int
    protection: str
    protected: int
    persistence: str | None
    persisted: int
    reason: str = ""
    free_bytes: int = -1
    world_size: int = 0
    store: str = ""
    is_alive: bool = True

    @property
    def is_well(self) -> bool:
        """Whether it has what was asked for."""
        return self.is_alive and self.protection == "protected" and self.persistence in (None, "protected")


@dataclass(frozen=True)
class JobStatus:
    """ranks: ascending. from_store: whether all nodes were asked; else `why_not` says why only this one was. damaged: a
    line for each file on this node that could not be read. by_log: whether the one rank speaks for all."""

    ranks: tuple[RankStatus, ...]
    from_store: bool
    why_not: str = ""
    damaged: tuple[str, ...] = ()
    by_log: bool = False


def status_of(text: bytes | str, *, is_alive: bool = True) -> RankStatus | None:
    """The status that a rank wrote; None for any other text.

    Args:
        text: JSON, as it lies in the store or in a file.
        is_alive: Whether the rank's process lives; True where that cannot be checked.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(data, dict) or type(rank := data.get("rank")) is not int or not 0 <= rank < MOST_RANKS:
        return None
    if math.isnan(at_s := number(data.get("at_s"))):
        return None
    texts = {name: value if isinstance(value := data.get(name), str) else "" for name in _TEXTS}
    protection = texts["protection"] if texts["protection"] in LEVELS else LEVELS[0]
    return RankStatus(
        rank,
        texts["job"],
        texts["node"],
        texts["strategy"],
        at_s,
        _whole(data.get("iteration")),
        protection,
        _whole(data.get("protected_iteration")),
        texts["persistence"] if texts["persistence"] in LEVELS else None,
        _whole(data.get("persisted_iteration")),
        texts["reason"],
        _whole(data.get("memory_free_bytes")),
        _whole(data.get("world_size")),
        texts["store"],
        is_alive,
    )


_TEXTS = ("job", "node", "strategy", "protection", "persistence", "reason", "store")


def job_status(memory_dir: Path, store: str | None, job: str | None) -> JobStatus:
    """The status of one job.

    Raises UsageError where there are several, UnreadableCheckpoint where there is none.

    Args:
        memory_dir: A `--moe-ckpt-memory-dir` on this node.
        store: `HOST:PORT` of the job's store, which is asked instead of `memory_dir`; None: found by way of
            `memory_dir`.
        job: Id of the job in `memory_dir`; None: the only one that there is.
    """
    if store is not None:
        if _address(store) is None:
            raise UsageError(f"{store} is no HOST:PORT of a store")
        found = tuple(_in_store(store))
        if not found:
            raise UnreadableCheckpoint(f"the store at {store} has nothing of a protected job")
        return JobStatus(found, from_store=True)
    damaged: list[str] = []
    here = _of_one_job(tuple(_here(memory_dir, damaged)), memory_dir, job, damaged)
    newest = max(here, key=lambda one: one.at_s)
    try:
        everywhere = tuple(_in_store(newest.store, newest.world_size)) if newest.is_alive else ()
    except UnreadableCheckpoint as error:
        return JobStatus(here, from_store=False, why_not=str(error), damaged=tuple(damaged))
    if not everywhere:
        why_not = "the job's store cannot be asked" if newest.is_alive else "its processes on this node have ended"
        return JobStatus(here, from_store=False, why_not=why_not, damaged=tuple(damaged))
    return JobStatus(everywhere, from_store=True, damaged=tuple(damaged))


def log_status(path: Path) -> RankStatus:
    """What a file of --metrics-jsonl says last. Raises UnreadableCheckpoint."""
    run = read_run(path, path.name)
    if not len(run):
        raise UnreadableCheckpoint(f"{path} has no iteration yet")
    last = {name: column[-1] for name, column in run.columns.items()}
    states = [None if math.isnan(last[name]) else LEVELS[int(last[name])] for name in ("protection", "persistence")]
    facts = run.starts[-1].facts if run.starts else {}
    return RankStatus(
        max(0, _whole(facts.get("world_size")) - 1),
        str(facts.get("job", "")),
        "",
        str(facts.get("strategy", "")),
        last["at_s"],
        int(last["iteration"]),
        states[0] or LEVELS[0],
        _whole(last["protected_iteration"]),
        states[1],
        _whole(last["persisted_iteration"]),
        run.reasons[-1][1] if run.reasons else "",
        world_size=_whole(facts.get("world_size")),
    )


def as_report(found: JobStatus, now_s: float, silent_s: float) -> Report:
    """The status of a job on one screen.

    Args:
        found: The status of its ranks.
        now_s: Current time, in seconds since 1970.
        silent_s: Seconds without a word after which a rank counts as silent.
    """
    ranks, first = found.ranks, found.ranks[0]
    storage = [one for one in ranks if one.persistence is not None]
    facts = [
        Fact("Job", first.job or "-"),
        Fact("Strategy", first.strategy or "-"),
        Fact("Ranks reporting", f"{len(ranks)} of {max(first.world_size, len(ranks))}"),
        Fact("Iteration", max(one.iteration for one in ranks), "count"),
        Fact("Protection", _worst(one.protection for one in ranks)),
        Fact("Newest protected", _known(min(one.protected for one in ranks)), "count"),
        Fact("Persistence", _worst(str(one.persistence) for one in storage) if storage else "no storage"),
        Fact("Newest persisted", _known(min((one.persisted for one in storage), default=-1)), "count"),
        Fact("Last heartbeat", _ago_s(max(one.at_s for one in ranks), now_s), "seconds"),
    ]
    nodes = {one.node: [other for other in ranks if other.node == one.node] for one in ranks}
    rows = (
        (
            node or "-", len(some), min(one.iteration for one in some), _worst(one.protection for one in some),
            _known(min(one.protected for one in some)), _known(min(one.persisted for one in some)),
            _known(min(one.free_bytes for one in some)), _ago_s(min(one.at_s for one in some), now_s),
        )
        for node, some in sorted(nodes.items())
    )  # fmt: skip
    trouble = ((one.rank, one.node or "-", *_trouble(one, now_s, silent_s)) for one in ranks)
    columns = (
        "node | ranks:count | iteration:count | protection | protected:count | persisted:count | memory free:bytes"
    )
    tables = (
        table("Nodes", f"{columns} | last heartbeat:seconds", rows),
        table("Problems", "rank:count | node | what | why", (row for row in trouble if row[2])),
    )
    notes = () if found.from_store else (f"Local view only: {found.why_not}.",)
    return Report("Job status", tuple(facts), tables, (*notes, *found.damaged))


def _ago_s(at_s: float, now_s: float) -> float | None:
    age_s = age_of(at_s, now_s)
    return None if age_s is None else round(age_s, 1)


def is_well(found: JobStatus, now_s: float, silent_s: float) -> bool:
    """Whether all ranks have what was asked for, and have said so lately.

    Args:
        found: The status of the job's ranks.
        now_s: Current time, in seconds since 1970.
        silent_s: Seconds without a word after which a rank counts as silent.
    """
    is_complete = found.by_log or len(found.ranks) >= found.ranks[0].world_size
    return is_complete and not any(_trouble(one, now_s, silent_s)[0] for one in found.ranks)


def _trouble(one: RankStatus, now_s: float, silent_s: float) -> tuple[str, str]:
    """What is less than it should be, and why; empty where all is well."""
    if not one.is_alive:
        return "ended", "its process has ended; a restart of the job continues from what lies here"
    if math.isnan(one.at_s):
        return "undated", "when it said something is not known: it may have ended long ago"
    if one.at_s - now_s > silent_s:
        return "clock", f"its clock is {one.at_s - now_s:.0f} s ahead of this one: when it said something is not known"
    if now_s - one.at_s > silent_s:
        return "silent", f"it said nothing for {now_s - one.at_s:.0f} s: hung, restarting, or ended"
    if one.is_well:
        return "", ""
    state = one.protection if one.protection != "protected" else f"{one.persistence} in storage"
    return state, one.reason or "copies are being made, as after a start or a recovery"


def _here(memory_dir: Path, damaged: list[str]) -> Iterator[RankStatus]:
    """What ranks on this node said; damaged: gets a line for each file that cannot be read."""
    for slot in slots(memory_dir):
        path = slot.directory / STATUS_FILE
        try:
            found = status_of(read_small(path, INFORMING_BYTES), is_alive=slot.alive)
        except FileNotFoundError:
            continue
        except OSError as error:
            damaged.append(f"{path} is left out: {error.strerror}.")
            continue
        if found is not None:
            yield found
        else:
            damaged.append(f"{path} is left out: no rank wrote that.")


def _of_one_job(
    found: Sequence[RankStatus], memory_dir: Path, job: str | None, damaged: Sequence[str]
) -> tuple[RankStatus, ...]:
    names = sorted({one.job for one in found if job in (None, one.job)})
    if not names:
        which = f"job {job}" if job else "a job"
        why = damaged[0] if damaged else "none runs here, or it has just begun"
        raise UnreadableCheckpoint(f"{memory_dir} has no status of {which}: {why}")
    living = sorted({one.job for one in found if one.is_alive and one.job in names})
    if len(living or names) > 1:
        raise UsageError(f"{memory_dir} has several jobs: choose one of {', '.join(living or names)} with --job")
    chosen = (living or names)[0]
    return tuple(sorted((one for one in found if one.job == chosen), key=lambda one: one.rank))


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    return (host, int(port)) if host and is_port else None


def _in_store(address: str, world_size: int = 0) -> Iterator[RankStatus]:
    """What the ranks wrote into the store; those that did not are left out. world_size: 0 where it is not known.

    Raises UnreadableCheckpoint.
    """
    place = _address(address)
    if place is None:
        raise UnreadableCheckpoint(f"{address or 'it'} is no HOST:PORT of a store")
    host, port = place
    try:
        # A client of torch tries for long, and says so, where nobody listens.
        socket.create_connection(place, timeout=CONNECT_S).close()
    except OSError as error:
        raise UnreadableCheckpoint(f"the store at {address} cannot be reached: {error.strerror or error}") from error
    from torch.distributed import TCPStore

    try:
        patience = timedelta(seconds=ANSWER_S)
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
        for rank in itertools.count():
            if rank >= min(world_size or SEARCHED, MOST_RANKS):
                return
            key = STATUS_KEY.format(rank)
            one = status_of(client.get(key)[:INFORMING_BYTES]) if client.check([key]) else None
            if one is not None:
                world_size = one.world_size
                yield one
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnreadableCheckpoint(f"the store at {address} does not answer: {reason}") from error


def _worst(states: Iterator[str]) -> str:
    return min(states, key=LEVELS.index)


def _whole(value: Any) -> int:
    found = number(value)
    return -1 if math.isnan(found) else int(found)


def _known(value: int) -> int | None:
    return None if value < 0 else value
