"""Puts the records of snapshots back into the live state of a rank.

What a restore must not get wrong is that something is left as it was: an operator of which a record was forgotten
would continue with stale values, and nobody would see it. So `poison` fills everything with NaN first, each record that
is written is noted by its key, and `complete` refuses to continue while a key is missing.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.fp8_utils import post_all_gather_processing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from ..core_versions.seams import cast_rows, casts_itself, quantized_rows, stage_masters
from ..errors import UnreadableCheckpoint, UsageError
from ..types import OperatorId, Part
from ..types.layout import aligned
from .operators import SINKS, StateTensor
from .optimizer_state import MASTER_OF_FUSED, holds_masters, layer_wise_chains, optimizer_members
from .quantization import is_in_blocks, is_quantized

_NAMED = 3
_PARTITION = re.compile(r"/tp\d+of\d+")


class LiveRestorer:
    """The `ports.Restorer` of live tensors.

    Args:
        tensors: All state of this rank, or what enumerates it; asked at each `poison`, and before the first `restore`.
        complete: Makes the compute weights whole on all ranks, a collective; with True it first derives this rank's
            from its master weights. `recast_compute_weights` and `gather_compute_weights` of `compute_weights.py`.
        gather: As `complete` with False, for `refresh`.
        settle: Waits for what may still write to live weights (`settle_gathers`), before anything is written here.
        recast: Derives the eight-bit weights of these operators from their master weights, a collective, for `refresh`.
        shared: Keys that this rank may lack, where a peer has them: `complete` gives it theirs.
        derived: Tensors that hold copies of other ranks' state, which `complete` overwrites: poisoned too.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[StateTensor]] | Sequence[StateTensor],
        complete: Callable[[bool], None],
        *,
        gather: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        recast: Callable[[Collection[OperatorId]], None] = lambda operators: None,
        derived: Sequence[torch.Tensor] = (),
        shared: Collection[str] = frozenset(),
    ) -> None:
        self._shared = shared
        self._enumerate = tensors if callable(tensors) else lambda: tensors
        self._complete, self._gather, self._settle, self._derived = complete, gather, settle, derived
        self._recast = recast
        self._tensors: tuple[StateTensor, ...] | None = None
        self._written: set[str] = set()
        self._fresh: set[str] = set()  # of these, what was written since the last refresh
        self._fresh_masters: set[OperatorId] = set()  # restored since then without their compute weights
        self._is_settled = False
        self.locked_bytes: Callable[[int], int] = lambda address: 0
        """How many bytes from an address on are page-locked: a device reads them where they are."""

    def poison(self) -> None:
        """As `ports.Restorer.poison`; integers get -1, or their largest value."""
        with torch.no_grad():
            for tensor in (*self._derived, *(state.tensor for state in self._begin())):
                tensor.fill_(_poison_of(tensor.dtype))

    def restore(self, read: Callable[[str], memoryview], parts: Mapping[Part, Collection[OperatorId]]) -> int:
        """As `ports.Restorer.restore`. A part of an operator is what state has any of its components."""
        tensors = self._all()
        # A gather of compute weights that is under way would overwrite what is written below.
        if not self._is_settled:
            self._settle()
            self._is_settled = True
        chosen = {part: frozenset(operators) for part, operators in parts.items()}
        copied_bytes, upload = 0, Upload(self.locked_bytes)
        try:
            # A key is asked for where this rank has its tensor: what other ranks own is not fetched.
            for state in tensors:
                if any(state.serves(part) and state.operator in operators for part, operators in chosen.items()):
                    record = self._read(read, state.key)
                    if record is None:
                        continue
                    write_record(state.key, record, state.tensor, upload)
                    self._fresh.add(state.key)
                    copied_bytes += state.nbytes
        finally:
            upload.end()  # also before the reader of records closes over an error: the device may read them still
        self._written |= self._fresh
        # Of operators, not of tensors: a rank that owns nothing of a weight takes part in its cast.
        for part, operators in chosen.items():
            if Part.MASTER in part and Part.COMPUTE not in part:
                self._fresh_masters |= operators
        return copied_bytes

    def keep(self, frozen: Collection[OperatorId] = ()) -> None:
        """As `ports.Restorer.keep`."""
        held_back = frozenset(frozen)
        # Compute weights of trained operators are left to `complete`: where a step was cut off behind its update, or
        # kept gradients were applied by this rank alone, they may not have been cast.
        self._written = {
            state.key
            for state in self._begin()
            if (state.serves(Part.COMPUTE) if state.operator in held_back else state.part is not Part.COMPUTE)
        }

    def has_restored(self, key: str) -> bool:
        """Whether a record was restored since the last `poison`."""
        return key in self._written

    def _read(self, read: Callable[[str], memoryview], key: str) -> memoryview | None:
        """A record; None where a peer has it in place of this rank. Raises what `read` raises."""
        try:
            return read(key)
        except UsageError:  # a snapshot without it
            if key in self._shared:
                return None
            if SINKS in key and (before := _PARTITION.sub("", key)) != key:
                return read(before)  # earlier versions stored them on each tensor rank as if all had the same
            raise

    def refresh(self) -> None:
        """As `ports.Restorer.refresh`: tensor by tensor the cast that Megatron's optimizers end their step with."""
        # Only what was restored since the last call: a frozen operator's master weights may still be NaN, and an
        # operator that is trained already has compute weights of its own.
        masters = {state.shard: state for state in self._all() if state.field == "master" and state.key in self._fresh}
        with torch.no_grad():
            for state in self._all():
                stale = state.field == "compute" and state.key not in self._fresh and state.shard in masters
                if stale and state.tensor.dtype is not torch.uint8:
                    state.tensor.copy_(masters[state.shard].tensor)
        self._recast(frozenset(self._fresh_masters))
        self._gather()
        self._fresh, self._fresh_masters, self._is_settled = set(), set(), False

    def missing(self, frozen: Collection[OperatorId] = ()) -> str:
        """As `ports.Restorer.missing`: of operators that are trained, master weights and moments."""
        held_back = frozenset(frozen)
        required = [
            state.key
            for state in self._not_written()
            # A frozen operator only runs forward; of the others the compute weights are the cast of the master weights.
            if (state.serves(Part.COMPUTE) if state.operator in held_back else state.part & Part.MASTER_AND_MOMENTS)
        ]
        if not required:
            return ""
        named = ", ".join(required[:_NAMED]) + (", ..." if len(required) > _NAMED else "")
        return f"{len(required)} tensors of this rank's state were not restored from any snapshot: {named}"

    def complete(self) -> None:
        """As `ports.Restorer.complete`; compute weights that were not restored to the last one are derived again."""
        if why := self.missing():
            raise UnreadableCheckpoint(why)
        # Compute weights are all that may be missing here; if any are, all are derived: the cast is the same one.
        self._complete(bool(self._not_written()))
        self._tensors = None  # enumerated again next time: an optimizer may replace its state meanwhile

    def _not_written(self) -> list[StateTensor]:
        return [state for state in self._all() if state.key not in self._written and state.key not in self._shared]

    def _all(self) -> tuple[StateTensor, ...]:
        return self._begin() if self._tensors is None else self._tensors

    def _begin(self) -> tuple[StateTensor, ...]:
        self._settle()
        self._tensors, self._written, self._fresh = tuple(self._enumerate()), set(), set()
        self._fresh_masters = set()
        self._is_settled = True
        return self._tensors


