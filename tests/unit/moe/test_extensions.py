"""An extension, like a strategy, is a folder of its own and one line of a table; a job imports what it asks for."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe import extensions
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.extensions import (
    EXTENSIONS,
    Additions,
    Extension,
    asked_for,
    persist_agent,
    wait_for_agent,
)
from megatron.core.dist_checkpointing.moe.extensions.persist_agent import agent
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, owners_of

ENGINE = "megatron.core.dist_checkpointing.moe"
ASKING: dict[str, dict[str, Any]] = {
    "shard": {"shard": "equal"},
    "gradient_replicas": {"replicate": "gradients"},
    "bubbles": {"copy_placement": "bubbles"},
    "persist_agent": {"persist_agent_s": 5.0},
    "capacity_boost": {"strategy": "selective", "capacity_boost": 10},
}


def imported_by(code: str) -> set[str]:
    """Names of modules of the engine that a process has imported after this."""
    listing = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], text=True, capture_output=True, check=True)
    return {name.removeprefix(f"{ENGINE}.") for name in done.stdout.splitlines()[-1].split() if name.startswith(ENGINE)}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_each_is_there_for_jobs_that_ask_for_it_alone(name: str) -> None:
    (kind,) = asked_for(MoECheckpointConfig(**{"strategy": "full"} | ASKING[name]))
    assert kind.__module__ == f"{ENGINE}.extensions.{name}" and issubclass(kind, Extension)
    assert kind.__doc__


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["full", "sparse"])
def test_a_job_imports_neither_extensions_nor_strategies_that_it_does_not_ask_for(strategy: str) -> None:
    code = f"""
from {ENGINE}.manager import MoECheckpointManager
from {ENGINE}.stock.hooks import Hooks
from {ENGINE}.strategies import STRATEGIES
from {ENGINE}.extensions import asked_for
from {ENGINE}.config import MoECheckpointConfig
STRATEGIES[{strategy!r}], asked_for(MoECheckpointConfig(strategy={strategy!r}))
"""
    found = imported_by(code)
    flags = {"extensions.partial_saves", "extensions.partial_saves.flags"}  # which every job has
    folders = {name.split(".")[1] for name in found - flags if name.startswith(("extensions.", "strategies."))}
    assert folders & (EXTENSIONS.keys() | {"elastic", "partial_saves", "lossy", *STRATEGIES}) == {strategy}


def test_one_that_does_nothing_is_a_folder_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModuleType(f"{ENGINE}.extensions.idle")
    folder.EXTENSION = type("Idle", (Extension,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, folder.__name__, folder)
    monkeypatch.setattr(extensions, "EXTENSIONS", {"idle": lambda config: True})
    (idle,) = asked_for(MoECheckpointConfig(strategy="full"))
    one, added = idle(session=None), Additions()
    for call in (one.chosen, one.opened, one.passes, one.reduced, one.copying, one.failed, one.stop):
        call()
    one.protects(added)
    assert one.share is None and one.reported("as it was") == "as it was"
    assert (added.steps, added.sender, added.sends, added.numbers, added.beyond) == (None,) * 5
    assert added.pace(1 << 20, 0.1) is None


def test_a_setting_is_for_the_strategy_whose_line_names_how_it_begins() -> None:
    assert [owners_of(name) for name in ("window", "pec_k_snapshot", "capacity_boost", "interval")] == [
        ("sparse",), ("pec",), ("selective",), (),
    ]  # fmt: skip


def test_a_job_waits_for_the_agent_of_an_earlier_attempt_though_it_has_none_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[Path, float | None]] = []
    monkeypatch.setattr(agent, "wait_for_agent", lambda slot, limit_s: waited.append((slot, limit_s)))
    wait_for_agent(tmp_path, None)
    assert waited == []
    (tmp_path / agent.LOCK).touch()
    wait_for_agent(tmp_path, None)
    assert waited == [(tmp_path, None)]


def test_an_agent_continues_where_training_fails_and_is_let_go_at_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    fake = SimpleNamespace(close=lambda: closed.append(True), announce=lambda orders: None)
    monkeypatch.setattr(persist_agent, "PersistAgent", lambda *facts: fake)
    config = MoECheckpointConfig(strategy="full", persist_dir=str(tmp_path), persist_agent_s=5.0)
    memory, control = SimpleNamespace(store=SimpleNamespace(directory=tmp_path)), SimpleNamespace(rank=0)
    one = persist_agent.EXTENSION(SimpleNamespace(config=config, control=control, memory=memory, held=ExitStack()))
    one.protects(Additions())
    one.failed()
    assert closed == []
    one.stop()
    assert closed == [True]
