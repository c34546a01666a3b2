"""What ranks agree on: a failure of one is raised on all, so that none waits in a collective alone; merged values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import or_
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
from torch.distributed import PrefixStore, Store

from ..errors import NAMED_RANKS, MoECheckpointError, PeerLost, PeerSilent, UsageError, ranks_named

if TYPE_CHECKING:
    from ..ports import Json, Transport


class Group(Protocol):
    """Ranks that merge values: a `Transport` between all ranks, or a part of them."""

    @property
    def rank(self) -> int:
        """This rank, among those of the job."""

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """As `ports.Transport.merge`, of the ranks of the group."""


class _Failures(msgspec.Struct, array_like=True):
    """Of a run of ranks: how many failed, the first of them, and the kind of error and the reason of the very first."""

    count: int = 0
    ranks: tuple[int, ...] = ()
    kind: int = 0
    why: str = ""

    def __or__(self, higher: _Failures) -> _Failures:
        """With those of higher ranks."""
        first, ranks = self if self.count else higher, (*self.ranks, *higher.ranks)
        return _Failures(self.count + higher.count, ranks[: 1 + NAMED_RANKS], first.kind, first.why)

    def __str__(self) -> str:
        rank, *others = self.ranks
        return f"rank {rank}: {self.why}{f' (also on {ranks_named(others, self.count - 1)})' if others else ''}"


def raise_on_all_ranks[T](
    group: Group, work: Callable[[], T], errors: Sequence[type[MoECheckpointError]] = (UsageError,)
) -> T:
    """Run `work` on each rank; if it fails on one, all raise the same error, which names that rank. A collective.

    Args:
        group: The ranks that take part.
        work: Must not raise between collectives of its own: there other ranks would wait.
        errors: What is raised: the first of these types that the error is of, otherwise the last one.

    Returns:
        What `work` returned on this rank.

    Raises:
        PeerLost: A rank did not answer.
    """
    own, value = _Failures(), None
    # Anything but an error of this package is a defect: it ends this rank, and the others lose a peer.
    try:
        value = work()
    except MoECheckpointError as error:
        kinds = (index for index, kind in enumerate(errors) if isinstance(error, kind))
        own = _Failures(1, (group.rank,), next(kinds, len(errors) - 1), str(error))
    # Every rank comes here, whether its work failed or not. The lowest rank with a problem decides what all raise.
    found = merged(group, own, _Failures, or_)
    if found.count:
        raise errors[found.kind](str(found))
    return cast("T", value)


# Values of all ranks through the store that they found each other in, before there are connections between them.

_READ_S = 5.0
"""How long rank 0 waits for the others to read what all have said: it may keep the store, and be about to end."""


def gathered_by_store(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    value: Json,
    summed_up: Callable[[list[Json]], Json],
    timeout_s: float,
) -> Json:
    """What rank 0 makes of the values of all ranks; a collective, for which each asks the store only a few times.

    Args:
        store: In which all ranks find each other.
        name: Of this call; the same on all ranks, and used once.
        rank: This rank.
        world_size: How many ranks call it.
        value: Of this rank.
        summed_up: Of the values of all ranks, in their order; small, for each rank reads it, and must not raise.
        timeout_s: How long the others may take to come.

    Raises:
        PeerSilent: Some did not come in time; names them.
        PeerLost: The store is gone.
    """
    place, patience = PrefixStore(name, store), timedelta(seconds=timeout_s)
    place.set(str(rank), json.dumps(value))
    place.append("here", f"{rank} ")
    # Rank 0 alone reads the values of all: if each rank read each of them, the one server of the store would get N^2
    # requests, and N^2 values would leave it if each got them as one.
    if rank:
        try:
            place.wait(["all"], patience)
        except RuntimeError:
            raise _unstarted(place, rank, world_size, timeout_s) from None
        why, found = json.loads(place.get("all"))
        if why:
            raise PeerSilent(why)
        # Counted by an atomic call, so that exactly one rank finds itself the last.
        if place.add("read", 1) == world_size - 1:
            place.set("all read", "")
        return cast("Json", found)
    keys = [str(other) for other in range(world_size)]
    try:
        place.wait(keys, patience)
    except RuntimeError:
        silent = _unstarted(place, rank, world_size, timeout_s)
        # Others came later, and would wait longer: they leave with the same words.
        with suppress(RuntimeError):
            place.set("all", json.dumps([str(silent), None]))
        raise silent from None
    told = json.dumps(["", summed_up([json.loads(one) for one in place.multi_get(keys)])])
    place.set("all", told)
    if world_size > 1:
        with suppress(RuntimeError):  # whoever has not read it by now has ended
            place.wait(["all read"], timedelta(seconds=min(timeout_s, _READ_S)))
    return cast("Json", json.loads(told)[1])


def _unstarted(place: Store, rank: int, world_size: int, timeout_s: float) -> PeerLost:
    """Who has not come, by one request: all ranks give up at about the same time."""
    try:
        missing = not_listed(place.get("here"), world_size)
    except RuntimeError:
        return PeerLost(f"rank {rank} lost the store in which ranks meet: the node that keeps it is gone")
    return PeerSilent(f"rank {rank} waited {timeout_s:g} s for {ranks_named(missing)}, which did not start", missing)


def not_listed(listed: bytes, world_size: int) -> tuple[int, ...]:
    """The ranks that have not added their number and a space.

    Args:
        listed: What ranks have added.
        world_size: The number of ranks.
    """
    here = set(map(int, listed.split()))
    return tuple(rank for rank in range(world_size) if rank not in here)


# Where ranks that connect again find each other: in a store, under a number on which all of them agree.

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.1
_ASKED_PER_S = 20_000
"""How often all ranks of a job together ask the one server of a store for the same thing."""
_ALL_HERE, _GIVEN_UP = b"all", "given up"
_TOO_LATE = "the last ones came when others had given up; try again"


class ConnectionEpochs:
    """Numbers the connections of a job: all ranks that `meet` leave with the same number, larger than before.

    A rank asks for the number after its last one and marks itself there. Whoever waits at a number and sees that the
    next one was asked for goes to it, so that ranks which notice a failure at different times, or gave up once
    already, come together at the largest. The store is polled, never waited on: a wait would keep other users of the
    same connection from it. What all ranks together ask for grows with their number, and not with its square.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._number = 0

    def meet(self, timeout_s: float) -> int:
        """Wait until all ranks are here. Raises PeerSilent for ranks that did not come; they may be met later."""
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        longest_s = max(LONGEST_PAUSE_S, self._world_size / _ASKED_PER_S)
        self._enter()
        while True:
            if self._store.check([self._outcome()]):
                if self._store.get(self._outcome()) == _ALL_HERE:
                    return self._number
                self._leave()
                self._enter()
            elif time.monotonic() > deadline:
                missing = self._missing()
                self._leave()
                raise PeerSilent(
                    f"rank {self._rank} waited {timeout_s:g} s for all {self._world_size} ranks to connect again:"
                    f" {f'{ranks_named(missing)} did not come' if missing else _TOO_LATE}",
                    missing,
                )
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _enter(self) -> None:
        # First of all: ranks that wait at the number before have to leave it, or nobody ever gets all of them here.
        self._store.set(self._outcome(), _GIVEN_UP)
        self._number += 1
        self._store.append(self._marks(), f"{self._rank} ")
        # Counted by one atomic call, so that exactly one rank, the last, finds all there: who left is counted off.
        if self._store.add(f"{self._number}/count", 1) == self._world_size:
            # Where the next number is wanted, somebody gave up this one, however many are here.
            self._store.compare_set(self._outcome(), "", _ALL_HERE.decode())

    def _leave(self) -> None:
        self._store.add(f"{self._number}/count", -1)

    def _outcome(self) -> str:
        """Where the last rank that comes to this number says so, or one that asks for the next number."""
        return f"{self._number}/outcome"

    def _marks(self) -> str:
        return f"{self._number}/here"

    def _missing(self) -> tuple[int, ...]:
        """Who never came to this number; marks stay when their ranks leave."""
        return not_listed(self._store.get(self._marks()), self._world_size)  # by one request: all ranks give up now


