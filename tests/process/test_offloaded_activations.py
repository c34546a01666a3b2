"""Jobs whose activations are on the host until their backward pass (`--fine-grained-activation-offloading`): killed,
and brought back exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import fp8_hooks as hooks
import pytest
import sparse_runs
from attempts import Cluster
from digested_runs import ended, unlike
from local_runs import assert_only_replayed, recover
from offload_hooks import offloading_from_the_cpu
from runs import Layout
from sparse_runs import LENGTH, UNTIED, Case, Run, assert_replayed
from test_mxfp8 import ENGINE
from world import World

OFFLOADED = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1"),
    *("--offload-modules", "core_attn", "attn_proj", "expert_fc1", "moe_act"),
)
DEEP = ("--num-layers", "8")
"""Two layers in each chunk: core takes one that keeps all of its activations on the device for done too early."""
GRID = Layout(pp=2, ep=2, ranks=4)
INTERLEAVED = Layout(pp=2, ep=1, ranks=2, vpp=2)
TABLE = "Activation Offload Summary"
"""What all ranks of a job print together when each has learned what it offloads."""


@pytest.mark.ci
def test_a_stage_that_replays_alone_offloads_alone(
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    model = (*ENGINE, *UNTIED, *DEEP)
    case = Case(GRID, (*model, *OFFLOADED), recovery="auto", faults=("1@9:step", "2@14:forward-backward"))
    digests = partial(hooks.digested, str(tmp_path / "killed"))
    run = recover(engine_cluster, case, tmp_path, hooks=(offloading_from_the_cpu, digests))
    assert_only_replayed(run, GRID, [[0]], [[1]])
    assert not unlike(run, undisturbed(Case(GRID, model)), GRID), "as without offloading and faults"
    assert [outcome.said.count(TABLE) for outcome in run.outcomes] == [1, 1, 1], "behind a replay, and not in it"


@pytest.mark.full
def test_interleaved_stages_replay_with_offloaded_activations(
    engine_world: World, corpus: str, engine_cluster: Cluster, tmp_path: Path
) -> None:
    case, folder = Case(INTERLEAVED, (*ENGINE, *DEEP, *OFFLOADED)), tmp_path / "killed"
    digests = partial(hooks.digested, str(folder))
    run = sparse_runs.killed(engine_cluster, case, folder, hooks=(offloading_from_the_cpu, digests))
    assert_replayed(run, int(case.window))
    # Copies lie elsewhere than what they are of, which by itself moves last bits of products on some CPUs.
    alone = tmp_path / "alone"
    alone.mkdir()
    given = (*LENGTH, *case.model, "--metrics-jsonl", alone / "reports")
    undisturbed = ended(engine_world, corpus, INTERLEAVED, alone, *given, hooks=(offloading_from_the_cpu,))
    assert not unlike(run, undisturbed, INTERLEAVED)
