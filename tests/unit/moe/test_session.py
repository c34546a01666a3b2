"""The session of a job without a strategy stands in for a real one wherever the loop calls it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
from megatron.core.dist_checkpointing.moe.runtime.session import Request, Session

CALLS = sorted(name for name, member in vars(Session).items() if callable(member) and not name.startswith("_"))


@pytest.mark.parametrize("name", CALLS)
def test_it_is_called_like_a_real_one(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Session, ProtectedSession))
    assert list(ours.parameters) == list(theirs.parameters)


def test_nothing_happens_in_it_but_the_loading_of_a_checkpoint() -> None:
    session, trainer = Session(), SimpleNamespace(iteration=0)
    session.restore(trainer, Request(lambda: 7))  # type: ignore[arg-type]
    assert trainer.iteration == 7
    assert not session.rejoin() and not session.is_replaying and session.coordinator is None
    with session.stepping(8, None, None):
        assert session.before_optimizer() == 0.0
    assert session.report() is None and session.communicator is None
