"""Jobs in which experts of one microbatch communicate while another one computes: `full` brings them back exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout
from sparse_runs import Case, Run
from test_fp8 import differences, engine_cluster, undisturbed  # noqa: F401
from test_mxfp8 import ENGINE, killed

OVERLAP = ("--overlap-moe-expert-parallel-comm",)
INTERLEAVED = Layout(pp=2, ep=2, ranks=4, vpp=2)


@pytest.mark.ci
def test_a_killed_job_with_interleaved_stages_ends_as_one_without_overlap_and_faults(
    undisturbed: Callable[[Case], Run],  # noqa: F811
    engine_cluster: Cluster,  # noqa: F811
    tmp_path: Path,
) -> None:
    case = Case(INTERLEAVED, (*ENGINE, *OVERLAP), faults=("1@8:forward-backward", "2@14:step"))
    run = killed(engine_cluster, case, tmp_path, "full")
    assert not differences(run, undisturbed(Case(INTERLEAVED, ENGINE)), INTERLEAVED.ranks)
