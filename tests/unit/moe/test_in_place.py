"""Process groups that are replaced in live objects, models built beside survivors, and what a process must forget."""

from __future__ import annotations

import functools
import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from effort import cases
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.errors import PeerLost, ReplayDiverged
from megatron.core.dist_checkpointing.moe.in_place import building, process_groups, process_restart
from megatron.core.dist_checkpointing.moe.in_place.building import Build, CannotBuildAlone
from megatron.core.dist_checkpointing.moe.in_place.passes import as_in_new_process
from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups, StillConnected
from megatron.core.dist_checkpointing.moe.in_place.process_restart import InProcessRestart
from megatron.core.dist_checkpointing.moe.megatron_state.quantization import forget_reductions
from megatron.core.dist_checkpointing.moe.runtime.peer_links import named_groups
from megatron.core.dist_checkpointing.moe.standby.heartbeat import Activity, Heartbeat, read_beat
from megatron.core.dist_checkpointing.moe.standby.slot import WorkerSlot
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore
from megatron.core.transformer.moe.paged_stash import PagedStashManager
from megatron.pretrain.testing import cpu_device

RANKS = 4


def connect() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups that connect nobody; nor is any socket of this process closed."""
    monkeypatch.setattr(process_groups, "close_connections", lambda: 0)
    connect()
    yield
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Holder:
    """Keeps a process group as a module of Megatron-Core does."""

    def __init__(self, group: Any) -> None:
        self.pp_group: Any = group


def renewed() -> ProcessGroups:
    taken = ProcessGroups.taken_down()
    assert not dist.is_initialized()
    connect()
    return taken


@pytest.mark.usefixtures("connected")
def test_attributes_items_and_variables_of_closures_get_the_new_group_of_the_same_name() -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    holder, items, groups = Holder(group), Holder({"reduce_group": group}), [group, None]
    closure = (lambda held: lambda: held)(group)
    del group
    assert sum(renewed().replace().values()) >= 4
    new = parallel_state.get_pipeline_model_parallel_group()
    for held in (holder.pp_group, items.pp_group["reduce_group"], groups[0], closure()):
        assert held is new


@pytest.mark.usefixtures("connected")
def test_holders_that_were_found_ahead_of_time_and_those_that_came_later_get_the_new_group() -> None:
    early, late = Holder(parallel_state.get_pipeline_model_parallel_group()), Holder(None)
    taken = renewed()
    taken.find_holders()
    late.pp_group = early.pp_group
    taken.replace()
    assert early.pp_group is late.pp_group is parallel_state.get_pipeline_model_parallel_group()


@pytest.mark.usefixtures("connected")
def test_what_went_away_after_it_was_found_ahead_of_time_is_no_obstacle() -> None:
    # A tuple cannot be given the new group: only that nobody keeps it any more saves the process.
    held = [(parallel_state.get_pipeline_model_parallel_group(), object())]
    taken = renewed()
    taken.find_holders()
    held.clear()
    taken.replace()


@pytest.mark.usefixtures("connected")
def test_no_search_is_needed_where_all_holders_were_found_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Holder(parallel_state.get_pipeline_model_parallel_group())
    taken = renewed()
    taken.find_holders()
    monkeypatch.setattr(process_groups, "_holders_of", lambda _: pytest.fail("searched again"))
    taken.replace()
    assert held.pp_group is parallel_state.get_pipeline_model_parallel_group()


@pytest.mark.usefixtures("connected")
def test_what_was_imported_is_not_looked_through_once_all_references_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    held, items = Holder(group), Holder({"reduce_group": group})  # the collector does not look into this dict
    del group
    taken = renewed()
    monkeypatch.setattr(process_groups, "_containers_of_modules", lambda: pytest.fail("looked through"))
    taken.find_holders()
    taken.replace()
    assert held.pp_group is items.pp_group["reduce_group"] is parallel_state.get_pipeline_model_parallel_group()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("where", ["a module", "a class"])
def test_what_was_imported_is_looked_through_for_references_that_are_not_found_elsewhere(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = sys.modules[__name__] if where == "a module" else Holder
    monkeypatch.setattr(holder, "kept", parallel_state.get_pipeline_model_parallel_group(), raising=False)
    taken = renewed()
    monkeypatch.setattr(gc, "get_referrers", lambda *_: [])  # as where all of it was frozen
    taken.find_holders()
    monkeypatch.setattr(process_groups, "_holders_of", lambda _: pytest.fail("searched again"))
    taken.replace()
    assert holder.kept is parallel_state.get_pipeline_model_parallel_group()


@pytest.mark.usefixtures("connected")
def test_groups_of_all_kinds_are_told_apart() -> None:
    names = ("get_tensor_model_parallel_group", "get_data_parallel_group", "get_embedding_group")
    holders = {name: Holder(getattr(parallel_state, name)()) for name in names}
    renewed().replace()
    assert all(holder.pp_group is getattr(parallel_state, name)() for name, holder in holders.items())


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("kind", cases(["a tuple", "a partial", "a key"], fast=["a partial"]))
def test_what_cannot_be_given_the_new_group_is_an_error_and_not_a_hang(kind: str) -> None:
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    keeps = Holder(None)
    if kind == "a tuple":
        keeps.pp_group = (group, 1)
    elif kind == "a partial":
        keeps.pp_group = functools.partial(print, group)
    else:
        keeps.pp_group = {group: 1}
    del group
    taken = renewed()
    with pytest.raises(StillConnected, match="keep process groups of before the fault"):
        taken.replace()
    assert keeps


@pytest.mark.usefixtures("connected")
def test_what_an_interrupted_iteration_left_in_circles_is_no_obstacle() -> None:
    circle: list[Any] = [(parallel_state.get_pipeline_model_parallel_group(),)]
    circle.append(circle)
    del circle
    renewed().replace()


def test_groups_that_were_being_made_when_a_fault_struck_do_not_shift_the_names_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "close_connections", lambda: 0)
    with monkeypatch.context() as struck:
        struck.setattr(dist.distributed_c10d, "_new_process_group_helper", lose_connection)
        with pytest.raises(ConnectionError):
            connect()
    ProcessGroups.taken_down()
    connect()
    names = set(named_groups())
    ProcessGroups.taken_down()
    assert "0" in names


def lose_connection(*_: Any, **__: Any) -> None:
    raise ConnectionError


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """In which the ranks of an attempt find each other; this process is rank 0 of one."""
    shared = dist.HashStore()
    monkeypatch.setattr(building, "_get_default_store", lambda: shared)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return shared


def gathered(_own: list[Any], *_: Any, **__: Any) -> None:
    _own[:] = [((None, False),), (("wd_mult", 0.0), True)]


@pytest.fixture
def survivor(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> Build:
    """That of a rank that has told in the store how all built together."""
    build = Build()
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    with build.building():
        dist.all_gather_object([None, None], "ours")
    build.connected()
    return build


def test_a_newcomer_gets_what_collectives_came_to_when_all_built_together(
    survivor: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer = Build()
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: pytest.fail("nobody answers"))
    newcomer.survivors = survivor.survivors
    objects: list[Any] = [None, None]
    with newcomer.building():
        dist.all_gather_object(objects, "ours")
        dist.barrier()
        assert dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert objects == [((None, False),), (("wd_mult", 0.0), True)]
    assert newcomer.answers == survivor.answers


def test_a_newcomer_that_asks_for_something_else_says_so(survivor: Build) -> None:
    newcomer = Build()
    newcomer.survivors = survivor.survivors
    with pytest.raises(CannotBuildAlone, match="asks for all_gather_object of 3 objects"), newcomer.building():
        dist.all_gather_object([None] * 3, "ours")


def test_nobody_is_kept_whose_build_exchanged_what_others_cannot_be_told(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Build()
    monkeypatch.setattr(dist, "all_gather_object", lambda objects, own: objects.__setitem__(0, own))
    with build.building():
        dist.all_gather_object([None], object())
    assert build.answers is None


def test_a_newcomer_is_answered_in_each_part_of_a_build(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather_object", lambda objects, own: objects.__setitem__(0, own))
    build, newcomer, parts = Build(), Build(), ("model", "data")
    for part in parts:
        with build.building():
            dist.all_gather_object([None], part)
        dist.all_gather_object([None], "of the recovery between them")
    build.connected()
    newcomer.survivors = build.survivors
    objects: list[Any] = [None]
    found = []
    for _ in parts:
        with newcomer.building():
            dist.all_gather_object(objects, "other")
        found.append(objects[0])
    assert tuple(found) == parts


def test_a_part_of_a_build_that_others_can_be_told_does_not_make_up_for_one_that_they_cannot(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Build()
    monkeypatch.setattr(dist, "all_gather_object", lambda objects, own: objects.__setitem__(0, own))
    for own in (object(), "data"):
        with build.building():
            dist.all_gather_object([None], own)
    assert build.answers is None


def test_buckets_reduce_gradients_again_in_the_order_of_a_first_iteration() -> None:
    """Else a rank that stayed and a new one would reduce different buckets with each other."""
    group = SimpleNamespace(
        is_first_batch=False, per_param_grad_ready_counts={"a": 1}, golden_per_param_grad_ready_counts={"a": 1},
        grad_reduce_handle="under way", param_gather_handle="under way", param_gather_dispatched=True,
        is_last_microbatch=False,
    )  # fmt: skip
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[], modules=list)
    part = SimpleNamespace(_has_grad_norm_group_cache={"a": True})
    as_in_new_process([chunk], SimpleNamespace(chained_optimizers=[part]))  # type: ignore[list-item]
    assert group.is_first_batch
    assert group.is_last_microbatch
    assert not (group.per_param_grad_ready_counts or group.golden_per_param_grad_ready_counts)
    assert group.grad_reduce_handle is None is group.param_gather_handle
    assert not group.param_gather_dispatched
    assert not vars(part)


def test_modules_forget_what_passes_that_were_interrupted_left_for_later() -> None:
    """Else later gradients are those of earlier microbatches, or a shared expert refuses to begin."""
    delayed, head, attention, shared, other = (torch.nn.Module() for _ in range(5))
    delayed.wgrad_store = SimpleNamespace(context=queue.Queue())  # type: ignore[assignment]
    delayed.wgrad_store.context.put(["of the interrupted microbatch"])
    other.wgrad_store = SimpleNamespace(context=None)  # type: ignore[assignment]
    head.embedding_activation_buffer, head.grad_output_buffer = ["of it"], ["of it"]  # type: ignore[assignment]
    attention.current_max_attn_logits = torch.ones(2)
    states = getattr(shared_experts, "SharedExpertState", None)  # since core 0.18
    vars(shared).update({} if states is None else {"_overlap_state": states.FC1_FORWARD_DONE}, cached_output="of it")
    fused, flexible, routed = (torch.nn.Module() for _ in range(3))
    vars(fused).update(_fused_ops=("with a queue of their own",), _fused_grouped_swiglu_ops=("too",))
    manager = SimpleNamespace(handle="of it", num_permuted_tokens=3, over_budget=torch.ones(1, dtype=torch.bool))
    manager.moe_expert_rank_capacity_factor = None  # as while core runs passes again that found no room
    settings = SimpleNamespace(moe_expert_rank_capacity_factor=1.5)
    flexible.token_dispatcher = SimpleNamespace(_comm_manager=manager, config=settings)  # type: ignore[assignment]
    routed.cudagraph_tensor_store = MoECudaGraphTensorStore()  # type: ignore[assignment]
    routed.cudagraph_tensor_store.set(probs=torch.ones(1))
    chunk = torch.nn.Sequential(delayed, head, attention, shared, other, fused, flexible, routed)
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []  # type: ignore[assignment]
    as_in_new_process([chunk], SimpleNamespace())
    assert delayed.wgrad_store.context.empty() and other.wgrad_store.context is None
    assert head.embedding_activation_buffer == [] == head.grad_output_buffer
    assert attention.current_max_attn_logits is None
    assert (vars(shared).get("_overlap_state"), vars(shared)["cached_output"]) == (states and states.IDLE, None)
    assert {name: one for name, one in vars(fused).items() if "fused" in name} == {
        "_fused_ops": None,
        "_fused_grouped_swiglu_ops": None,
    }
    assert (manager.handle, manager.num_permuted_tokens, bool(manager.over_budget)) == (None, None, False)
    assert manager.moe_expert_rank_capacity_factor == 1.5
    assert not hasattr(manager, "_original_num_tokens") and routed.cudagraph_tensor_store.is_empty()


def test_what_is_offloaded_is_learned_again_by_ranks_that_stay_and_new_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks gather what each offloads at the end of a first iteration: one that stayed would not take part."""
    monkeypatch.setattr(fine_grained_activation_offload.PipelineOffloadManager, "OFFLOAD_MGR", "learned")
    as_in_new_process([], SimpleNamespace())
    assert fine_grained_activation_offload.PipelineOffloadManager.OFFLOAD_MGR is None


