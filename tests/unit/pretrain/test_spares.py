"""Nodes that wait for a place in a job start standbys once it is known that its script takes slots."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler

from megatron.pretrain.standby import meeting
from megatron.pretrain.standby.meeting import StandbyNotice

WAIT_S = 30


def handler(store: Any, run_id: str = "job") -> RendezvousHandler:
    return cast(RendezvousHandler, SimpleNamespace(_store=store, get_run_id=lambda: run_id))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setattr(meeting, "LOOK_S", 0.01)
    return HashStore()


def test_what_one_node_tells_the_others_of_its_job_hear(store: HashStore) -> None:
    spare = StandbyNotice(handler(store))
    assert not spare.heard()
    StandbyNotice(handler(store)).tell()
    assert spare.heard()
    assert not StandbyNotice(handler(store, "another job")).heard()


def test_a_single_node_has_nobody_to_tell() -> None:
    alone = StandbyNotice(cast(RendezvousHandler, SimpleNamespace(get_run_id=lambda: "job")))
    alone.tell()
    assert not alone.heard()


def test_a_node_that_waits_starts_standbys_once_ranks_have_taken_slots_and_not_before(store: HashStore) -> None:
    node, called, looks = StandbyNotice(handler(store)), threading.Event(), threading.Semaphore(0)
    heard, node.heard = node.heard, lambda: (looks.release(), heard())[1]  # type: ignore[method-assign]
    with node.heeded(called.set):
        assert looks.acquire(timeout=WAIT_S)
        assert looks.acquire(timeout=WAIT_S), "the second look comes after what the first one led to"
        assert not called.is_set(), "a script that takes no slots would train by itself"
        StandbyNotice(handler(store)).tell()
        assert called.wait(WAIT_S)
    assert not [one for one in threading.enumerate() if one.name == "moe-ckpt-standbys"]


@pytest.mark.parametrize("error", [OSError("no memory"), DistNetworkError("the store is gone")])
def test_a_node_that_cannot_start_one_says_so_and_waits_on(
    error: Exception, store: HashStore, caplog: pytest.LogCaptureFixture
) -> None:
    node, tried = StandbyNotice(handler(store)), threading.Event()
    node.tell()

    def fail() -> None:
        tried.set()
        raise error

    with node.heeded(fail):
        assert tried.wait(WAIT_S)
    assert [one.message for one in caplog.records] == [f"no standby while this node waits: {error}"]
