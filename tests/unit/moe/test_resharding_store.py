"""Storage that shows snapshots of another layout as this job's: what is read, what is refused, what is freed."""

from __future__ import annotations

import errno
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.policy.resharding import Grid, RecordKey
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, Listing, Manifest, SnapshotId, Torn
from megatron.core.dist_checkpointing.moe.recovery.inventory import listing
from megatron.core.dist_checkpointing.moe.resharding.generation import Generation, LiveLayout, LiveTensor, fitted
from megatron.core.dist_checkpointing.moe.resharding.store import ReshardingStore
from megatron.core.dist_checkpointing.moe.storage.filesystem import SEGMENT, FilesystemStore
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, Tier, Topology

OPERATOR = OperatorId(0, OperatorKind.NON_EXPERT)
OLD, NEW = Topology(4, tp=2), Topology(2, tp=1)
ROWS, COLUMNS = 6, 8
WHOLE = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
SMALL = Grid(ROWS, COLUMNS)
GROUP = {"lr": 0.1, "weight_decay": 0.01}
TRAINER = {"iteration": 4, "param_groups": [GROUP], "grad_scalers": [{"scale": 2.0}]}


def facts_of(topology: Topology) -> dict[str, Any]:
    names = ("world_size", "tp", "pp", "vpp", "cp", "ep")
    return {name: getattr(topology, name) for name in names} | {"etp": topology.expert_tp}


