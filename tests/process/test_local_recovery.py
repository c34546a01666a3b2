"""A fault costs only the stages that it struck: the others resume from parked state, and the end is the same."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster, Nodes
from local_hooks import counted, held_back, killed_at, replicas_refused
from runs import Layout
from sparse_hooks import killed_in_replay
from sparse_runs import (
    BF16,
    DROPOUT,
    EXPERT_BIAS,
    FP16,
    FP32,
    UNTIED,
    Case,
    FaultFree,
    Run,
    assert_identical,
    killed,
)
from world import Hook

TWO = Layout(1, 2, 2, ranks=4)
TWO_WIDE = Layout(1, 2, 2, ranks=8)
FOUR = Layout(1, 4, 2, ranks=8)
CHUNKS = Layout(1, 2, 2, ranks=4, vpp=2)
TENSOR = Layout(2, 2, 1, ranks=4)
MODEL = (*BF16, *UNTIED, *DROPOUT, *EXPERT_BIAS)
WINDOW = 3
full = pytest.mark.full


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


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        pytest.param(TWO, {"0@8:forward-backward": [[0]], "3@13:step": [[1]]}, id="first and last of two"),
        pytest.param(FOUR, {"2@9:start": [[1]]}, id="second of four"),
        pytest.param(TWO_WIDE, {"6@10:end": [[1]]}, id="last of two, experts twice", marks=full),
        pytest.param(FOUR, {"5@9:step": [[2]]}, id="third of four", marks=full),
        pytest.param(FOUR, {"0@9:step": [[0]]}, id="first of four", marks=full),
        pytest.param(FOUR, {"7@9:forward-backward": [[3]]}, id="last of four", marks=full),
        pytest.param(TENSOR, {"1@9:step": [[0]], "2@14": [[1]]}, id="tensor parallel"),
        pytest.param(CHUNKS, {"1@9:step": [[0]], "2@14": [[1]]}, id="virtual stages"),
    ],
)
def test_only_the_stage_of_the_lost_rank_runs_iterations_again(
    layout: Layout, victims: dict[str, list[list[int]]], cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(layout, *victims)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, layout, *victims.values())
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        *((0, "forward-backward"), (0, "end"), (3, "start"), (3, "step")),
        *(pytest.param(*one, marks=full) for one in ((0, "start"), (0, "step"), (3, "forward-backward"), (3, "end"))),
    ],
)
def test_a_rank_may_be_lost_in_any_phase_of_a_step(
    rank: int, phase: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, f"{rank}@11:{phase}")
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[rank // 2]])
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("model", "distributed"),
    [
        pytest.param(FP32, False, id="fp32-plain"),
        pytest.param(FP16, True, id="fp16-distributed"),
        pytest.param(FP32, True, id="fp32-distributed", marks=full),
        pytest.param(FP16, False, id="fp16-plain", marks=full),
    ],
)
def test_it_is_exact_in_other_precisions_and_with_other_optimizers(
    model: tuple[str, ...], distributed: bool, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, "1@9:step", "2@14:forward-backward", model=(*model, *UNTIED, *DROPOUT), distributed=distributed)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[0]], [[1]])
    assert_identical(run, fault_free(one))


def test_it_is_exact_where_gradients_and_weights_travel_while_others_are_computed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    overlapped = ("--overlap-grad-reduce", "--overlap-param-gather")
    one = case(TWO, "1@9:step", "2@14:forward-backward", "3@16:end", model=(*MODEL, *overlapped))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[0]], [[1]], [[1]])
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("faults", "segments"),
    [
        pytest.param(("2@9", "4@9"), [[1, 2]], id="adjacent"),
        pytest.param(("0@9", "6@9"), [[0], [3]], id="disjoint"),
        pytest.param(("1@9", "4@9"), [[0], [2]], id="one apart", marks=full),
        pytest.param(("0@9", "2@9", "5@9"), [[0, 1, 2]], id="three", marks=full),
    ],
)
def test_several_lost_stages_recover_together_where_they_touch_and_alone_where_they_do_not(
    faults: tuple[str, ...], segments: list[list[int]], cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(FOUR, *faults)
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, FOUR, segments)
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("rank", "batch"), [(0, 8), (3, 4), pytest.param(0, 4, marks=full), pytest.param(3, 8, marks=full)]
)
def test_logs_are_told_apart_by_microbatch(
    batch: int, rank: int, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """With data parallelism of two, so many samples are half as many microbatches; each has data of its own."""
    samples = ("--global-batch-size", str(2 * batch))
    one = case(TWO, f"{rank}@10:step", model=(*MODEL, *samples))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, TWO, [[rank // 2]])
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_did_not_hear_the_norm_makes_the_step_from_its_kept_gradients(
    rank: int, distributed: bool, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """Its stage runs nothing again, and it reads the same batches as its peers afterwards."""
    one = case(TWO, "3@10:end", distributed=distributed)
    run = recover(cluster, one, tmp_path, hooks=(partial(held_back, str(tmp_path), rank, 10),))
    assert_only_replayed(run, TWO, [[1]])
    assert rejoined(run, rank)[0]["rolled"] == [rank], run.outcomes[1].said
    assert_identical(run, fault_free(one))


def test_tied_ends_of_the_pipeline_recover_together(cluster: Cluster, fault_free: FaultFree, tmp_path: Path) -> None:
    one = case(FOUR, "1@9:step", "3@14", model=(*BF16, *DROPOUT))
    run = recover(cluster, one, tmp_path)
    assert_only_replayed(run, FOUR, [[0, 3]], [[1]])
    assert_identical(run, fault_free(one))


def test_a_lost_node_is_replaced_by_a_spare_and_its_stage_replays_from_replicas(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-2", "node-1", "node-1")
    one = case(TWO, "0@10", "1@10")
    run = recover(cluster, one, tmp_path, nodes=Nodes((before, after), lost={0: "node-0"}))
    assert_only_replayed(run, TWO, [[0]])
    assert "peer memory of node" in run.outcomes[1].said
    assert_identical(run, fault_free(one))


def test_a_stage_replays_from_the_newest_window_of_which_all_its_ranks_have_replicas(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """The replicas of one rank are a window behind those of the other when their node is lost."""
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-2", "node-1", "node-1")
    one, nodes = case(TWO, "0@12", "1@12"), Nodes((before, after), lost={0: "node-0"})
    up_to_date = recover(cluster, one, tmp_path / "up-to-date", nodes=nodes)
    behind = recover(cluster, one, tmp_path, nodes=nodes, hooks=(partial(replicas_refused, 0, range(7, 13)),))
    assert restored(behind) == restored(up_to_date) - WINDOW, behind.outcomes[1].said
    assert_only_replayed(behind, TWO, [[0]])
    assert_identical(behind, fault_free(one))


def test_ranks_that_come_back_elsewhere_find_their_parked_state(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-1", "node-1", "node-0", "node-0")
    one = case(TWO, "2@10:step")
    run = recover(cluster, one, tmp_path, nodes=Nodes((before, after)))
    assert_only_replayed(run, TWO, [[1]])
    assert_identical(run, fault_free(one))


def test_when_the_node_with_the_logs_is_lost_too_the_scope_widens(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-0", "node-0", "node-2", "node-2")
    one = case(TWO, "0@10", "2@10", "3@10")
    run = recover(cluster, one, tmp_path, nodes=Nodes((before, after), lost={0: "node-1"}))
    assert {event["scope"] for rank in range(4) for event in rejoined(run, rank)} == {"global"}
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(("rank", "place"), [(1, "parking"), (3, "restarting"), (2, "restarting"), (0, "waiting")])
def test_a_second_loss_before_all_stand_together_is_survived(
    rank: int, place: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, "2@10:step")
    run = recover(cluster, one, tmp_path, hooks=(partial(killed_at, str(tmp_path), rank, place),))
    assert (tmp_path / f"struck-{rank}-{place}").exists()
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(("nth", "phase"), [(1, "after step"), (2, "before step")])
def test_a_loss_in_the_replaying_stage_begins_its_replay_anew(
    nth: int, phase: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, "2@10:step")
    run = recover(cluster, one, tmp_path, hooks=(partial(killed_in_replay, str(tmp_path), 3, nth, phase),))
    assert len(run.outcomes) == 3
    assert_only_replayed(run, TWO, [[1]])
    assert_identical(run, fault_free(one))


def test_a_peer_that_dies_while_it_sends_what_others_need_is_gone_around(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    nodes = Nodes((("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-2", "node-1", "node-1")), {0: "node-0"})
    one = case(TWO, "0@10", "1@10")
    run = recover(cluster, one, tmp_path, nodes=nodes, hooks=(partial(killed_at, str(tmp_path), 2, "sending"),))
    assert (tmp_path / "struck-2-sending").exists()
    assert_identical(run, fault_free(one))


def test_many_losses_in_one_run_cost_nothing(cluster: Cluster, fault_free: FaultFree, tmp_path: Path) -> None:
    one = case(TWO, "0@6:step", "3@8", "1@9:forward-backward", "2@12:end", "0@15:step", "3@17")
    run = recover(cluster, one, tmp_path)
    assert len(run.outcomes) == 7
    assert_identical(run, fault_free(one))


def test_global_recovery_may_be_asked_for(cluster: Cluster, fault_free: FaultFree, tmp_path: Path) -> None:
    one = replace(case(TWO, "2@10:step"), recovery="global")
    run = recover(cluster, one, tmp_path)
    assert {event["scope"] for rank in range(4) for event in rejoined(run, rank)} == {"global"}
    assert_identical(run, fault_free(one))
