"""Records what a rank sends over stage boundaries, beside training (MoEvement 3.4, "Upstream Logging").

The schedule calls `BoundaryRecorder.sent` for each tensor right before it is sent. The recorder checks the tensor
against the log's layout, which was planned from the shape of the iteration's passes, and hands its bytes to a copy
engine. Nothing that goes wrong here may disturb training: it is kept, and raised by `end`, which costs the log of one
iteration.

Of each tensor that comes the log gets a fingerprint: a replay of the stage that sent it is compared with that.
A fingerprint that cannot be taken costs that comparison and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from ..errors import MoECheckpointError, UsageError
from ..policy.rollback import log_keys, receives
from ..ports import Field, Layout, MappedWriter
from ..snapshot.copy_engines import CopyEngine, Span
from ..types import Direction, Topology, received_key

log = logging.getLogger(__name__)

# Fingerprints of tensors: 64 bits, computed where the tensor is, without waiting for the device.
#
# A stage that replays alone must send what it sent when the iteration ran first. Whoever received that keeps a
# fingerprint of it: the sum of all 64-bit words, each multiplied by an odd number of its place, modulo 2**64. Whole
# numbers add up to the same in any order, so the result is the same in each run, on any number of threads. One word
# that changed, by whatever amount, always changes it: an odd number divides no power of two. More of them go unnoticed
# with a chance of about 2**-64. It guards against accidents and not against forgery.

FINGERPRINT_BYTES = 8
UNKNOWN = 0
"""No tensor has this fingerprint."""

_BLOCK = 1 << 13
"""Words that are multiplied by one row of numbers: there is one row, and one number for each block."""
_ROW, _BLOCKS, _REST, _TAIL = 1, 2, 3, 4  # sequences of numbers


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """One int64 on the device of a contiguous tensor; never UNKNOWN. A GPU needs as much memory again meanwhile."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % FINGERPRINT_BYTES:
        flat = flat.clone()  # words have to begin at a multiple of their size
    size, device = flat.numel() // FINGERPRINT_BYTES * FINGERPRINT_BYTES, flat.device
    words, tail = flat[:size].view(torch.int64), flat[size:]
    blocks, rest = words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK), words[words.numel() // _BLOCK * _BLOCK :]
    parts = [
        (_products(blocks, _numbers(_ROW, _BLOCK, device)) * _numbers(_BLOCKS, blocks.shape[0], device)).sum(),
        (rest * _numbers(_REST, rest.numel(), device)).sum(),
        (tail.to(torch.int64) * _numbers(_TAIL, tail.numel(), device)).sum(),
    ]
    total = torch.stack(parts).sum()
    return torch.where(total == UNKNOWN, torch.ones_like(total), total).view(1)


def _products(blocks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The sum of each block. On the CPU without the products in memory, 15 times as fast; CUDA has no such kernel."""
    return (blocks * row).sum(1) if blocks.is_cuda else torch.mv(blocks, row)


@lru_cache(maxsize=64)
def _numbers(sequence: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, the same on all machines (splitmix64)."""
    state = (torch.arange(count, dtype=torch.int64) + (sequence << 32)) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # Of a signed number the sign would be shifted in.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (state | 1).to(device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_RELEASE_S = 60.0
_DIRECTIONS = {direction.value: direction for direction in Direction}
_RECEIVED = {received_key(direction): direction for direction in Direction}


class BoundaryFailure(MoECheckpointError):
    """What was sent in an iteration is not what was planned, or could not be copied: there is no log of it."""


@dataclass(eq=False)
class _ExpectedSends:
    """What is still expected of an iteration: by direction, the fields and their offsets in the order of sending, and
    the offsets of fingerprints in the order of arrival."""

    # Schedules mix the two directions (1F1B), each in its own order: so they are counted apart.
    planned: Mapping[Direction, tuple[tuple[Field, int], ...]]
    received: Mapping[Direction, list[int]]
    sent: dict[Direction, int]
    segment: memoryview
    problem: str = ""
    passed: bool = False

    @classmethod
    def of(cls, layout: Layout, segment: memoryview) -> _ExpectedSends:
        """Those of a log's layout. Raises UsageError for a key that is of no direction."""
        planned: dict[Direction, list[tuple[Field, int]]] = {direction: [] for direction in Direction}
        received: dict[Direction, list[int]] = {direction: [] for direction in Direction}
        for field, offset in zip(layout.fields, layout.offsets, strict=True):
            name = field.key.partition("/")[0]
            if field.key in _RECEIVED:
                end = offset + field.nbytes
                received[_RECEIVED[field.key]].extend(range(offset, end, FINGERPRINT_BYTES))
                segment[offset:end] = bytes(field.nbytes)  # none is known yet, and the memory was another log's
                continue
            if name not in _DIRECTIONS:
                raise UsageError(f"record {field.key} is no boundary tensor: its key begins with no direction")
            planned[_DIRECTIONS[name]].append((field, offset))
        sent = dict.fromkeys(Direction, 0)
        return cls({way: tuple(fields) for way, fields in planned.items()}, received, sent, segment)

    @property
    def complete(self) -> bool:
        """Whether all that was planned was sent."""
        return not self.problem and all(self.sent[way] == len(self.planned[way]) for way in Direction)

    def offset_of_next(self, direction: Direction, tensor: torch.Tensor) -> int:
        """Where the next tensor of a direction goes. Raises BoundaryFailure for one that the plan does not have."""
        # Counted first, so that a tensor that does not fit shows in the counts of `shortfall` all the same.
        index, planned = self.sent[direction], self.planned[direction]
        self.sent[direction] += 1
        if index >= len(planned):
            raise BoundaryFailure(f"more than the {len(planned)} planned tensors were sent {direction.value}")
        # A shape that differs would be received as another tensor in a replay: better no log than a wrong one.
        (field, offset), dtype = planned[index], str(tensor.dtype).removeprefix("torch.")
        if dtype != field.dtype or tuple(tensor.shape) != field.shape:
            raise BoundaryFailure(
                f"{field.key} was planned as {field.dtype} {list(field.shape)}, but {dtype} {list(tensor.shape)} was"
                " sent"
            )
        return offset

    def shortfall(self) -> str:
        """What is wrong with what was sent up to now; empty where all is as planned."""
        if self.problem or self.complete:
            return self.problem
        counts = (f"{self.sent[way]} of {len(self.planned[way])} {way.value}" for way in Direction)
        return f"the iteration ended with fewer tensors sent than were planned: {', '.join(counts)}"


class BoundaryRecorder:
    """The `ports.BoundarySink` that copies what is sent in an iteration into a snapshot's memory, beside training.

    In each iteration: `arm`, any number of `sent`, `passed`, `end`, or `disarm` at any time. Between `passed` and the
    next `arm`, as in an evaluation, nothing is recorded. The k-th tensor that is sent in a direction is the k-th record
    of the layout whose key begins with it (see `types.boundary_key`).

    Args:
        engine: Copies tensors of the device that they are on; used by nobody else.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._expected: _ExpectedSends | None = None
        self._armed = 0

    def arm(self, layout: Layout, writer: MappedWriter) -> None:
        """Record what is sent from here on.

        Args:
            layout: Of a boundary log, as `LogPlan.layout` gives it.
            writer: Of the log's memory, reserved with this layout.

        Raises:
            UsageError: It is armed already, or the layout is not that of a boundary log.
            TimeoutError: The device still copies what was given up; that must not end up in this log's memory.
        """
        if self._expected is not None:
            raise UsageError("boundary tensors are being recorded: end that before the next iteration begins")
        # No patience: training waits for this call, at the start of an iteration.
        self._engine.wait(0)
        self._expected = _ExpectedSends.of(layout, writer.whole())
        self._armed += 1

    def sent(self, direction: Direction, tensor: Any) -> None:
        """As `ports.BoundarySink.sent`; what is wrong is raised by `end`."""
        expected = self._expected
        if expected is None or expected.problem or expected.passed:
            return
        try:
            offset = expected.offset_of_next(direction, tensor)
            # A view, not the tensor itself: schedules empty `tensor.data` once it is sent (deallocate_output_tensor),
            # while the copy still needs the storage, which a view keeps.
            source = tensor.detach().reshape(-1).view(torch.uint8)
            self._engine.add(((Span(source, offset),), expected.segment))
        except Exception as error:  # the schedule that called must not see it, and `end` raises it
            is_ours = isinstance(error, MoECheckpointError)
            expected.problem = str(error) if is_ours else f"{type(error).__name__}: {error}"

    def receiving(self, direction: Direction) -> Callable[[Any], None]:
        """As `ports.BoundarySink.receiving`; of more than was planned no fingerprints are kept."""
        expected = self._expected
        if expected is None or expected.problem or expected.passed or not expected.received[direction]:
            return _unwanted
        return partial(self._arrived, self._armed, direction, expected.received[direction].pop(0))

    def _arrived(self, armed: int, direction: Direction, offset: int, tensor: Any) -> None:
        # By number: a request that nobody waits for must not keep the memory of its iteration.
        expected = self._expected
        if expected is None or armed != self._armed or expected.problem or expected.passed:
            return
        try:
            found = fingerprint(tensor).view(torch.uint8)
            self._engine.add(((Span(found, offset),), expected.segment))
        except Exception as error:  # the schedule that called must not see it
            expected.received[direction].clear()
            log.warning("no fingerprints of tensors received %s in this iteration: %s", direction.value, error)

    def passed(self) -> None:
        """The passes of the iteration have ended: what is sent from here on, as in an evaluation, is not recorded."""
        if self._expected is not None:
            self._expected.passed = True

    @property
    def complete(self) -> bool:
        """Whether it is armed and all that was planned has been sent; the copies may still be under way."""
        return self._expected is not None and self._expected.complete

    def end(self, timeout_s: float) -> None:
        """Wait until all is copied; nothing refers to the writer's memory afterwards, and nothing is recorded.

        With nothing armed it returns.

        Raises:
            TimeoutError: Copies are still under way; it may be called again, or given up by `disarm`.
            BoundaryFailure: What was sent is not what the layout says, or a copy failed.
        """
        if self._expected is None:
            return
        # Copies of a log that is given up need not be waited for.
        if problem := self._expected.shortfall():
            self.disarm()
            raise BoundaryFailure(problem)
        try:
            self._engine.wait(timeout_s)
        except TimeoutError:  # it stays armed: copies still refer to the memory
            raise
        except Exception as error:
            self._expected = None
            raise BoundaryFailure(f"a boundary tensor could not be copied: {error}") from error
        self._expected = None

    def disarm(self) -> None:
        """Give up what was recorded since `arm`, and record nothing more.

        Its memory is release as soon as possible: a store does not use it again before.
        """
        if self._expected is not None:
            self._expected = None
            self._engine.drop()  # copies that cannot be stopped are waited for in the next `arm`

    def settle(self) -> None:
        """Wait until nothing is copied, as memory is about to be given back; between two iterations.

        Raises:
            BoundaryFailure: Copies are still under way, or one failed; then `end` raises it, too.
        """
        try:
            # Copies of a round that was given up may still run, to memory that is about to be unmapped.
            self._engine.wait(_RELEASE_S)
        except Exception as error:
            problem = f"a boundary tensor could not be copied: {error}"
            if self._expected is not None and not isinstance(error, TimeoutError):
                self._expected.problem = problem
            raise BoundaryFailure(problem) from error

    def close(self) -> None:
        """End the use of the recorder."""
        self.disarm()
        self._engine.close()


def _unwanted(_tensor: Any) -> None:
    """What comes is none of an iteration that is recorded."""


# What the boundary logs of a rank hold, and how much memory they take.

_UNDER_WAY = 2
"""Logs beside those that are kept: one that is being recorded, one that is being sealed."""


@dataclass(frozen=True)
class LogPlan:
    """What the logs of a rank hold, and how many of them are kept.

    Attributes:
        topology: Of the job.
        rank: This rank.
        shape: Of each tensor that goes over a stage boundary; see `policy.rollback.tensor_shape`.
        dtype: Of these, without "torch.".
        lookback: The newest iterations whose logs are kept at most.
        group: Microbatches that a model chunk takes in turn, None for Megatron-Core's default.
    """

    topology: Topology
    rank: int
    shape: tuple[int, ...]
    dtype: str
    lookback: int
    group: int | None = None

    def layout(self, microbatches: int) -> Layout:
        """The records of an iteration with so many microbatches: of each direction in the order of sending; and of
        each direction the fingerprints of what is received."""
        if microbatches not in self._layouts:
            sent = (Field(key, self.dtype, self.shape) for key in self.sent(microbatches))
            counts = ((way, receives(self.topology, self._stage, microbatches, way, self.group)) for way in Direction)
            received = (Field(received_key(way), "int64", (count,)) for way, count in counts if count)
            self._layouts[microbatches] = Layout.of((*sent, *received))
        return self._layouts[microbatches]

    def sent(self, microbatches: int) -> tuple[str, ...]:
        """The keys of what is sent, those of each direction in the order of sending."""
        return log_keys(self.topology, self._stage, microbatches, self.group)

    @property
    def _stage(self) -> int:
        return self.topology.stage(self.rank)

    @property
    def segments(self) -> int:
        """How many logs there are at most, those under way among them."""
        return self.lookback + _UNDER_WAY

    def sizes(self, microbatches: int) -> list[int]:
        """Bytes of the segments that logs of at most so many microbatches need: their sum is the bound."""
        return [self.layout(microbatches).nbytes] * self.segments

    @cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}
