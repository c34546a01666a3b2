"""Which nodes get a place: whole allocation units first, then those whose memory holds copies, then who came first."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousState,
)

from megatron.pretrain import spare_nodes
from megatron.pretrain.allocation_units import UNIT, UNIT_NODES, Candidate, admitted, whole_units
from megatron.pretrain.processes import NODE_NAME
from megatron.pretrain.rendezvous import NodesHandler
from megatron.pretrain.spare_nodes import SpareHandler, SpareNotNeeded, _Executor
from megatron.pretrain.standby.run import parse_options


def line(text: str) -> list[Candidate]:
    """Nodes as `a1 b2:5 c1!`: unit and number, the last round in which it trained, `!` for one that has joined."""
    found = []
    for word in text.split():
        name, _, trained = word.rstrip("!").partition(":")
        found.append(Candidate(name, name[0], int(trained or -1), word.endswith("!")))
    return found


def places(text: str, most: int, unit_nodes: int = 1, *, least: int | None = None, is_late: bool = False) -> str:
    return " ".join(sorted(map(str, admitted(line(text), most, least or most, unit_nodes, is_late=is_late))))


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ("s1 s2 a1:3 a2:3", "a1 a2"),
        ("s1 a1:3 s2", "a1 s1"),
        ("a1:1 s1 b1:2", "a1 b1"),
        ("s1! a1:3 a2:3", "a1 s1"),
        ("s1 s2 s3", "s1 s2"),
        ("s1", "s1"),
    ],
)
def test_nodes_that_come_back_go_before_standbys_that_came_earlier(waiting: str, expected: str) -> None:
    assert places(waiting, 2) == expected


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ("c1 c2 a2:3 b1:3 b2:3", "b1 b2 c1 c2"),  # a1 is lost: a2 leaves with it
        ("c1 d1 d2 a2:3 b1:3 b2:3", "b1 b2 d1 d2"),  # c is no whole unit
        ("c1 c2 a2:3 b1:3 b2:3 a1:3", "a1 a2 b1 b2"),  # a1 is back before others took its place
        ("c1! c2 a2:3 b1:3 b2:3 a1:3", "a1 a2 c1 c2"),  # c has begun to join
        ("c1 c2 c3 b1:3 b2:3", "b1 b2 c1 c2"),
        ("c1 a2:3 b1:3 b2:3", "a2 b1 b2 c1"),  # no whole unit waits, so the job continues with parts
        ("a2:3 b1:3 b2:3", "b1 b2"),  # not all places can be filled: a whole unit may come
    ],
)
def test_a_unit_that_lost_a_node_is_replaced_as_a_whole(waiting: str, expected: str) -> None:
    assert places(waiting, 4, 2) == expected


def test_at_the_first_start_parts_of_units_wait_for_the_rest_until_it_is_late() -> None:
    assert places("a1 b1 b2 c1", 4, 2) == "b1 b2"
    assert places("a1 b1 b2 c1 c2", 4, 2) == "b1 b2 c1 c2"
    assert places("a1 b1 b2 c1", 4, 2, is_late=True) == "a1 b1 b2 c1"


def test_an_elastic_job_continues_with_fewer_whole_units() -> None:
    assert places("a2:3 b1:3 b2:3", 4, 2, least=2, is_late=True) == "b1 b2"


@pytest.mark.parametrize("unit_nodes", [1, 2, 4])
def test_whatever_waits_no_more_join_than_there_are_places_and_who_joined_stays(unit_nodes: int) -> None:
    for seed in range(300):
        draw = random.Random(seed)
        waiting = [
            Candidate(f"{unit}{number}", unit, draw.choice((-1, -1, 2, 3)))
            for unit, number in itertools.product("abcde", range(unit_nodes))
            if draw.random() < 0.8
        ]
        draw.shuffle(waiting)
        joined, most = set[Any](), 2 * unit_nodes
        for _ in range(most + 1):
            now = [Candidate(one.node, one.unit, one.trained, one.node in joined) for one in waiting]
            chosen = admitted(now, most, most, unit_nodes, is_late=bool(draw.getrandbits(1)))
            assert joined <= chosen, seed
            assert len(chosen) <= most, seed
            assert {one.node for one in whole_units(now, most, unit_nodes)} <= chosen, seed
            if new := sorted(chosen - joined):
                joined.add(draw.choice(new))
        assert len(joined) == min(most, len(waiting)) or len(waiting) < most, seed


class Backend:
    """The value that agents replace by compare-and-set."""

    def __init__(self) -> None:
        self.value, self.version = pickle.dumps(_RendezvousState()), 0

    def get_state(self) -> tuple[bytes, int]:
        return self.value, self.version

    def set_state(self, value: bytes, token: int | None) -> tuple[bytes, int, bool]:
        is_new = token == self.version
        if is_new:
            self.value, self.version = value, self.version + 1
        return self.value, self.version, is_new


class Agent:
    """One node's part in a rendezvous, a step at a time."""

    def __init__(
        self, name: str, backend: Any, monkeypatch: pytest.MonkeyPatch, *, unit_nodes: int = 2, least: int = 4
    ) -> None:
        for variable, value in ((NODE_NAME, name), (UNIT, name[0]), (UNIT_NODES, str(unit_nodes))):
            monkeypatch.setenv(variable, value)
        settings = self.settings = RendezvousSettings(
            "job", least, 4, RendezvousTimeout(), keep_alive_interval=timedelta(days=1), keep_alive_max_attempt=1
        )
        self.name = name
        # Torch numbers nodes by these, so that a unit's do not follow each other.
        self.node = _NodeDesc(name[1:] + name[0], 1, 0)
        self.holder = _BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        self.executor = _Executor(self.node, self.holder, settings)
        self.executor.since_s = float("inf")

    @property
    def state(self) -> Any:
        self.holder.sync()
        return self.holder.state

    def leave(self) -> None:
        """What an agent does before it meets again."""
        self.executor.run(_RendezvousExitOp(), float("inf"))

    def die(self) -> None:
        """What the others do with a node without heartbeats."""
        self.holder.sync()
        for found in (self.holder.state.participants, self.holder.state.last_heartbeats):
            found.pop(self.node)
        _remove_participant_epilogue(self.holder.state, self.settings)
        self.holder.mark_dirty()
        self.holder.sync()


