"""A whole job in a simulated world: ranks that are killed together and started again until training has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.ports import PeerLost
from megatron.core.dist_checkpointing.moe.recovery.sources import KeptState
from megatron.core.dist_checkpointing.moe.types import OperatorId

from .lanes import FakeClock, FakeLane
from .memory import Memory
from .model import FakeModel
from .network import Network
from .rank import FakeCapturer, FakeRestorer, FakeTrainerState
from .storage import FakeStore
from .transport import FakeTransport
from .world import NOBODY, World


@dataclass(frozen=True)
class RankPorts:
    """What one process of a rank works with. `memory` is its own tier, `standby` lies beside it, `persistent` is shared
    by all ranks.

    start: how often the job was started before, from 0. kept: what the live state of a process that stays is already.
    """

    rank: int
    node: int
    start: int
    world: World
    model: FakeModel
    memory: FakeStore
    standby: FakeStore
    persistent: FakeStore
    capturer: FakeCapturer
    restorer: FakeRestorer
    trainer: FakeTrainerState
    clock: FakeClock
    network: Network
    timeout_s: float
    kept: KeptState

    def lane(self, name: str) -> FakeLane:
        """A new lane of this rank."""
        return FakeLane(self.world, self.rank, name)

    def transport(self, name: str, timeout_s: float | None = None) -> FakeTransport:
        """A new transport, connected: all ranks must come. Raises PeerLost."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        transport = FakeTransport(self.network, self.rank, name, wait_s, is_connected=False)
        transport.renew()
        return transport


@dataclass(frozen=True)
class Start:
    """How one start of the job ended: in `events_until` events of the world so far, with which ranks killed first, and
    with which errors of ranks. Without either the job is done."""

    killed: tuple[int, ...]
    errors: Mapping[int, Exception]
    events_until: int

    @property
    def is_done(self) -> bool:
        """Whether all ranks came to their end."""
        return not self.killed and not self.errors


