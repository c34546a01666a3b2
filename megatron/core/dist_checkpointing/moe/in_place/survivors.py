"""A training loop that a process outlives: its `train` is left at a fault of others, and entered again.

Model, optimizer and datasets stay as they are; iterators over data are made again. What takes the place of a lost rank
goes through all of the loop's script, alone: up to `train` its collectives are answered, see `building`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import PeerLost
from ..recovery.timeline import Milestone, Timestamps
from ..runtime.nccl_settings import process_group_backend
from ..runtime.opening import RECOVERY_PATIENCE
from ..runtime.watcher import watched_start
from ..standby.slot import own_slot
from .building import built_beside_survivors, own_build
from .process_restart import InProcessRestart, unless_called_off

log = logging.getLogger(__name__)

_TOLD = "moe-ckpt-stock-data"
_TIMEOUT_S = 600.0


class Datasets:
    """A provider of datasets that remembers what it gave."""

    def __init__(self, provider: Callable[..., Any]) -> None:
        self._provider = provider
        self._given: dict[str, Any] = {}
        self.is_distributed = getattr(provider, "is_distributed", False)

    def __call__(self, *sizes: Any, **options: Any) -> Any:
        # By sizes asked for: a loop that asks for other sizes after a fault gets them.
        asked_for = repr((sizes, options))
        if asked_for not in self._given:
            self._given = {asked_for: self._provider(*sizes, **options)}
        return self._given[asked_for]


def become(old: Any, new: Any) -> None:
    """Let iterators that others hold read what new ones would read.

    Args:
        old: One of them, a sequence of any depth, or None.
        new: As many.
    """
    if isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            become(one, other)
    elif old is not None:
        # In place: the loop, its callbacks and wrappers have it in variables of their own.
        vars(old).clear()
        vars(old).update(vars(new))


def tell(facts: dict[str, Any]) -> None:
    """For survivors: what all ranks agreed on when data were built."""
    # The store of this attempt, which replacements have, too; no collective works for them yet.
    _get_default_store().set(_TOLD, json.dumps(facts))


def survivors_facts() -> dict[str, Any]:
    """For a process that comes to them. Raises PeerLost."""
    store = _get_default_store()
    try:
        store.wait([_TOLD], timedelta(seconds=_TIMEOUT_S))
    except RuntimeError:
        raise PeerLost(f"waited {_TIMEOUT_S:g} s for a survivor to tell which data there are") from None
    facts: dict[str, Any] = json.loads(store.get(_TOLD))
    return facts


class LoopSurvivor:
    """This process as one that stays, or as one that comes to those; a loop's adapter calls what its loop does.

    Attributes:
        marks: Of this process or of its newest slot, for the timeline of a recovery.
    """

    def __init__(self) -> None:
        self._build, self._watched = contextlib.ExitStack(), contextlib.ExitStack()
        self._connect: Callable[[], object] | None = None
        self._overlap: Callable[[], object] | None = None
        self._kept: InProcessRestart | None = None
        self.marks = _marks(stayed=False)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block with collectives of all ranks."""
        self._build.close()
        try:
            yield
        finally:
            self._watched.close()  # the session has a watcher of its own by now
        if self._kept is None:
            self._begin_building()

    def _connected(self, connect: Callable[[], object]) -> None:
        """All ranks are connected for the first time in this process, and it can stay. connect: does that again."""
        own_build().connected()
        self.marks.mark(Milestone.RENDEZVOUS)
        self._connect = connect
        self._begin_building()

    def _cannot_stay(self, reason: str) -> None:
        if own_slot().may_stay and dist.get_rank() == 0:
            log.warning("in-place recovery disabled, a failure restarts all ranks: %s", reason)

    def _overlapping(self, overlap: Callable[[], object]) -> None:
        """Make the buffers of `--tp-comm-overlap`: survivors make them, too, so nothing is answered."""
        self._build.close()
        overlap()
        self._overlap = overlap
        self._begin_building()

    def _connect_again(self, timeout_s: float, facts: dict[str, Any]) -> None:
        """After a fault. facts: that all ranks agreed on when data were built."""
        assert self._kept is not None
        self.marks = _marks(stayed=True)
        unless_called_off(self._connect_all, own_slot())
        self._watch(timeout_s)
        self.marks.mark(Milestone.RENDEZVOUS)
        tell(facts)
        self._kept.connected()

    def _connect_all(self) -> None:
        assert self._connect is not None
        self._connect()
        own_build().connected()
        # Behind that, as new processes do once they know of survivors: a collective.
        if self._overlap is not None:
            self._overlap()

    def _watch(self, timeout_s: float) -> None:
        """Until the session watches: a rank that is stopped before keeps others in collectives of NCCL for ever."""
        if "nccl" in process_group_backend():
            self._watched.enter_context(watched_start(dist.get_rank(), RECOVERY_PATIENCE * timeout_s))

    def _begin_building(self) -> None:
        if self._connect is not None:
            self._build.enter_context(built_beside_survivors(own_build()))


def prepare_chunks(chunks: Sequence[Any], timers: Any) -> None:
    """Let `train` begin with them as it does in a process that was just built.

    Args:
        chunks: Of the model of this rank.
        timers: Of the loop.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
    for timer in timers._timers.values():
        timer.reset()  # one that runs cannot be started


def _marks(*, stayed: bool) -> Timestamps:
    marks = Timestamps(stayed=stayed)
    if own_slot().taken_s is not None:
        marks.mark(Milestone.RESTARTED, own_slot().taken_s)
    return marks
