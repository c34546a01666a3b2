"""A fault costs only the stages that it struck: the others resume from parked state, and the end is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster
from local_hooks import held_back
from local_runs import MODEL, PAIR, PIPE, TWO, assert_only_replayed, case, recover, rejoined
from runs import Layout
from sparse_runs import BF16, DROPOUT, FP16, FP32, UNTIED, FaultFree, assert_identical

TWO_WIDE = Layout(1, 2, 2, ranks=8)
FOUR = Layout(1, 4, 2, ranks=8)
CHUNKS = Layout(1, 2, 2, ranks=4, vpp=2)
TENSOR = Layout(2, 2, 1, ranks=4)
full = pytest.mark.full


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        pytest.param(TWO, {"0@8:forward-backward": [[0]], "3@13:step": [[1]]}, id="first and last of two"),
        pytest.param(PIPE, {"1@9:start": [[1]]}, id="second of four", marks=full),
        pytest.param(FOUR, {"2@9:start": [[1]]}, id="second of four, experts spread", marks=full),
        pytest.param(TWO_WIDE, {"6@10:end": [[1]]}, id="last of two, experts twice", marks=full),
        pytest.param(FOUR, {"5@9:step": [[2]]}, id="third of four", marks=full),
        pytest.param(FOUR, {"0@9:step": [[0]]}, id="first of four", marks=full),
        pytest.param(FOUR, {"7@9:forward-backward": [[3]]}, id="last of four", marks=full),
        pytest.param(TENSOR, {"1@9:step": [[0]]}, id="tensor parallel", marks=full),
        pytest.param(TENSOR, {"2@14": [[1]]}, id="tensor parallel, last", marks=full),
        pytest.param(CHUNKS, {"2@14": [[1]]}, id="virtual stages", marks=full),
        pytest.param(CHUNKS, {"1@9:step": [[0]], "2@14": [[1]]}, id="virtual stages, both", marks=full),
    ],
)
def test_only_the_stage_of_the_lost_rank_runs_iterations_again(
    layout: Layout, victims: dict[str, list[list[int]]], cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(layout, *victims)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, layout, *victims.values())
    assert_identical(run, fault_free(one))


@full
@pytest.mark.parametrize("phase", ["start", "forward-backward", "step", "end"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_may_be_lost_in_any_phase_of_a_step(
    rank: int, phase: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, f"{rank}@11:{phase}")
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[rank // 2]])
    assert_identical(run, fault_free(one))


@full
@pytest.mark.parametrize(
    ("model", "distributed"),
    [
        pytest.param(FP32, False, id="fp32-plain"),
        pytest.param(FP16, True, id="fp16-distributed"),
        pytest.param(FP32, True, id="fp32-distributed"),
        pytest.param(FP16, False, id="fp16-plain"),
        pytest.param((*BF16, "--freeze-experts"), True, id="frozen experts"),
    ],
)
def test_it_is_exact_in_other_precisions_and_with_other_optimizers(
    model: tuple[str, ...], distributed: bool, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, "1@9:step", "2@14:forward-backward", model=(*model, *UNTIED, *DROPOUT), distributed=distributed)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[0]], [[1]])
    assert_identical(run, fault_free(one))


@full
def test_it_is_exact_where_gradients_and_weights_travel_while_others_are_computed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    overlapped = ("--overlap-grad-reduce", "--overlap-param-gather")
    one = case(TWO, "1@9:step", "3@14:end", model=(*MODEL, *overlapped))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[0]], [[1]])
    assert_identical(run, fault_free(one))


@full
@pytest.mark.parametrize(
    ("layout", "faults", "segments"),
    [
        pytest.param(PIPE, ("1@9", "2@9"), [[1, 2]], id="adjacent"),
        pytest.param(PIPE, ("0@9", "3@9"), [[0], [3]], id="disjoint"),
        pytest.param(FOUR, ("2@9", "4@9"), [[1, 2]], id="adjacent, experts spread"),
        pytest.param(FOUR, ("0@9", "6@9"), [[0], [3]], id="disjoint, experts spread"),
        pytest.param(FOUR, ("1@9", "4@9"), [[0], [2]], id="one apart"),
        pytest.param(FOUR, ("0@9", "2@9", "5@9"), [[0, 1, 2]], id="three"),
    ],
)
def test_several_lost_stages_recover_together_where_they_touch_and_alone_where_they_do_not(
    layout: Layout,
    faults: tuple[str, ...],
    segments: list[list[int]],
    cluster: Cluster,
    fault_free: FaultFree,
    tmp_path: Path,
) -> None:
    one = case(layout, *faults)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, layout, segments)
    assert_identical(run, fault_free(one))


@full
@pytest.mark.parametrize(
    ("layout", "rank", "microbatches"),
    [
        (PAIR, 1, 8),
        *((TWO, rank, count) for rank in (0, 3) for count in (4, 8)),
    ],
    ids=str,
)
def test_logs_are_told_apart_by_microbatch(
    layout: Layout, rank: int, microbatches: int, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """More of them than otherwise; each has data of its own."""
    replicas = layout.ranks // layout.pp
    samples = ("--global-batch-size", str(replicas * microbatches))
    one = case(layout, f"{rank}@10:step", model=(*MODEL, *samples))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, layout, [[rank // replicas]])
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("rank", "distributed"),
    [
        pytest.param(0, False, id="0-plain", marks=full),
        pytest.param(1, True, id="1-distributed", marks=pytest.mark.ci),
        pytest.param(0, True, id="0-distributed", marks=full),
        pytest.param(1, False, id="1-plain", marks=full),
    ],
)
def test_a_rank_that_did_not_hear_the_norm_makes_the_step_from_its_kept_gradients(
    rank: int, distributed: bool, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """Its stage runs nothing again, and it reads the same batches as its peers afterwards."""
    one = case(TWO, distributed=distributed)
    run = recover(cluster, one, tmp_path, hooks=(partial(held_back, str(tmp_path), rank, 10, 3),))
    assert_only_replayed(run, TWO, [[1]])
    assert rejoined(run, rank)[0]["rolled"] == [rank], run.outcomes[1].said
    assert_identical(run, fault_free(one))


@full
def test_a_rank_that_is_lost_when_all_have_made_the_step_costs_only_its_stage(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """The others lose it in what is agreed on behind the update, and their state is whole."""
    one = case(PAIR)
    run = recover(cluster, one, tmp_path, hooks=(partial(held_back, str(tmp_path), -1, 10, 1),))
    assert_only_replayed(run, PAIR, [[1]])
    assert_identical(run, fault_free(one))


@full
@pytest.mark.parametrize(
    ("layout", "faults", "segments"),
    [
        pytest.param(Layout(1, 3, 1, ranks=3), ("0@9:step", "1@14"), [[[0, 2]], [[1]]], id="of three"),
        pytest.param(FOUR, ("1@9:step", "3@14"), [[[0, 3]], [[1]]], id="of four, experts spread"),
    ],
)
def test_tied_ends_of_the_pipeline_recover_together(
    layout: Layout,
    faults: tuple[str, ...],
    segments: list[list[list[int]]],
    cluster: Cluster,
    fault_free: FaultFree,
    tmp_path: Path,
) -> None:
    one = case(layout, *faults, model=(*BF16, *DROPOUT))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, layout, *segments)
    assert_identical(run, fault_free(one))
