"""Jobs with weights of MXFP8, blockwise FP8 and NVFP4, by rows and by columns, or scales of attention: killed, they
come back."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attempts
import fp8_hooks as hooks
import pytest
from attempts import Cluster
from digested_runs import check_saves_resume, examined, killed_under, unlike
from local_runs import assert_only_replayed, recover
from runs import Layout
from sparse_runs import UNTIED, Case, Run, assert_replayed, killed
from stock_trainer import configured
from test_fp8 import TENSORWISE
from world import World

ENGINE = ("--bf16", "--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
MXFP8 = (
    *(*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    *("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
)
BLOCKWISE = (*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather")
NVFP4 = (*ENGINE, "--fp4-format", "e2m1", "--fp4-param-gather")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
PAIR, GRID = Layout(pp=1, ep=2, ranks=2), Layout(pp=2, ep=2, ranks=4)
ATTENTION = (hooks.attention_emulated, partial(configured, fp8_dot_product_attention=True))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param((*MXFP8, *OVERLAP), "MXFP8Tensor", id="overlapped", marks=pytest.mark.ci),
        pytest.param(MXFP8, "MXFP8Tensor", id="at once", marks=pytest.mark.ci),
        pytest.param((*BLOCKWISE, *OVERLAP), "Float8BlockwiseQTensor", id="blockwise"),
        pytest.param((*NVFP4, *OVERLAP), "NVFP4Tensor", id="four bits"),
    ],
)
def test_masters_alone_bring_weights_back_by_rows_and_by_columns(
    model: tuple[str, ...], kind: str, engine_world: World, corpus: str, tmp_path: Path
) -> None:
    hooked = [partial(hooks.examined_in_blocks, str(tmp_path))]
    for facts in examined(engine_world, corpus, PAIR, tmp_path, model, hooked):
        assert facts["weights"] == [kind]
        assert facts["fields"] == ["exp_avg", "exp_avg_sq", "master"]
        assert facts["restored"] == []
        assert facts["one cast dropped"] != []
        assert facts["missing"]["nothing"] == ""
        assert facts["missing"]["master"].startswith("master weights of ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(PAIR, (*MXFP8, *OVERLAP), id="overlapped"),
        pytest.param(GRID, MXFP8, id="two stages", marks=pytest.mark.full),
        pytest.param(PAIR, (*NVFP4, *OVERLAP), id="four bits"),
        pytest.param(PAIR, (*BLOCKWISE, *OVERLAP), id="blockwise", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit(
    layout: Layout,
    model: tuple[str, ...],
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case = Case(layout, model, faults=("1@8:forward-backward", "0@14:step"))
    run = killed_under(["full"], engine_cluster, case, tmp_path)
    assert re.search(r"recovered iteration \d+ exactly", run.outcomes[1].said)
    assert not unlike(run, undisturbed(case), layout)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(GRID, (*MXFP8, *OVERLAP, *UNTIED), id="two stages, overlapped"),
        pytest.param(GRID, (*BLOCKWISE, *OVERLAP, *UNTIED), id="blockwise", marks=pytest.mark.full),
        pytest.param(PAIR, MXFP8, id="at once", marks=pytest.mark.full),
    ],
)
def test_frozen_operators_run_with_the_weights_that_they_had(
    layout: Layout,
    model: tuple[str, ...],
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case, folder = Case(layout, model), tmp_path / "killed"
    run = killed(engine_cluster, case, folder, hooks=(partial(hooks.digested, str(folder)),))
    assert_replayed(run, int(case.window))
    assert not unlike(run, undisturbed(case), layout)


@pytest.mark.full
def test_one_stage_alone_runs_iterations_again_with_weights_in_blocks(
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    model = (*MXFP8, *OVERLAP, *UNTIED)
    case = Case(GRID, model, recovery="auto", faults=("1@9:step", "2@14:forward-backward"))
    run = recover(engine_cluster, case, tmp_path, hooks=(partial(hooks.digested, str(tmp_path / "killed")),))
    assert_only_replayed(run, GRID, [[0]], [[1]])
    assert not unlike(run, undisturbed(case), GRID)


@pytest.mark.parametrize("dropped", [pytest.param("cast", marks=pytest.mark.ci), "scale"])
def test_a_frozen_weight_that_is_not_what_it_was_ends_the_replay(
    dropped: str,
    engine_cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(PAIR, MXFP8, faults=("1@8:forward-backward",))
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 2)
    with pytest.raises(AssertionError, match=r"came out otherwise: .*it gave the loss"):
        killed(
            engine_cluster, case, tmp_path / "killed", hooks=(partial(hooks.recast_without, dropped),),
            forgiven="came out otherwise",
        )  # fmt: skip


@pytest.mark.full
def test_partial_snapshots_bring_back_what_they_have(
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case = Case(PAIR, (*MXFP8, *OVERLAP), faults=("1@8:forward-backward",))
    run = killed_under(["pec", "--moe-ckpt-pec-k-snapshot", "1"], engine_cluster, case, tmp_path)
    assert run.reports[-1]["iteration"] == 18
    assert all(report["lm_loss"] < 20 for report in run.reports)


@pytest.mark.ci
def test_saves_resume_to_the_bit(engine_world: World, corpus: str, tmp_path: Path) -> None:
    """Core's own load casts columns from what rows have kept."""
    check_saves_resume(engine_world, corpus, PAIR, tmp_path, *MXFP8, *OVERLAP)


@pytest.mark.full
def test_attention_in_eight_bits_keeps_scales_whatever_the_recipe_and_they_come_back(
    engine_world: World,
    corpus: str,
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    model = (*ENGINE, "--fp8-format", "hybrid", *TENSORWISE)
    hooked = [*ATTENTION, partial(hooks.examined_in_blocks, str(tmp_path))]
    for facts in examined(engine_world, corpus, PAIR, tmp_path, model, hooked):
        assert facts["scales"], "attention keeps none"
        assert all(".core_attention." in name for name in facts["scales"])
        assert facts["restored"] == []
        assert ".core_attention" in facts["missing"]["scaling_fwd.amax_history"]
    runs = {}
    for name, faults in (("undisturbed", ()), ("killed", ("1@8:forward-backward",))):
        (tmp_path / name).mkdir()
        case = Case(PAIR, model, faults=faults)
        runs[name] = killed_under(["full"], engine_cluster, case, tmp_path / name, ATTENTION)
    assert not unlike(runs["killed"], runs["undisturbed"], PAIR)