_STAGED_BYTES = 32 << 20
_ALIGNED_BYTES = 256


class Upload:
    """Copies bytes to a device: from where they are if that is page-locked, as in segments of this node, else through
    two page-locked buffers: while one is filled, the device reads the other.

    All copies run on the stream that is current; `end` waits for them, once.

    Args:
        locked_bytes: How many bytes from an address on are page-locked.
    """

    def __init__(self, locked_bytes: Callable[[int], int] = lambda address: 0) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._used = _STAGED_BYTES
        self._locked_bytes = locked_bytes
        self._sources: list[np.ndarray] = []  # mapped as long as the device reads them

    def copy(self, data: np.ndarray, flat: torch.Tensor) -> None:
        """Queue a copy.

        Args:
            data: Bytes, which do not change until `end`.
            flat: As many bytes of a device.
        """
        start, address = 0, int(data.ctypes.data)
        while start < data.size:
            if direct := min(self._locked_bytes(address + start), data.size - start):
                end, source = start + direct, _writable(data[start : start + direct])
                self._sources.append(data)
            else:
                if self._used >= _STAGED_BYTES:
                    self._turn()
                end = min(data.size, start + _STAGED_BYTES - self._used)
                source = self._buffers[0][0][self._used : self._used + end - start]
                np.copyto(source.numpy(), data[start:end])
                self._used += aligned(end - start, _ALIGNED_BYTES)
            flat[start:end].copy_(source, non_blocking=True)
            start = end

    def end(self) -> None:
        """All of it is there."""
        if self._sources or self._buffers:
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
        self._sources = []

    def _turn(self) -> None:
        """The next buffer is the first, and free."""
        if self._buffers:
            self._buffers[0][1].record()
        if len(self._buffers) < 2:
            self._buffers.insert(0, (_page_locked(_STAGED_BYTES), torch.cuda.Event()))
        else:
            self._buffers.reverse()
            self._buffers[0][1].synchronize()
        self._used = 0


def _writable(data: np.ndarray) -> torch.Tensor:
    """The same bytes, of which torch does not warn that they are read-only: nothing writes to them here."""
    return torch.frombuffer((ctypes.c_uint8 * data.size).from_address(int(data.ctypes.data)), dtype=torch.uint8)