class Step(Exception):
    """Raised in place of a pause, so that another agent takes its turn."""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stop(*, seconds: float) -> None:
        raise Step

    monkeypatch.setattr(dynamic_rendezvous, "_delay", stop)
    # Events of torch look at the whole stack of calls, which takes most of the time here.
    monkeypatch.setattr(_Executor, "_record", lambda self, **told: None)

    def until_all_wait(agents: list[Agent], seed: int) -> dict[str, int]:
        """Agents take turns until each has a place or waits; numbers by name."""
        draw, met = random.Random(seed), dict[str, int]()
        for _ in range(12 * len(agents)):
            one = draw.choice(agents)
            if one.name not in met:
                try:
                    one.executor.run(_RendezvousJoinOp(), float("inf"))
                except Step:
                    continue
                met[one.name] = one.state.participants[one.node]
        return met

    return until_all_wait


@pytest.mark.parametrize("seed", range(10))
def test_agents_replace_the_whole_unit_of_a_lost_node_and_number_units_in_blocks(
    seed: int, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend()
    agents = {name: Agent(name, backend, monkeypatch) for name in "a1 b1 a2 b2 c1 c2".split()}
    first = [agents[name] for name in "a1 b1 a2 b2".split()]
    numbers = play(first, seed)
    assert {frozenset(numbers[f"{unit}{node}"] for node in "12") for unit in "ab"} == {
        frozenset((0, 1)),
        frozenset((2, 3)),
    }
    assert play([agents["c1"], agents["c2"]], seed) == {}

    agents["a1"].die()
    for name in random.Random(seed).sample(["a2", "b1", "b2"], 3):
        agents[name].leave()
    numbers = play([one for name, one in agents.items() if name != "a1"], seed)
    assert set(numbers) == {"b1", "b2", "c1", "c2"}
    assert agents["a2"].node in agents["a2"].state.redundancy_list


@pytest.mark.parametrize("seed", range(10))
def test_survivors_keep_their_places_however_fast_standbys_are(
    seed: int, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend()
    agents = [Agent(f"{number}", backend, monkeypatch, unit_nodes=1) for number in range(7)]
    assert len(play(agents[:4], seed)) == 4
    assert play(agents[4:], seed) == {}
    agents[0].die()
    for left in range(1, 4):
        agents[left].leave()
        assert play(agents[4:], seed) == {}, "not all have met, however often standbys look"
    (first, *_) = [name for name, _ in vars(agents[1].state)["line"].values() if name in "456"]
    assert set(play(agents[1:], seed)) == {"1", "2", "3", first}


class Sick(Exception):
    """A node does not pass its check."""


@pytest.mark.parametrize("is_sick", [False, True])
def test_a_spare_whose_check_is_due_passes_it_beside_its_heartbeats_before_it_takes_a_place(
    is_sick: bool, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, checked = Backend(), list[bool]()
    agents = [Agent(f"{number}", backend, monkeypatch, unit_nodes=1) for number in range(5)]
    spare = agents[4]
    handler = SpareHandler(spare.node, spare.settings, "", HashStore(), spare.holder)
    spare.executor = vars(handler)["_executor"]

    def beating() -> bool:
        return any("KeepAlive" in thread.name for thread in threading.enumerate())

    def check() -> None:
        checked.append(beating() and spare.node not in spare.holder.state.participants)
        if is_sick:
            raise Sick

    handler.due_check = lambda: None if checked else check
    assert len(play(agents[:4], 0)) == 4
    assert play([spare], 0) == {}
    assert not checked
    agents[0].die()
    for one in agents[1:4]:
        one.leave()
    assert play(agents[1:4], 0) == {}
    with pytest.raises(Sick) if is_sick else contextlib.nullcontext():
        assert set(play(agents[1:], 0)) == {"1", "2", "3", "4"}
    assert checked == [True]
    assert not beating()
    assert (spare.node in agents[1].state.participants) != is_sick


def half_unit_of_an_elastic_job(play: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, list[Agent]]:
    """A node whose unit has lost the other one, and those that train on without it."""
    backend = Backend()
    agents = {name: Agent(name, backend, monkeypatch, least=2) for name in "a1 a2 b1 b2".split()}
    assert len(play([*agents.values()], 1)) == 4
    agents["a1"].die()
    for name in ("a2", "b1", "b2"):
        agents[name].leave()
    monkeypatch.setattr(RendezvousTimeout, "last_call", timedelta(microseconds=1))
    return agents["a2"], [agents["b1"], agents["b2"]]


def handler_of(agent: Agent) -> Any:
    """As of a node whose workers have trained."""
    handler: Any = object.__new__(SpareHandler)
    vars(handler).update(_executor=agent.executor, _state_holder=agent.holder, _settings=agent.settings, _trained=True)
    return handler


def test_what_is_left_of_a_unit_waits_for_the_rest_for_as_long_as_an_elastic_job_trains(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, others = half_unit_of_an_elastic_job(play, monkeypatch)
    assert set(play([*others, waits], 1)) == {"b1", "b2"}
    handler, ends = handler_of(waits), iter([RendezvousTimeoutError(), RendezvousClosedError()])

    def meet(_: object) -> None:
        play([waits], 1)
        raise next(ends)

    monkeypatch.setattr(NodesHandler, "next_rendezvous", meet)
    with pytest.raises(SpareNotNeeded):  # not the failure of a node that trained: the job has ended without it
        handler.next_rendezvous()


def test_a_spare_whose_store_is_gone_does_not_know_that_it_is_not_needed(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, others = half_unit_of_an_elastic_job(play, monkeypatch)
    assert set(play([*others, waits], 1)) == {"b1", "b2"}

    def meet(_: object) -> None:
        play([waits], 1)
        raise RendezvousConnectionError

    monkeypatch.setattr(NodesHandler, "next_rendezvous", meet)
    with pytest.raises(RendezvousConnectionError):
        handler_of(waits).next_rendezvous()


def test_a_job_that_cannot_meet_again_ends_with_the_failure_of_a_node_that_trained(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, _ = half_unit_of_an_elastic_job(play, monkeypatch)
    for error in (RendezvousTimeoutError, RendezvousClosedError):
        handler = handler_of(waits)

        def meet(_: object, error: type[Exception] = error) -> None:
            play([waits], 1)
            raise error

        monkeypatch.setattr(NodesHandler, "next_rendezvous", meet)
        with pytest.raises(error):
            handler.next_rendezvous()


def test_a_node_that_is_replaced_since_its_heartbeat_is_late_is_named_once(
    play: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ranks may be well: then no other line says why all start again."""
    backend = Backend()
    agents = [Agent(f"node-{number}", backend, monkeypatch, unit_nodes=1) for number in range(5)]
    assert len(play(agents[:4], 0)) == 4
    play(agents[4:], 0)
    one = agents[1]
    handler = SpareHandler(one.node, one.settings, "", HashStore(), one.holder)
    assert handler.num_nodes_waiting() == 0
    agents[2].die()
    play(agents[4:], 0)
    assert [handler.num_nodes_waiting() for _ in range(3)] == [1, 1, 1]
    (said,) = caplog.messages
    assert said == "no heartbeat from node-2 for 86400 s: replaced; all ranks restart"


def parsed(*given: str) -> Any:
    return parse_options([*given, "script.py"])


def test_flags_of_units_reach_the_rendezvous_and_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNIT, "")
    monkeypatch.setenv(UNIT_NODES, "")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf-3.node-17")
    parsed("--nnodes=4", "--rdzv-backend=c10d", "--moe-ckpt-unit=slurm", "--moe-ckpt-unit-nodes=2")
    assert (spare_nodes.os.environ[UNIT], spare_nodes.os.environ[UNIT_NODES]) == ("core.leaf-3", "2")
    monkeypatch.setenv(UNIT, "rack-7")
    parsed()
    assert (spare_nodes.os.environ[UNIT], spare_nodes.os.environ[UNIT_NODES]) == ("rack-7", "1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--nnodes=4 --rdzv-backend=c10d --moe-ckpt-unit=a --moe-ckpt-unit-nodes=3", "not a multiple"),
        ("--nnodes=4 --rdzv-backend=c10d --moe-ckpt-unit=a --moe-ckpt-unit-nodes=0", "not a multiple"),
        ("--nnodes=4 --rdzv-backend=c10d --moe-ckpt-unit-nodes=2", "give --moe-ckpt-unit LABEL"),
        ("--nnodes=4 --moe-ckpt-unit=a --moe-ckpt-unit-nodes=2", "give --rdzv-backend c10d"),
        ("--moe-ckpt-unit=slurm", "SLURM_TOPOLOGY_ADDR"),
        ("--moe-ckpt-unit=a\nb", "give letters"),
    ],
)
def test_units_that_cannot_be_are_refused_in_one_line(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
    monkeypatch.setenv(UNIT, "")
    with pytest.raises(SystemExit, match="2"):
        parsed(*given.split(" "))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_nodes_that_could_still_join_are_waited_for_by_no_clock_of_another_node(
    ahead_s: int, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, clock = Backend(), SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(spare_nodes, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    agents = {name: Agent(name, backend, monkeypatch, unit_nodes=1, least=2) for name in "a1 a2 b1".split()}
    assert not play([agents["a1"], agents["a2"]], 0), "others may still come"
    holder = agents["a1"].holder
    holder.sync()
    holder.state.deadline += timedelta(seconds=ahead_s)  # as another node's clock would tell it
    holder.mark_dirty()
    holder.sync()
    assert not play([agents["a1"], agents["a2"]], 1)
    clock.now_s += 29
    assert not play([*agents.values()], 2), "the third comes just in time"
    clock.now_s += 31
    assert play([*agents.values()], 3).keys() == agents.keys()
