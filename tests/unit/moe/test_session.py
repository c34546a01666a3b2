"""The session of a job without a strategy stands in for a real one wherever the loop calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.resharding.survivors import PreviousLayout
from megatron.core.dist_checkpointing.moe.runtime import protected_session
from megatron.core.dist_checkpointing.moe.runtime.opening import RECOVERY_PATIENCE
from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
from megatron.core.dist_checkpointing.moe.runtime.session import Request, Session
from megatron.core.dist_checkpointing.moe.types import StepJournal

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
    with session.stepping(8, StepJournal()):
        assert session.before_optimizer() == 0.0
    assert session.report() is None and session.communicator is None


@pytest.mark.parametrize(("given", "counted"), [((4, 0), True), (None, False), ((4,), False)])
def test_the_count_of_lost_tokens_continues_or_its_new_beginning_is_said(
    given: tuple[int, ...] | None, counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a checkpoint of an earlier release, or of a model with other layers."""
    session = Mock(lost_tokens=(0, 0), _rank=0)
    ProtectedSession.lost_before(session, 7, given)
    assert session.strategy.lost_before.call_args_list == [call(7, given)] * counted
    assert [line.split(":")[0] for line in caplog.messages] == ["lost tokens are counted from iteration 7 on"] * (
        not counted
    )


def test_what_another_layout_left_is_served_for_as_long_as_a_recovery_may_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Made(Exception):
        pass

    def made(*given: Any, **named: Any) -> None:
        raise Made(inspect.signature(PreviousLayout).bind(*given, **named).arguments)

    monkeypatch.setattr(protected_session, "PreviousLayout", made)
    session = Mock(config=MoECheckpointConfig(timeout_s=5.0))
    with pytest.raises(Made) as found:
        ProtectedSession._prepare_restart(session, None)
    assert found.value.args[0]["transport"] is session.patient
    assert found.value.args[0]["waits_s"] == RECOVERY_PATIENCE * 5.0, "a rank may read slow storage before it asks"


def test_agents_that_still_persist_are_waited_for_as_long_as_a_recovery_may_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Waited(Exception):
        pass

    def waited(transport: object, work: Callable[[], None]) -> None:
        monkeypatch.setattr(protected_session, "wait_for_agent", Mock(side_effect=Waited(transport)))
        work()

    for name in ("parallel_layout", "slot_of"):
        monkeypatch.setattr(protected_session, name, Mock())
    monkeypatch.setattr(protected_session, "raise_on_all_ranks", waited)
    session = Mock()
    with pytest.raises(Waited) as found:
        ProtectedSession._open_memory(session)
    assert found.value.args[0] is session.patient
