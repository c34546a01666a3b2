"""Starts the process groups and random states of a rank."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Mapping

import numpy
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe import Milestone, ProcessInfo, Timestamps, set_for_parking
from megatron.core.dist_checkpointing.moe.policy.determinism import ENVIRONMENT, wrong_values
from megatron.core.dist_checkpointing.moe.replication.interface import use_for_gloo
from megatron.core.dist_checkpointing.moe.replication.store_gather import gathered_by_store
from megatron.core.dist_checkpointing.moe.seats.seat import own_seat
from megatron.pretrain import te_on_cpu
from megatron.pretrain.agreement import raise_invalid_input_on_all_ranks
from megatron.pretrain.bound_store import bound_store, is_loopback
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.derived import Environment, virtual_pipeline_size
from megatron.pretrain.config.training import TrainingConfig
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.processes import started_s

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Rank of this process in the job, as torchrun's environment variables say; one process without torchrun.

    place: where it runs, and in which job. node_ranks: of each node, 1 where the launcher does not say.
    """

    rank: int
    world_size: int
    attempt: int
    place: ProcessInfo
    node_ranks: int = 1

    @property
    def local_rank(self) -> int:
        """Among the ranks of its node."""
        return self.place.local_rank

    @staticmethod
    def from_environment() -> Launch:
        number = {name: int(os.environ.get(name, default)) for name, default in _LAUNCH_DEFAULTS.items()}
        place = ProcessInfo.from_environment()
        ranks = number["RANK"], number["WORLD_SIZE"], number["TORCHELASTIC_RESTART_COUNT"]
        return Launch(*ranks, place, number["LOCAL_WORLD_SIZE"])


_LAUNCH_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "1"}


def probe_environment(world_size: int, node_ranks: int = 1) -> Environment:
    """What this machine offers to a job of `world_size` ranks, `node_ranks` of them on each node."""
    return Environment(
        world_size=world_size,
        cuda=torch.cuda.is_available(),
        transformer_engine=_can_import("transformer_engine.pytorch"),
        apex=_can_import("apex"),
        engine_on_cpu=te_on_cpu.is_loaded(),
        node_ranks=node_ranks,
    )


def _can_import(module: str) -> bool:
    """As Megatron-Core sees it, which has tried before: an ImportError says that a package is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def marks_of_this_process(seated_s: float | None = None, *, stayed: bool = False) -> Timestamps:
    """For the timeline of a recovery: this process has begun, or has taken the seat of a rank.

    stayed: whether it trained before.
    """
    marks = Timestamps(stayed=stayed)
    marks.mark(Milestone.RESTARTED, started_s(os.getpid()) if seated_s is None else seated_s)
    return marks


def initialize(config: PretrainConfig, launch: Launch, marks: Timestamps | None = None) -> tuple[Launch, Timestamps]:
    """Select the device, `connect`, and seed everything; with which seat, and since when.

    On `--device cpu` this installs `cpu_device`; on `cuda` that module is not even imported.
    """
    layout = config.parallel
    if config.training.deterministic_mode:
        _repeat_to_the_bit()
    if layout.device == "cpu":
        use_cpu()
    else:
        os.environ.update(device_queues(config, os.environ))
        torch.cuda.set_device(launch.local_rank)

    joined = _joined(config, launch, marks)
    seed(config.training)
    return joined


def _joined(config: PretrainConfig, launch: Launch, marks: Timestamps | None) -> tuple[Launch, Timestamps]:
    """`connect`, with the rank that this process has by then."""
    from megatron.core.dist_checkpointing.moe.in_place.newcomer import connected  # once the device is chosen

    seats = [(launch, marks or marks_of_this_process(own_seat().taken_s))]

    def connect_in_seat() -> tuple[Launch, Timestamps]:
        seat = seats.pop() if seats else (Launch.from_environment(), marks_of_this_process(own_seat().taken_s))
        connect(config, *seat)
        return seat

    if config.moe_checkpoint.strategy == "none":  # nothing would bring this process back
        return connect_in_seat()
    return connected(connect_in_seat)


def connect(config: PretrainConfig, launch: Launch, marks: Timestamps | None = None) -> None:
    """Start torch.distributed and Megatron's process groups, at the start or after a fault.

    marks: noted is when all ranks were connected.
    """
    layout = config.parallel
    timeout = datetime.timedelta(minutes=layout.distributed_timeout_minutes)
    start_process_group(str(layout.distributed_backend), launch, timeout, config.moe_checkpoint.interface)
    if config.training.deterministic_mode:
        raise_invalid_input_on_all_ranks(_refuse_other_values)  # nodes may differ

    from megatron.core.dist_checkpointing.moe.in_place.building import own_build

    make_groups(config)
    own_build().connected()
    if marks is not None:
        marks.mark(Milestone.RENDEZVOUS)


def make_groups(config: PretrainConfig) -> None:
    """Megatron's process groups, once torch.distributed has started."""
    from megatron.core import parallel_state

    layout = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(config),
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        distributed_timeout_minutes=layout.distributed_timeout_minutes,
        create_gloo_process_groups=layout.distributed_backend == "nccl",
    )