# What all ranks have to know, made on the way, and what each rank has for a few others; typed, over any transport.


def merged[T](group: Group, own: T, kind: type[T], combine: Callable[[T, T], T]) -> T:
    """The values of all ranks as one, on all of them; a collective.

    Args:
        group: The ranks that take part.
        own: The value of this rank.
        kind: Its type, as msgspec reads it.
        combine: Of two values, the first one of lower ranks; which neighbours are combined first must not matter.

    Raises:
        PeerLost: A rank did not answer, or not with such a value.
    """
    decoder = msgspec.msgpack.Decoder(kind)

    def bytes_of(one: bytes, other: bytes) -> bytes:
        return msgspec.msgpack.encode(combine(decoder.decode(one), decoder.decode(other)))

    return _read(decoder, group.merge(msgspec.msgpack.encode(own), bytes_of))


def of_first[T](group: Group, own: T, kind: type[T]) -> T:
    """The value of the lowest rank, on all of them; a collective.

    Args:
        group: The ranks that take part.
        own: The value of this rank; what others have than the lowest one counts for nothing.
        kind: Its type, as msgspec reads it.

    Raises:
        PeerLost: A rank did not answer, or not with such a value.
    """
    return _read(msgspec.msgpack.Decoder(kind), group.merge(msgspec.msgpack.encode(own), lambda first, _: first))


def combined(
    at: int,
    size: int,
    value: bytes,
    combine: Callable[[bytes, bytes], bytes],
    tell: Callable[[int, bytes], None],
    heard: Callable[[int], bytes],
) -> bytes:
    """The values of some ranks combined, on all of them, up a binomial tree and down again.

    Args:
        at: The place of this rank among them.
        size: How many they are.
        value: Of this rank.
        combine: Of two values, the second one of higher ranks.
        tell: Sends a value to the rank at a place.
        heard: Receives one from there.
    """
    step = 1
    while step < size and not at & step:
        if at + step < size:
            value = combine(value, heard(at + step))
        step *= 2
    # `step` is now the lowest bit of this place, without which its number is that of its parent.
    if at:
        tell(at - step, value)
        value = heard(at - step)
    while step := step // 2:
        if at + step < size:
            tell(at + step, value)
    return value


def exchanged[T](transport: Transport, outgoing: Mapping[int, T], kind: type[T]) -> list[tuple[int, T]]:
    """What each rank has for this one, by the rank that it comes from, ascending; a collective.

    Args:
        transport: To all ranks.
        outgoing: What this rank has, by the rank that it is for.
        kind: The type of the values, as msgspec reads it.

    Raises:
        PeerLost: A rank did not answer, or not with such values.
    """
    came = transport.exchange({to: msgspec.msgpack.encode(value) for to, value in outgoing.items()})
    decoder = msgspec.msgpack.Decoder(kind)
    return [(source, _read(decoder, data)) for source, data in came]


def _read[T](decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerLost(f"what came from other ranks cannot be read: {error}") from None