@dataclass
class SimulatedJob:
    """Starts all ranks, kills them all when one is killed or fails, and starts them again, as torchrun does.

    shards: parameters by operator that a rank owns. segment_bytes: of each rank's memory. nodes: the node of each rank
    in a start, counted from 0, so that ranks may move; empty is node 0 for all. wipe: a killed rank takes its node
    along: all ranks of it, and their memory. notice_s: the others continue for up to this long, by the seed. network:
    makes that of one start. max_starts: more of them fail. store_fails: by rank and whether it is persistent, see
    FakeStore. All times are virtual. is_called_off: whether the launcher has noticed a loss; ranks that are `finishing`
    then have `finish_s` to come to an end, and what they leave in `kept` they have in the next start.
    """

    world: World
    world_size: int
    shards: Callable[[int], Mapping[OperatorId, int]]
    segment_bytes: Sequence[int]
    nodes: Callable[[int], Sequence[int]] = lambda start: ()
    wipe: bool = False
    notice_s: float = 0.01
    timeout_s: float = 1.0
    network: Callable[[World, int], Network] = Network
    max_starts: int = 8
    store_fails: Callable[[int, bool, int, str], bool] | None = None
    disk: Memory = field(default_factory=Memory)
    memories: dict[tuple[int, int], Memory] = field(default_factory=dict)
    standbys: dict[tuple[int, int], Memory] = field(default_factory=dict)
    models: dict[int, FakeModel] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    finish_s: float = 60.0
    is_called_off: bool = False
    finishing: set[int] = field(default_factory=set)
    kept: dict[int, tuple[FakeModel, KeptState]] = field(default_factory=dict)

    def node_of(self, rank: int) -> int:
        """The node of a rank in the start that runs, or comes next."""
        nodes = self.nodes(len(self.starts))
        return nodes[rank] if nodes else 0

    def slot_of(self, rank: int) -> int:
        """The place of a rank on its node."""
        return sum(self.node_of(other) == self.node_of(rank) for other in range(rank))

    def memory_of(self, rank: int) -> Memory:
        """What a rank's slot on its node keeps over restarts."""
        return self.memories.setdefault((self.node_of(rank), self.slot_of(rank)), Memory())

    def standby_of(self, rank: int) -> Memory:
        """What the rank's slot has beside that."""
        return self.standbys.setdefault((self.node_of(rank), self.slot_of(rank)), Memory())

    def run(self, make_rank: Callable[[int, RankPorts], Callable[[], object]]) -> list[Start]:
        """Start the job until all ranks come to their end; `make_rank(rank, ports)` gives the main of a rank, and is
        called by the rank itself. Returns how each start ended; `models` are those of the last one.

        MoECheckpointErrors end a rank and so a start; other errors are raised, and so is the last one when there are
        too many starts, or when a start without any crash ended with something else than PeerLost.
        """
        while not self.starts or not self.starts[-1].is_done:
            if len(self.starts) == self.max_starts:
                raise self._hopeless()
            self.starts.append(self._start_once(make_rank))
            self._refuse_unprovoked(self.starts[-1])
        return self.starts

    def _start_once(self, make_rank: Callable[[int, RankPorts], Callable[[], object]]) -> Start:
        for rank in range(self.world_size):
            self.world.revive(rank)
        network = self.network(self.world, self.world_size)
        self.is_called_off, self.finishing = False, set()
        ended: set[int] = set()
        errors: dict[int, Exception] = {}
        killed: list[int] = []

        def main(rank: int) -> None:
            try:
                make_rank(rank, self._ports(rank, network))()
                ended.add(rank)
            except MoECheckpointError as error:
                errors[rank] = error
                self.world.kill(rank)

        for rank in range(self.world_size):
            self.world.spawn(rank, "main", lambda rank=rank: main(rank))  # type: ignore[misc]
        self.world.spawn(NOBODY, "launcher", lambda: killed.extend(self._launch(ended, errors)))
        self.world.run()
        return Start(tuple(killed), errors, len(self.world.trace))

    def _launch(self, ended: set[int], errors: Mapping[int, Exception]) -> list[int]:
        """Wait until all have ended, or one has died: then end them all. Returns who was killed first."""
        ranks = range(self.world_size)

        def dead() -> list[int]:
            return [rank for rank in ranks if self.world.is_dead(rank)]

        self.world.wait("waits for all ranks", lambda: len(ended) == self.world_size or bool(dead()))
        first = dead()
        if not first:
            return []
        nodes = {self.node_of(rank) for rank in first if rank not in errors}
        lost = [rank for rank in ranks if self.wipe and self.node_of(rank) in nodes]
        for rank in lost:
            self.world.kill(rank)
            self.memory_of(rank).wipe()
            self.standby_of(rank).wipe()
        self.world.sleep(self.world.random.random() * self.notice_s)
        self.is_called_off = True
        self.world.wait("waits for replays", lambda: all(map(self.world.is_dead, self.finishing)), self.finish_s)
        for rank in ranks:
            self.world.kill(rank)
        for rank in self.kept.keys() - errors.keys():
            del self.kept[rank]
        return [rank for rank in first if rank not in errors]

    def _ports(self, rank: int, network: Network) -> RankPorts:
        world = self.world
        model, kept = self.kept.pop(rank, (FakeModel(world, rank, self.shards(rank)), KeptState()))
        self.models[rank] = model

        return RankPorts(
            rank=rank,
            node=self.node_of(rank),
            start=len(self.starts),
            world=world,
            model=model,
            memory=FakeStore(
                self.memory_of(rank),
                self.slot_of(rank),
                self.segment_bytes,
                world=world,
                rank=rank,
                fails=self._fails(rank, persistent=False),
            ),
            standby=FakeStore(self.standby_of(rank), self.slot_of(rank), (1,), world=world, rank=rank),
            persistent=FakeStore(self.disk, rank, world=world, fails=self._fails(rank, persistent=True)),
            capturer=FakeCapturer(model, world),
            restorer=FakeRestorer(model, world),
            trainer=FakeTrainerState(model, world),
            clock=FakeClock(world),
            network=network,
            timeout_s=self.timeout_s,
            kept=kept,
        )

    def _fails(self, rank: int, *, persistent: bool) -> Callable[[int, str], bool] | None:
        fails = self.store_fails
        return None if fails is None else lambda number, name: fails(rank, persistent, number, name)

    def _refuse_unprovoked(self, start: Start) -> None:
        provoked = any(one.killed for one in self.starts)
        for error in start.errors.values():
            if not provoked and not isinstance(error, PeerLost):
                raise self._noted(error)

    def _hopeless(self) -> Exception:
        errors = list(self.starts[-1].errors.values())
        return self._noted(errors[0] if errors else MoECheckpointError(f"not done after {len(self.starts)} starts"))

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"repeat with seed {self.world.seed}; the last events were:\n{self.world.story()}")
        return error
