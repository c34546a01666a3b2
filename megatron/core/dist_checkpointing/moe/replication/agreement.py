"""What ranks agree on: a failure of one is raised on all, so that none waits in a collective alone; merged values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
from torch.distributed import PrefixStore, Store

from ..errors import MoECheckpointError, PeerLost, PeerSilent, UsageError

if TYPE_CHECKING:
    from ..ports import Json, Transport


class Group(Protocol):
    """Ranks that gather values: a `Transport` between all ranks, or a part of them."""

    def gather(self, value: Json) -> list[Json]:
        """The values of all ranks of the group, in the order of ranks. Raises PeerLost."""


def raise_on_all_ranks[T](
    group: Group,
    work: Callable[[], T],
    errors: Sequence[type[MoECheckpointError]] = (UsageError,),
    ranks: Sequence[int] | None = None,
) -> T:
    """Run `work` on each rank; if it fails on one, all raise the same error, which names that rank. A collective.

    Args:
        group: The ranks that take part.
        work: Must not raise between collectives of its own: there other ranks would wait.
        errors: What is raised: the first of these types that the error is of, otherwise the last one.
        ranks: Global ranks of the group, ascending; None: the group is of all ranks.

    Returns:
        What `work` returned on this rank.

    Raises:
        PeerLost: A rank did not answer.
    """
    problem: list[Json] = [-1, ""]
    value: T | None = None
    # Anything but an error of this package is a defect: it ends this rank, and the others lose a peer.
    try:
        value = work()
    except MoECheckpointError as error:
        kinds = (index for index, kind in enumerate(errors) if isinstance(error, kind))
        problem = [next(kinds, len(errors) - 1), str(error)]
    # Every rank comes here, whether its work failed or not. The lowest rank with a problem decides what all raise.
    answers = [cast("tuple[int, str]", answer) for answer in group.gather(problem)]
    for rank, (index, why) in zip(ranks or range(len(answers)), answers, strict=True):
        if index >= 0:
            raise errors[index](f"rank {rank}: {why}")
    return cast("T", value)


# Values of all ranks through the store that they found each other in, before there are connections between them.

_READ_S = 5.0
"""How long rank 0 waits for the others to read what all have said: it may keep the store, and be about to end."""


def gathered_by_store(store: Store, name: str, rank: int, world_size: int, value: Json, timeout_s: float) -> list[Json]:
    """The values of all ranks, in their order; a collective, for which each rank asks the store only a few times.

    Args:
        store: In which all ranks find each other.
        name: Of this call; the same on all ranks, and used once.
        rank: This rank.
        world_size: How many ranks call it.
        value: Of this rank.
        timeout_s: How long the others may take to come.

    Raises:
        PeerSilent: Some did not come in time; names them.
    """
    place, patience = PrefixStore(name, store), timedelta(seconds=timeout_s)
    place.set(str(rank), json.dumps(value))
    place.append("here", f"{rank} ")
    # Rank 0 reads the values of all and writes them as one: if each rank read each value, the one server of the store
    # would get N^2 requests.
    if rank:
        try:
            place.wait(["all"], patience)
        except RuntimeError:
            raise _unstarted(place, rank, world_size, timeout_s) from None
        found: list[Json] = json.loads(place.get("all"))
        if isinstance(found, str):  # why there is nothing
            raise PeerSilent(found)
        # Counted by an atomic call, so that exactly one rank finds itself the last.
        if place.add("read", 1) == world_size - 1:
            place.set("all read", "")
        return found
    keys = [str(other) for other in range(world_size)]
    try:
        place.wait(keys, patience)
    except RuntimeError:
        silent = _unstarted(place, rank, world_size, timeout_s)
        # Others came later, and would wait longer: they leave with the same words.
        with suppress(RuntimeError):
            place.set("all", json.dumps(str(silent)))
        raise silent from None
    values: list[Json] = [json.loads(one) for one in place.multi_get(keys)]
    place.set("all", json.dumps(values))
    if world_size > 1:
        with suppress(RuntimeError):  # whoever has not read it by now has ended
            place.wait(["all read"], timedelta(seconds=min(timeout_s, _READ_S)))
    return values


def _unstarted(place: Store, rank: int, world_size: int, timeout_s: float) -> PeerSilent:
    """Who has not come, by one request: all ranks give up at about the same time."""
    missing = not_listed(place.get("here"), world_size)
    return PeerSilent(f"rank {rank} waited {timeout_s:g} s for {ranks_named(missing)}, which did not start", missing)


def not_listed(listed: bytes, world_size: int) -> tuple[int, ...]:
    """The ranks that have not added their number and a space.

    Args:
        listed: What ranks have added.
        world_size: The number of ranks.
    """
    here = set(map(int, listed.split()))
    return tuple(rank for rank in range(world_size) if rank not in here)


def ranks_named(ranks: Sequence[int]) -> str:
    """Such as `rank 3` or `ranks 3, 7`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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


def merged[T](transport: Transport, own: T, kind: type[T], combine: Callable[[T, T], T]) -> T:
    """The values of all ranks as one, on all of them; a collective.

    Args:
        transport: To all ranks.
        own: The value of this rank.
        kind: Its type, as msgspec reads it.
        combine: Of two values, the first one of lower ranks; which neighbours are combined first must not matter.

    Raises:
        PeerLost: A rank did not answer, or not with such a value.
    """
    decoder = msgspec.msgpack.Decoder(kind)

    def bytes_of(one: bytes, other: bytes) -> bytes:
        return msgspec.msgpack.encode(combine(decoder.decode(one), decoder.decode(other)))

    return _read(decoder, transport.merge(msgspec.msgpack.encode(own), bytes_of))


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
