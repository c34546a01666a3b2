"""Idle time in pipeline schedules, and snapshots placed into it."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.bubbles.schedules import (
    Bubbles,
    Pass,
    PipelineSchedule,
    bytes_in_bubbles,
    schedule_1f1b,
)
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

NAN, INF = math.nan, math.inf
SECONDS = st.floats(0.001, 10)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, object], PipelineSchedule]:
    """Arguments and the schedule that they make: uneven stages, communication, interleaved or not."""
    chunks = draw(st.integers(1, 3))
    stages = draw(st.integers(2 if chunks > 1 else 1, 5))
    microbatches = draw(st.integers(1, 3)) * stages if chunks > 1 else draw(st.integers(1, 12))
    times = st.lists(SECONDS, min_size=stages, max_size=stages) | SECONDS
    arguments = {
        "stages": stages,
        "microbatches": microbatches,
        "forward_s": draw(times),
        "backward_s": draw(times),
        "chunks": chunks,
        "communication_s": draw(st.just(0.0) | SECONDS),
    }
    return arguments, schedule_1f1b(**arguments)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_each_stage_of_1f1b_idles_for_one_microbatch_per_other_stage(stages: int, microbatches: int) -> None:
    schedule = schedule_1f1b(stages, microbatches, 0.3, 0.7)
    assert schedule.span_s == pytest.approx(microbatches + stages - 1)  # MoEvement App. C: (M + S - 1) t
    for stage in range(stages):
        assert schedule.bubbles(stage).idle_s == pytest.approx(stages - 1)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 12), (6, 12)])
def test_interleaving_divides_the_idle_time_by_the_chunks(stages: int, microbatches: int, chunks: int) -> None:
    schedule = schedule_1f1b(stages, microbatches, 0.4, 0.8, chunks)
    for stage in range(stages):
        assert schedule.bubbles(stage).idle_s == pytest.approx((stages - 1) * 1.2 / chunks)


def test_two_stages_and_two_microbatches_idle_where_one_would_draw_it() -> None:
    # stage 0: F0 F1 . B0 B0 . B1 B1     stage 1: . F0 B0 B0 F1 B1 B1 . .
    schedule = schedule_1f1b(2, 2, 1.0, 2.0)
    assert schedule.span_s == 9.0
    assert schedule.bubbles(0).intervals == ((2.0, 4.0), (6.0, 7.0))
    assert schedule.bubbles(1).intervals == ((0.0, 1.0), (7.0, 9.0))


def test_communication_delays_what_waits_for_it_and_nothing_else() -> None:
    schedule = schedule_1f1b(2, 2, 1.0, 2.0, communication_s=0.5)
    assert schedule.bubbles(0).intervals == ((2.0, 5.0), (7.0, 8.0))
    assert schedule.bubbles(1).intervals == ((0.0, 1.5), (7.5, 10.0))


def test_a_slow_stage_never_idles_between_its_first_and_last_operation() -> None:
    schedule = schedule_1f1b(3, 6, [0.1, 1.0, 0.1], [0.2, 2.0, 0.2])
    inner = [(start, end) for start, end in schedule.bubbles(1).intervals if start > 0 and end < schedule.span_s]
    # Between warm-up and steady state it waits once for the last stage to turn around, and no more.
    assert len(inner) <= 1
    assert schedule.bubbles(1).idle_s < min(schedule.bubbles(0).idle_s, schedule.bubbles(2).idle_s) / 10


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (2, 2, 3), (3, 9, 4), (4, 10, 1), (5, 3, 1)])
def test_each_stage_works_in_the_order_of_megatron_core(stages: int, microbatches: int, chunks: int) -> None:
    schedule = schedule_1f1b(stages, microbatches, 1.0, 2.0, chunks)
    table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(microbatches, chunks, stages)]
    for stage, operations in enumerate(schedule.operations):
        group = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        communicator = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        _, _, warmup, _ = get_pp_rank_microbatches(microbatches, chunks, stages, p2p_communicator=communicator)
        order = [(step.chunk, step.microbatch) for step in operations if step.direction is Pass.FORWARD]
        assert order == table
        order = [(step.chunk, step.microbatch) for step in operations if step.direction is Pass.BACKWARD]
        assert order == [(chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
        # After the warm-up one forward, one backward; what warmed up is cooled down.
        letters = "".join(step.direction.name[0] for step in operations)
        assert letters == "F" * warmup + "FB" * (len(table) - warmup) + "B" * warmup


@settings(max_examples=examples(150))
@given(schedules())
def test_busy_and_idle_time_make_up_the_span_of_each_stage(case) -> None:
    arguments, schedule = case
    for stage, operations in enumerate(schedule.operations):
        bubbles = schedule.bubbles(stage)
        computed_s = math.fsum(step.end_s - step.start_s for step in operations)
        assert computed_s + bubbles.idle_s == pytest.approx(schedule.span_s)
        assert bubbles.busy_s == pytest.approx(computed_s)
        per_stage = [
            value[stage] if isinstance(value, list) else value
            for value in (arguments["forward_s"], arguments["backward_s"])
        ]
        assert computed_s == pytest.approx(arguments["microbatches"] * sum(per_stage))


@settings(max_examples=examples(150))
@given(schedules())
def test_no_stage_does_two_things_at_once_and_no_bubble_touches_an_operation(case) -> None:
    _, schedule = case
    for stage, operations in enumerate(schedule.operations):
        taken = [(step.start_s, step.end_s) for step in operations] + list(schedule.bubbles(stage).intervals)
        taken.sort()
        assert taken[0][0] == 0.0 and taken[-1][1] == schedule.span_s
        assert all(end == start for (_, end), (start, _) in pairwise(taken))


@settings(max_examples=examples(150))
@given(schedules())
def test_every_operation_waits_for_its_input_and_starts_at_once_when_it_and_the_stage_are_there(case) -> None:
    arguments, schedule = case
    last, chunks, delay = arguments["stages"] - 1, arguments["chunks"], arguments["communication_s"]
    ends = {
        (step.direction, step.stage, step.chunk, step.microbatch): step.end_s
        for operations in schedule.operations
        for step in operations
    }
    assert len(ends) == 2 * arguments["stages"] * chunks * arguments["microbatches"]
    for operations in schedule.operations:
        free_s = 0.0
        for step in operations:
            stage, chunk, microbatch = step.stage, step.chunk, step.microbatch
            arrival_s = 0.0
            if step.direction is Pass.FORWARD and (stage, chunk) != (0, 0):
                before = (stage - 1, chunk) if stage else (last, chunk - 1)
                arrival_s = ends[(Pass.FORWARD, *before, microbatch)] + delay
            elif step.direction is Pass.BACKWARD and (stage, chunk) != (last, chunks - 1):
                after = (stage + 1, chunk) if stage < last else (0, chunk + 1)
                arrival_s = ends[(Pass.BACKWARD, *after, microbatch)] + delay
            if step.direction is Pass.BACKWARD:
                assert ends[Pass.FORWARD, stage, chunk, microbatch] <= step.start_s
            assert step.start_s == pytest.approx(max(free_s, arrival_s), abs=1e-9)
            free_s = step.end_s


def test_times_that_binary_numbers_cannot_hold_leave_no_slivers_of_idle_time() -> None:
    schedule = schedule_1f1b(4, 64, 0.1, 0.2, 2)
    shortest = min(end - start for stage in range(4) for start, end in schedule.bubbles(stage).intervals)
    assert shortest > 0.04  # every bubble is a multiple of 0.05 s


def test_a_snapshot_shorter_than_the_bubbles_runs_in_them_entirely() -> None:
    assert bytes_in_bubbles(Bubbles(((0.0, 1.0), (3.0, 4.0)), 10.0), 150, 100.0) == 150


def test_a_longer_snapshot_is_split_where_the_bubbles_end() -> None:
    # Alg. 4: t_ss = 6 s, t_bubble = 2 s, so floor(600 x 2 / 6) bytes into bubbles.
    assert bytes_in_bubbles(Bubbles(((0.0, 1.0), (3.0, 4.0)), 10.0), 600, 100.0) == 200


def test_a_stage_without_bubbles_copies_everything_beside_computation() -> None:
    assert bytes_in_bubbles(schedule_1f1b(1, 4, 0.5, 0.5).bubbles(0), 300, 100.0) == 0


@settings(max_examples=examples(150))
@given(schedules(), st.integers(0, 10**6), st.floats(1, 1e5))
def test_bubbles_take_what_they_have_time_for(case, nbytes, bandwidth) -> None:
    _, schedule = case
    for stage in range(len(schedule.operations)):
        bubbles = schedule.bubbles(stage)
        room = math.floor(bubbles.idle_s * bandwidth)
        assert bytes_in_bubbles(bubbles, nbytes, bandwidth) == pytest.approx(min(nbytes, room), abs=1)


@settings(max_examples=examples(100))
@given(schedules(), st.integers(0, 10**6), st.floats(1, 1e5), st.floats(1, 10))
def test_more_bandwidth_never_moves_bytes_out_of_the_bubbles(case, nbytes, bandwidth, factor) -> None:
    _, schedule = case
    bubbles = schedule.bubbles(0)
    assert bytes_in_bubbles(bubbles, nbytes, bandwidth * factor) >= bytes_in_bubbles(bubbles, nbytes, bandwidth)


@pytest.mark.parametrize("field", ["stages", "microbatches", "chunks"])
@pytest.mark.parametrize("bad", [0, -2, 1.5, NAN])
def test_counts_that_are_no_positive_whole_numbers_are_refused_by_name(field: str, bad: float) -> None:
    arguments = {"stages": 2, "microbatches": 4, "forward_s": 1.0, "backward_s": 1.0, "chunks": 1} | {field: bad}
    with pytest.raises(UsageError, match=rf"^{field} is {bad}, but must be a whole number of at least 1$"):
        schedule_1f1b(**arguments)


@pytest.mark.parametrize("field", ["forward_s", "backward_s"])
@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF])
def test_passes_that_take_no_finite_positive_time_are_refused_by_name(field: str, bad: float) -> None:
    arguments = {"stages": 2, "microbatches": 4, "forward_s": 1.0, "backward_s": 1.0}
    with pytest.raises(UsageError, match=rf"^{field} is {bad}, but must be a finite number greater than 0$"):
        schedule_1f1b(**(arguments | {field: bad}))
    with pytest.raises(UsageError, match=rf"^{field} of stage 1 is {bad}, "):
        schedule_1f1b(**(arguments | {field: [1.0, bad]}))
    with pytest.raises(UsageError, match=rf"^{field} has 3 values, but must be one number or one per stage \(2\)$"):
        schedule_1f1b(**(arguments | {field: [1.0, 1.0, 1.0]}))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 6), (4, 2), (1, 4)])
def test_interleaving_without_whole_groups_of_microbatches_is_refused(stages: int, microbatches: int) -> None:
    with pytest.raises(UsageError, match=rf"^microbatches is {microbatches} with 2 chunks, .*\(stages is {stages}\)$"):
        schedule_1f1b(stages, microbatches, 1.0, 1.0, 2)


@pytest.mark.parametrize("bad", [-1.0, NAN, INF])
def test_communication_that_takes_negative_or_no_finite_time_is_refused(bad: float) -> None:
    with pytest.raises(UsageError, match=rf"^communication_s is {bad}, but must be a finite number of at least 0$"):
        schedule_1f1b(2, 4, 1.0, 1.0, communication_s=bad)


@pytest.mark.parametrize(
    "intervals", [((2.0, 1.0),), ((0.0, 2.0), (1.0, 3.0)), ((0.0, 11.0),), ((-1.0, 1.0),), ((NAN, 1.0),), ((1.0, 1.0),)]
)
def test_profiled_bubbles_that_overlap_or_leave_the_iteration_are_refused(intervals) -> None:
    with pytest.raises(UsageError, match=r"^bubble \("):
        Bubbles(intervals, 10.0)


def test_a_placement_refuses_impossible_bytes_and_bandwidths() -> None:
    bubbles = Bubbles((), 1.0)
    with pytest.raises(UsageError, match=r"^checkpoint_bytes is -1, but must be a whole number of at least 0$"):
        bytes_in_bubbles(bubbles, -1, 1.0)
    for bad in (0.0, -1.0, NAN, INF):
        with pytest.raises(UsageError, match=rf"^bandwidth_bytes_per_s is {bad}, but must be a finite number"):
            bytes_in_bubbles(bubbles, 1, bad)
    for bad in (0.0, NAN, INF):
        with pytest.raises(UsageError, match=rf"^span_s is {bad}, but must be a finite number greater than 0$"):
            Bubbles((), bad)
