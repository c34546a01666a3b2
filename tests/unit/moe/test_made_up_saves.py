"""Saves and exits that the stock loop missed because of a fault, made up for where all ranks stand at one iteration."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from stock_stand_in import one_rank

from megatron.core.dist_checkpointing.moe.stock import iteration
from megatron.core.dist_checkpointing.moe.stock.iteration import DeferredSaves

SETTINGS = {"save": "there", "save_interval": 3, "exit_interval": None, "eval_interval": None, "do_valid": False}


def made_up(newest: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[bool, list[int]]:
    """Whether a job that stands at iteration 6 ends there, and what it saves."""
    args = SimpleNamespace(**SETTINGS, micro_batch_size=1, data_parallel_size=1, iteration=6)
    vars(args).update(settings)
    loop = SimpleNamespace(get_args=lambda: args, one_logger_utils=SimpleNamespace(track_e2e_metrics=lambda: 1 / 0))
    saved: list[int] = []

    def save(at: int, *_: object, **__: object) -> None:
        loop.one_logger_utils.track_e2e_metrics()  # divides by the iterations that this process has trained
        saved.append(at)

    loop.save_checkpoint_and_time = save
    state: Any = SimpleNamespace(
        validated=0, evaluated=6, operations=0, batch_grows=False, evaluate_from=lambda *_: None
    )
    monkeypatch.setattr(iteration, "newest_iteration", lambda folder: newest)
    with one_rank():
        saves = DeferredSaves(loop, state, SimpleNamespace(iteration=6), recovered=True)
        saves.starts(defaultdict(lambda: None))  # type: ignore[arg-type]
        return saves.make_up(), saved


def test_a_save_that_a_fault_interrupted_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_up(3, monkeypatch) == (False, [6])
    assert made_up(6, monkeypatch) == (False, [])
    assert made_up(3, monkeypatch, save_interval=4) == (False, [])


def test_a_newer_checkpoint_of_an_earlier_training_does_not_stand_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_up(9, monkeypatch) == (False, [])
    assert made_up(9, monkeypatch, ckpt_step=3) == (False, [6])
    assert made_up(9, monkeypatch, ckpt_step=3, exit_interval=6) == (True, [6])


def test_a_job_leaves_where_it_was_to_leave_unless_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_up(3, monkeypatch, exit_interval=6) == (True, [6])
    assert made_up(6, monkeypatch, exit_interval=6) == (False, [])