def test_pages_of_activations_are_forgotten_by_who_runs_passes_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fault interrupts the passes, activations wait for their pages: core's next iteration would not begin."""
    monkeypatch.setattr(PagedStashManager, "STASH_MGR", None)
    with cpu_device.installed():
        manager = PagedStashManager.get_instance()
        manager.status, manager.stash_buffers, manager.paged_tensors_to_stash = "captured", {}, ["waiting"]
        as_in_new_process([], SimpleNamespace())
    assert (manager.status, manager.stash_buffers, manager.paged_tensors_to_stash) == ("begin", None, [])
    assert PagedStashManager.get_instance() is manager


def test_modules_enter_their_scales_again_in_what_is_reduced_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"scales of all modules": ("a recipe", "a group of before the fault")}
    engine = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(reset=tables.clear))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", engine)  # type: ignore[misc]
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    meta = {"scaling_fwd": "its scales", "buffer_index_and_autocast_key": [0], "global_fp8_buffer_pos_fwd_recompute": 0}
    layer.fp8_meta = meta  # type: ignore[assignment]
    forget_reductions([torch.nn.Sequential(layer, other)])
    assert not tables
    assert meta == {"scaling_fwd": "its scales"}


class Manager:
    """Protected training until the fault."""

    def __init__(self, *, ends: bool = True, told: bool = False, called_off: bool = False) -> None:
        self.ends, self.is_told_to_end, self.called_off = ends, told, called_off

    def abandon(self) -> bool:
        return self.ends


