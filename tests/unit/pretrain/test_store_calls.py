"""What nodes and ranks ask of the one server of a store while they meet: so much for each, however many there are."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, Store

from megatron.core.dist_checkpointing.moe.ports import PeerLost
from megatron.core.dist_checkpointing.moe.replication import agreement
from megatron.core.dist_checkpointing.moe.replication.agreement import ConnectionEpochs, gathered_by_store
from megatron.core.dist_checkpointing.moe.runtime.peer_links import PeerLinks
from megatron.pretrain.standby.meeting import NodeRank, NodeRankAgreement

PATIENCE = timedelta(seconds=30)
SIZES = (8, 64, 512)


class CountedStore(Store):
    """Counts calls, and the keys and bytes that come back with them. Whoever waits for a key is woken by that key."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.read_bytes = Counter[str](), 0
        self._values: dict[str, bytes] = {}
        self._lock, self._there = threading.Lock(), defaultdict[str, threading.Event](threading.Event)

    def _count(self, call: str, values: Sequence[bytes] = ()) -> None:
        self.calls[call] += 1
        self.read_bytes += sum(map(len, values))

    def _put(self, key: str, value: bytes | str, before: bytes = b"") -> None:
        self._values[key] = before + (value.encode() if isinstance(value, str) else value)
        self._there[key].set()

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        for key in keys:
            with self._lock:
                there = self._there[key]
            if not there.wait(PATIENCE.total_seconds()):
                raise DistStoreError(key)
        return [self._values[key] for key in keys]

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._count("set")
            self._put(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        with self._lock:
            self._count("multi_set")
            for one in zip(keys, values, strict=True):
                self._put(*one)

    def append(self, key: str, value: Any) -> None:
        with self._lock:
            self._count("append")
            self._put(key, value, self._values.get(key, b""))

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._count("add")
            self._put(key, str(int(self._values.get(key, b"0")) + amount))
            return int(self._values[key])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._lock:
            self._count("compare_set")
            if not expected and key not in self._values:
                self._put(key, desired)
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            self._count("check")
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key], "get")[0]

    def multi_get(self, keys: Sequence[str], call: str = "multi_get") -> list[bytes]:
        values = self._read(keys)
        with self._lock:
            self._count(call, values)
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta = PATIENCE) -> None:
        with self._lock:
            self._count("wait")
        self._read(keys)


def asked(parts: int, part: Callable[[Store, int], Any]) -> tuple[CountedStore, list[Any]]:
    """The store after all of so many have done their part at the same time, and what each came to."""
    store = CountedStore()
    with ThreadPoolExecutor(parts) as threads:
        return store, list(threads.map(lambda index: part(store, index), range(parts)))


@pytest.mark.parametrize("nodes", SIZES)
def test_a_node_asks_for_its_number_and_for_where_workers_meet_by_a_few_calls(nodes: int) -> None:
    def meet(store: Store, index: int) -> tuple[int, Any]:
        agreement_ = NodeRankAgreement(store, index, nodes)
        number = agreement_.number(NodeRank((index + 1) % nodes, nodes))
        place = agreement_.workers(number, starts=index, address="127.0.0.1")
        return number, (place.port, place.start)

    store, found = asked(nodes, meet)
    assert [number for number, _ in found] == [(index + 1) % nodes for index in range(nodes)]
    assert {start for _, (_, start) in found} == {nodes - 1}
    assert len({place for _, place in found}) == 1
    assert store.calls.total() <= 4 * nodes + 4
    assert store.read_bytes <= 100 * nodes


@pytest.mark.parametrize("ranks", SIZES)
def test_a_rank_hears_by_a_few_calls_and_bytes_what_the_first_makes_of_the_values_of_all(ranks: int) -> None:
    def told(store: Store, rank: int) -> Any:
        return gathered_by_store(
            store, "values", rank, ranks, [rank, "x" * 1000], lambda all_: [len(all_), all_[-1][0]], 30.0
        )

    store, found = asked(ranks, told)
    assert found == [[ranks, ranks - 1]] * ranks
    assert store.read_bytes <= 1100 * ranks  # those of all once, and a few to each rank
    assert store.calls.total() <= 5 * ranks + 4  # one of a rank says that it waits, for whoever names those who do not


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only while somebody sleeps."""
    clock = SimpleNamespace(now_s=0.0)

    def sleep(pause_s: float) -> None:
        clock.now_s += pause_s

    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    return clock


@pytest.mark.parametrize("ranks", SIZES)
def test_ranks_that_all_give_up_name_who_did_not_come_by_a_few_calls_each(ranks: int, clock: SimpleNamespace) -> None:
    store = CountedStore()
    for rank in range(ranks - 1):
        with pytest.raises(PeerLost, match="did not come"):
            ConnectionEpochs(store, rank, ranks).meet(0.0)
    assert store.calls.total() <= 8 * ranks


@pytest.mark.parametrize("ranks", [512, 16_384, 65_536])
def test_ranks_that_wait_for_one_ask_together_no_oftener_than_a_store_answers(
    ranks: int, clock: SimpleNamespace
) -> None:
    store = CountedStore()
    with pytest.raises(PeerLost, match="waited 100 s"):
        ConnectionEpochs(store, 0, ranks).meet(100.0)
    assert ranks * store.calls["check"] / clock.now_s < 30_000  # the first ones come sooner


@pytest.mark.parametrize("ranks", SIZES[:2])
def test_a_rank_asks_for_the_places_of_its_links_alone(ranks: int) -> None:
    store, links = asked(ranks, lambda store, rank: PeerLinks(store, rank, ranks, "127.0.0.1", 30.0))
    for one in links:
        one.end()
    assert store.calls.total() == ranks * 3


def test_a_node_that_does_not_come_is_named_by_the_first_one() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("slots/had/2", "null")
    with pytest.raises(DistStoreError, match=r"waited 0.2 s for slots/had/1, slots/had/3$"):
        NodeRankAgreement(store, 0, 4).number(None)
    store.set("slots/starts/1", "0")
    with pytest.raises(DistStoreError, match=r"waited 0.2 s for slots/starts/2$"):
        NodeRankAgreement(store, 0, 3).workers(0, 0, "127.0.0.1")
