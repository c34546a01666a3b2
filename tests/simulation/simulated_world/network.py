"""The network between simulated ranks: what is under way, who can reach whom, and when all have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Json

from .world import World


@dataclass(eq=False)
class Message:
    """One message between two ranks: complete when both sides have begun and `arrives_s` has come.

    void: one side gave up before that; its memory is not referred to any more.
    """

    nbytes: int
    source: memoryview | None = None
    target: memoryview | None = None
    arrives_s: float | None = None
    delivered: bool = False
    void: bool = False

    def give_up(self) -> None:
        """Release the memory of both sides, unless all is done."""
        if not self.delivered:
            self.source, self.target, self.void = None, None, True


@dataclass(eq=False)
class Collective:
    """What the ranks gave to their n-th collective; `done_s`: when each rank knows all, once the last has come.

    It never ends when ranks were cut off from each other at that time.
    """

    what: str
    values: dict[int, object] = field(default_factory=dict)
    done_s: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """Messages from one rank to another, in order; `posted` counts the sends and the receives."""

    messages: deque[Message] = field(default_factory=deque)
    sent: int = 0
    received: int = 0
    dropped: int = 0
    free_s: float = 0.0


class Connection:
    """All ranks connected once, until one of them gives up; `left` says which did, and why."""

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], Link] = {}
        self.collectives: list[Collective] = []
        self.left: dict[int, str] = {}

    def link(self, source: int, to: int) -> Link:
        """The messages from one rank to another."""
        return self.links.setdefault((source, to), Link())


class Channel:
    """The transports of one name of all ranks.

    waiting: those that came to the next renewal. withdrew_s: when those that came in vain went away again.
    """

    def __init__(self) -> None:
        self.connection = Connection()
        self.waiting: dict[int, Callable[[Connection], None]] = {}
        self.withdrew_s: dict[int, float] = {}


class Network:
    """Everything between the ranks of one start of the job.

    latency_s, bytes_per_s: of each pair of ranks; collectives take one latency, up to twice as long for some ranks.
    flip_rate: the share of messages between two ranks in which one bit is flipped. resets: a killed rank's peers see
    that the connection broke; without, as when a node loses its power, they wait for their timeout.
    """

    def __init__(
        self,
        world: World,
        world_size: int,
        *,
        latency_s: float = 1e-4,
        bytes_per_s: float = 1e9,
        flip_rate: float = 0.0,
        resets: bool = True,
    ) -> None:
        self.world, self.world_size = world, world_size
        self.latency_s, self.bytes_per_s, self.flip_rate, self.resets = latency_s, bytes_per_s, flip_rate, resets
        self.flipped = 0
        self.lives = [world.life_of(rank) for rank in range(world_size)]
        self._channels: dict[str, Channel] = {}
        self._cut: set[frozenset[int]] = set()
        self._deaths, self._gone = -1, frozenset[int]()

    def channel(self, name: str) -> Channel:
        """The transports of this name."""
        return self._channels.setdefault(name, Channel())

    def cut(self, one: int, other: int) -> None:
        """From now on nothing arrives between two ranks, and neither is told."""
        self._cut.add(frozenset((one, other)))

    def silence(self, rank: int) -> None:
        """From now on nothing arrives from or at this rank."""
        for other in range(self.world_size):
            self.cut(rank, other)

    def heal(self) -> None:
        """All ranks reach each other again."""
        self._cut.clear()
        for channel in self._channels.values():
            self.meet(channel)

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that were there when the network began and were killed since; asked for at each switch."""
        world = self.world
        if self._deaths != world.deaths:
            everyone = range(self.world_size)
            self._gone = frozenset(r for r in everyone if world.is_dead(r) or world.life_of(r) != self.lives[r])
            self._deaths = world.deaths
        return self._gone

    def reaches(self, one: int, other: int) -> bool:
        """Whether messages between two ranks arrive; from dead ranks none do."""
        gone = self.gone
        return one == other or not (
            one in gone or other in gone or (self._cut and frozenset((one, other)) in self._cut)
        )

    def reaches_all(self, one: int) -> bool:
        """Whether messages of a rank arrive at all others."""
        return not (self.gone or self._cut) or all(self.reaches(one, other) for other in range(self.world_size))

    def broken(self, connection: Connection | None, me: int, others: Sequence[int]) -> str:
        """Which of the others is dead, or has left the connection, as far as `me` can know; empty when none."""
        left, gone = connection.left if connection is not None else {}, self.gone
        if not (left or gone):
            return ""
        for other in others:
            if other == me:
                continue
            if self.resets and other in gone:
                return f"rank {other} is dead"
            if other in left and self.reaches(me, other):
                return f"rank {other} closed the connection ({left[other]})"
        return ""

    def post(self, link: Link, view: memoryview, *, is_sent: bool) -> Message:
        """The n-th send or receive of a link. Raises UsageError when both sides do not agree on the size."""
        nbytes = view.nbytes
        at = (link.sent if is_sent else link.received) - link.dropped
        if at == len(link.messages):
            link.messages.append(Message(nbytes))
        message = link.messages[at]
        if message.nbytes != nbytes:
            # Sizes are told in messages, which may have been damaged; otherwise the protocol is wrong.
            if not self.flip_rate:
                raise UsageError(f"a message of {message.nbytes} bytes on one side has {nbytes} on the other")
            message.give_up()
        if message.void:
            view = memoryview(b"")
        if is_sent:
            message.source, link.sent = view, link.sent + 1
        else:
            message.target, link.received = view, link.received + 1
        if not message.void and message.source is not None and message.target is not None:
            begun_s = max(self.world.now_s(), link.free_s)
            link.free_s = begun_s + nbytes / self.bytes_per_s
            message.arrives_s = link.free_s + self.latency_s
        while link.dropped < min(link.sent, link.received):
            link.messages.popleft()
            link.dropped += 1
        return message

    def deliver(self, message: Message) -> None:
        """Copy the bytes, which may be damaged on the way; only now, so the sender must not have changed them."""
        if message.delivered or message.source is None or message.target is None:
            return
        message.delivered = True
        message.target[:] = message.source
        if message.nbytes and self.flip_rate and self.world.random.random() < self.flip_rate:
            bit = self.world.random.randrange(8 * message.nbytes)
            message.target[bit // 8] ^= 1 << bit % 8
            self.flipped += 1
        message.source = message.target = None

    def join(self, connection: Connection, number: int, rank: int, what: str, value: Json) -> Collective:
        """Come to a collective. Raises UsageError when others came to another one."""
        if number == len(connection.collectives):
            connection.collectives.append(Collective(what))
        here = connection.collectives[number]
        if here.what != what:
            raise UsageError(f"collective {number}: rank {rank} came to {what}, but others to {here.what}")
        here.values[rank] = value
        if len(here.values) == self.world_size and self._all_reach_all():
            now_s, random = self.world.now_s(), self.world.random
            here.done_s = {one: now_s + self.latency_s * (1 + random.random()) for one in range(self.world_size)}
        return here

    def meet(self, channel: Channel) -> None:
        """Connect all ranks of a channel again, once all that there are wait for it and reach each other."""
        if len(channel.waiting) < self.world_size or not self._all_reach_all():
            return
        channel.connection = Connection()
        for connect in channel.waiting.values():
            connect(channel.connection)
        channel.waiting.clear()

    def _all_reach_all(self) -> bool:
        ranks = range(self.world_size)
        return all(self.reaches(one, other) for one in ranks for other in ranks)
