"""The session of an unprotected job stands in for a real one wherever the loop calls it."""

import inspect

import pytest

from megatron.core.dist_checkpointing.moe.runtime.session import Session
from megatron.core.dist_checkpointing.moe.runtime.unprotected import Unprotected
from megatron.core.dist_checkpointing.moe.types import StepJournal

MEMBERS = sorted(name for name in vars(Session) if not name.startswith("_"))


def test_it_has_the_members_of_a_session_and_no_others():
    assert sorted(name for name in vars(Unprotected) if not name.startswith("_")) == MEMBERS


@pytest.mark.parametrize("name", [name for name in MEMBERS if callable(getattr(Session, name))])
def test_it_is_called_like_a_session(name):
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Unprotected, Session))
    assert list(ours.parameters.values()) == list(theirs.parameters.values())


def test_an_iteration_passes_through_it():
    session = Unprotected()
    assert session.look() is None and not session.rejoin() and not session.is_replaying
    with session.stepping(1, None, None):
        assert session.before_optimizer() == 0.0
    session.step_end(1, StepJournal())
    assert session.report() is None and session.communicator is None
