"""The CPU device: every mapping is undone exactly, and what it maps behaves as the device would."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megatron.pretrain import testing
from megatron.pretrain.testing import cpu_device
from megatron.pretrain.testing.cpu_device import switch
from megatron.pretrain.testing.cpu_device.patch import ABSENT, Patch
from megatron.pretrain.testing.cpu_device.table import LOOP_PATCHES, PATCHES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with cpu_device.installed():
        yield


@pytest.fixture
def tracker(on_cpu: None) -> random.CudaRNGStatesTracker:
    tracker = random.CudaRNGStatesTracker()
    torch.cuda.manual_seed(11)
    tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 22)
    return tracker


def attributes() -> list[object]:
    """What stands under each name of the table now, in its owner's own namespace."""
    return [vars(pkgutil.resolve_name(patch.owner)).get(patch.name, ABSENT) for patch in (*PATCHES, *LOOP_PATCHES)]


# The table


def test_importing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    monkeypatch.setattr(testing, "cpu_device", cpu_device)
    for name in [name for name in sys.modules if name.startswith(cpu_device.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module(cpu_device.__name__) is not cpu_device
    assert all(now is old for now, old in zip(attributes(), before, strict=True))


def test_uninstall_puts_back_every_object() -> None:
    before = attributes()
    cpu_device.install()
    while_installed = attributes()
    cpu_device.uninstall()
    # What may be absent may also be what replaces it already.
    changed = [now is not old for now, old in zip(while_installed, before, strict=True)]
    assert all(is_new or patch.may_be_absent for is_new, patch in zip(changed, (*PATCHES, *LOOP_PATCHES), strict=True))
    assert all(now is old for now, old in zip(attributes(), before, strict=True))


def test_functions_compile_again_after_uninstall() -> None:
    before = torch._dynamo.eval_frame._stance
    with cpu_device.installed():
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance == before


def test_installing_twice_is_undone_once() -> None:
    before = attributes()
    cpu_device.install()
    cpu_device.install()
    assert cpu_device.is_installed()
    cpu_device.uninstall()
    cpu_device.uninstall()
    assert not cpu_device.is_installed()
    assert all(now is old for now, old in zip(attributes(), before, strict=True))


def test_the_block_leaves_alone_what_was_installed_before_it(on_cpu: None) -> None:
    with cpu_device.installed():
        pass
    assert cpu_device.is_installed()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_upstream_still_has_what_is_mapped(patch: Patch) -> None:
    assert patch.may_be_absent or hasattr(pkgutil.resolve_name(patch.owner), patch.name)


def test_no_name_is_mapped_twice() -> None:
    assert len({(patch.owner, patch.name) for patch in PATCHES}) == len(PATCHES)


def test_a_half_finished_install_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    gone = replace(PATCHES[0], name="renamed_upstream")
    monkeypatch.setattr(switch, "PATCHES", (*PATCHES, gone))
    with pytest.raises(AttributeError, match="torch has no renamed_upstream"):
        cpu_device.install()
    assert not cpu_device.is_installed()
    assert all(now is old for now, old in zip(attributes(), before, strict=True))


def test_no_two_names_share_a_function(on_cpu: None) -> None:
    functions = [value for value in attributes() if inspect.isfunction(value)]
    assert len({id(function) for function in functions}) == len(functions) > 20


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (token_dispatcher.maybe_move_tensor_to_cpu, ["tensor", "as_numpy", "record_stream"]),
        (mappings._gather_along_first_dim, ["input_", "group", "output_split_sizes", "use_global_buffer"]),
    ],
)
def test_upstream_functions_still_take_what_their_replacements_take(function: Any, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


# Tensors


def test_cuda_literals_make_tensors_on_the_cpu(on_cpu: None) -> None:
    template = torch.ones(2, 3)
    made = [
        torch.tensor([1.0], device="cuda"),
        torch.zeros(2, device="cuda:1"),
        torch.empty(2, 3, dtype=torch.bfloat16, device=torch.device("cuda", 0)),
        torch.full((2,), 7, device=torch.cuda.current_device()),
        torch.zeros_like(template, device="cuda"),
        template.to("cuda"),
        template.to(device="cuda", dtype=torch.float16),
        template.to(torch.device("cuda"), torch.int32),
        template.cuda(torch.cuda.current_device()),
        torch.nn.Linear(2, 2).to("cuda").cuda().weight,
        torch.tensor([1], pin_memory=True),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert [tensor.dtype for tensor in made[5:8]] == [torch.float32, torch.float16, torch.int32]


def test_other_devices_stay_what_they_are(on_cpu: None) -> None:
    assert torch.empty(3, device="meta").device.type == "meta"
    assert torch.ones(3).to("meta").device.type == "meta"
    assert torch.ones(3).to(torch.empty(1, dtype=torch.float64)).dtype == torch.float64


def test_cuda_stays_unavailable(on_cpu: None) -> None:
    assert not torch.cuda.is_available()


def test_the_type_of_a_tensor_reads_as_on_a_gpu_and_back(on_cpu: None) -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert tensor.type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type(tensor.type()).dtype == torch.bfloat16
    assert tensor.type(torch.float32).dtype == torch.float32


def test_pinning_makes_a_copy_that_outlives_the_original(on_cpu: None) -> None:
    tensor = torch.arange(4)
    pinned = tensor.pin_memory()
    tensor.zero_()
    assert pinned.tolist() == [0, 1, 2, 3]


def test_torchscript_still_knows_the_mapped_factories(on_cpu: None) -> None:
    @torch.jit.script
    def filled(n: int) -> torch.Tensor:
        return torch.zeros(n) + torch.ones(n) + torch.full([n], 2.0) + torch.arange(n)

    assert filled(2).tolist() == [3.0, 4.0]


def test_fused_functions_run_without_compiling(on_cpu: None) -> None:
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gate, up = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(swiglu(torch.cat([gate, up], dim=-1)), torch.nn.functional.silu(gate) * up)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_split_sizes_leave_the_dispatcher_as_integers(on_cpu: None) -> None:
    splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 5]), as_numpy=True)
    assert splits.tolist() == [3, 5]
    assert not torch.is_tensor(splits)
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


