"""Savers that `snapshot.py` compares with, behind the calls that the training loop makes to a checkpointing session.

All save the sharded state dict of Megatron-LM's loop, each as fast as its own options allow on a CPU: known structures
are not checked again, data-parallel ranks share the writing. Asynchronous saves of `torch_dist` and NVRx fork a process
each; Megatron-LM 0.19 makes none without the worker of `--use-persistent-ckpt-worker`, which needs a GPU. As in that
loop, writers are polled after each iteration; a save waits for the one before it, so that none piles up. Like ours,
each keeps its newest checkpoint only: memory is not endless.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

OURS = ("full", "full, replica", "full, replica, storage", "pec")
"""Our strategies that take part; the third is what `moe-ckpt advise` recommends, with every checkpoint in storage."""

WHEELS = {
    "NVRx": "nvidia-resiliency-ext==0.6.0 defusedxml",
    "LM-Resiliency": "lm-resiliency==0.2.0",
    "DLRover": "dlrover==0.6.1 deprecated pynvml nvidia-ml-py wrapt",
    "torchft": "torchft==0.2.0",
}
"""What peers by these names are made from."""


class WithoutCheckpoints:
    """Training without any."""

    def before_optimizer(self) -> float:
        return 0.0

    def step_end(self, iteration: int, journal: Any) -> None:
        """Nothing is saved."""

    report = settle = tidy = close = lambda self: None

    def written_bytes(self) -> int:
        return 0


def missing_peers(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Unpack the wheels of peers, not what these depend on, unless that was done; why not, by the name of the peer.

    What is used of them is Python, which runs with an older glibc, and with a newer torch, than they ask for.

    Args:
        folder: What they are unpacked to.
        names: Of the peers.
    """
    missing = {}
    for name in names:
        wheels = WHEELS[name]
        first, _, release = wheels.split()[0].partition("==")
        if (folder / f"{first.replace('-', '_')}-{release}.dist-info").is_dir():
            continue
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        command += [f"--platform={name}_x86_64" for name in ("manylinux_2_39", "manylinux2014")]
        command += ["--only-binary=:all:", *wheels.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            missing[name] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return missing


def import_peers(folder: Path) -> None:
    """Make what was unpacked importable: before Megatron-Core is imported, which looks for NVRx once."""
    if folder.is_dir():
        sys.path.append(str(folder))


class _Peer:
    """A saver at fixed iterations into `folder`; writes in the background go through `queue`."""

    def __init__(self, trainer: Any, folder: Path, interval: int, queue: Any) -> None:
        self._trainer, self._folder, self._interval, self._queue = trainer, folder, interval, queue
        folder.mkdir(parents=True, exist_ok=True)

    def before_optimizer(self) -> float:
        """Nothing waits here: what is written was copied, or belongs to a forked process."""
        return 0.0

    def step_end(self, iteration: int, journal: Any) -> None:
        """Poll, and save if that is due."""
        due = iteration % self._interval == 0
        self._queue.maybe_finalize_async_calls(blocking=due)
        if due:
            self._save(iteration)

    def report(self) -> None:
        """A peer has no protection to report."""

    def settle(self) -> None:
        """Bring what is under way to its end; a collective."""
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        """The end."""
        self._queue.close()

    def _save(self, iteration: int) -> None:
        raise NotImplementedError


FORKED = ("torch_dist async", "NVRx local async")
"""Those that fork a process for each save."""


class TorchDistSaver(_Peer):
    """Megatron-Core's `dist_checkpointing.save` in the format `torch_dist`, in the foreground or in its own forks."""

    def __init__(self, trainer: Any, folder: Path, interval: int, *, background: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        super().__init__(trainer, folder, interval, AsyncCallsQueue())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        inner = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self._strategy = FullyParallelSaveStrategyWrapper(inner, group, True)
        self._background, self._checked, self._newest = background, False, folder
        self._removing = threading.Thread()

    def written_bytes(self) -> int:
        """Bytes of the newest checkpoint: the shards of this rank; rank 0 also counts what belongs to no rank."""
        import torch

        mine = f"__{torch.distributed.get_rank()}_"
        files = [path for path in self._newest.iterdir() if path.is_file()]
        is_first = torch.distributed.get_rank() == 0
        return sum(
            path.stat().st_size
            for path in files
            if path.name.startswith(mine) or (is_first and not path.name.endswith(".distcp"))
        )

    def tidy(self) -> None:
        """Remove what the turn has left."""
        import torch

        if self._removing.ident is not None:
            self._removing.join()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            for old in self._folder.iterdir():
                shutil.rmtree(old)
        torch.distributed.barrier()

    def _save(self, iteration: int) -> None:
        from megatron.core import dist_checkpointing

        complete, self._newest = self._newest, self._folder / f"iter_{iteration:07d}"
        self._remove_all_but(complete, self._newest)
        self._newest.mkdir(exist_ok=True)
        state_dict = self._trainer.sharded_state_dict()
        # The loop is protected, which asks the flag whether another process has the results of the writer.
        with mock.patch.object(self._trainer.args, "async_save", self._background):
            request = dist_checkpointing.save(
                state_dict,
                str(self._newest),
                self._strategy,
                validate_access_integrity=not self._checked,
                async_sharded_save=self._background,
                async_strategy="mcore",
            )
        self._checked = True
        if request is not None:
            self._queue.schedule_async_request(request)

    def _remove_all_but(self, complete: Path, newest: Path) -> None:
        """Remove what is older than the complete checkpoint, beside training; other ranks may have begun the newest."""
        import torch

        if torch.distributed.get_rank() == 0:
            older = [path for path in self._folder.iterdir() if path not in (complete, newest)]
            self._removing = threading.Thread(target=lambda: [shutil.rmtree(path) for path in older])
            self._removing.start()


class NvrxLocal(_Peer):
    """NVRx's local checkpoints without replication, as Megatron-LM makes them with `--non-persistent-ckpt-type local`.

    What they need of CUDA the driver's CPU device already answers; instead of the copy from the device Megatron-Core
    clones tensors that are on the host.
    """

    def __init__(self, trainer: Any, folder: Path, interval: int, *, background: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        super().__init__(trainer, folder, interval, AsyncCallsQueue(persistent=False))
        self._manager = LocalCheckpointManager(folder, session_id="benchmark")
        self._background, self._distribution = background, None

    def written_bytes(self) -> int:
        """Bytes of the newest checkpoint of this rank."""
        files = sorted(self._manager.local_ckpt_dir.glob("iter_*"))
        return files[-1].stat().st_size

    def tidy(self) -> None:
        """Remove what the turn has left; during the turn the manager removes what is older than the newest."""
        for path in self._manager.local_ckpt_dir.glob("iter_*"):
            path.unlink(missing_ok=True)

    def _save(self, iteration: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

        aware, self._distribution = MCoreTensorAwareStateDict.from_state_dict(
            self._trainer.sharded_state_dict(),
            algo="fully_parallel",
            parallelization_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            cached_metadata=self._distribution,
        )
        request = self._manager.save(aware, iteration, is_async=self._background)
        if request is not None:
            self._queue.schedule_async_request(request)


class _Tensors(_Peer):
    """Saves the tensors that `full` saves: master weights and moments, those of this rank alone."""

    def __init__(self, trainer: Any, folder: Path, interval: int, queue: Any) -> None:
        import torch

        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
        from megatron.core.dist_checkpointing.moe.types import Part

        super().__init__(trainer, folder, interval, queue)
        world_size = torch.distributed.get_world_size()
        live = state_tensors(trainer.chunks, trainer.optimizer, read_topology(world_size))
        self._tensors = [one.tensor for one in live if one.part is not Part.COMPUTE]

    def written_bytes(self) -> int:
        """Of this rank."""
        return sum(tensor.nbytes for tensor in self._tensors)


class TorchDcp(_Tensors):
    """torch's own `distributed.checkpoint.async_save` in its fastest form for the caller: a process that writes, shared
    memory that stays, plans that are made once."""

    def __init__(self, trainer: Any, folder: Path, interval: int) -> None:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(trainer, folder, interval, self)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )  # as far as there is no GPU
        self._stager, self._written, self._rank = DefaultStager(options), None, torch.distributed.get_rank()

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        """Wait for the checkpoint before."""
        if blocking and self._written is not None:
            self._written.result()
            self._written = None

    def tidy(self) -> None:
        """The newest checkpoint takes the place of the one before."""

    def close(self) -> None:
        self.settle()
        self._stager.close()

    def _save(self, iteration: int) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        own = {f"{self._rank}/{at}": tensor for at, tensor in enumerate(self._tensors)}
        self._written = checkpoint.async_save(
            own,
            storage_writer=checkpoint.FileSystemWriter(self._folder, sync_files=False, overwrite=True),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )


class LmResiliency(_Tensors):
    """LM-Resiliency's checkpoints in memory, with a replica at the other rank or without, and no files.

    Tensors that are on the host it copies in the call that saves; from a GPU it would copy beside training.
    """

    def __init__(self, trainer: Any, folder: Path, interval: int, *, replicates: bool) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        super().__init__(trainer, folder, interval, self)
        config = InMemoryCkptConfig(
            interval=interval, replication_jump=1, disk_flush_interval=0, disk_folder=str(folder), run_id="benchmark"
        )
        held = None if replicates else SimpleNamespace(has_natural_replicas=True)
        self._manager = InMemoryCheckpointManager(config, parallelism_info=held)

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        """A save itself waits for the replica of the one before."""

    def settle(self) -> None:
        self._manager.finalize_replication()

    def tidy(self) -> None:
        """Its buffers are written over."""

    def close(self) -> None:
        self._manager.close()

    def _save(self, iteration: int) -> None:
        self._manager.save_tensors(self._tensors, iteration)


class DlroverFlash(_Tensors):
    """DLRover's flash checkpoints of all ranks, in shared memory and without files: the call that saves copies, also
    from a GPU. The process that would write them is there, as without `dlrover-run`."""

    def __init__(self, trainer: Any, folder: Path, interval: int) -> None:
        import logging

        from dlrover.python.common.log import default_logger
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.megatron_engine import MegatronDistCheckpointEngine

        for logger in (logging.getLogger(), default_logger):  # its import has all loggers tell each of its steps
            logger.setLevel(logging.WARNING)
        super().__init__(trainer, folder, interval, self)
        self._engine = MegatronDistCheckpointEngine(str(folder), PosixDiskStorage())

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        """A save has ended when its call has."""

    def tidy(self) -> None:
        """Its memory is written over."""

    def close(self) -> None:
        self._engine.close()
        for left in Path("/dev/shm").glob(f"{os.environ['TORCHELASTIC_RUN_ID']}_*"):  # which it keeps for a next start
            left.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock", os.environ["TORCHELASTIC_RUN_ID"]), ignore_errors=True)

    def _save(self, iteration: int) -> None:
        tensors = {str(at): tensor for at, tensor in enumerate(self._tensors)}
        if not self._engine.save_to_memory(iteration, tensors, {}):
            raise RuntimeError(f"DLRover skipped the checkpoint of iteration {iteration}")


PEERS: dict[str, Callable[..., _Peer]] = {
    "torch_dist": lambda *where: TorchDistSaver(*where, background=False),
    "torch_dist async": lambda *where: TorchDistSaver(*where, background=True),
    "NVRx local": lambda *where: NvrxLocal(*where, background=False),
    "NVRx local async": lambda *where: NvrxLocal(*where, background=True),
    "torch DCP async": TorchDcp,
    "DLRover": DlroverFlash,
    "LM-Resiliency": lambda *where: LmResiliency(*where, replicates=False),
    "LM-Resiliency, replica": lambda *where: LmResiliency(*where, replicates=True),
}
"""By name; each from the trainer, a folder and the interval."""
