"""Jobs that recover locally: which ranks ran iterations again, and from where."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from attempts import Cluster
from local_hooks import counted
from runs import Layout
from sparse_runs import BF16, DROPOUT, EXPERT_BIAS, UNTIED, Case, Run, killed
from world import Hook

PAIR = Layout(1, 2, 1, ranks=2)
"""Two stages of one rank each."""
TWO = Layout(1, 2, 2, ranks=4)
PIPE = Layout(1, 4, 1, ranks=4)
"""Four stages of one rank each."""
MODEL = (*BF16, *UNTIED, *DROPOUT, *EXPERT_BIAS)
WINDOW = 3


def case(layout: Layout, *faults: str, model: tuple[str, ...] = MODEL, **other: Any) -> Case:
    return Case(layout, model, window=str(WINDOW), recovery="auto", faults=faults, **other)


def recover(cluster: Cluster, of: Case, folder: Path, *, hooks: tuple[Hook, ...] = (), **options: Any) -> Run:
    return killed(cluster, of, folder / "killed", hooks=(partial(counted, str(folder / "killed")), *hooks), **options)


def rejoined(run: Run, rank: int) -> list[dict[str, Any]]:
    """What a rank noted each time that it rejoined the others after a fault."""
    return [event for event in run.events[rank] if event["event"] == "rejoined" and event["recovered"]]


def restored(run: Run) -> int:
    """The iteration from which the stage that was lost first began to replay."""
    found = re.search(r"restored iteration (\d+), then replayed", run.outcomes[1].said)
    assert found, run.outcomes[1].said
    return int(found[1])


def assert_only_replayed(run: Run, layout: Layout, *stages: list[list[int]]) -> None:
    """In each recovery these segments of stages ran iterations again, no longer than three windows, and no others."""
    per_stage = layout.ranks // layout.pp
    for rank in range(layout.ranks):
        noted = rejoined(run, rank)
        assert [one["stages"] for one in noted] == [*stages], run.outcomes[-1].said
        for one, replaying in zip(noted, stages, strict=True):
            expected = any(rank // per_stage in segment for segment in replaying)
            assert (one["forwards"] > 0) == expected, (rank, one)
            assert one["scope"] == "local"
    assert all(len(replay) <= 3 * WINDOW for replay in run.replays), [len(replay) for replay in run.replays]
