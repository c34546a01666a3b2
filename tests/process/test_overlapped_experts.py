"""Jobs in which experts of one microbatch communicate while another one computes, killed and brought back exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import fp8_hooks as hooks
import pytest
from attempts import Cluster
from digested_runs import killed_under, unlike
from runs import Layout
from sparse_runs import Case, Run, assert_replayed, killed
from test_mxfp8 import ENGINE

OVERLAP = ("--overlap-moe-expert-parallel-comm",)
DELAYED = (*OVERLAP, "--delay-wgrad-compute", "--no-gradient-accumulation-fusion")
PAIR = Layout(pp=1, ep=2, ranks=2)
INTERLEAVED = Layout(pp=2, ep=2, ranks=4, vpp=2)


@pytest.mark.full
def test_a_killed_job_with_interleaved_stages_ends_as_one_without_overlap_and_faults(
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case = Case(INTERLEAVED, (*ENGINE, *OVERLAP), faults=("1@8:forward-backward", "2@14:step"))
    run = killed_under(["full"], engine_cluster, case, tmp_path)
    assert not unlike(run, undisturbed(Case(INTERLEAVED, ENGINE)), INTERLEAVED)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "model", "recovery"),
    [
        pytest.param(INTERLEAVED, DELAYED, "global", id="interleaved, delayed"),
        pytest.param(INTERLEAVED, DELAYED, "auto", id="stage alone, delayed", marks=pytest.mark.full),
        pytest.param(INTERLEAVED, OVERLAP, "global", id="interleaved", marks=pytest.mark.full),
        pytest.param(PAIR, DELAYED, "global", id="one stage, delayed", marks=pytest.mark.full),
        pytest.param(PAIR, OVERLAP, "global", id="one stage", marks=pytest.mark.full),
    ],
)
def test_a_replay_runs_the_schedule_of_training_with_operators_frozen(
    layout: Layout,
    model: tuple[str, ...],
    recovery: str,
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case, folder = Case(layout, (*ENGINE, *model), recovery=recovery), tmp_path / "killed"
    run = killed(engine_cluster, case, folder, hooks=(partial(hooks.digested, str(folder)),))
    assert_replayed(run, int(case.window))
    assert not unlike(run, undisturbed(case), layout)
