"""A node that is lost counts as lost soon where the others meet again, and not while they train."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from megatron.pretrain import rendezvous
from megatron.pretrain.rendezvous import NodesHandler


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
