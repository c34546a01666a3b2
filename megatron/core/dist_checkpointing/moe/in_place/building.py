"""Model and optimizer of a process that takes a lost rank's slot, built while the survivors keep theirs.

Some constructors of Megatron-Core are collectives: the optimizer gathers which groups of parameters all ranks have, and
datasets are built behind a barrier. Survivors build nothing, so nobody would answer. What these collectives gave when
all ranks built together every rank has noted, and a newcomer gets it through the store of its attempt. What else such a
build exchanges are values that the recovery restores.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core import timers

from ..core_versions.training import replaced
from ..errors import NewProcessesNeeded, PeerLost
from ..replication.agreement import gathered_by_store

Answers = list[tuple[str, Any]]
"""What each collective on objects came to, with its name, in the order of the build."""

_TIMEOUT_S = 600.0
"""How long ranks wait for each other before they build: new processes import everything first."""


VAIN_STARTS = 3
"""So many times in a row survivors wait for processes with which training does not begin; then they end, too."""


class CannotBuildAlone(NewProcessesNeeded):
    """A build asks for a collective that cannot be answered from what was noted."""


class Build:
    """How this process came to its model.

    Attributes:
        answers: None until it is built, and where what was exchanged cannot be told to others.
        survivors: How many ranks have kept their processes; the same on all ranks, known once they are connected.
    """

    def __init__(self) -> None:
        self.answers: Answers | None = None
        self.survivors = 0
        self._noted: Answers = []
        self._to_ask: Answers | None = None

    def connected(self) -> None:
        """All ranks are connected: agree on who has a model already. A collective. Raises PeerLost."""
        store, rank, ranks = _get_default_store(), dist.get_rank(), dist.get_world_size()
        own, name = self.answers is not None, "moe-ckpt-built"
        found: Any = gathered_by_store(store, name, rank, ranks, own, _survivors, _TIMEOUT_S)
        self.survivors, lowest = found
        # The lowest of them writes the answers for all. Where nobody has any, nobody asks: all build together.
        if rank == lowest:
            # As `repr` within JSON: tuples come back as tuples, which JSON alone would turn into lists.
            store.set("moe-ckpt-answers", json.dumps(repr(self.answers)))

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A block in which model, optimizer and data are built, by all ranks together or beside survivors.

        A build may have several such blocks, between which all ranks, survivors too, have collectives.
        """
        if self.survivors:
            if self._to_ask is None:
                # Kept as its own, too: at the next fault this rank may be the survivor that writes them.
                self.answers = _told_answers(_get_default_store())
                # A copy to take from, block after block: `_answered` pops what was asked.
                self._to_ask = list(self.answers)
            with _answered(self._to_ask):
                yield
            return
        with _noted(self._noted):
            yield
        # Evaluated again after each block, from the notes of all blocks so far. A block that raises leaves `answers` as
        # it was: a build that came to nothing says nothing about this model.
        self.answers = None
        with contextlib.suppress(ValueError, SyntaxError):  # others than literals nobody can be told: `answers` is None
            self.answers = ast.literal_eval(repr(self._noted))


def _survivors(built: list[Any]) -> Any:
    """How many ranks have a model already, and the lowest of them."""
    return [sum(map(bool, built)), built.index(True) if True in built else -1]


@cache
def own_build() -> Build:
    """How this process came to its model."""
    return Build()


def _told_answers(store: Store) -> Answers:
    try:
        store.wait(["moe-ckpt-answers"], timedelta(seconds=_TIMEOUT_S))
    except RuntimeError:
        raise PeerLost(f"waited {_TIMEOUT_S:g} s for a survivor to tell how the model was built") from None
    answers: Answers = ast.literal_eval(json.loads(store.get("moe-ckpt-answers")))
    return answers


@contextlib.contextmanager
def _noted(answers: Answers) -> Iterator[None]:
    """Note what collectives on objects come to."""

    def noting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def called(objects: list[Any], *arguments: Any, **options: Any) -> Any:
            outcome = collective(objects, *arguments, **options)
            # After the call: the collective fills the list in place. A copy, because its owner may change it later.
            answers.append((name, list(objects)))
            return outcome

        return called

    with contextlib.ExitStack() as stack:
        for name in _ON_OBJECTS:
            stack.enter_context(replaced(dist, **{name: noting(name, getattr(dist, name))}))
        yield


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """A block in which a model is built by one process alone, for practice: as if all ranks had what it has."""

    def gathered(objects: list[Any], own: Any, *_arguments: Any, **_options: Any) -> None:
        objects[:] = [own] * len(objects)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(dist, all_gather_object=gathered))
        for name in ("broadcast_object_list", *_ON_TENSORS):
            stack.enter_context(replaced(dist, **{name: _skipped}))
        yield


@contextlib.contextmanager
def built_beside_survivors(build: Build) -> Iterator[None]:
    """A block in which this process builds, alone where others keep what they have."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(build.building())
        # Timers gather seconds of all ranks, and survivors do not time what they do not do.
        if build.survivors:
            stack.enter_context(replaced(timers, dist_all_gather_func=lambda *_: None))
        yield


@contextlib.contextmanager
def _answered(answers: Answers) -> Iterator[None]:
    """Answer them, in the same order; what is exchanged between tensors stays as it is here."""

    def answering(name: str) -> Callable[..., Any]:
        def called(objects: list[Any], *_arguments: Any, **_options: Any) -> None:
            noted, values = answers.pop(0) if answers else ("", [])
            # Answers have no keys but their order. Another collective, or one of another size, means that this build
            # took another way than the survivors' did: every later answer would be wrong as well.
            if noted != name or len(values) != len(objects):
                raise CannotBuildAlone(
                    f"a model is built beside survivors, and asks for {name} of {len(objects)} objects where they had"
                    f" {noted or 'nothing'} of {len(values)}: all start again when that has come {VAIN_STARTS} times"
                )
            objects[:] = values

        return called

    with contextlib.ExitStack() as stack:
        for name in _ON_OBJECTS:
            stack.enter_context(replaced(dist, **{name: answering(name)}))
        # No survivor takes part, so these would never end. Tensors keep the values of this process until the recovery
        # restores them from a snapshot.
        for name in _ON_TENSORS:
            stack.enter_context(replaced(dist, **{name: _skipped}))
        yield


_ON_OBJECTS = ("all_gather_object", "broadcast_object_list")
_ON_TENSORS = ("barrier", "all_reduce", "broadcast")


def _skipped(*_arguments: Any, **options: Any) -> Any:
    return _Done() if options.get("async_op") else None


class _Done:
    """In place of the work of a collective."""

    def wait(self) -> bool:
        return True
