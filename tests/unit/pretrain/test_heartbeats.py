"""Nodes of a rendezvous are lost when they say no more that they are there, whatever time their clocks tell."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousState,
    _should_keep_alive,
)

from megatron.pretrain import rendezvous
from megatron.pretrain.rendezvous import HEARTBEAT_S, MISSED_MEETING_S, MISSED_S, NodesHandler

MISSED_HEARTBEATS = round(MISSED_S / HEARTBEAT_S)
HERE, THERE = _NodeDesc("here", 1, 0), _NodeDesc("there", 2, 0)
SETTINGS = RendezvousSettings(
    "job",
    2,
    2,
    RendezvousTimeout(),
    keep_alive_interval=timedelta(seconds=HEARTBEAT_S),
    keep_alive_max_attempt=MISSED_HEARTBEATS,
)


class Nodes:
    """The state of two nodes, as the node that is here looks at it once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.state = _RendezvousState()
        backend: Any = SimpleNamespace(get_state=lambda: (pickle.dumps(self.state), 0), set_state=None, name="here")
        self.holder = _BackendRendezvousStateHolder(backend, SETTINGS, cache_duration=0)
        self.handler = NodesHandler(HERE, SETTINGS, "here", HashStore(), self.holder)
        self.says(HERE)
        self.says(THERE)

    def says(self, node: _NodeDesc, ahead: timedelta = timedelta()) -> None:
        """A node writes what its clock tells, which is so far ahead of the one that is here."""
        self.state.participants.setdefault(node, 0)
        self.state.last_heartbeats[node] = datetime.now(UTC) + timedelta(seconds=self.now_s) + ahead

    def lost(self, after_s: float = 1.0) -> set[str]:
        """Who is lost after one more look."""
        self.now_s += after_s
        self.holder.sync()
        return {node.addr for node in self.state.participants.keys() - self.holder.state.participants.keys()}


@pytest.mark.parametrize("ahead", [timedelta(days=-1), timedelta(seconds=-30), timedelta(days=1)], ids=str)
def test_a_node_whose_clock_is_off_stays_for_as_long_as_it_is_heard_of(
    ahead: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch)
    for _ in range(30):
        nodes.says(HERE)
        nodes.says(THERE, ahead)
        assert not nodes.lost()
    for second in range(MISSED_HEARTBEATS + 2):
        nodes.says(HERE)
        assert bool(nodes.lost()) == (second >= MISSED_HEARTBEATS)
    assert nodes.lost() == {"there"}


@pytest.mark.parametrize(("trained", "spare"), [(True, None), (True, THERE), (False, None)])
def test_a_node_without_heartbeats_is_lost_sooner_where_few_that_trained_meet_again(
    trained: bool, spare: _NodeDesc | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch)
    assert not nodes.lost()
    if trained:
        vars(nodes.handler).update(_meets_since_s=nodes.now_s, _trained_nodes={HERE, THERE} - {spare})
    assert not nodes.lost(MISSED_MEETING_S + 0.01)  # which says nothing: the store stood still
    assert not nodes.lost(MISSED_MEETING_S / 2)
    assert not nodes.lost(MISSED_MEETING_S / 2)
    assert nodes.lost(0.01) == ({"there"} if trained and spare is None else set())


def test_a_node_that_did_not_look_for_long_loses_nobody_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch)
    nodes.says(THERE)
    assert not nodes.lost(after_s=100.0)


def test_a_store_that_stood_still_for_all_costs_nobody_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch)
    for _ in range(3):
        nodes.says(HERE)
        nodes.says(THERE)
        assert not nodes.lost()
    assert not nodes.lost(after_s=MISSED_S + 1.0)
    for _ in range(MISSED_HEARTBEATS):
        assert not nodes.lost()
    assert nodes.lost() == {"there"}  # this node never takes itself for lost


def test_a_node_whose_own_clock_is_set_back_says_again_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch)
    nodes.says(HERE, timedelta(days=1))
    nodes.lost()
    assert _should_keep_alive(_RendezvousContext(HERE, nodes.holder.state, SETTINGS))