@pytest.mark.parametrize(
    ("error", "may_stay", "manager"),
    [
        pytest.param(PeerLost("gone"), False, Manager(), id="its launcher keeps no survivors"),
        pytest.param(ValueError("its own"), True, Manager(), id="its own fault"),
        pytest.param(PeerLost("gone"), True, Manager(ends=False), id="a write that does not end"),
        pytest.param(PeerLost("gone"), True, Manager(told=True), id="told to end while it parked"),
        pytest.param(MemoryError(), True, Manager(called_off=True), id="has no memory"),
        pytest.param(torch.OutOfMemoryError(), True, Manager(called_off=True), id="has no memory on its device"),
        pytest.param(ReplayDiverged("another loss"), True, Manager(called_off=True), id="its replay diverged"),
    ],
)
def test_a_process_that_cannot_stay_ends_with_the_error_that_it_had(
    error: Exception, may_stay: bool, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, build = WorkerSlot(None), Build()
    slot.may_stay, build.answers, slot.is_called_off = may_stay, [], manager.called_off
    monkeypatch.setattr(process_restart, "own_slot", lambda: slot)
    monkeypatch.setattr(process_restart, "own_build", lambda: build)
    monkeypatch.setattr(process_restart, "get_model_config", lambda _: SimpleNamespace())
    kept = InProcessRestart([torch.nn.Linear(1, 1)], SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(type(error)) as raised:
        kept.stay(error, manager)
    assert raised.value is error
    assert not kept.has_left


@pytest.mark.parametrize(
    ("error", "is_called_off", "manager", "doing"),
    [
        pytest.param(PeerLost("gone"), False, None, Activity.LOST_A_PEER, id="connects as another rank is lost"),
        pytest.param(OSError("closed"), True, None, Activity.LOST_A_PEER, id="connects as its launcher closes that"),
        pytest.param(PeerLost("gone"), False, Manager(), Activity.LOST_A_PEER, id="loads as another rank is lost"),
        pytest.param(OSError("its own"), True, Manager(), Activity.LOADING, id="had failed before"),
        pytest.param(OSError("its own"), False, None, Activity.LOADING, id="its own fault"),
    ],
)
def test_a_survivor_that_ends_has_said_whether_it_lost_a_peer_meanwhile(
    error: Exception, is_called_off: bool, manager: Manager | None, doing: Activity, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own = Heartbeat(str(tmp_path))
    own.loads()
    slot = SimpleNamespace(may_stay=False, is_called_off=is_called_off)
    monkeypatch.setattr(process_restart, "own_slot", lambda: slot)
    monkeypatch.setattr(process_restart, "own_heartbeat", lambda: own)
    with pytest.raises(type(error)):
        InProcessRestart([], SimpleNamespace()).stay(error, manager)  # type: ignore[arg-type]
    found = read_beat(tmp_path, os.getpid())
    assert found is not None and found.doing is doing


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process does on its way, as one that was called off and stays."""
    calls: list[str] = []
    left = SimpleNamespace(may_stay=True, is_called_off=True, leave=lambda *_, meanwhile: calls.append("slot left"))
    taken = SimpleNamespace(taken_down=lambda: calls.append("groups") or SimpleNamespace(find_holders=None))  # type: ignore[func-returns-value]
    monkeypatch.setattr(process_restart, "own_slot", lambda: left)
    monkeypatch.setattr(process_restart, "own_build", lambda: SimpleNamespace(answers=[]))
    monkeypatch.setattr(process_restart, "get_model_config", lambda _: SimpleNamespace())
    monkeypatch.setattr(process_restart, "as_in_new_process", lambda *_: None)
    monkeypatch.setattr(process_restart, "release", lambda _: calls.append("graphs and buffers"))
    monkeypatch.setattr(process_restart, "ProcessGroups", taken)
    return calls


def test_a_process_that_stays_releases_graphs_and_buffers_before_its_groups_go(staying: list[str]) -> None:
    """An abort of a communicator waits for graphs that have it, and ends before c10d forgets the group."""
    InProcessRestart([torch.nn.Linear(1, 1)], SimpleNamespace()).stay(PeerLost("gone"), Manager())  # type: ignore[arg-type]
    assert staying == ["graphs and buffers", "groups", "slot left"]


def test_a_device_that_does_not_answer_is_told_before_anything_waits_for_it(
    staying: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(process_restart, "_device_answers", lambda: False)
    manager = Manager()
    monkeypatch.setattr(manager, "abandon", lambda: staying.append("waited"))
    with pytest.raises(PeerLost):
        InProcessRestart([torch.nn.Linear(1, 1)], SimpleNamespace()).stay(PeerLost("gone"), manager)  # type: ignore[arg-type]
    assert staying == [] and "its device does not answer" in caplog.text


def test_a_process_that_stays_ends_once_others_cannot_begin_beside_it_several_times(staying: list[str]) -> None:
    kept = InProcessRestart([torch.nn.Linear(1, 1)], SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(2):
        kept.stay(PeerLost("gone"), None)
    kept.stay(PeerLost("gone"), Manager())
    for _ in range(building.VAIN_STARTS - 1):
        kept.stay(PeerLost("gone"), None)
    del staying[:]
    with pytest.raises(PeerLost):
        kept.stay(PeerLost("gone"), None)
    assert not staying


@pytest.mark.parametrize(
    ("error", "is_said"),
    [(ValueError("a sample"), True), (PeerLost("gone"), False), (RuntimeError("Connection reset by peer"), False)],
)
def test_an_error_that_may_be_its_own_is_said_with_its_traceback_where_the_process_stays(
    error: Exception, is_said: bool, staying: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise error
    except type(error) as raised:
        InProcessRestart([torch.nn.Linear(1, 1)], SimpleNamespace()).stay(raised, Manager())  # type: ignore[arg-type]
    assert staying[-1] == "slot left"
    assert bool(caplog.records) == is_said
    assert ("ValueError: a sample" in caplog.text and "raise error" in caplog.text) == is_said


def test_a_survivor_whose_connecting_is_called_off_leaves_it_behind_and_it_never_continues() -> None:
    slot = SimpleNamespace(keeps=True, is_called_off=False)
    waits, struck, continued = threading.Event(), threading.Event(), threading.Event()

    def connecting() -> None:
        try:
            waits.wait()
            continued.set()
        except process_restart.RestartSuperseded:
            struck.set()

    threading.Timer(0.1, lambda: setattr(slot, "is_called_off", True)).start()
    begun_s = time.monotonic()
    with pytest.raises(process_restart.RestartSuperseded):
        process_restart.unless_called_off(connecting, slot)
    assert time.monotonic() - begun_s < 10
    waits.set()
    assert struck.wait(10)
    assert not continued.is_set()


@pytest.mark.parametrize("keeps", [False, True])
def test_what_goes_wrong_while_a_rank_connects_is_raised_where_it_is_waited_for(keeps: bool) -> None:
    def connecting() -> None:
        raise PeerLost("no rank 3")

    with pytest.raises(PeerLost, match="no rank 3"):
        process_restart.unless_called_off(connecting, SimpleNamespace(keeps=keeps, is_called_off=False))
