"""What is trained, and what its state consists of: the live objects, and how they are copied and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from ..extensions import Share
from ..local_recovery.survivor import LiveTensors, Passes
from ..megatron_state.megatron import (
    copies_embeddings,
    live_restorer,
    operators_of_parameters,
    state_tensors,
    stepped_parameters,
    unchanging_operators,
)
from ..megatron_state.optimizer_state import allocate_optimizer_state
from ..megatron_state.partitions import check_complete, random_draws, tensor_grids
from ..megatron_state.quantization import allocate_quantization_state, quantization_tensors
from ..policy.resharding import RecordKey
from ..ports import Execution, Json, TrainerState
from ..replay.execution import LiveExecution
from ..resharding.generation import LiveLayout, LiveTensor
from ..snapshot.capturer import LiveCapturer
from ..snapshot.copy_engines import CopyEngine, ThreadEngine
from ..snapshot.page_locks import LOCKS
from ..snapshot.stream_engine import StreamEngine
from ..storage.system import local_cpus
from ..types import OperatorId, Topology


@dataclass(frozen=True)
class Training:
    """What is trained: live objects of Megatron-Core, and what belongs to no operator.

    Attributes:
        chunks: The model chunks of this rank, wrapped in DistributedDataParallel.
        optimizer: What core's `get_megatron_optimizer` gave for them.
        trainer: The state that belongs to no operator.
        tokens_per_iteration: Input tokens of the whole job.
        iterations: Iterations of the whole training.
        topk: Experts per token.
        passes: The shape of an iteration's passes; without it boundaries of pipeline stages are not logged.
        save: Folder that the loop saves checkpoints to.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    trainer: TrainerState
    tokens_per_iteration: int
    iterations: int
    topk: int = 1
    passes: Passes | None = None
    save: str | None = None


class LiveState:
    """The training state of one rank, enumerated: how it is copied, restored, parked.

    Args:
        training: What is trained.
        topology: The layout of the job.
        rank: This rank.
        share: Which part of it this rank stores; None: all of it.

    Raises:
        UsageError: The model or its optimizer cannot be protected.
        IncompleteState: Not every byte of its state belongs to exactly one operator.

    Attributes:
        on_device: Whether it lies on a GPU.
        varying: Keys of what this rank stores in some snapshots and leaves to its peers in others.
    """

    varying: frozenset[str] = frozenset()

    def __init__(self, training: Training, topology: Topology, rank: int, share: Share | None = None) -> None:
        self._training, self._topology, self._rank, self._share = training, topology, rank, share
        self._engine: CopyEngine | None = None
        self.refresh()

    def refresh(self) -> None:
        """Enumerate it again, as is needed after a checkpoint was loaded in another way."""
        chunks, optimizer, trainer = self._training.chunks, self._training.optimizer, self._training.trainer
        # First: optimizers make their moments in the first step, and before that there is nothing to enumerate.
        allocate_optimizer_state(optimizer)
        allocate_quantization_state(chunks)
        tensors = every = state_tensors(chunks, optimizer, self._topology)
        check_complete(chunks, optimizer, tensors, quantization_tensors(chunks))
        # Made once: an engine has a thread or streams, and locked pages that take long to lock again.
        if self._engine is None:
            self.on_device = any(state.tensor.is_cuda for state in tensors)
            self._locks = LOCKS if self.on_device else None
            self._engine = StreamEngine(self._locks) if self.on_device else ThreadEngine()
        self.restorer, left_out = live_restorer(chunks, optimizer, self._topology), None
        if self._share is not None:
            tensors, self.restorer, left_out, self.varying = self._share(tensors)
        self._stored = tuple(state for state in tensors if state.part)
        self.capturer = LiveCapturer(tensors, trainer, self._engine, left_out=left_out, varying=self.varying)
        stepped = stepped_parameters(chunks, optimizer, self._topology)
        self.live = LiveTensors(self.capturer, trainer, optimizer, every, stepped, self._locks)

    @property
    def unchanging(self) -> frozenset[OperatorId]:
        """Operators of which this rank has a part, none of which training changes."""
        return unchanging_operators(self._training.chunks, self._topology)

    def layout(self, facts: Mapping[str, Json]) -> LiveLayout:
        """What snapshots of this rank hold, for those that another layout made. facts: the layout of this job."""
        chunks, topology = self._training.chunks, self._topology
        tensors = [LiveTensor(one.record, RecordKey.parse(one.key), one.in_forward) for one in self._stored]
        scalars = self._training.trainer.scalars()
        draws = random_draws(unwrap_model(chunks[0]).config)
        return LiveLayout(self._rank, topology, facts, tuple(tensors), tensor_grids(chunks, topology), scalars, draws)

    def execution(self) -> Execution:
        """With what operators are frozen in a replay. Raises UsageError for models that cannot be."""
        chunks, optimizer = self._training.chunks, self._training.optimizer
        return LiveExecution(chunks, optimizer, operators_of_parameters(chunks, self._topology))

    def clear_counters(self) -> None:
        """Set what routers count to zero."""
        for state in state_tensors(self._training.chunks, self._training.optimizer, self._topology):
            if state.field == "buffer":
                state.tensor.zero_()

    @property
    def near_cpus(self) -> frozenset[int]:
        """The cores near the GPU that it lies on; none where it lies on the host, or the system does not tell."""
        if not self.on_device:
            return frozenset()
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        try:
            address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        except AttributeError:  # releases of torch that do not know it
            return frozenset()
        return local_cpus(address)

    @property
    def engine(self) -> CopyEngine:
        """What copies it."""
        assert self._engine is not None
        return self._engine

    def close(self, *, keeps_memory: bool = False) -> None:
        """Copy nothing any more.

        Args:
            keeps_memory: Whether what snapshots were copied to stays mapped, for the next session of this process.
        """
        self.engine.close()
        # Pages are unlocked before somebody unmaps them: CUDA knows them by address only.
        if self._locks is not None and not keeps_memory:
            self._locks.release()

    @property
    def copies_embeddings(self) -> bool:
        """Whether the first and the last pipeline stage share their embedding."""
        return copies_embeddings(unwrap_model(self._training.chunks[0]))
