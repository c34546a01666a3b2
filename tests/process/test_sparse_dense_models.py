"""Sparse checkpoints of models without experts: layers are operators, anchored from the last one of a stage on."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout
from sparse_runs import BF16, DROPOUT, FP32, UNTIED, Case, FaultFree, assert_identical, assert_replayed, killed

pytestmark = pytest.mark.ci

FOUR_LAYERS = ("--num-layers", "4")

CASES = {
    "pp2-bf16-tied": Case(Layout(1, 2, 1, ranks=2, experts=None), (*FOUR_LAYERS, *BF16, *DROPOUT), window="4"),
    "tp2-fp32-untied": Case(Layout(2, 1, 1, ranks=2, experts=None), (*FOUR_LAYERS, *FP32, *UNTIED), window="3"),
}


@pytest.mark.parametrize("name", ["pp2-bf16-tied", pytest.param("tp2-fp32-untied", marks=pytest.mark.full)])
def test_a_dense_model_is_replayed_exactly_with_its_layers_from_back_to_front(
    name: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    case = CASES[name]
    run = killed(cluster, case, tmp_path / "killed")
    assert_replayed(run, int(case.window))
    assert_identical(run, fault_free(case))
    planned = [event for event in run.events[0] if event["event"] == "planned"][: int(case.window)]
    steps = [[name.split() for name in event["anchored"]] for event in planned]
    when = {int(layer): at for at, step in enumerate(steps) for layer, kind, _ in step if kind == "NON_EXPERT"}
    assert sorted(when) == [0, 1, 2, 3]
    of_stage = 4 // case.layout.pp
    for first in range(0, 4, of_stage):
        turns = [when[layer] for layer in range(first, first + of_stage)]
        assert turns == sorted(turns, reverse=True), when
