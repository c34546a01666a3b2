"""CUDA graphs and buffers of the lost connections: released, and made by their owners over the new groups."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.in_place import process_groups, process_restart
from megatron.core.dist_checkpointing.moe.in_place.building import Build
from megatron.core.dist_checkpointing.moe.in_place.newest_state import newest_state, refuse_another_model
from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups, release
from megatron.core.dist_checkpointing.moe.in_place.process_restart import flex_backend, missing_kernels, unreleasable
from megatron.core.dist_checkpointing.moe.ports import Facts, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.stock import survivors
from megatron.core.dist_checkpointing.moe.stock.resumed_settings import changed_model
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types.layout import Field
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, _CudagraphRecordNode, _CudaGraphRunner
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.token_dispatcher import _DeepepManager, _HybridEPManager
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.testing import cpu_device

TOKENS, HIDDEN, EXPERTS = 6, 4, 2


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device.installed():
        yield


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups that connect nobody; nor is any socket of this process closed."""
    monkeypatch.setattr(process_groups, "close_connections", lambda: 0)
    connect()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def connect() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)


def ep_group() -> dist.ProcessGroup:
    return parallel_state.get_expert_tensor_and_model_parallel_group()


class Sizes:
    """`deep_ep.Config`."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, _ranks: int) -> int:
        return 1000 * hidden_bytes

    def get_rdma_buffer_size_hint(self, _hidden_bytes: int, _ranks: int) -> int:
        return 0


class Runtime:
    """The compiled part of a buffer. Its destructor waits for all ranks of the group."""


class Buffer:
    """`deep_ep.Buffer`, of one rank with all tokens."""

    made: list[tuple[str, dist.ProcessGroup]]

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.runtime = Runtime()
        self.made.append(("deepep", group))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Sizes:
        return Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        return None, None, torch.bincount(topk_idx.view(-1), minlength=num_experts), None, None

    def dispatch(self, x: torch.Tensor, **given: Any) -> tuple[Any, ...]:
        counts = given["num_tokens_per_expert"].tolist()
        return x.clone(), given["topk_idx"], given["topk_weights"], counts, ("handle",), None


class HybridEPBuffer:
    """`deep_ep.HybridEPBuffer`, of one rank with all tokens."""

    made: list[tuple[str, dist.ProcessGroup]]

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
    ) -> None:
        assert (hidden_dim, max_num_of_tokens_per_rank, num_local_experts) == (HIDDEN, TOKENS, EXPERTS)
        self.group = group
        self.made.append(("hybridep", group))

    def dispatch_with_permute(self, *, hidden: torch.Tensor, probs: torch.Tensor, **_: Any) -> tuple[Any, ...]:
        return hidden.clone(), probs.clone(), None, torch.full((EXPERTS,), TOKENS // EXPERTS), ("handle",) * 9


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dist.ProcessGroup]]:
    """What is called when buffers of both packages are made: the package, and the group."""
    Buffer.made = HybridEPBuffer.made = []
    monkeypatch.setattr(fused_a2a, "Buffer", Buffer, raising=False)
    monkeypatch.setattr(fused_a2a, "HybridEPBuffer", HybridEPBuffer, raising=False)
    for name in ("_buffer", "_hybrid_ep_buffer"):
        monkeypatch.setattr(fused_a2a, name, None)
    return Buffer.made


def dispatcher(backend: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Core's own manager of this backend, over its own autograd functions."""
    given = {"moe_permute_fusion": False, "moe_expert_capacity_factor": None, "moe_router_dtype": "fp32"}
    given |= {"moe_pad_expert_input_to_capacity": False, "moe_expert_rank_capacity_factor": None}
    given |= {"moe_hybridep_pad_uneven_dispatch_inputs": False, "moe_router_topk": 1, "moe_deepep_num_sms": 20}
    given |= {"moe_flex_dispatcher_num_sms": None, "moe_hybridep_num_blocks_permute": None, "fp8": None, "fp4": None}
    given |= {"moe_hybridep_num_blocks_unpermute": None, "moe_permute_fusion_into_hybridep": False}
    config: Any = SimpleNamespace(**given, moe_hybridep_num_sms_preprocessing=108, moe_router_padding_for_fp8=False)
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    monkeypatch.setattr(token_dispatcher, "fused_dispatch", fused_a2a.FusedDispatch.apply)
    monkeypatch.setattr(token_dispatcher, "hybrid_ep_dispatch", lambda **named: hybrid(**named))
    monkeypatch.setattr(token_dispatcher, "set_deepep_num_sms", lambda _: None)
    if backend == "deepep":
        return _DeepepManager(ep_group(), EXPERTS, 1, EXPERTS, config)
    return _HybridEPManager(ep_group(), EXPERTS, EXPERTS, config)