def _page_locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def write_record(key: str, data: memoryview, tensor: torch.Tensor, upload: Upload | None = None) -> None:
    """Copy a record into a live tensor.

    Args:
        key: The record's key, for the error.
        data: Its bytes.
        tensor: A contiguous tensor of as many bytes.
        upload: Takes the bytes to a device, together with others: the caller ends it. None: the copy has ended.

    Raises:
        UnreadableCheckpoint: The record is of another size.
    """
    flat = tensor.view(-1).view(torch.uint8)
    if data.nbytes != flat.numel():
        raise UnreadableCheckpoint(
            f"record {key} has {data.nbytes} bytes, but its tensor has {flat.numel()}: it was written by another model"
            " or another layout of ranks"
        )
    if not data.nbytes:
        return
    with torch.no_grad():
        # Through numpy: records are read-only memory, which torch.frombuffer does not take without a warning.
        source: np.ndarray = np.frombuffer(data, np.uint8)
        if not flat.is_cuda:
            np.copyto(flat.numpy(), source)
            return
        one = upload or Upload()
        one.copy(source, flat)
        if upload is None:
            one.end()


# Integers have no NaN: the most improbable value stands in.
def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    return -1 if dtype.is_signed else torch.iinfo(dtype).max


# Makes a rank's compute weights whole again after its master weights, or its share of the compute weights, changed.
#
# All of it is what Megatron-Core 0.19.2 does at the end of an optimizer's step, in the same order and over the same
# buckets, so that no bit differs from training.


def settle_gathers(chunks: Sequence[torch.nn.Module]) -> None:
    """Wait for parameter gathers under way (`--overlap-param-gather`), which would overwrite what a restore writes."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if getattr(group, "param_gather_handle", None) is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None


def gather_compute_weights(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None = None) -> None:
    """Make the compute weights whole from what the data-parallel ranks own; a collective.

    Does nothing where each rank steps all. Call `settle_gathers` before shards are written.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Theirs, where it may step whole parameters in no order of the buckets, as core's layer-wise one does
            that was made without their layout (Megatron-Bridge).
    """
    # Where a gather is under way, `start_param_sync(force_sync=True)` would only wait for that one.
    settle_gathers(chunks)
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    for chain in layer_wise_chains(optimizer) if optimizer is not None else ():
        if not getattr(chain, "use_buffer_param_sync", False):
            chain.allgather_params()
    quantized = [
        parameter
        for chunk in chunks
        if not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag  # there the gather ends with it
        for parameter in chunk.parameters()
        if is_quantized(parameter) or is_in_blocks(parameter)
    ]
    if quantized:  # core does this after some gathers only: backward passes would read the transposes of before
        post_all_gather_processing(quantized)


def any_rank(condition: bool) -> bool:
    """Whether it holds on any rank; a collective."""
    found = torch.tensor([condition], dtype=torch.int32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return bool(found.item())


@torch.no_grad()
def recast_quantized_weights(optimizer: MegatronOptimizer, chosen: Collection[torch.nn.Parameter]) -> None:
    """Make this rank's shards of eight-bit weights from master weights, as the optimizer's step ends; a collective.

    Weights of MXFP8 are cast where they are gathered, as in `recast_compute_weights`: here masters go to that buffer.
    Scales of delayed scaling must be those that the step found: restore them before.

    Args:
        optimizer: The optimizer with the master weights.
        chosen: The parameters, the same on all data-parallel ranks; of others neither weights nor scales change.
    """
    for member in optimizer_members(optimizer):
        if not casts_itself(member):
            continue
        if member.config.reuse_grad_buf_for_mxfp8_param_ag:
            stage_masters(member, chosen)
        else:
            cast_rows(member, quantized_rows(member, lambda parameter: parameter in chosen))


@torch.no_grad()
def recast_compute_weights(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Make the compute weights from the master weights after a restore that had none; a collective.

    Weights of MXFP8 have no place in a buffer of parameters: core gathers masters as bf16 in the buffer of gradients,
    from which each rank casts whole weights.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Its optimizer, with the restored master weights.
    """
    settle_gathers(chunks)
    for member in optimizer_members(optimizer):
        if holds_masters(member):
            _recast_from_fused(member.optimizer)
        elif member.config.reuse_grad_buf_for_mxfp8_param_ag and isinstance(member, DistributedOptimizer):
            if not member.is_stub_optimizer:
                member._copy_main_params_to_param_buffer()
        elif not isinstance(member, FP32Optimizer):  # there both are one tensor
            member._copy_main_params_to_model_params()
    gather_compute_weights(chunks, optimizer)


def _recast_from_fused(inner: Any) -> None:
    """Core leaves the cast to `FusedAdam`, which makes it in its step only. Masters of fewer bits were restored with
    their compute weights: those of fp32 are all that may have come alone."""
    for parameter, state in inner.state.items():
        master = state[MASTER_OF_FUSED]
        if master.dtype is torch.float32 and not is_quantized(master):
            parameter.data.copy_(master)


@torch.no_grad()
def level_step_counts(tensors: Sequence[StateTensor]) -> None:
    """Give all parameters of all ranks the largest step count, as Megatron, which knows one for all; a collective.

    They differ only after a lossy recovery, where experts come back with older moments.
    """
    counts = [tensor.tensor for tensor in tensors if tensor.field == "step"]
    # A rank may have none, as of a stage without trained parameters: the others wait for it.
    largest = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    if counts:
        largest.copy_(torch.stack([count.max() for count in counts]).max())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    for count in counts:
        count.fill_(largest.item())