def half(tensor: np.ndarray, which: int) -> tuple[int, int]:
    """Which elements of a partition one of two data-parallel ranks has: not cut at the end of a row."""
    return ((0, tensor.size // 2 + 1), (tensor.size // 2 + 1, tensor.size))[which]


def share(rank: int, whole: np.ndarray = WHOLE) -> dict[str, tuple[Part, np.ndarray]]:
    """What a rank of the old layout stored of a row-parallel weight, its step count, and a norm that all hold."""
    tp, dp = rank % 2, rank // 2
    partition = np.ascontiguousarray(whole[:, tp * whole.shape[1] // 2 : (tp + 1) * whole.shape[1] // 2]).reshape(-1)
    start, end = half(partition, dp)
    here = f"w/tp{tp}of2[{start}:{end}]"
    return {
        f"{here}/master": (Part.MASTER, partition[start:end]),
        f"{here}/step": (Part.MOMENTS, np.array([4.0], np.float32)),
        "n[0:4]/master": (Part.MASTER, np.ones(4, np.float32)),
        f"c/rank{rank}[0:2]/buffer": (Part.MASTER, np.zeros(2, np.float32)),
    }


def put(
    store: FilesystemStore,
    rank: int,
    records: Mapping[str, tuple[Part, np.ndarray]],
    topology: Topology | Mapping[str, Any] = OLD,
    iteration: int = 4,
    scales: bool = False,
    digest: str = "digest",
    **scalars: Any,
) -> None:
    fields = [Field(key, str(value.dtype), value.shape, part, OPERATOR) for key, (part, value) in records.items()]
    states = ("random/torch", *(("random/quantization",) if scales else ()))
    fields += [Field(key, "uint8", (3,)) for key in states]
    layout = Layout.of(fields)
    with store.reserve(SnapshotId(iteration, rank), layout) as writer:
        for key, (_, value) in records.items():
            writer.put(key, np.ascontiguousarray(value))
        for key in states:
            writer.put(key, np.array([rank, 1, 2], np.uint8))
        held = [[OPERATOR.layer, OPERATOR.kind.value, OPERATOR.expert, Part.EVERYTHING.value]]
        own = {"operators": held, "timeline": [["1-a", 0]], "window": [iteration, iteration], "trainer": TRAINER}
        made_in = facts_of(topology) if isinstance(topology, Topology) else topology
        writer.seal(Facts("job", digest, made_in, own | scalars))


def live_of(rank: int, grid: Grid = SMALL, **changes: Any) -> LiveLayout:
    """What rank 0 or 1 of the new layout wants: data-parallel halves of the weight, all of the norm."""
    start, end = ((0, grid.numel // 2 + 3), (grid.numel // 2 + 3, grid.numel))[rank]
    wanted = {
        f"w[{start}:{end}]/master": (Part.MASTER, end - start),
        f"w[{start}:{end}]/step": (Part.MOMENTS, 1),
        "n[0:4]/master": (Part.MASTER, 4),
        f"c/rank{rank}[0:2]/buffer": (Part.MASTER, 2),
    }
    tensors = tuple(
        LiveTensor(Field(key, "float32", (numel,), part, OPERATOR), RecordKey.parse(key), in_forward=False)
        for key, (part, numel) in wanted.items()
    )
    live = {"param_groups": [GROUP, GROUP], "grad_scalers": [{"scale": 1.0}] * 2}
    return replace(LiveLayout(rank, NEW, facts_of(NEW), tensors, {"w": grid}, live), **changes)


def view(folder: Path, rank: int = 0, *, inexact: bool = False, live: LiveLayout | None = None) -> ReshardingStore:
    store = FilesystemStore(folder, rank)
    return ReshardingStore(store, lambda: live or live_of(rank), facts_of(NEW), rank, inexact=inexact)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(OLD.world_size):
        put(FilesystemStore(tmp_path, rank), rank, share(rank))
    return tmp_path


def test_each_rank_reads_its_own_state_from_the_shares_of_the_other_layout(folder: Path) -> None:
    flat = []
    for rank in range(NEW.world_size):
        store = view(folder, rank)
        assert store.snapshots().sealed == (SnapshotId(4, rank),)
        with store.open(SnapshotId(4, rank)) as reader:
            (weight, step, norm, counts, random) = [
                bytes(reader.read(field.key)) for field in reader.manifest.layout.fields
            ]
            assert reader.manifest.facts.topology == facts_of(NEW)
            assert not reader.verify()
        flat += [*np.frombuffer(weight, np.float32)]
        assert np.frombuffer(step, np.float32) == [4.0]
        assert (np.frombuffer(norm, np.float32) == 1).all()
        assert (np.frombuffer(counts, np.float32) == 0).all()
        assert random[0] == 2 * rank, "of the rank at the same data-parallel coordinate"
    assert flat == [*WHOLE.reshape(-1)]


def test_a_shard_of_one_element_takes_the_step_count_of_any_rank(folder: Path) -> None:
    keys = {"w[47:48]/master": Part.MASTER, "w[47:48]/step": Part.MOMENTS}
    alone = tuple(
        LiveTensor(Field(key, "float32", (1,), part, OPERATOR), RecordKey.parse(key), in_forward=False)
        for key, part in keys.items()
    )
    with view(folder, live=live_of(0, tensors=alone)).open(SnapshotId(4, 0)) as reader:
        assert [np.frombuffer(bytes(reader.read(key)), np.float32).item() for key in keys] == [WHOLE[-1, -1], 4.0]


def test_parameter_groups_and_loss_scalers_are_as_many_as_this_rank_has(folder: Path) -> None:
    with view(folder).open(SnapshotId(4, 0)) as reader:
        trainer: Any = reader.manifest.facts.scalars["trainer"]
    assert len(trainer["param_groups"]) == 2
    assert trainer["grad_scalers"] == [{"scale": 2.0}] * 2
    assert trainer["iteration"] == 4


def test_step_counts_of_groups_are_kept_and_scales_that_differ_refused() -> None:
    counted = {"param_groups": [{**GROUP, "step": 7}], "grad_scalers": []}
    assert fitted(counted, [counted], {"param_groups": [GROUP]})["param_groups"] == [{**GROUP, "step": 7}]
    other = {**TRAINER, "grad_scalers": [{"scale": 4.0}]}
    with pytest.raises(UnreadableCheckpoint, match="loss scales differ"):
        fitted(TRAINER, [TRAINER, other], TRAINER)


RATES = [{"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.2, "weight_decay": 0.01}]


def groups_of(*kept: dict[str, float], scheduler: bool = False) -> dict[str, Any]:
    return {"param_groups": [*kept], "scheduler": {"num_steps": 4} if scheduler else {}}


@pytest.mark.parametrize(
    ("saved", "came_back"),
    [
        ([RATES, RATES], RATES[:2]),
        ([RATES[:2], RATES], RATES[:2]),  # a stage without experts
        ([RATES[:1], RATES[:1]], RATES[:1] * 2),
    ],
    ids=["as many on all ranks", "fewer on one", "one for all"],
)
def test_rates_that_no_scheduler_sets_come_back_in_another_layout(
    saved: list[list[dict[str, float]]], came_back: list[dict[str, float]]
) -> None:
    everywhere = [groups_of(*one) for one in saved]
    live = groups_of({"lr": 9.0, "weight_decay": 9.0}, {"lr": 9.0, "weight_decay": 9.0})
    assert fitted(everywhere[0], everywhere, live)["param_groups"] == came_back


@pytest.mark.parametrize("saved", [[RATES[:1], RATES[1:]], [RATES[:2], RATES[:2]]], ids=["others", "too few"])
def test_rates_of_groups_that_are_others_here_are_refused_where_no_scheduler_sets_them(
    saved: list[list[dict[str, float]]],
) -> None:
    everywhere = [groups_of(*one) for one in saved]
    with pytest.raises(UnreadableCheckpoint, match=r"^lr and weight_decay differ .* no scheduler sets them"):
        fitted(everywhere[0], everywhere, groups_of(*RATES))


def test_rates_that_a_scheduler_sets_are_left_to_it() -> None:
    everywhere = [groups_of(*RATES[:1], scheduler=True), groups_of(*RATES[1:], scheduler=True)]
    assert fitted(everywhere[0], everywhere, groups_of(*RATES))["param_groups"] == RATES


class Counting(FilesystemStore):
    """Notes which records are read."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.reads: Counter[tuple[int, str]] = Counter()

    def open(self, snapshot: SnapshotId) -> Any:
        reader, whole = super().open(snapshot), self.reads
        read = reader.read

        def counted(key: str) -> memoryview:
            whole[snapshot.rank, key] += 1
            return read(key)

        reader.read = counted  # type: ignore[method-assign]
        return reader


def test_each_needed_record_is_read_once_and_no_other(folder: Path) -> None:
    for rank in range(NEW.world_size):
        below = Counting(folder, rank)
        store = ReshardingStore(below, lambda rank=rank: live_of(rank), facts_of(NEW), rank, inexact=False)  # type: ignore[misc]
        with store.open(SnapshotId(4, rank)) as reader:
            for field in reader.manifest.layout.fields:
                reader.read(field.key)
        assert set(below.reads.values()) == {1}
        weights = {owner for owner, key in below.reads if key.startswith("w/") and key.endswith("master")}
        # Of each rank's rows some elements lie behind the cut between the data-parallel ranks, some before.
        assert weights == ({0, 1, 2}, {1, 2, 3})[rank]


def test_memory_is_one_record_beside_what_is_made(tmp_path: Path) -> None:
    whole = np.zeros((2048, 1024), np.float32)
    for rank in range(OLD.world_size):
        put(FilesystemStore(tmp_path, rank), rank, share(rank, whole))
    store, made = view(tmp_path, live=live_of(0, Grid(2048, 1024))), 0
    with store.open(SnapshotId(4, 0)) as reader:
        tracemalloc.start()
        for field in reader.manifest.layout.fields:
            made = max(made, reader.read(field.key).nbytes)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    stored = whole.nbytes // 4
    assert peak < made + stored + stored // 8


def read_all(store: ReshardingStore, rank: int) -> None:
    with store.open(SnapshotId(4, rank)) as reader:
        for field in reader.manifest.layout.fields:
            reader.read(field.key)


def refusal(store: ReshardingStore, rank: int = 0) -> str:
    assert store.snapshots().sealed == (SnapshotId(4, rank),)
    with pytest.raises(UnreadableCheckpoint) as refused:
        read_all(store, rank)
    assert "\n" not in str(refused.value)
    return str(refused.value)


ROW_MOMENT = "moment2_buffer"
"""Of Muon with `moment2_method`: a mean square for each row of what a rank has, or one for all of it."""


def view_of_moments(folder: Path, wanted: str, numel: int, topology: Topology) -> ReshardingStore:
    record = Field(f"{wanted}/{ROW_MOMENT}", "float32", (numel,), Part.MOMENTS, OPERATOR)
    tensors = (LiveTensor(record, RecordKey.parse(record.key), in_forward=False),)
    live = replace(live_of(0), topology=topology, facts=facts_of(topology), tensors=tensors)
    return ReshardingStore(FilesystemStore(folder, 0), lambda: live, facts_of(topology), 0, inexact=False)


def put_moments(folder: Path, topology: Topology, *of_ranks: tuple[str, int, float]) -> None:
    for rank, (key, numel, value) in enumerate(of_ranks):
        moments = {f"{key}/{ROW_MOMENT}": (Part.MOMENTS, np.full(numel, value, np.float32))}
        put(FilesystemStore(folder, rank), rank, moments, topology)


CUT = "w/tp0of2[0:24]", "w/tp1of2[0:24]"


@pytest.mark.parametrize("numel", [ROWS, 1], ids=["of rows", "of all"])
@pytest.mark.parametrize("joins", [True, False])
def test_a_moment_of_a_shard_as_a_whole_is_refused_where_tensor_ranks_cut_otherwise(
    joins: bool, numel: int, tmp_path: Path
) -> None:
    if joins:
        put_moments(tmp_path, Topology(2, tp=2), *((key, numel, 7.0) for key in CUT))
        store = view_of_moments(tmp_path, "w[0:48]", numel, NEW)
    else:
        put_moments(tmp_path, NEW, *[("w[0:48]", numel, 7.0)] * 2)
        store = view_of_moments(tmp_path, CUT[0], max(1, numel // 2), Topology(2, tp=2))
    assert "no rank stored that shard: start with that layout again" in refusal(store)


def test_a_moment_of_rows_comes_back_where_tensor_ranks_cut_alike(tmp_path: Path) -> None:
    put_moments(tmp_path, OLD, *[(CUT[0], ROWS, 7.0), (CUT[1], ROWS, 8.0)] * 2)
    store = view_of_moments(tmp_path, CUT[0], ROWS, Topology(2, tp=2))
    with store.open(SnapshotId(4, 0)) as reader:
        assert [*np.frombuffer(reader.read(f"{CUT[0]}/{ROW_MOMENT}"), np.float32)] == [7.0] * ROWS


def test_a_moment_of_each_element_is_no_moment_of_rows(tmp_path: Path) -> None:
    put_moments(tmp_path, OLD, *[(key, 24, 7.0) for key in CUT * 2])
    store = view_of_moments(tmp_path, CUT[0], ROWS, Topology(2, tp=2))
    assert "moment2_buffer has 24 elements in the snapshot of rank 0 after iteration 4, and 6 are" in refusal(store)


def test_values_of_another_dtype_are_shown_as_they_are_stored_and_never_as_bytes_of_this_jobs(folder: Path) -> None:
    live = live_of(0)
    narrow = [
        replace(one, record=replace(one.record, dtype="bfloat16")) if one.key.field == "master" else one
        for one in live.tensors
    ]
    scale = LiveTensor(
        Field("n[0:4]/master_scale", "float32", (1,), Part.MASTER, OPERATOR),
        RecordKey.parse("n[0:4]/master_scale"),
        False,
    )
    with view(folder, live=replace(live, tensors=(*narrow, scale))).open(SnapshotId(4, 0)) as reader:
        record, *_ = reader.manifest.records
        assert (record.field.key, record.field.dtype) == ("w[0:27]/master", "float32")
        assert [*np.frombuffer(reader.read(record.key), np.float32)] == [*WHOLE.reshape(-1)[:27]]
        assert scale.record.key not in reader.manifest.by_key, "whoever sees the dtype refuses it by that"


def test_ranks_that_stored_one_tensor_in_two_dtypes_are_refused(tmp_path: Path) -> None:
    for rank in range(OLD.world_size):
        wide = {"n[0:4]/master": (Part.MASTER, np.ones(4, np.float64))} if rank == 3 else {}
        put(FilesystemStore(tmp_path, rank), rank, share(rank) | wide)
    assert "n/master is stored as float32 and as float64" in refusal(view(tmp_path))


def test_a_share_that_is_missing_is_told_by_what_it_held(folder: Path) -> None:
    FilesystemStore(folder, 3).free(SnapshotId(4, 3))
    said = refusal(view(folder, 1), 1)
    assert "made in the parallel layout world_size 4, tp 2" in said
    assert "w/master: elements from " in said
    assert "a rank's share is missing" in said


def test_a_missing_share_with_the_random_states_is_told_by_its_rank(folder: Path) -> None:
    FilesystemStore(folder, 2).free(SnapshotId(4, 2))
    live = live_of(1)
    only_norm = replace(live, tensors=live.tensors[2:3])
    assert "the share of rank 2 is missing, whose random states are needed" in refusal(
        view(folder, 1, live=only_norm), 1
    )


def test_a_torn_share_counts_as_missing(folder: Path) -> None:
    with (folder / SnapshotId(4, 1).name / "segment.bin").open("r+b") as file:
        file.truncate(16)
    store = view(folder)
    assert "a rank's share is missing" in refusal(store)
    assert [torn.snapshot.rank for torn in store.snapshots().torn] == [1]


def test_a_changed_byte_is_found_before_it_is_used(folder: Path) -> None:
    segment = folder / SnapshotId(4, 3).name / "segment.bin"
    data = bytearray(segment.read_bytes())
    data[5] ^= 1
    segment.write_bytes(data)
    assert "does not match its checksum" in refusal(view(folder, 1), 1)


def test_ranks_that_disagree_about_what_all_hold_are_named(tmp_path: Path) -> None:
    for rank in range(OLD.world_size):
        records = share(rank) | ({"n[0:4]/master": (Part.MASTER, np.zeros(4, np.float32))} if rank == 3 else {})
        put(FilesystemStore(tmp_path, rank), rank, records)
    assert "n/master: ranks 0 and 3 stored different values of the same elements" in refusal(view(tmp_path))


def test_what_each_rank_counted_for_itself_must_be_the_same_everywhere(tmp_path: Path) -> None:
    for rank in range(OLD.world_size):
        counted = {f"c/rank{rank}[0:2]/buffer": (Part.MASTER, np.full(2, rank, np.float32))}
        put(FilesystemStore(tmp_path, rank), rank, share(rank) | counted)
    assert "c/buffer has one value on rank 0 and another on rank 1" in refusal(view(tmp_path))


def test_what_all_ranks_have_in_memory_is_read_where_storage_got_a_part_by_another_plan(tmp_path: Path) -> None:
    for rank in range(OLD.world_size):
        put(FilesystemStore(tmp_path / "memory", rank), rank, share(rank))
    put(FilesystemStore(tmp_path / "storage", 0), 0, share(0), digest="experts that are persisted")
    storage, memory = (FilesystemStore(tmp_path / name, 0) for name in ("storage", "memory"))
    store = ReshardingStore(storage, lambda: live_of(0), facts_of(NEW), 0, inexact=False)
    store.use_memory(memory)  # type: ignore[arg-type]
    with store.open(SnapshotId(4, 0)) as reader:
        assert not reader.verify()


def test_a_record_that_is_damaged_in_memory_is_read_from_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank, place in product(range(OLD.world_size), ("memory", "storage")):
        put(FilesystemStore(tmp_path / place, rank), rank, share(rank))
    (segment,) = (tmp_path / "memory" / SnapshotId(4, 2).name).glob(SEGMENT)
    with segment.open("r+b") as file:
        file.write(bytes([255] * 16))
    storage, memory = (FilesystemStore(tmp_path / name, 0) for name in ("storage", "memory"))
    store = ReshardingStore(storage, lambda: live_of(0), facts_of(NEW), 0, inexact=False)
    store.use_memory(memory)  # type: ignore[arg-type]
    with caplog.at_level("WARNING"), store.open(SnapshotId(4, 0)) as reader:
        assert not reader.verify()
        weight = np.frombuffer(bytes(reader.read("w[0:27]/master")), np.float32)
    assert [*weight] == [*WHOLE.reshape(-1)[:27]]
    assert "using the copy in storage" in caplog.text


def test_a_window_of_iterations_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    for rank in range(OLD.world_size):
        put(FilesystemStore(tmp_path, rank), rank, share(rank), window=[2, 4])
    said = refusal(view(tmp_path))
    assert "iterations 2 to 4 have to be run again in the layout" in said
    assert "moe-ckpt convert --to dense" in said


def test_a_window_of_iterations_may_be_run_again_here_without_losses_of_samples_that_others_have_now(
    tmp_path: Path,
) -> None:
    journal = {"grad_norm": 0.5, "skipped": False, "lm_loss": 2.5, "num_tokens": 64}
    windows(tmp_path, (3, 4), journal=journal)
    store = FilesystemStore(tmp_path, 0)
    here = ReshardingStore(store, lambda: live_of(0), facts_of(NEW), 0, inexact=False, replays=True)
    assert here.previous_window() is None, "no other processes are needed"
    with here.open(SnapshotId(3, 0)) as reader:
        assert reader.manifest.facts.scalars["journal"] == journal | {"lm_loss": None}
        assert reader.manifest.facts.scalars["window"] == [3, 4]
        assert not reader.verify()


def windows(folder: Path, *spans: tuple[int, int], lacks: tuple[int, int] | None = None, **scalars: Any) -> None:
    """All snapshots of windows of the old layout, but that of an iteration and rank."""
    for first, last in spans:
        for iteration in range(first, last + 1):
            for rank in range(OLD.world_size):
                if (iteration, rank) != lacks:
                    store = FilesystemStore(folder, rank)
                    put(store, rank, share(rank), iteration=iteration, window=[first, last], **scalars)


def test_the_newest_window_of_which_all_ranks_left_everything_can_be_run_again(tmp_path: Path) -> None:
    windows(tmp_path, (1, 2), (3, 4), (5, 6), lacks=(5, 3))
    found = view(tmp_path).previous_window()
    assert found is not None
    assert (found.first, found.last, found.in_memory) == (3, 4, False)
    assert str(found) == "iterations 3 to 4 of the layout world_size 4, tp 2, etp 2"


def test_of_two_pasts_the_newer_one_is_run_again(tmp_path: Path) -> None:
    windows(tmp_path, (5, 6))
    windows(tmp_path, (3, 4), timeline=[["2-b", 2]])
    found = view(tmp_path).previous_window()
    assert found is not None
    assert found.last == 4


def test_a_window_that_two_attempts_stored_parts_of_is_not_run_again(tmp_path: Path) -> None:
    windows(tmp_path, (3, 4), (5, 6))
    for rank in range(OLD.world_size):  # a later one went back to 4, and was cut off between the two
        store = FilesystemStore(tmp_path, rank)
        store.free(SnapshotId(5, rank))
        put(store, rank, share(rank), iteration=5, window=[5, 6], timeline=[["1-a", 0], ["2-b", 4]])
    found = view(tmp_path).previous_window()
    assert found is not None
    assert (found.first, found.last) == (3, 4)


def test_no_window_is_run_again_where_none_is_whole_or_training_draws_random_numbers(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert view(folder).previous_window() is None, "a whole state is none"
    other = tmp_path_factory.mktemp("windows")
    windows(other, (3, 4))
    live = live_of(0, draws="hidden_dropout 0.1")
    assert view(other, live=live).previous_window() is None
    assert view(other, live=live, inexact=True).previous_window() is not None


def test_what_another_layout_left_is_copied_as_it_is(tmp_path: Path) -> None:
    windows(tmp_path / "from", (3, 4))
    view(tmp_path / "from").copy_previous(FilesystemStore(tmp_path / "to", 0))
    before, after = (sorted(path for path in (tmp_path / name).rglob("*.*")) for name in ("from", "to"))
    assert [path.relative_to(tmp_path / "from") for path in before] == [
        path.relative_to(tmp_path / "to") for path in after
    ]
    assert len(before) == 2 * 2 * OLD.world_size
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(before, after, strict=True))


def test_a_damaged_generation_is_named_and_the_others_are_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windows(tmp_path / "from", (1, 2), (3, 4))
    records = tmp_path / "from" / SnapshotId(2, 2).name / SEGMENT
    records.write_bytes(bytes(records.stat().st_size))
    view(tmp_path / "from").copy_previous(FilesystemStore(tmp_path / "to", 0))
    found = view(tmp_path / "to").previous_window()
    assert found is not None
    assert (found.first, found.last) == (3, 4)
    (warning,) = caplog.messages
    assert "skipped: iteration 2 of layout world_size 4, tp 2, etp 2" in warning
    assert "does not match its checksum" in warning


def test_random_draws_are_refused_unless_accepted(folder: Path) -> None:
    live = live_of(0, draws="hidden_dropout 0.1")
    assert "hidden_dropout 0.1" in refusal(view(folder, live=live))
    with view(folder, live=live, inexact=True).open(SnapshotId(4, 0)) as reader:
        assert reader.read("n[0:4]/master").nbytes == 16


@pytest.mark.parametrize(
    ("shares", "iterations", "first", "is_whole"),
    [
        ((0, 1, 2, 3), (4,), 4, True),
        ((0, 1, 3), (4,), 4, False),
        ((0, 1, 2, 3), (3, 4), 3, True),
        ((0, 1, 2, 3), (4,), 3, False),
    ],
)
def test_a_whole_state_that_a_flag_would_show_is_not_passed_by(
    shares: tuple[int, ...], iterations: tuple[int, ...], first: int, is_whole: bool, tmp_path: Path
) -> None:
    for rank in shares:
        for iteration in iterations:
            put(FilesystemStore(tmp_path, rank), rank, share(rank), iteration=iteration, window=[first, 4])
    store = view(tmp_path, live=live_of(0, draws="hidden_dropout 0.1"))
    for row in listing(store, Tier.PERSISTENT, facts_of(NEW), owner=0, is_older=lambda snapshot: True):
        assert "give --moe-ckpt-reshard inexact" in row.why
        assert row.is_foreign == is_whole, "what is lost is lost with any flag"


@pytest.mark.parametrize("tied", [True, False])
def test_output_weights_that_core_leaves_idle_on_several_stages_are_those_of_the_embedding(
    tied: bool, tmp_path: Path
) -> None:
    """With tied embeddings and layers that predict further tokens: a job of one stage has no such tensor."""
    for rank in range(OLD.world_size):
        cut = {key.replace("w/", "embedding.word_embeddings.weight/"): value for key, value in share(rank).items()}
        put(FilesystemStore(tmp_path, rank), rank, cut)
    key, grid = f"output_layer.weight[0:{SMALL.numel}]/master", {"output_layer.weight": SMALL}
    record = Field(key, "float32", (SMALL.numel,), Part.MASTER, OPERATOR)
    live = live_of(0, tensors=(LiveTensor(record, RecordKey.parse(key), False),), grids=grid, tied=tied)
    store = view(tmp_path, live=live)
    if not tied:
        assert "output_layer.weight/master is in none of the snapshots" in refusal(store)
        return
    with store.open(SnapshotId(4, 0)) as reader:
        assert [*np.frombuffer(reader.read(key), np.float32)] == [*WHOLE.reshape(-1)]


def in_buckets(topology: Topology, buckets: str) -> dict[str, Any]:
    return facts_of(topology) | {"buckets": buckets}


@pytest.fixture
def cut_elsewhere(tmp_path: Path) -> Callable[[tuple[str, ...]], ReshardingStore]:
    """The same ranks stored it, with other gradient buckets, of a model that draws random numbers."""
    for rank in range(NEW.world_size):
        start, end = ((0, 7), (7, WHOLE.size))[rank]
        records = {
            f"w[{start}:{end}]/master": (Part.MASTER, WHOLE.reshape(-1)[start:end]),
            f"w[{start}:{end}]/step": (Part.MOMENTS, np.array([4.0], np.float32)),
            "n[0:4]/master": (Part.MASTER, np.ones(4, np.float32)),
            f"c/rank{rank}[0:2]/buffer": (Part.MASTER, np.full(2, rank, np.float32)),
        }
        put(FilesystemStore(tmp_path, rank), rank, records, in_buckets(NEW, "aa"), scales=True)

    def seen_with(parameters: tuple[str, ...]) -> ReshardingStore:
        grids = {name: {"w": SMALL, "n": Grid(1, 4)}[name] for name in parameters}
        here = in_buckets(NEW, "bb")
        live = live_of(1, draws="hidden_dropout 0.1", facts=here, grids=grids)
        return ReshardingStore(FilesystemStore(tmp_path, 1), lambda: live, here, 1, inexact=False)

    return seen_with


def test_other_buckets_alone_change_neither_random_numbers_nor_whose_counts_and_scales_are_taken(
    cut_elsewhere: Callable[[tuple[str, ...]], ReshardingStore],
) -> None:
    with cut_elsewhere(("w", "n")).open(SnapshotId(4, 1)) as reader:
        weight, step, norm, counts, *random = [bytes(reader.read(field.key)) for field in reader.manifest.layout.fields]
    assert [*np.frombuffer(weight, np.float32)] == [*WHOLE.reshape(-1)[SMALL.numel // 2 + 3 :]]
    assert np.frombuffer(step, np.float32) == [4.0]
    assert (np.frombuffer(norm, np.float32) == 1).all()
    assert (np.frombuffer(counts, np.float32) == 1).all()
    assert [data[0] for data in random] == [1, 1], "with the scales of modules"


def test_where_stages_have_other_layers_random_numbers_come_out_otherwise_in_any_buckets(
    cut_elsewhere: Callable[[tuple[str, ...]], ReshardingStore],
) -> None:
    assert "hidden_dropout 0.1" in refusal(cut_elsewhere(("w",)), 1)


def at_stage(rank: int, operator: OperatorId, *names: str) -> Manifest:
    """What one of two pipeline stages stored of these tensors."""
    keys = [f"{name}[0:4]/master" for name in names]
    layout = Layout.of([Field(key, "float32", (4,), Part.MASTER, operator) for key in keys])
    facts = Facts("job", "digest", facts_of(Topology(2, pp=2)), {})
    return Manifest(SnapshotId(4, rank), facts, "", layout, ("",) * len(keys))


@pytest.mark.parametrize(
    ("operator", "stored", "here", "moved"),
    [
        (OPERATOR, (("a", "b"), ("c", "d")), ("c", "d"), False),
        (OPERATOR, (("a", "b"), ("c", "d")), ("b", "c", "d"), True),
        (OPERATOR, (("a",), ("b", "c", "d")), ("c", "d"), True),
        (OPERATOR, (("a",), ("c",)), ("c", "d"), False),
        (OperatorId(-1, OperatorKind.EMBEDDING), (("e",), ()), ("e",), False),
    ],
    ids=["as before", "one gained", "one lost", "one that this snapshot has not", "tied and stored once"],
)
def test_a_stage_that_gained_or_lost_a_layer_computes_something_else(
    operator: OperatorId, stored: tuple[tuple[str, ...], ...], here: tuple[str, ...], moved: bool
) -> None:
    generation = Generation({rank: at_stage(rank, operator, *names) for rank, names in enumerate(stored)})
    topology = Topology(2, pp=2)
    live = replace(live_of(1), topology=topology, facts=facts_of(topology), grids=dict.fromkeys(here, Grid(1, 4)))
    assert generation.moves(live) is moved


def test_what_routers_of_a_layer_counted_comes_to_the_stage_that_gained_it(tmp_path: Path) -> None:
    topology, elsewhere = Topology(2, pp=2), "r.counts/rank{}[0:2]/buffer"
    for rank, names in enumerate((("a", "r"), ("c",))):
        records = {f"{name}[0:4]/master": (Part.MASTER, np.ones(4, np.float32)) for name in names}
        records |= {elsewhere.format(0): (Part.MASTER, np.full(2, 7, np.float32))} if "r" in names else {}
        put(FilesystemStore(tmp_path, rank), rank, records, in_buckets(topology, "aa"))
    here, key = in_buckets(topology, "bb"), elsewhere.format(1)
    counts = LiveTensor(Field(key, "float32", (2,), Part.MASTER, OPERATOR), RecordKey.parse(key), in_forward=False)
    grids = dict.fromkeys(("r", "c"), Grid(1, 4))
    live = replace(live_of(1), topology=topology, facts=here, grids=grids, tensors=(counts,))
    store = ReshardingStore(FilesystemStore(tmp_path, 1), lambda: live, here, 1, inexact=False)
    with store.open(SnapshotId(4, 1)) as reader:
        assert [*np.frombuffer(reader.read(key), np.float32)] == [7.0, 7.0]


def test_where_a_tensor_of_this_stage_cannot_be_laid_out_again_each_snapshot_says_so(folder: Path) -> None:
    def refuses() -> LiveLayout:
        raise UsageError("conv.weight is cut along dimension 2, which cannot be laid out again")

    store = ReshardingStore(FilesystemStore(folder, 0), refuses, facts_of(NEW), 0, inexact=False)
    assert "tp 2, etp 2; conv.weight is cut along dimension 2" in refusal(store)
    assert store.previous_window() is None
    store.free(SnapshotId(4, 0))
    assert [snapshot.rank for snapshot in FilesystemStore(folder, 0).snapshots().sealed] == [1, 3]


def test_a_window_in_other_buckets_is_told_by_them(tmp_path: Path) -> None:
    for iteration, rank in ((3, 0), (3, 1), (4, 0), (4, 1)):
        store = FilesystemStore(tmp_path, rank)
        put(store, rank, share(rank), in_buckets(NEW, "aa"), iteration=iteration, window=[3, 4])
    here = in_buckets(NEW, "bb")
    live = live_of(0, draws="hidden_dropout 0.1", facts=here, grids={"w": SMALL, "n": Grid(1, 4)})
    store = ReshardingStore(FilesystemStore(tmp_path, 0), lambda: live, here, 0, inexact=False)
    assert str(store.previous_window()) == "iterations 3 to 4 of the layout world_size 2, buckets aa"
    with pytest.raises(UnreadableCheckpoint, match="were run in, world_size 2, buckets aa: moe-ckpt convert"):
        store.open(SnapshotId(3, 0))


def test_what_this_layout_stored_is_left_as_it_is(folder: Path) -> None:
    own = {"n[0:4]/master": (Part.MASTER, np.full(4, 7, np.float32))}
    put(FilesystemStore(folder, 0), 0, own, NEW, iteration=5)
    store = view(folder)
    assert store.snapshots().sealed == (SnapshotId(4, 0), SnapshotId(5, 0))
    with store.open(SnapshotId(5, 0)) as reader:
        assert np.frombuffer(reader.read("n[0:4]/master"), np.float32)[0] == 7
    with FilesystemStore(folder, 0).open(SnapshotId(5, 0)) as reader:
        assert len(reader.manifest.records) == 2


def test_a_snapshot_of_this_layout_under_the_same_name_is_meant(folder: Path) -> None:
    store = FilesystemStore(folder, 0)
    store.free(SnapshotId(4, 0))
    put(store, 0, {"n[0:4]/master": (Part.MASTER, np.full(4, 7, np.float32))}, NEW)
    with view(folder).open(SnapshotId(4, 0)) as reader:
        assert len(reader.manifest.records) == 2


def test_what_is_superseded_goes_whichever_rank_stored_it(folder: Path) -> None:
    view(folder, 1).free(SnapshotId(4, 1))
    assert [path.name[18:23] for path in sorted(folder.iterdir())] == ["00000", "00002"]
    store = view(folder, 0)
    store.free(SnapshotId(4, 0))
    assert not list(folder.iterdir())
    assert store.snapshots().sealed == ()


@pytest.mark.parametrize(
    "strange",
    [
        {"operators": "none"},
        {"operators": [[0, 99, -1, 7]]},
        {"operators": [[0, 1, -1, 99]]},
        {"trainer": 1},
        {"trainer": {"param_groups": [1], "grad_scalers": [{"scale": 2.0}]}},
    ],
    ids=lambda strange: " ".join(map(str, strange.items())),
)
def test_a_manifest_that_no_job_of_ours_has_made_costs_its_own_snapshot(folder: Path, strange: dict[str, Any]) -> None:
    for rank in range(OLD.world_size):
        put(FilesystemStore(folder, rank), rank, share(rank), iteration=5, **strange)
    store = view(folder)
    usable, refused = listing(store, Tier.PERSISTENT, facts_of(NEW), owner=0)
    assert (usable.snapshot.iteration, usable.why) == (4, "")
    assert refused.why
    assert "\n" not in refused.why
    assert store.previous_window() is None
    read_all(store, 0)


@pytest.mark.parametrize("layout", [{"world_size": 10**15}, {"world_size": float("inf")}, {"shard": ["x"]}, {"tp": []}])
def test_a_layout_that_no_job_has_costs_its_own_snapshot(folder: Path, layout: dict[str, Any]) -> None:
    with FilesystemStore(folder, 0).reserve(SnapshotId(6, 0), Layout.of([])) as writer:
        own = {"operators": [], "timeline": [["1-a", 0]], "window": [1, 10**17]}
        writer.seal(Facts("job", "digest", facts_of(OLD) | layout, own))
    windows(folder, (7, 8))
    store = view(folder)
    found = store.previous_window()
    assert found is not None
    assert found.last == 8
    read_all(store, 0)


class OneOf:
    """A rank of several, of which others have found so many snapshots of other layouts."""

    def __init__(self, rank: int, world_size: int, elsewhere: int = 0) -> None:
        self.rank, self.world_size, self._elsewhere = rank, world_size, elsewhere

    def total(self, values: list[int]) -> tuple[int, ...]:
        return tuple(value + self._elsewhere for value in values)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose snapshots were opened, or their manifests read."""
    found, manifest = list[int](), vars(FilesystemStore)["_manifest"]

    def noting(self: FilesystemStore, snapshot: SnapshotId) -> Any:
        found.append(snapshot.rank)
        return manifest(self, snapshot)

    monkeypatch.setattr(FilesystemStore, "_manifest", noting)
    return found


def test_where_all_is_of_this_layout_a_rank_reads_the_manifests_of_its_share_alone(
    tmp_path: Path, opened: list[int]
) -> None:
    for rank in range(4):
        put(FilesystemStore(tmp_path, rank), rank, share(rank), NEW)
    store = view(tmp_path, 1)
    store.look_together(OneOf(1, 4))  # type: ignore[arg-type]
    assert store.snapshots(1).sealed == (SnapshotId(4, 1),) and not store.timelines
    with store.open(SnapshotId(4, 1)):
        pass
    store.use_memory(None)
    assert not store.timelines and {*opened} == {1}


@pytest.mark.parametrize(("elsewhere", "is_seen"), [(1, True), (0, False)])
def test_what_another_rank_finds_of_another_layout_all_ranks_look_for(
    elsewhere: int, is_seen: bool, folder: Path, opened: list[int]
) -> None:
    put(FilesystemStore(folder, 0), 0, share(0), NEW, iteration=5)
    put(FilesystemStore(folder, 7), 7, share(0), NEW, iteration=5)
    store = view(folder, 7)
    store.look_together(OneOf(7, 8, elsewhere))  # type: ignore[arg-type]
    assert {*opened} == {7}
    assert bool(store.timelines) is is_seen


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_an_earlier_layout_alone_had_are_shared_out_too(rank: int, folder: Path) -> None:
    for own in (0, 1):
        FilesystemStore(folder, own).free(SnapshotId(4, own))
        put(FilesystemStore(folder, own), own, share(own), NEW, iteration=5)
    store = view(folder, rank)
    store.look_together(OneOf(rank, 2))  # type: ignore[arg-type]
    assert store.timelines


@pytest.mark.parametrize("way", ["cannot be listed", "has one that may be there again", "has one that may open again"])
def test_storage_that_cannot_be_read_now_is_looked_at_by_all_ranks(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(FilesystemStore(tmp_path, 0), 0, share(0), NEW)
    store, looked = view(tmp_path), list[int]()

    def listed(self: FilesystemStore, rank: int | None = None) -> Listing:
        torn = Torn(SnapshotId(4, 0), "it", "Stale file handle", may_pass=way == "has one that may be there again")
        return Listing((SnapshotId(4, 0),), (torn,))

    def fails(*_: object) -> Any:
        try:
            raise OSError(errno.ESTALE, "Stale file handle")
        except OSError as error:
            raise (StoreFailure if "listed" in way else UnreadableCheckpoint)("it is stale") from error

    if "listed" in way:
        monkeypatch.setattr(FilesystemStore, "ranks", fails)
    else:
        monkeypatch.setattr(FilesystemStore, "snapshots", listed)
    if "open" in way:
        monkeypatch.setattr(FilesystemStore, "open", fails)
    one: Any = OneOf(0, 1)
    one.total = lambda values: looked.extend(values) or tuple(values)
    store.look_together(one)
    assert looked == [1]