# Streams and events


def test_side_streams_and_events_run_in_program_order(on_cpu: None) -> None:
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor = torch.ones(8, device="cuda")
        tensor.record_stream(side)
        end.record(side)
    torch.cuda.current_stream().wait_event(side.record_event())
    torch.cuda.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0


# Random numbers


def test_the_state_of_the_device_restores_its_draws_bit_for_bit(on_cpu: None) -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(64, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(64, device="cuda"), drawn)


def test_every_way_to_seed_the_device_gives_the_same_draws(on_cpu: None) -> None:
    def draw(seed: Any) -> list[float]:
        seed(9)
        return torch.rand(8).tolist()

    assert draw(torch.cuda.manual_seed) == draw(torch.cuda.manual_seed_all) == draw(torch.manual_seed)


@pytest.mark.parametrize("host_first", [True, False])
def test_host_and_device_states_of_a_checkpoint_restore_in_any_order(on_cpu: None, host_first: bool) -> None:
    torch.manual_seed(3)
    torch.rand(7)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    expected = torch.rand(16)
    setters = [lambda: torch.set_rng_state(host), lambda: torch.cuda.set_rng_state(device)]
    for restore in setters if host_first else reversed(setters):
        restore()
    assert torch.equal(torch.rand(16), expected)


def test_a_fork_draws_from_its_own_sequence_and_leaves_the_default_one(tracker: Any) -> None:
    torch.cuda.manual_seed(11)
    expected_default = torch.rand(8)
    torch.cuda.manual_seed(22)
    expected_forked = torch.rand(8)

    torch.cuda.manual_seed(11)
    with tracker.fork():
        first = torch.rand(4)
    half = torch.rand(4)
    with tracker.fork():
        second = torch.rand(4)
    assert torch.equal(torch.cat([first, second]), expected_forked)
    assert torch.equal(torch.cat([half, torch.rand(4)]), expected_default)


