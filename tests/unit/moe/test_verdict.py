"""What a training process that ends for good says, and leaves to its launcher."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.errors import (
    MoECheckpointError,
    NoExactState,
    PeerLost,
    StoreFailure,
    UsageError,
)
from megatron.core.dist_checkpointing.moe.in_place.building import CannotBuildAlone
from megatron.core.dist_checkpointing.moe.in_place.process_groups import StillConnected
from megatron.core.dist_checkpointing.moe.standby.verdict import (
    VERDICT_FILE,
    forget_verdict,
    has_left_early,
    leave_early,
    leave_verdict,
    permanent_errors_end_the_job,
)


def fail(error: MoECheckpointError) -> None:
    with permanent_errors_end_the_job():
        raise error


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VERDICT_FILE, str(tmp_path / "verdict"))
    return tmp_path / "verdict"


@pytest.mark.parametrize(("kind", "code"), [(UsageError, "2"), (NoExactState, "1")])
def test_a_permanent_error_is_said_once_on_a_node_and_left_to_its_launcher(
    kind: type[MoECheckpointError], code: str, verdict: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(SystemExit) as ending:
                fail(kind("no"))
            assert ending.value.code == 0, "torchrun restarts what fails"
    assert (caplog.messages, verdict.read_text()) == (["no"], code)


@pytest.mark.parametrize("kind", [PeerLost, StoreFailure, StillConnected, CannotBuildAlone])
def test_an_error_that_a_restart_may_mend_passes(kind: type[MoECheckpointError], verdict: Path) -> None:
    with pytest.raises(kind):
        fail(kind("for now"))
    assert not verdict.exists()


def test_who_left_early_in_an_earlier_attempt_counts_no_more(verdict: Path) -> None:
    leave_verdict(2)
    leave_early()
    assert has_left_early()
    forget_verdict()
    assert not has_left_early()
    assert not verdict.exists()


def test_without_our_launcher_every_error_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VERDICT_FILE, raising=False)
    with pytest.raises(UsageError):
        fail(UsageError("no"))
    assert not leave_verdict(2)
    leave_early()
    assert not has_left_early()
