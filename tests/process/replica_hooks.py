"""What tests of replication do inside workers: exchange snapshots of real stores, be silent, be killed.

Each rank leaves a JSON file of facts; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, Manifest, NoRoom, PeerLost, SnapshotId
from megatron.core.dist_checkpointing.moe.replication import connections, staged
from megatron.core.dist_checkpointing.moe.replication.replicator import Exchange, ReplicaOffer, Replicator
from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport
from megatron.core.dist_checkpointing.moe.replication.transports import TRANSPORTS
from megatron.core.dist_checkpointing.moe.storage.manifest import decode, encode
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import Topology

RANKS = 4
VICTIM = 3
DAMAGED, FULL, SKIPPING = 1, 2, 0
TIMEOUT_S = 4.0
CHUNK_BYTES = 300_000
LAYOUT = Layout.of(
    [Field("weights", "float32", (511, 1000)), Field("nothing", "uint8", (0,)), Field("b", "uint8", (5,))]
)


@contextlib.contextmanager
def replicating(folder: str, kind: str) -> Iterator[None]:
    """Instead of a job: the whole scenario over one kind of transport.

    The victim plays in a child, so that its worker lives on.
    """
    rank = int(os.environ["RANK"])
    if rank == VICTIM:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            raise SystemExit(0 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else 1)
    warnings.simplefilter("error", UserWarning)
    connections.CHUNK_BYTES = staged.CHUNK_BYTES = staged.LEAST_BYTES = CHUNK_BYTES
    _Scenario(rank, Path(folder), kind).play()
    raise SystemExit(0)
    yield


def content(iteration: int, owner: int) -> dict[str, bytes]:
    """What `owner` has after `iteration`."""
    draw = np.random.default_rng([iteration, owner])
    return {field.key: draw.bytes(field.nbytes) for field in LAYOUT.fields}


class _IncomingReplica:
    def __init__(self, store: MemoryStore, manifest: Manifest) -> None:
        self._manifest = manifest
        self._writer = store.reserve(manifest.snapshot, manifest.layout)

    @property
    def buffer(self) -> memoryview:
        return self._writer.whole()

    def seal(self) -> None:
        self._writer.seal(self._manifest.facts, self._manifest.checksums)

    def abandon(self) -> None:
        self._writer.abandon()


class _Receiver:
    """Keeps replicas in a memory store; `before` may do anything when room is asked for."""

    def __init__(self, store: MemoryStore, before: Callable[[], None] = lambda: None) -> None:
        self._store, self._before = store, before

    def manifest(self, owner: int, data: bytes) -> Manifest:
        return decode(data, f"an offer of rank {owner}")

    def holds(self, wanted: Manifest) -> bool:
        return wanted.snapshot in self._store.snapshots().sealed

    def lacking(self, wanted: Manifest) -> None:
        return None

    def begin(self, wanted: Manifest) -> _IncomingReplica:
        self._before()
        return _IncomingReplica(self._store, wanted)


class _Tampering:
    """A transport that does something to raw bytes: flips a bit of the first that arrive, or dies in the middle."""

    def __init__(self, inner: TcpTransport, *, flip: bool = False, die: Callable[[], None] | None = None):
        self._inner, self._flip, self._die = inner, flip, die

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, to: int, data: Any) -> Any:
        if self._die is not None and memoryview(data).nbytes == LAYOUT.nbytes:
            self._inner.send(to, memoryview(data)[: 3 * CHUNK_BYTES]).wait()
            self._die()
        return self._inner.send(to, data)

    def receive(self, source: int, into: memoryview) -> Any:
        transfer = self._inner.receive(source, into)
        if self._flip and into.nbytes == LAYOUT.nbytes:
            self._flip = False
            return _Flipped(transfer, into)
        return transfer


class _Flipped:
    def __init__(self, inner: Any, into: memoryview) -> None:
        self._inner, self._into = inner, into

    def wait(self) -> None:
        self._inner.wait()
        self._into[1234] ^= 16
        del self._into


class _Scenario:
    """All that one rank does, in the same order on all ranks."""

    def __init__(self, rank: int, folder: Path, kind: str) -> None:
        self.rank, self._folder, self._kind, self.facts = rank, folder, kind, {}
        wait = datetime.timedelta(seconds=120)
        self._rendezvous = TCPStore("localhost", int(os.environ["MASTER_PORT"]), RANKS, rank == 0, wait)
        training = PrefixStore("training", self._rendezvous)
        torch.distributed.init_process_group("gloo", store=training, rank=rank, world_size=RANKS)
        self._survivors = torch.distributed.new_group([at for at in range(RANKS) if at != VICTIM])
        memory = folder / f"node-{rank}"
        memory.mkdir()
        self._store = MemoryStore(memory, "job", 0, (LAYOUT.nbytes,) * 3)
        self._lane = ThreadPoolExecutor(1)
        self._transport: Any = None

    def play(self) -> None:
        self._transport = self._beside(self._connect)
        self.facts["numbers"] = self._beside(self._numbers)
        self.facts["bytes"] = self._beside(self._messages)
        for replicas in (1, 2):
            self.facts[f"r={replicas}"] = self._beside(lambda r=replicas: self._kept(r, self._exchange(r, r)))
        self.facts["again"] = self._kept(2, self._exchange(2, 2))
        self._free()
        self.facts["flipped"] = self._flipped()
        self.facts["full"] = self._refused()
        self.facts["skip"] = self._kept(5, self._exchange(5, 2, skip=self.rank == SKIPPING))
        self.facts["silent"] = self._beside(self._silent, alone=True)
        self.facts["renewed"] = self._beside(self._renewed)
        self._write()
        self.facts["killed"] = self._beside(self._killed, alone=True)
        self._write()
        self._rendezvous.set(f"ended/{self.rank}", "")
        if self.rank == 0:
            self._rendezvous.wait([f"ended/{rank}" for rank in range(RANKS) if rank != VICTIM])

    def _write(self) -> None:
        (self._folder / f"rank-{self.rank}.json").write_text(json.dumps(self.facts))

    def _beside(self, work: Callable[[], Any], *, alone: bool = False) -> Any:
        """What `work` returns on the lane while the main thread trains with all ranks, or without the victim."""
        task: Future[Any] = self._lane.submit(work)
        if not (alone and self.rank == VICTIM):
            rounds = self._train(task, self._survivors if alone else torch.distributed.group.WORLD)
            self.facts.setdefault("rounds of training", []).append(rounds)
        return task.result()

    def _train(self, task: Future[Any], group: Any) -> int:
        """Collectives of the main thread until the lane is through on all ranks of the group."""
        ranks, rounds, ended = torch.distributed.get_world_size(group), 0, 0
        while ended < ranks:
            numbers = torch.tensor([int(task.done()), 1])
            torch.distributed.all_reduce(numbers, group=group)
            ended, counted = numbers.tolist()
            assert counted == ranks
            rounds += 1
            time.sleep(0.001)  # leaves the machine to other tests
        return rounds

    def _connect(self) -> TcpTransport:
        return TRANSPORTS[self._kind](self._rendezvous, self.rank, RANKS, "replicas", TIMEOUT_S, address="127.0.0.1")

    def _numbers(self) -> dict[str, Any]:
        values = [self.rank, -self.rank, 2**60 + self.rank]
        return {
            "least": self._transport.least(values),
            "total": self._transport.total(values),
            "gathered": self._transport.gather({"rank": self.rank, "text": "ä" * self.rank, "none": None}),
            "nothing": self._transport.least([]),
        }

    def _messages(self) -> list[bool]:
        """Messages of many sizes around the ring, all posted before any is waited for."""
        to, source = (self.rank + 1) % RANKS, (self.rank - 1) % RANKS
        sizes = (5, 0, CHUNK_BYTES, 1, CHUNK_BYTES + 1, 5 * CHUNK_BYTES)
        into = [bytearray(size) for size in sizes]
        under_way = [self._transport.receive(source, memoryview(buffer)) for buffer in into]
        under_way += [self._transport.send(to, bytes([self.rank + at]) * size) for at, size in enumerate(sizes)]
        for transfer in under_way:
            transfer.wait()
        equal = [buffer == bytes([source + at]) * len(buffer) for at, buffer in enumerate(into)]
        for buffer in into:
            buffer.append(0)  # fails while anything refers to it
        return equal

    def _exchange(
        self,
        iteration: int,
        replicas: int,
        *,
        transport: Any = None,
        before: Callable[[], None] = lambda: None,
        skip: bool = False,
    ) -> Exchange:
        own = SnapshotId(iteration, self.rank)
        if own not in self._store.snapshots().sealed:
            self._free()
            with self._store.reserve(own, LAYOUT) as writer:
                for key, data in content(iteration, self.rank).items():
                    writer.put(key, data)
                writer.seal(Facts("job"))
        place = place_replicas(Topology(RANKS, ranks_per_node=1), replicas)
        transport = transport or self._transport
        replicator = Replicator(transport, place.peers[self.rank], place.kept_by[self.rank])
        with self._store.open(own) as reader:
            offer = partial(ReplicaOffer, "snapshot", encode(reader.manifest))  # the raw bytes in no frame of this test
            receiver = _Receiver(self._store, before)
            return replicator.exchange(iteration, None if skip else [offer(reader.raw())], receiver)

    def _kept(self, iteration: int, exchange: Exchange) -> dict[str, Any]:
        """What came of an exchange, and whose bytes the store has in truth."""
        exact = []
        for snapshot in self._store.snapshots().sealed:
            with self._store.open(snapshot) as reader:
                expected = content(iteration, snapshot.rank)
                if snapshot.iteration == iteration and all(reader.read(key) == expected[key] for key in expected):
                    exact.append(snapshot.rank)
        return {
            "acknowledged": exchange.acknowledged,
            "kept": [owner for owner, _ in exchange.kept],
            "exact": exact,
            "sent": exchange.sent_bytes / LAYOUT.nbytes,
            "received": exchange.received_bytes / LAYOUT.nbytes,
            "failures": exchange.failures,
        }

    def _flipped(self) -> dict[str, Any]:
        transport = _Tampering(self._transport, flip=self.rank == DAMAGED)
        return self._kept(3, self._exchange(3, 2, transport=transport))

    def _refused(self) -> dict[str, Any]:
        def no_room() -> None:
            if self.rank == FULL:
                raise NoRoom("all segments are in use")

        return self._kept(4, self._exchange(4, 2, before=no_room))

    def _silent(self) -> dict[str, Any]:
        """The victim does not answer until all others have noticed."""

        def be_silent() -> None:
            if self.rank == VICTIM:
                self._rendezvous.wait([f"noticed/{rank}" for rank in range(RANKS) if rank != VICTIM])

        facts = self._lost(6, lambda: self._exchange(6, 2, before=be_silent))
        self._rendezvous.set(f"noticed/{self.rank}", "")
        return facts

    def _renewed(self) -> dict[str, Any]:
        refused = ""
        try:
            self._transport.total([1])
        except PeerLost as error:
            refused = str(error)
        self._transport.renew()
        return {"before": refused, **self._kept(7, self._exchange(7, 2))}

    def _killed(self) -> dict[str, Any]:
        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        transport = _Tampering(self._transport, die=die if self.rank == VICTIM else None)
        facts = self._lost(8, lambda: self._exchange(8, 2, transport=transport))
        began_s = time.monotonic()
        try:
            self._transport.renew()
        except PeerLost as error:
            facts |= {"renewal": str(error), "renewal_s": time.monotonic() - began_s}
        return facts

    def _lost(self, iteration: int, work: Callable[[], object]) -> dict[str, Any]:
        """What an exchange that must fail says, and what it leaves in the store, while its error is still kept."""
        began_s = time.monotonic()
        try:
            work()
        except PeerLost as error:
            kept_error = error
        else:
            return {"error": None}
        waited_s = time.monotonic() - began_s
        sealed = [[snapshot.iteration, snapshot.rank] for snapshot in self._store.snapshots().sealed]
        self._free()
        return {"error": str(kept_error), "waited_s": waited_s, "sealed": sealed, "free": self._free_segments()}

    def _free_segments(self) -> int:
        """How many segments can be written: those that no view refers to."""
        with contextlib.ExitStack() as stack:
            for at in range(4):
                try:
                    stack.enter_context(self._store.reserve(SnapshotId(99, at), LAYOUT))
                except (NoRoom, UsageError):
                    return at
        return 4

    def _free(self) -> None:
        for snapshot in self._store.snapshots().sealed:
            self._store.free(snapshot)
