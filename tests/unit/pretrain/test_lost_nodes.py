"""A node that is lost counts as lost soon where the others meet again, and not while they train."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, RendezvousTimeout

from megatron.pretrain import rendezvous
from megatron.pretrain.rendezvous import MISSED_MEETING_S, MISSED_S, Beats, NodesHandler

SOON_S = MISSED_MEETING_S + 0.01


class Kept(RendezvousBackend):
    """The state of a rendezvous in this process."""

    name = "kept"

    def __init__(self) -> None:
        self._state, self._number = b"", 0

    def get_state(self) -> Any:
        return (self._state, self._number) if self._state else None

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if token != (self._number or None):
            return self._state, self._number, False
        self._state, self._number = state, self._number + 1
        return self._state, self._number, True


def test_a_node_is_silent_whose_heartbeat_does_not_change() -> None:
    beats = Beats()
    assert not beats.silent({"a": 1, "b": 1}, 0.0)
    assert not beats.silent({"a": 2, "b": 1}, 1.0)
    assert beats.silent({"a": 2, "b": 1}, SOON_S) == {"b"}
    assert not beats.silent({"a": 3, "b": 2}, 2 * SOON_S)


def test_clocks_of_nodes_do_not_matter_nor_when_a_node_came() -> None:
    beats = Beats()
    assert not beats.silent({"a": -3600}, 100.0)
    assert not beats.silent({"a": 3600, "b": 0}, 100.0 + SOON_S)
    assert not beats.silent({"a": 1}, 100.0 + 2 * SOON_S)
    assert not beats.silent({"a": 1, "b": 0}, 100.0 + 3 * SOON_S - 0.02)


def test_nodes_that_meet_again_wait_for_a_lost_one_no_longer_than_for_a_few_heartbeats() -> None:
    backend, store = Kept(), HashStore()

    def node(name: str) -> NodesHandler:
        timeout = RendezvousTimeout(join=timedelta(seconds=60), last_call=timedelta(seconds=60))
        missed = round(MISSED_S / rendezvous.FEW_HEARTBEAT_S)
        handler: NodesHandler = NodesHandler.from_backend(
            "job", store, backend, 2, 2, name, timeout, keep_alive_interval=rendezvous.FEW_HEARTBEAT_S,  # type: ignore[arg-type]
            keep_alive_max_attempt=missed,
        )  # fmt: skip
        return handler

    with ThreadPoolExecutor(2) as threads:
        first = node("a")
        list(threads.map(lambda one: one.next_rendezvous(), [first, node("b")]))
        begun_s = time.monotonic()  # nobody has the second one any more, and so it says nothing
        found = list(threads.map(lambda one: one.next_rendezvous(), [first, node("c")]))
    assert time.monotonic() - begun_s < 0.8 * MISSED_S
    assert {met.rank for met in found} == {0, 1}


@pytest.mark.parametrize(
    ("nodes", "conf", "beat_s", "missed"),
    [(2, {}, 0.25, 20), (64, {}, 1.0, 5), (64, {"keep_alive_interval": "2", "keep_alive_max_attempt": "3"}, 2.0, 3)],
)
def test_how_often_nodes_say_that_they_are_there_follows_from_their_number_and_the_flag(
    nodes: int, conf: dict[str, str], beat_s: float, missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(rendezvous, "create_backend", lambda params: (Kept(), HashStore()))

    class Handler(NodesHandler):
        @classmethod
        def from_backend(cls, *arguments: Any, **options: Any) -> Any:
            given.update(options)
            return super().from_backend(*arguments, **options)

    registry = RendezvousHandlerRegistry()
    monkeypatch.setattr(rendezvous, "rendezvous_handler_registry", registry)
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    rendezvous.register_backend(Handler)
    params = RendezvousParameters(rendezvous.BACKEND, "127.0.0.1:0", "job", nodes, nodes, **conf)
    registry.create_handler(params)
    assert (given["keep_alive_interval"], given["keep_alive_max_attempt"]) == (beat_s, missed)
