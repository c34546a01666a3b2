"""In the stock loop too, a rank that is inside a call of C is freed when a peer dies, and parks."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

from stock_jobs import FOUR
from watcher_hooks import standing

AT, SEALED_WITHIN_S = 4, 5.0
SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "2", "--exit-signal-handler")


def test_a_rank_inside_a_call_parks_within_seconds_of_the_death_of_its_peer(
    new_job, undisturbed, tmp_path: Path
) -> None:
    job, hook = new_job(FOUR), partial(standing, str(tmp_path), AT, (0,), 3)
    outcome = job.run(*SPARSE, hooks=[hook], codes={-signal.SIGKILL, 1})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (died,) = (event for event in events if event["event"] == "died")
    (parked,) = (event for event in events if event["event"] == "parked" and event["rank"] == 0)
    assert parked["iteration"] == AT - 1, outcome.said
    assert parked["at_s"] - died["at_s"] < SEALED_WITHIN_S, outcome.said
    assert "the main thread waits in stand" in outcome.said
    assert not [event for event in events if event["event"] == "went on"]
    again = job.run(*SPARSE)
    assert any("local rollback" in line for line in again.lines), again.said
    assert job.records() == undisturbed(FOUR)
