"""How a process in the stock loop outlives faults of others: it leaves the loop's `train`, and enters it again.

Nothing of `pretrain` comes a second time but `train`: flags, model, optimizer and datasets stay as they are. What takes
the place of a lost rank goes through all of `pretrain`, alone: up to `train` its collectives are answered, see
`in_place.building`, apart from the recovery, in which all ranks take part.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core import timers

from ..errors import PeerLost, UsageError
from ..in_place.building import own_build, rehearsed
from ..in_place.called_off import unless_called_off
from ..in_place.kept_process import KeptProcess
from ..recovery.timeline import Milestone, Timestamps
from ..replay.patches import replaced
from ..seats.seat import own_seat
from . import flags
from .kept_data import KeptData
from .kept_globals import KeptGlobals
from .may_stay import why_not
from .seams import Call

log = logging.getLogger(__name__)

_INITIALIZE = "megatron.training.initialize"
_CONNECTS = "_initialize_distributed"
_TOLD = "moe-ckpt-stock-data"
_TIMEOUT_S = 600.0


class Survivors:
    """This process as one of them, or as one that comes to them.

    Sequence: a block of `building` around `pretrain`; in it a block of `together` for each recovery, `data` for each
    time that data iterators are built, and `train` when the loop's is called. After a fault: `connect`, `together`,
    `renew_data`.

    Args:
        loop: The module that has the loop.
        version: Of Megatron-Core.
        start: Starts torch.distributed; None where the loop does.

    Attributes:
        marks: Of this process or of its newest seat, for the timeline of a recovery.
    """

    def __init__(self, loop: Any, version: str, start: Callable[[], object] | None = None) -> None:
        self._loop, self._version, self._start = loop, version, start
        self._build = contextlib.ExitStack()
        self._connect: Callable[[], object] | None = None
        self._kept: KeptProcess | None = None
        self._globals: KeptGlobals | None = None
        self._data = KeptData(loop)
        self.marks = _marks(stayed=False)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A block around `pretrain`: from where all ranks are connected, its collectives are noted or answered."""
        by_others = dist.is_initialized() and self._start is None
        if self._start is not None and not dist.is_initialized():
            self._start()
        initialize = importlib.import_module(_INITIALIZE)
        original = getattr(initialize, _CONNECTS, None)
        if original is None:  # a release that is not known
            yield
            return

        def connecting(*arguments: Any, **options: Any) -> None:
            def connect() -> None:
                original(*arguments, **options)

            connect()
            self._connected(connect, by_others=by_others)

        with self._build, replaced(initialize, **{_CONNECTS: connecting}):
            yield

    @contextlib.contextmanager
    def together(self, chunks: Any) -> Iterator[None]:
        """A block with collectives of all ranks. chunks: of the model, as it was built."""
        self._build.close()
        if self._globals is None and self._connect is not None:
            self._globals = KeptGlobals(self._loop, chunks)
        yield
        if self._kept is None:
            self._begin_building()

    def data(self, call: Call) -> Any:
        """Build data iterators, from datasets that are built once."""
        if self._connect is None:
            return call.go_on()
        built = self._data.build(call)
        if own_build().survivors and self._kept is None:
            self._data.set_facts(_told())
        return built

    def train(self, chunks: Any, optimizer: Any) -> KeptProcess | None:
        """The loop's `train` is called; returns what keeps this process, None where it ends with a fault."""
        self._build.close()
        if self._connect is not None:
            self._kept = KeptProcess(chunks, optimizer)
        return self._kept

    def connect(self) -> None:
        """After a fault: connect all ranks, and let what this process has kept use the new connections."""
        assert self._kept is not None
        assert self._globals is not None
        self.marks = _marks(stayed=True)
        unless_called_off(self._connect_again, own_seat())
        self.marks.mark(Milestone.RENDEZVOUS)
        _get_default_store().set(_TOLD, json.dumps(self._data.facts()))
        self._kept.connected()
        self._globals.as_before_training()

    def _connect_again(self) -> None:
        assert self._connect is not None
        if self._start is not None:
            self._start()
        self._connect()
        own_build().connected()

    def renew_data(self) -> None:
        """Let data iterators read on from where training was brought back to."""
        facts = self._data.facts()
        with rehearsed():  # those that come are answered, too
            self._data.renew()
        self._data.set_facts(facts)

    def _connected(self, connect: Callable[[], object], *, by_others: bool) -> None:
        """All ranks are connected for the first time in this process."""
        args = self._loop.get_args()
        try:
            config = flags.read(args)
        except UsageError:
            return  # said where the model is built
        if config.strategy == "none":
            return
        reason = why_not(args, self._version, is_started_by_script=by_others)
        if reason is not None:
            if own_seat().may_stay and dist.get_rank() == 0:
                log.warning("after a fault all ranks will start anew, each in a new process: %s", reason)
            return
        own_build().connected()
        self.marks.mark(Milestone.RENDEZVOUS)
        self._connect = connect
        self._begin_building()

    def _begin_building(self) -> None:
        if self._connect is None:
            return
        self._build.enter_context(own_build().building())
        if own_build().survivors:  # which do not time what they do not do
            self._build.enter_context(replaced(timers, dist_all_gather_func=lambda *_: None))


def _marks(*, stayed: bool) -> Timestamps:
    marks = Timestamps(stayed=stayed)
    if own_seat().taken_s is not None:
        marks.mark(Milestone.RESTARTED, own_seat().taken_s)
    return marks


def _told() -> dict[str, Any]:
    store = _get_default_store()
    try:
        store.wait([_TOLD], timedelta(seconds=_TIMEOUT_S))
    except RuntimeError:
        raise PeerLost(f"waited {_TIMEOUT_S:g} s for a survivor to tell which data there are") from None
    facts: dict[str, Any] = json.loads(store.get(_TOLD))
    return facts
