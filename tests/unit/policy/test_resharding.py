"""Which stored elements of one layout make up the tensors of another one."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.policy.resharding import (
    ElementRange,
    Grid,
    ReadPlan,
    RecordKey,
    StoredRange,
    common,
    freed_by,
    one_value,
    plan_reads,
    source_rank,
)
from megatron.core.dist_checkpointing.moe.types import Topology
from megatron.core.dist_checkpointing.moe.types.layout import is_same_layout


def test_other_buckets_make_another_layout_but_not_of_snapshots_of_before_which_do_not_tell_theirs() -> None:
    here = {"world_size": 2, "tp": 1, "buckets": "1a2b3c4d"}
    assert is_same_layout(dict(here), here)
    assert is_same_layout({"world_size": 2, "tp": 1}, here)
    assert not is_same_layout(here | {"buckets": "0"}, here)
    assert not is_same_layout({"world_size": 2, "tp": 2}, here)
    assert not is_same_layout(here | {"shard": "share"}, here)


def partition(whole: np.ndarray, part: int, parts: int) -> np.ndarray:
    """What a tensor rank has of a matrix, flattened."""
    width = whole.shape[1] // parts
    return whole[:, part * width : (part + 1) * width].reshape(-1)


def cut(numel: int, pieces: int, draw: Random) -> list[tuple[int, int]]:
    """Stretches that follow each other, some of them empty, as data-parallel shards do."""
    ends = [0, *sorted(draw.randint(0, numel) for _ in range(pieces - 1)), numel]
    return [(start, end) for start, end in itertools.pairwise(ends) if start < end]


def stored_as(grid: Grid, parts: int, pieces: int, draw: Random, stage: int = 0) -> list[StoredRange]:
    records = []
    for part in range(parts):
        for start, end in cut(grid.numel // parts, pieces, draw):
            rank = len(records)
            records.append(
                StoredRange(rank, stage, f"{rank}", ElementRange(start, end, part, parts), f"{part}:{start}")
            )
    return records


def carried_out(whole: np.ndarray, plans: tuple[ReadPlan, ...], wanted: ElementRange) -> np.ndarray:
    """What comes of the plans; every element must be written once."""
    result, writes = np.full(wanted.numel, -1), np.zeros(wanted.numel, int)
    for plan in plans:
        of = plan.record.elements
        source = partition(whole, of.part, of.parts)[of.start : of.end]
        for run in plan.runs:
            for at in range(run.count):
                here, there = run.source + at * run.source_step, run.target + at * run.target_step
                assert 0 <= here <= here + run.length <= len(source)
                result[there : there + run.length] = source[here : here + run.length]
                writes[there : there + run.length] += 1
    assert (writes == 1).all()
    return result


grids = st.builds(Grid, st.integers(1, 7), st.sampled_from([12, 24, 36]))
degrees = st.sampled_from([1, 2, 3, 4, 6])


@settings(max_examples=examples(400), deadline=None)
@given(grids, degrees, degrees, st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_element_of_any_new_shard_is_read_exactly_once(
    grid: Grid, old: int, new: int, pieces: int, shards: int, draw: Random
) -> None:
    whole = np.arange(grid.numel).reshape(grid.rows, grid.width)
    stored = stored_as(grid, old, pieces, draw)
    draw.shuffle(stored)
    for part in range(new):
        for start, end in cut(grid.numel // new, shards, draw):
            wanted = ElementRange(start, end, part, new)
            plans = plan_reads("w", grid, stored, wanted)
            assert (carried_out(whole, plans, wanted) == partition(whole, part, new)[start:end]).all()
            assert len({plan.record for plan in plans}) == len(plans), "each record is read once"


@settings(max_examples=examples(200), deadline=None)
@given(grids, degrees, degrees, st.integers(2, 5), st.randoms(use_true_random=False))
def test_a_share_that_is_missing_is_a_gap_for_exactly_those_who_need_it(
    grid: Grid, old: int, new: int, pieces: int, draw: Random
) -> None:
    stored = stored_as(grid, old, pieces, draw)
    lost = stored.pop(draw.randrange(len(stored)))
    for part in range(new):
        wanted = ElementRange(0, grid.numel // new, part, new)
        if common(grid, lost.elements, wanted):
            with pytest.raises(UnreadableCheckpoint, match="a rank's share is missing"):
                plan_reads("w", grid, stored, wanted)
        else:
            assert plan_reads("w", grid, stored, wanted)


def test_the_first_missing_element_is_named() -> None:
    stored = [StoredRange(0, 0, "a", ElementRange(0, 4), "a"), StoredRange(2, 0, "c", ElementRange(8, 12), "c")]
    with pytest.raises(UnreadableCheckpoint, match=r"^w/master: elements from 4 of the 12 that this rank needs"):
        plan_reads("w/master", Grid(1, 12), stored, ElementRange(0, 12))


@pytest.mark.parametrize("other", [ElementRange(2, 6), ElementRange(0, 3), ElementRange(3, 12)])
def test_elements_that_two_ranks_stored_in_different_stretches_are_refused(other: ElementRange) -> None:
    stored = [StoredRange(0, 0, "a", ElementRange(0, 4), "a"), StoredRange(5, 0, "b", other, "b")]
    with pytest.raises(UnreadableCheckpoint, match="both stored element"):
        plan_reads("w", Grid(1, 12), stored, ElementRange(0, 12))


def test_copies_that_differ_are_refused_with_their_ranks() -> None:
    stored = [StoredRange(rank, 0, "k", ElementRange(0, 12), xxh3) for rank, xxh3 in ((1, "a"), (3, "a"), (4, "b"))]
    with pytest.raises(UnreadableCheckpoint, match="ranks 1 and 4 stored different values of the same elements"):
        plan_reads("w", Grid(1, 12), stored, ElementRange(0, 12))


def test_copies_are_read_by_different_ranks() -> None:
    stored = [StoredRange(rank, 0, "k", ElementRange(0, 12), "a") for rank in (1, 3)]
    plans = [plan_reads("w", Grid(1, 12), stored, ElementRange(0, 12), reader) for reader in range(4)]
    assert [plan.record.rank for (plan,) in plans] == [1, 3, 1, 3]


def test_of_tied_embeddings_the_shares_of_one_stage_are_taken() -> None:
    draw, grid = Random(1), Grid(1, 24)
    whole = np.arange(24).reshape(1, 24)
    first, last = stored_as(grid, 2, 3, draw), stored_as(grid, 2, 2, draw, stage=3)
    for stored in ([*first, *last], [*first[1:], *last]):
        plans = plan_reads("w", grid, stored, ElementRange(0, 24))
        assert len({plan.record.stage for plan in plans}) == 1
        assert (carried_out(whole, plans, ElementRange(0, 24)) == whole[0]).all()


def test_a_vocabulary_that_is_padded_otherwise_is_told() -> None:
    stored = [StoredRange(0, 0, "a", ElementRange(0, 12), "a")]
    with pytest.raises(UnreadableCheckpoint, match="--make-vocab-size-divisible-by"):
        plan_reads("w", Grid(1, 8), stored, ElementRange(0, 8))
    with pytest.raises(UnreadableCheckpoint, match=r"elements from 12 of the 16.*--make-vocab-size-divisible-by"):
        plan_reads("output_layer.weight/master", Grid(1, 16), stored, ElementRange(0, 16))


@pytest.mark.parametrize(("stored", "wanted"), [(1, 2), (2, 1), (2, 4)])
def test_projections_that_are_joined_stay_as_they_are_cut(stored: int, wanted: int) -> None:
    grid, draw = Grid(1, 16, fused=True), Random(0)
    records = stored_as(grid, stored, 2, draw)
    assert plan_reads("mixer.in_proj.weight/master", grid, records, ElementRange(0, 16 // stored, 0, stored))
    with pytest.raises(UnreadableCheckpoint, match=f"tensor-parallel size of before, {stored}"):
        plan_reads("mixer.in_proj.weight/master", grid, records, ElementRange(0, 16 // wanted, 0, wanted))


def test_columns_that_cannot_be_shared_out_are_refused() -> None:
    stored = [StoredRange(0, 0, "a", ElementRange(0, 3, 0, 4), "a")]
    with pytest.raises(UnreadableCheckpoint, match="14 columns cannot be shared out evenly to 4"):
        plan_reads("w", Grid(1, 14), stored, ElementRange(0, 14))


def test_a_value_that_ranks_disagree_about_is_refused_with_their_names() -> None:
    same = [StoredRange(rank, 0, "k", ElementRange(0, 12), "a") for rank in (0, 1)]
    assert one_value("step", same, 3).rank == 1
    with pytest.raises(UnreadableCheckpoint, match="rank 0 and another on rank 7"):
        one_value("step", [*same, StoredRange(7, 0, "k", ElementRange(0, 12), "b")])
    with pytest.raises(UnreadableCheckpoint, match="step is in none of the snapshots"):
        one_value("step", [])


def test_ranks_whose_random_states_must_be_equal_take_them_from_such_ranks() -> None:
    old, new = Topology(8, tp=2, pp=2), Topology(12, tp=4, pp=1)
    for rank in range(new.world_size):
        here, there = new.coordinates(rank), old.coordinates(source_rank(rank, old, new))
        assert (there.tp, there.dp, there.pp) == (here.tp % 2, here.dp % 2, 0)
    for same in (Topology(8, tp=2, pp=2, ep=2), Topology(12, tp=2, cp=3, pp=2)):
        assert [source_rank(rank, same, same) for rank in range(same.world_size)] == list(range(same.world_size))


@given(st.integers(1, 16), st.sets(st.integers(0, 40)))
def test_each_superseded_snapshot_is_removed_by_one_rank(world_size: int, stored: set[int]) -> None:
    new = Topology(world_size)
    freed = [owner for rank in range(world_size) for owner in freed_by(rank, new, sorted(stored))]
    assert sorted(freed) == sorted(stored)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a.b.weight[0:4096]/exp_avg", RecordKey("a.b.weight", "exp_avg", ElementRange(0, 4096))),
        ("w/tp1of2[8:16]/master", RecordKey("w", "master", ElementRange(8, 16, 1, 2))),
        ("c/rank3[0:4]/buffer", RecordKey("c", "buffer", ElementRange(0, 4), own_of=3)),
    ],
)
def test_a_key_says_what_it_was_made_of(key: str, expected: RecordKey) -> None:
    assert RecordKey.parse(key) == expected


@pytest.mark.parametrize("key", ["random/torch", "w[0:4]", "w[4]/master", "[0:4]/master"])
def test_another_key_is_refused(key: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match="names no elements"):
        RecordKey.parse(key)
