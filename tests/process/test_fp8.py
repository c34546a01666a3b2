"""Jobs that train in eight bits: killed, they come back to the last bit, and what is lost on the way is noticed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attempts
import fp8_hooks as hooks
import pytest
from attempts import Cluster
from digested_runs import Seen, check_saves_resume, examined, killed_under, unlike
from effort import cases
from local_runs import assert_only_replayed, recover
from runs import Layout
from sparse_runs import UNTIED, Case, Run, assert_replayed, killed
from world import Hook, World

ENGINE = ("--bf16", "--transformer-impl", "transformer_engine", "--fp8-format", "hybrid")
WEIGHTS = ("--fp8-param-gather",)
DELAYED = tuple("--fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max".split())
TENSORWISE = ("--fp8-recipe", "tensorwise")
GROUPED = ("--moe-grouped-gemm",)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
PAIR, GRID = Layout(pp=1, ep=2, ranks=2), Layout(pp=2, ep=2, ranks=4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param((*WEIGHTS, *DELAYED, *GROUPED, *UNTIED), GRID, id="delayed, grouped experts"),
        pytest.param((*WEIGHTS, *TENSORWISE, *OVERLAP), PAIR, id="tensorwise, overlapped"),
        pytest.param((*WEIGHTS, *TENSORWISE, *GROUPED), GRID, id="tensorwise, two stages"),
        pytest.param((*DELAYED, *GROUPED), PAIR, id="weights of bf16"),
        pytest.param((*WEIGHTS, *DELAYED), Layout(tp=2, pp=1, ep=1, ranks=2), id="tensor parallel"),
    ],
)
def test_killed_jobs_replay_with_frozen_operators_and_end_as_if_nothing_had_happened(
    model: tuple[str, ...],
    layout: Layout,
    undisturbed: Callable[[Case], Run],
    engine_cluster: Cluster,
    tmp_path: Path,
) -> None:
    case = Case(layout, (*ENGINE, *model), window="3")
    folder = tmp_path / "killed"
    run = killed(engine_cluster, case, folder, hooks=(partial(hooks.digested, str(folder)),))
    assert len(run.outcomes) == 3
    assert_replayed(run, int(case.window))
    assert not unlike(run, undisturbed(case), layout)


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["full", pytest.param("pec --moe-ckpt-pec-k-snapshot 1", marks=pytest.mark.full)])
def test_other_strategies_bring_back_what_they_have(
    strategy: str, undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    # Snapshots of `full` are restored with overlap on: what follows from weights is made by no gather of core's then.
    case = Case(PAIR, (*ENGINE, *WEIGHTS, *DELAYED, *GROUPED, *OVERLAP), faults=("1@8:forward-backward",))
    run = killed_under(strategy.split(), engine_cluster, case, tmp_path)
    if strategy == "full":
        assert re.search(r"recovered iteration \d+ exactly", run.outcomes[1].said)
        assert not unlike(run, undisturbed(case), PAIR)
    else:
        assert run.reports[-1]["iteration"] == 18
        assert all(math.isfinite(report["lm_loss"]) for report in run.reports)


MUTATIONS: dict[str, tuple[Hook, str]] = {
    "a weight's scale": (partial(hooks.restored_without, "compute_scale"), "it gave the loss"),
    "a row of largest values": (partial(hooks.scales_changed, "amax row"), "scale is not what was recorded"),
    "columns of two experts": (partial(hooks.scales_changed, "experts"), "it gave the loss"),
    "all but the first snapshot's": (partial(hooks.scales_changed, "first snapshot"), "is not what was recorded"),
}
MUTATED = Case(PAIR, (*ENGINE, *WEIGHTS, *DELAYED, *GROUPED), window="3", faults=("1@8:forward-backward",))


@pytest.mark.parametrize(
    "mutation",
    cases(MUTATIONS, fast=(), full=("columns of two experts",)),
)
def test_a_scale_that_comes_back_wrong_ends_the_replay(
    mutation: str, engine_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, said = MUTATIONS[mutation]
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 2)
    with pytest.raises(AssertionError, match=f"came out otherwise: .*{said}"):
        killed(engine_cluster, MUTATED, tmp_path / "killed", hooks=(hook,), forgiven="came out otherwise")


@pytest.mark.full
def test_losses_alone_would_not_tell_that_scales_are_those_of_the_first_snapshot(
    undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    changed = (partial(hooks.digested, str(folder)), partial(hooks.scales_changed, "first snapshot"))
    run = killed(engine_cluster, MUTATED, folder, hooks=(*changed, hooks.not_compared))
    assert run.replays  # to its end: nothing was noticed
    assert unlike(run, undisturbed(MUTATED), PAIR)


@pytest.fixture(scope="module")
def seen(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("examined")
    hooked = [partial(hooks.examined, str(folder))]
    return examined(engine_world, corpus, PAIR, folder, (*MUTATED.model, *OVERLAP), hooked)


def test_weights_are_float8_tensors_whose_products_see_few_values(seen: Seen) -> None:
    for facts in seen:
        assert facts["weights"] == ["Float8Tensor"]
        assert max(facts["values"]) <= 256
        assert facts["products"] > 0


def test_every_part_of_the_state_is_missed_by_name(seen: Seen) -> None:
    for facts in seen:
        assert facts["missing"]["nothing"] == ""
        for left_out, name in hooks.LEFT_OUT.items():
            assert name in facts["missing"][left_out], left_out


@pytest.mark.parametrize("part", ["EVERYTHING", "MASTER_AND_MOMENTS"])
def test_a_poisoned_state_comes_back_with_scales_and_transposes(part: str, seen: Seen) -> None:
    assert [facts["restored"][part] for facts in seen] == [[], []]


def test_a_full_state_has_the_bytes_of_the_table(seen: Seen) -> None:
    """Row 2 of MoEvement Table 7: masters and moments of 4 bytes; weights are cast from them again."""
    for facts in seen:
        assert facts["bytes"]["full"] == 12
        assert facts["bytes"]["weights"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param((*WEIGHTS, *DELAYED, *GROUPED), id="delayed, grouped experts"),
        pytest.param((*WEIGHTS, *TENSORWISE), id="tensorwise", marks=pytest.mark.full),
        pytest.param(DELAYED, id="weights of bf16", marks=pytest.mark.full),
    ],
)
def test_saves_resume_to_the_bit(model: tuple[str, ...], engine_world: World, corpus: str, tmp_path: Path) -> None:
    check_saves_resume(engine_world, corpus, PAIR, tmp_path, *ENGINE, *model)


@pytest.mark.full
def test_only_the_stage_of_the_lost_rank_runs_iterations_again(
    undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    model = (*ENGINE, *WEIGHTS, *DELAYED, *GROUPED, *UNTIED)
    case = Case(GRID, model, window="3", recovery="auto", faults=("1@9:step", "2@14:forward-backward"))
    run = recover(engine_cluster, case, tmp_path, hooks=(partial(hooks.digested, str(tmp_path / "killed")),))
    assert_only_replayed(run, GRID, [[0]], [[1]])
    assert not unlike(run, undisturbed(case), GRID)
