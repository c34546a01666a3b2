"""Which process this is, the device it has, and how it meets the others."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe import ProcessInfo, set_for_parking
from megatron.core.dist_checkpointing.moe.replication.agreement import gathered_by_store
from megatron.core.dist_checkpointing.moe.replication.interface import of_local_rank, use_for_gloo
from megatron.core.dist_checkpointing.moe.runtime.status import report_silence
from megatron.pretrain.bound_store import bound_store, is_loopback
from megatron.pretrain.engine_errors import driver_errors


@dataclasses.dataclass(frozen=True)
class Launch:
    """Rank of this process in the job, as torchrun's environment variables say; one process without torchrun.

    place: where it runs, and in which job.
    """

    rank: int
    world_size: int
    attempt: int
    place: ProcessInfo

    @property
    def local_rank(self) -> int:
        """Among the ranks of its node."""
        return self.place.local_rank

    @staticmethod
    def from_environment() -> Launch:
        number = {name: int(os.environ.get(name, default)) for name, default in _LAUNCH_DEFAULTS.items()}
        place = ProcessInfo.from_environment()
        ranks = number["RANK"], number["WORLD_SIZE"], number["TORCHELASTIC_RESTART_COUNT"]
        return Launch(*ranks, place)


_LAUNCH_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


def use_cpu() -> None:
    """Let the CPU play the device; before Megatron-LM is imported, which this does."""
    from megatron.pretrain.testing import cpu_device

    # Core advises on the queues of a GPU.
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    cpu_device.install()


def shut_down() -> None:
    """Leave the process groups, so that no other rank waits for this one, and free the device.

    What Megatron-Core keeps in globals goes as well, so that another job can follow in this process.
    """
    if dist.is_initialized():
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.moe.core_versions.training import drop_auxiliary_losses

        drop_auxiliary_losses()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    # Scales of all modules that ran once, which Transformer Engine would continue to reduce over groups that are gone.
    scales = sys.modules.get("transformer_engine.pytorch.quantization")
    if scales is not None:
        scales.FP8GlobalStateManager.reset()
    # Looked up, not imported: a run on GPUs never loads it.
    cpu_device = sys.modules.get("megatron.pretrain.testing.cpu_device")
    if cpu_device is not None:
        cpu_device.uninstall()


def start_process_group(
    backend: str, launch: Launch, timeout: datetime.timedelta, interface: str | None = None
) -> None:
    """Connect all ranks, those of a restart at fresh addresses.

    Args:
        backend: `gloo` or `nccl`.
        launch: The place of this process in the job.
        timeout: How long connecting, and later each collective, may take.
        interface: Of `--moe-ckpt-interface`, for all that gloo does.

    Raises:
        InvalidInput: On all ranks: the interface is not there.
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
                of_local_rank(interface, launch.place.local_rank),
                launch.rank,
                lambda own: gathered_by_store(store, "interface", *ranks, own, _first, timeout.total_seconds()),
            )
    try:
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except RuntimeError as error:
        report_silence(error)  # torch names the key of the store that is not there
        raise


def _first(problems: list[Any]) -> Any:
    return next(filter(None, problems), "")


def _joined_store(launch: Launch, timeout: datetime.timedelta) -> dist.Store:
    """The store in which the ranks meet, as the launcher says."""
    address, is_agents = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.rank == 0 and not is_agents and is_loopback(address):
        return bound_store(address, int(os.environ["MASTER_PORT"]), timeout)  # torch's would listen on all interfaces
    store: dist.Store = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return store