def device_queues(config: PretrainConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be set, before the first use of a GPU, for kernels and transfers to overlap in core.

    With tensor or context parallelism core relies on kernels running in the order in which they were launched, over
    all streams: on one hardware queue. What the user has set stays.
    """
    layout = config.parallel
    in_order = layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
    return {QUEUES: "1"} if in_order and QUEUES not in environment else {}


def _repeat_to_the_bit() -> None:
    """As Megatron-LM's `--deterministic-mode`, before any library looks at the environment."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    torch.use_deterministic_algorithms(True)


def _refuse_other_values() -> None:
    """Raises InvalidInput for what the environment says against `--deterministic-mode`."""
    if wrong := "; ".join(wrong_values(os.environ)):
        raise InvalidInput(f"--deterministic-mode: {wrong}, or leave it to the flag")


def use_cpu(*, stock_loop: bool = False) -> None:
    """Let the CPU play the device; before anything that asks for one, such as Megatron-Core's model modules.

    stock_loop: for the loop of Megatron-LM, which this imports.
    """
    from megatron.pretrain import cpu_device

    # Core advises on the queues of a GPU.
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    cpu_device.install(stock_loop=stock_loop)


def shut_down() -> None:
    """Undo `initialize`: leave the process groups, so that no other rank waits for this one, and free the device.

    What Megatron-Core keeps in globals goes as well, so that another job can follow in this process.
    """
    if dist.is_initialized():
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.moe.core_versions.training import drop_auxiliary_losses

        drop_auxiliary_losses()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    # Scales of all modules that ran once, which Transformer Engine would go on to reduce over groups that are gone.
    scales = sys.modules.get("transformer_engine.pytorch.quantization")
    if scales is not None:
        scales.FP8GlobalStateManager.reset()
    # Looked up, not imported: a run on GPUs never loads it.
    cpu_device = sys.modules.get("megatron.pretrain.cpu_device")
    if cpu_device is not None:
        cpu_device.uninstall()


def start_process_group(
    backend: str, launch: Launch, timeout: datetime.timedelta, interface: str | None = None
) -> None:
    """Connect all ranks, those of a restart at fresh addresses.

    interface: of `--moe-ckpt-interface`, for all that gloo does. Raises InvalidInput, on all ranks, for one that is
    not there.
    """
    if "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()
    else:
        store = _joined_store(launch, timeout)
        shared = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and shared:
            # torch 2.13 keeps this store over all restarts of a job; without a prefix of its own, a restarted worker
            # would try to reach the addresses of the workers that died. Where each restart has a store of its own, a
            # prefix would part the workers of agents that count restarts differently, as a spare does.
            store = dist.PrefixStore(f"attempt_{launch.attempt}", store)
    set_for_parking(backend)
    if interface is not None:
        ranks = launch.rank, launch.world_size
        with driver_errors():
            use_for_gloo(
                interface,
                launch.rank,
                lambda own: gathered_by_store(store, "interface", *ranks, own, timeout.total_seconds()),
            )
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def _joined_store(launch: Launch, timeout: datetime.timedelta) -> dist.Store:
    """The store in which the ranks meet, as the launcher says."""
    address, is_agents = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.rank == 0 and not is_agents and is_loopback(address):
        return bound_store(address, int(os.environ["MASTER_PORT"]), timeout)  # torch's would listen on all interfaces
    store: dist.Store = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return store


def seed(training: TrainingConfig) -> None:
    """Give this rank the random states that its job begins with."""
    from megatron.core import parallel_state, tensor_parallel

    # Pipeline stages hold different layers, so they must not draw the same weights.
    number = training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if training.data_parallel_random_init:
        number += 10 * parallel_state.get_data_parallel_rank()
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    tensor_parallel.model_parallel_cuda_manual_seed(number)
