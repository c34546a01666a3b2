"""The planner says what a job does: from the tokens that a job counted it plans each of that job's snapshots."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster
from effort import cases
from plan_hooks import recorded
from runs import Layout

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import GATE_UNIT
from megatron.core.dist_checkpointing.moe.types import (
    PRECISIONS,
    ModelShape,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Topology,
)
from moe_ckpt.commands.counts_file import load_counts
from moe_ckpt.simulator.driver import Driver, strategy_job

LAYOUT = Layout(tp=1, pp=2, ep=2, ranks=4)
ITERATIONS = 14
TOKENS = 32 * LAYOUT.microbatches * LAYOUT.ranks // LAYOUT.pp
LENGTH = ("--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS))
SHAPE = ModelShape("of the test", 2, 32, 4, 384, 128, num_experts=4, moe_ffn_hidden_size=32, gated_linear_unit=True)
PLANNED = (SHAPE, Topology(4, pp=2, ep=2), PRECISIONS["fp32"])
OFTEN = {"reorder_threshold": 0.01, "reorder_fraction": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"interval": 2},
    "pec, experts in turn": {"interval": 1, "pec_k_snapshot": 1},
    "pec, experts by load": {"interval": 3, "pec_k_snapshot": 1, "pec_selection": "load-aware"},
    "selective": {"budget_local": "1B", "budget_remote": "1B"},
    "sparse": {"window": "3"},
    "sparse, by gates of all tokens": {"window": "2", "ordering": "soft-count", **OFTEN},
    "sparse, lately popular experts last": {"window": "2", "ordering": "time-decayed", "ordering_decay": 0.5, **OFTEN},
    "sparse, by capacity": {
        "window": "2",
        "ordering": "capacity-aware",
        "ordering_capacities": (1.0, 1.0, 9.0, 1.0),
        **OFTEN,
    },
    "sparse, popular experts last": {"window": "2", **OFTEN},
}


def sizes_in(recorded: dict[str, Any]) -> dict[int, dict[OperatorId, OperatorSize]]:
    """Bytes by rank and operator: the distributed optimizer cuts shards at any byte, which a planner cannot know."""
    found: dict[int, dict[OperatorId, OperatorSize]] = {}
    for rank, own in recorded.items():
        named = ((OperatorId(layer, OperatorKind(kind), index), size) for (layer, kind, index), size in own)
        found[int(rank)] = {operator: OperatorSize(*size) for operator, size in named}
    return found


REPEATED = {"pec, experts in turn", "sparse", "sparse, by capacity", "sparse, by gates of all tokens"}
"""Settings of which another one shows the same and more."""


@pytest.mark.parametrize("name", cases(SETTINGS, fast=("sparse, popular experts last",), full=REPEATED))
def test_the_planner_plans_each_snapshot_of_a_job_from_its_counts(name: str, cluster: Cluster, tmp_path: Path) -> None:
    strategy = name.partition(",")[0]
    config = dataclasses.replace(MoECheckpointConfig(strategy=strategy), **SETTINGS[name])
    flags = [
        part
        for key, value in SETTINGS[name].items()
        for part in (f"--moe-ckpt-{key.replace('_', '-')}", *(value if isinstance(value, tuple) else (value,)))
    ]
    hooks = [partial(recorded, str(tmp_path), strategy)]
    cluster.run(LAYOUT, *LENGTH, "--moe-ckpt-strategy", strategy, *flags, hooks=hooks)

    events = [json.loads(line) for line in (tmp_path / "plans-0.jsonl").read_text().splitlines()]
    of_job = {event["planned"]: event["digest"] for event in events if "planned" in event}
    tokens = [event["tokens"] for event in events if "counted" in event]
    if SETTINGS[name].get("ordering") == "soft-count":  # every token counts for 1 in each layer, wherever it was sent
        each = TOKENS / GATE_UNIT
        assert [sum(row) for rows in tokens for row in rows] == pytest.approx([each] * 2 * len(tokens), rel=1e-3)
    (tmp_path / "counts.json").write_text(json.dumps(tokens or [[1] * 4] * 2))
    counts = load_counts(tmp_path / "counts.json", SHAPE)
    sizes = [event["sizes"] for event in events if "sizes" in event][-1]  # the first are planned, to check the memory
    job = dataclasses.replace(strategy_job(*PLANNED, config, iterations=ITERATIONS), sizes=sizes_in(sizes))
    taken = Driver(job, counts.of).snapshots(ITERATIONS)
    planned = {snapshot.plan.iteration: snapshot.plan.digest() for snapshot in taken}
    assert len(of_job) >= ITERATIONS // 3
    assert planned == of_job