def test_a_fork_that_draws_does_not_warn(tracker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tracker.fork():
        torch.rand(4)
    assert not caplog.records


def test_the_states_of_the_tracker_restore_its_forks(tracker: Any) -> None:
    states = tracker.get_states()
    with tracker.fork():
        drawn = torch.rand(16)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(16), drawn)


def test_recomputed_activations_drop_the_same_elements(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    masks: list[torch.Tensor] = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        plain = torch.nn.functional.dropout(hidden, 0.5)
        with tracker.fork():
            forked = torch.nn.functional.dropout(hidden, 0.5)
        masks.append(torch.stack([plain, forked]).detach())
        return plain + forked

    hidden = torch.ones(256, requires_grad=True)
    output = random.checkpoint(layer, False, hidden)
    state_after_forward, states_after_forward = torch.cuda.get_rng_state(), tracker.get_states()
    output.sum().backward()

    forward, recomputed = masks
    assert torch.equal(forward, recomputed)
    assert torch.equal(hidden.grad, forward.sum(dim=0))
    assert torch.equal(torch.cuda.get_rng_state(), state_after_forward)
    assert all(torch.equal(tracker.get_states()[name], state) for name, state in states_after_forward.items())


# What needs a process group


@contextlib.contextmanager
def world(store: Path, rank: int, ranks: int) -> Iterator[None]:
    """A gloo world of `ranks` processes, with the CPU device installed."""
    with cpu_device.installed():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_every_group_runs_its_collectives_on_one_thread(tmp_path: Path) -> None:
    with world(tmp_path / "store", rank=0, ranks=1):
        groups = [dist.group.WORLD, dist.new_group([0], timeout=timedelta(seconds=77))]
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        assert [option._threads for option in options] == [1, 1]
        assert options[1]._timeout == timedelta(seconds=77)


def queue_gathers(_: int, store: Path) -> None:
    with world(store, rank=0, ranks=1):
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        shard, whole = [torch.ones(1)], [[torch.empty(1)]]
        for _ in range(200):
            # Enough in the queue that two threads would take from it side by side.
            for gather in [group.allgather_coalesced(whole, shard) for _ in range(2000)]:
                gather.wait()


@pytest.mark.full
def test_many_coalesced_gathers_in_flight_leave_the_heap_whole(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(queue_gathers, (tmp_path / "store",), nprocs=1)


def gather_rows(rank: int, store: Path, results: Path) -> None:
    with world(store, rank, ranks=2):
        rows = [[3, 1], [0, 2]]
        for case, sizes in enumerate(rows):
            own = torch.full((sizes[rank], 2), float(rank + 1), requires_grad=True)
            gathered = mappings.gather_from_sequence_parallel_region(
                own, tensor_parallel_output_grad=True, group=dist.group.WORLD, output_split_sizes=sizes
            )
            (gathered * (rank + 1)).sum().backward()
            torch.save({"gathered": gathered.detach(), "gradient": own.grad}, results / f"{case}_{rank}.pt")


@pytest.mark.ci
def test_as_many_tokens_as_each_rank_has_are_gathered_and_their_gradients_come_back(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(gather_rows, (tmp_path / "store", tmp_path), nprocs=2)
    for case, sizes in enumerate([[3, 1], [0, 2]]):
        expected = torch.repeat_interleave(torch.tensor([1.0, 2.0]), torch.tensor(sizes)).unsqueeze(1).expand(-1, 2)
        for rank in range(2):
            result = torch.load(tmp_path / f"{case}_{rank}.pt", weights_only=True)
            assert torch.equal(result["gathered"], expected)
            assert torch.equal(result["gradient"], torch.full((sizes[rank], 2), 3.0))


# Small numbers


def test_denormal_numbers_count_as_zero_while_it_is_installed() -> None:
    smallest = torch.tensor([torch.finfo(torch.float32).tiny])
    with cpu_device.installed():
        assert not (smallest / 2).item()
    assert (smallest / 2).item()