def hybrid(x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, group: Any, **named: Any) -> Any:
    return fused_a2a.HybridEPDispatch.apply(x, routing_map, probs, group, named["num_local_experts"])


def dispatched(manager: Any) -> None:
    routed = torch.nn.functional.one_hot(torch.arange(TOKENS) % EXPERTS, EXPERTS)
    manager.setup_metadata(routed.bool(), routed.float())
    manager.dispatch(torch.ones(TOKENS, HIDDEN), async_finish=False, allocate_on_comm_stream=False)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_a_buffer_of_a_flex_dispatcher_is_made_again_over_the_new_group(
    backend: str, made: list[tuple[str, dist.ProcessGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = dispatcher(backend, monkeypatch)
    for _ in range(2):
        dispatched(manager)
    assert made == [(backend, ep_group())], "one for all layers and iterations"
    made.clear()
    release([])
    lost = ProcessGroups.taken_down()
    connect()
    lost.replace()
    dispatched(manager)
    assert made == [(backend, ep_group())]


@pytest.mark.usefixtures("connected")
def test_the_destructor_of_a_buffer_that_lost_ranks_share_never_runs(made: list[Any]) -> None:
    buffer = fused_a2a.get_buffer(ep_group(), 8)
    runtime = weakref.ref(buffer.runtime)
    del buffer
    release([])
    gc.collect()
    assert runtime() is not None, "it would wait for them on the device"
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(runtime()))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"moe_flex_dispatcher_backend": "deepep", "expert_model_parallel_size": 16}, "NVSHMEM"),
        (
            {"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "hybridep", "expert_tensor_parallel_size": 2},
            "de",
        ),
        ({"moe_flex_dispatcher_backend": "deepep", "expert_tensor_parallel_size": 2}, "over 16 ranks"),
        ({"moe_flex_dispatcher_backend": "ncclep"}, "ncclep: it borrows"),
        ({"moe_flex_dispatcher_backend": "deepep"}, ""),
        ({"moe_flex_dispatcher_backend": "hybridep", "expert_model_parallel_size": 64}, ""),
        ({"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "mpi"}, "--tp-comm-bootstrap-backend mpi"),
        ({"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "nccl"}, ""),
        ({"cuda_graph_impl": "full_iteration"}, ""),
    ],
)
def test_what_cannot_be_released_is_named_by_its_flag(given: dict[str, Any], named: str) -> None:
    said = "; ".join(unreleasable(SimpleNamespace(**flags(given))))
    assert bool(said) == bool(named), said
    assert named in said


def flags(given: dict[str, Any]) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 8} | given


@pytest.mark.parametrize(("version", "refused"), [("2.9.0", True), ("2.10.0", False)])
def test_graphs_of_a_transformer_engine_that_cannot_reset_them_are_refused(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setattr(importlib.import_module("megatron.core.utils"), "_te_version", Version(version))
    said = "".join(unreleasable(SimpleNamespace(cuda_graph_impl="transformer_engine")))
    assert refused == (f"transformer-engine {version} cannot reset graphs" in said)


# The order of calls around `--tp-comm-overlap`, with Megatron-LM's own function over a stand-in for Transformer Engine.


class Base(ModuleType):
    """`transformer_engine.pytorch.module.base`."""

    UserBufferQuantizationMode = SimpleNamespace(FP8="fp8", NONE="none")

    def __init__(self, calls: list[str]) -> None:
        super().__init__("transformer_engine.pytorch.module.base")
        self.calls, self.gathers, self.is_made = calls, dist.all_gather_object, False

    def initialize_ub(self, *, shape: list[int], tp_size: int, quantization_modes: Any, ub_cfgs: Any,
                      bootstrap_backend: str) -> None:  # fmt: skip
        if self.is_made:
            raise RuntimeError("UB communicators are already initialized.")
        assert dist.all_gather_object is self.gathers, "nothing is noted or answered"
        assert (shape, tp_size, bootstrap_backend) == ([64, 32], 2, "gloo")
        self.is_made = True
        self.calls.append("buffers made")

    def destroy_ub(self) -> None:
        self.is_made = False
        self.calls.append("buffers destroyed")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Base:
    """In place of Transformer Engine's module."""
    found = Base([])
    module: Any = ModuleType("transformer_engine.pytorch.module")
    module.base = found
    pytorch: Any = ModuleType("transformer_engine.pytorch")
    pytorch.module = module
    for name, stand_in in (("", ModuleType("te")), (".pytorch", pytorch), (".pytorch.module", module)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", stand_in)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def test_buffers_of_tensor_parallelism_are_destroyed_before_groups_go_and_made_by_all_ranks_behind_their_agreement(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize, calls = importlib.import_module("megatron.training.initialize"), base.calls
    args = SimpleNamespace(
        tp_comm_overlap_cfg=None, seq_length=32, micro_batch_size=2, context_parallel_size=1, hidden_size=32, fp8=None,
        tensor_model_parallel_size=2, tp_comm_bootstrap_backend="gloo",
    )  # fmt: skip
    facts = SimpleNamespace(do_train=1, do_valid=0, do_test=0, eval_iters=1)
    build = Build()
    monkeypatch.setattr(build, "connected", lambda: calls.append("agreed on survivors"))
    monkeypatch.setattr(process_restart, "own_build", lambda: build)
    monkeypatch.setattr(survivors, "own_build", lambda: build)
    monkeypatch.setattr(survivors, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(survivors.flags, "read", lambda _: SimpleNamespace(strategy="full", timeout_s=60.0))
    monkeypatch.setattr(initialize, "get_args", lambda: args)
    monkeypatch.setattr(initialize, "is_te_min_version", lambda _: True)
    monkeypatch.setattr(initialize, "_initialize_distributed", lambda: calls.append("connected"))
    stays = survivors.Survivors(SimpleNamespace(get_args=lambda: facts), "0.19.2")
    monkeypatch.setattr(survivors, "KeptGlobals", lambda *_: SimpleNamespace(as_before_training=lambda: None))
    monkeypatch.setattr(process_restart, "_get_default_store", dist.HashStore)
    connects, overlaps = "_initialize_distributed", "_initialize_tp_communicators"
    with stays.building():
        getattr(initialize, connects)()
        assert dist.all_gather_object is not base.gathers
        getattr(initialize, overlaps)()
        assert dist.all_gather_object is not base.gathers, "what is built behind it is noted"
        stays.built([])
        with stays.together():
            pass
        stays.train([], None)
        first = ["connected", "agreed on survivors", "buffers made"]
        assert calls == first
        release([])
        stays.connect()
        assert calls == [*first, "buffers destroyed", *first]
        assert dist.all_gather_object is base.gathers


# Graphs of layers, over a stand-in for capture: core's own managers and modules record, capture and replay.


class Graph:
    """A CUDA graph that was captured, or a callable of Transformer Engine that has some."""

    def __init__(self) -> None:
        self.resets = 0

    def __call__(self, *given: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        assert not self.resets, "a graph that was reset runs no more"
        said.append("replay")
        return given

    def reset(self) -> None:
        self.resets += 1


said: list[str] = []


@pytest.fixture(autouse=True)
def silent() -> None:
    said.clear()


class Layer(GraphableMegatronModule):
    """A layer that says when its code runs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        said.append("eager")
        return hidden * 2


def of_layer(impl: str) -> TransformerConfig:
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
    config.cuda_graph_impl = impl  # checked for Transformer Engine when the configuration is made
    return config


def test_layers_that_transformer_engine_captured_run_eagerly_until_they_are_captured_again() -> None:
    layer, graph = Layer(of_layer("transformer_engine")), Graph()
    layer.cuda_graphs, layer.cuda_graph_manual_hooks = [graph], [(said.append, ("gather",))]
    hidden = torch.ones(1)
    layer(hidden)
    release([torch.nn.Sequential(layer)])
    layer(hidden)
    assert (said, graph.resets, layer.cuda_graph_manual_hooks) == (["gather", "replay", "eager"], 1, [])


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's runners capture nothing, and replay graphs that say so."""
    runner = _CudaGraphRunner

    def forward(self: Any, *_: Any, **_named: Any) -> None:
        said.append("capture")
        self.fwd_graph = Graph()

    def replay(self: Any, _is_first: bool, args: Any, _kwargs: Any) -> Any:
        return _CudagraphRecordNode.apply(self, self.fwd_graph(*args)[0])  # notes the pass back

    monkeypatch.setattr(runner, "create_fwd_graph", forward)
    monkeypatch.setattr(runner, "create_bwd_graph", lambda self: setattr(self, "bwd_graph", Graph()))
    monkeypatch.setattr(runner, "replay_graph_capture", replay)
    monkeypatch.setattr(cuda_graphs, "get_cuda_rng_tracker", lambda: SimpleNamespace(is_inference_rng_tracker=True))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict.fromkeys(
        ("allocated_bytes.all.current", "reserved_bytes.all.current"), 0))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(said)))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    for name, value in (("cudagraph_created", False), ("cudagraph_record", [])):
        monkeypatch.setattr(_CudagraphGlobalRecord, name, value)
    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "global_mempool", None)


@pytest.mark.usefixtures("capturing")
def test_layers_that_core_captured_are_recorded_and_captured_again_behind_the_next_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
    monkeypatch.setattr(
        cuda_graphs.ProcessGroupCollection, "use_mpu_process_groups", classmethod(lambda *_, **__: groups)
    )
    original = torch.autograd.function.FunctionCtx.save_for_backward
    layer = Layer(of_layer("local"))
    model = torch.nn.Sequential(layer)

    def iteration() -> str:
        said.clear()
        layer(torch.ones(1, requires_grad=True)).sum().backward()
        cuda_graphs.create_cudagraphs()
        return " ".join(said)

    first = [iteration() for _ in range(3)]
    (runner,) = layer.cudagraph_manager.cudagraph_runners
    graphs = runner.fwd_graph, runner.bwd_graph
    assert first == ["eager capture", "replay", "replay"]
    pool = cuda_graphs.CudaGraphManager.global_mempool
    release([model])
    assert torch.autograd.function.FunctionCtx.save_for_backward is not original, "what is recorded is observed"
    assert [iteration() for _ in range(3)] == first
    assert [graph.resets for graph in graphs] == [1, 1]
    assert layer.cudagraph_manager.cudagraph_runners[0].mempool != pool


def test_a_process_without_any_of_it_releases_nothing(caplog: pytest.LogCaptureFixture) -> None:
    release([torch.nn.Linear(1, 1)])
    assert not caplog.messages
    assert flex_backend(SimpleNamespace()) == "deepep"
    assert process_restart.NVLINK_RANKS == 8


# Before the model is built: what cannot dispatch, and a dispatcher that was another one.


@pytest.mark.parametrize(
    ("backend", "installed", "named"),
    [
        ("hybridep", SimpleNamespace(Buffer=Buffer), "deep_ep.HybridEPBuffer: deep_ep has none"),
        ("deepep", None, "deep_ep.Buffer: import of deep_ep halted"),
        ("hybridep", SimpleNamespace(HybridEPBuffer=HybridEPBuffer), ""),
        ("deepep", SimpleNamespace(Buffer=Buffer), ""),
    ],
)
def test_a_flex_dispatcher_that_is_not_installed_or_in_part_is_one_line(
    backend: str, installed: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", installed)
    args = SimpleNamespace(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, num_experts=8)
    assert [named in line and f"-backend {backend}" in line for line in missing_kernels(args)] == [True] * bool(named)
    assert not list(missing_kernels(SimpleNamespace(**vars(args) | {"moe_token_dispatcher_type": "alltoall"})))


def test_a_backend_that_is_not_known_is_one_line() -> None:
    """A recipe's configuration has no parser that would refuse it."""
    config = SimpleNamespace(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deep", num_moe_experts=8)
    (line,) = missing_kernels(config)
    assert line == "--moe-flex-dispatcher-backend deep is unknown; choose deepep, hybridep, ncclep"


def test_kernels_that_do_not_load_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem_host.so.3: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    args = SimpleNamespace(moe_token_dispatcher_type="flex", moe_enable_deepep=True, num_experts=8)
    (line,) = missing_kernels(args)
    assert "needs deep_ep.Buffer: libnvshmem_host.so.3" in line


@pytest.mark.parametrize("replays", [False, True])
def test_another_dispatcher_is_named_by_its_flag_where_iterations_are_run_again(replays: bool) -> None:
    recorded = {"flags": {"moe_token_dispatcher_type": "alltoall"}}
    changed = changed_model(recorded, {"moe_token_dispatcher_type": "flex"}, replays=replays)
    assert changed == ["--moe-token-dispatcher-type was alltoall and is flex"] * replays


def test_state_of_another_dtype_is_named_by_the_flag_that_was_changed() -> None:
    recorded = {"flags": {"bf16": True, "exp_avg_dtype": "torch.float16"}}
    given = {"bf16": True, "exp_avg_dtype": "torch.bfloat16", "main_params_dtype": "torch.float16"}
    assert changed_model(recorded, given, replays=False) == [
        "--main-params-dtype was torch.float32 and is torch.float16",
        "--exp-avg-dtype was torch.float16 and is torch.bfloat16",
    ]


@pytest.mark.parametrize("left_in", ["memory", "storage", "storage of another job", "nowhere"])
def test_the_state_of_before_is_found_in_memory_or_else_in_storage(left_in: str, tmp_path: Path) -> None:
    layout, slot, storage = Layout.of([Field("w/master", "float32", (4,))]), tmp_path / "slot", tmp_path / "storage"
    slot.mkdir()
    stores: dict[str, Any] = {
        "memory": MemoryStore(slot, "job", 0, [layout.nbytes]),
        "storage": FilesystemStore(storage, 1),
        "of another rank": FilesystemStore(storage, 0),
    }
    for place, iteration in {"memory": 3, "storage": 4, "of another rank": 9}.items():
        if left_in.startswith(place) or place == "of another rank":
            with stores[place].reserve(SnapshotId(iteration, int(place != "of another rank")), layout) as writer:
                writer.put("w/master", bytes(16))
                writer.seal(Facts("other" if left_in == "storage of another job" else "job"))
    folder = stores["memory"].directory
    stores["memory"].close()
    found = newest_state(folder, str(storage), 1, "job")
    expected = {"memory": (str(folder), 3), "storage": (str(storage), 4)}.get(left_in)
    assert (found and (found[0], found[1].snapshot.iteration)) == expected


@pytest.mark.parametrize(
    ("launcher", "refused"),
    [({"RANK": "1", "SLURM_PROCID": "0"}, True), ({"SLURM_PROCID": "1"}, True), ({"RANK": "0"}, False), ({}, False)],
    ids=str,
)
def test_the_state_in_storage_that_is_judged_is_that_of_the_rank_that_the_launcher_names(
    launcher: dict[str, str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (launcher | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    layout = Layout.of([Field("w/master", "float32", (4,))])
    for rank in (0, 1):
        with FilesystemStore(tmp_path / "storage", rank).reserve(SnapshotId(3, rank), layout) as writer:
            writer.put("w/master", bytes(16))
            writer.seal(Facts("slurm-7", scalars={"trainer": {"optimizer": ["adam", "muon"][rank]}}))
    config = MoECheckpointConfig(memory_dir=str(tmp_path), persist_dir=str(tmp_path / "storage"))
    with pytest.raises(UsageError, match=r"muon, but .*storage has the state") if refused else nullcontext():
        refuse_another_model(config, lambda recorded: ["muon"] * (recorded["optimizer"] == "muon"))
