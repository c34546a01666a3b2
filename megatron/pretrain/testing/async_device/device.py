"""A device that runs what it was given later, in an order that a schedule draws."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.pretrain.testing.async_device.memory import Block, Memory
from megatron.pretrain.testing.async_device.schedules import DrawnOrder
from megatron.pretrain.testing.async_device.streams import Event, QueuedWork, Stream

_LOOK_S = 0.05
"""How often a host that waits behind a kernel that spins looks whether it still does."""
_PATIENCE_S = 120.0
"""CUDA would wait for ever; a test should say what it waits for."""


@dataclass(frozen=True)
class BlockingCopy:
    """A copy that was asked not to block, to or from host memory that is not page-locked: the host waited for it."""

    to_host: bool
    thread: str
    nbytes: int


class AsyncDevice:
    """The device of one rank; also as `torch.cuda.cudart()`.

    Args:
        schedule: One of `SCHEDULES`.
        seed: Of its order.
        index: The rank's device. As in CUDA, a thread is on device 0 until it chooses another.

    Attributes:
        blocking: Copies that held the host up, in order.
        elsewhere: Calls that a thread made on another device than this rank's, and the thread's name.
        waited: By thread, how much work of the device it has waited for.
        after_free: Work that ran on memory that had been freed before.
        executed: How much work was run.
        copied_to_host: By thread, bytes of copies that were launched without waiting.
    """

    def __init__(self, schedule: str, seed: int, index: int = 3) -> None:
        self.index, self.schedule = index, DrawnOrder(schedule, seed)
        self.streams: list[Stream] = []
        self.Stream = type("Stream", (Stream,), {"device_of_all": self})
        self.Event = type("Event", (Event,), {"device_of_all": self})
        self.default = self.Stream()
        self.memory = Memory(self.hand_out_freed, self.reclaim)
        self.blocking: list[BlockingCopy] = []
        self.elsewhere: set[tuple[str, str]] = set()
        self.waited = Counter[str]()
        self.after_free: list[str] = []
        self.executed = 0
        self.copied_to_host = Counter[str]()
        self.error = ""
        # A condition, as whoever waits behind a kernel that spins leaves the device to others.
        self._changed = threading.Condition(threading.RLock())
        self._of_thread = threading.local()

    # Threads

    @property
    def thread_index(self) -> int:
        """The device that the calling thread is on."""
        return getattr(self._of_thread, "index", 0)

    @thread_index.setter
    def thread_index(self, index: int) -> None:
        self._of_thread.index = index

    @property
    def is_running_work(self) -> bool:
        """Whether the calling thread plays the device just now."""
        return getattr(self._of_thread, "runs", False)

    def set_device(self, device: Any) -> None:
        """As `torch.cuda.set_device`."""
        self.thread_index = device if isinstance(device, int) else torch.device(device).index or 0

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """As `torch.cuda.device`."""
        before = self.thread_index
        if device is not None and device != -1:
            self.set_device(device)
        try:
            yield
        finally:
            self.thread_index = before

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """As `torch.cuda.stream`: also the device of the stream becomes the current one."""
        if stream is None:
            yield
            return
        before = self.current_stream()
        self._of_thread.stream = stream
        try:
            with self.device(self.index):
                yield
        finally:
            self._of_thread.stream = before

    def current_stream(self, device: Any = None) -> Stream:
        """As `torch.cuda.current_stream`."""
        stream: Stream = getattr(self._of_thread, "stream", self.default)
        return stream

    def called(self, name: str) -> None:
        """A call of CUDA by the calling thread. Raises RuntimeError once there was an error: it stays.

        Calls by which torch itself chooses the device, such as launches of kernels, are not meant.
        """
        if self.thread_index != self.index:
            self.elsewhere.add((name, threading.current_thread().name))
        self.require_context()

    def require_context(self) -> None:
        """Raises RuntimeError once a kernel has failed."""
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}")

    # Work

    def give(
        self,
        run: Callable[[], object],
        name: str,
        *,
        stream: Stream | None = None,
        after: Sequence[QueuedWork] = (),
        blocks: Sequence[Block] = (),
    ) -> QueuedWork:
        """Have a stream do something once all that it was given before is done.

        Args:
            run: What it does.
            name: For messages.
            stream: Which; None: the current one.
            after: Work of other streams that comes before.
            blocks: Memory of the device that it touches.
        """
        self.require_context()
        work = self._given(QueuedWork(run, stream or self.current_stream(), after, name, blocks))
        for block in blocks:
            block.last_work[work.stream] = work
        return work

    def reclaim(self, block: Block, after: Sequence[QueuedWork]) -> None:
        """Memory was freed: the next allocation on its stream may get it, once all that it was kept for is done.

        Args:
            block: The memory.
            after: The last work of each stream that it was recorded for.
        """
        if not after:
            block.stream.freed.append(block)
            return
        # The allocator asks events; no stream of the program waits for them.
        with self._changed:
            aside = self.Stream()

            def free() -> None:
                block.stream.freed.append(block)
                self.streams.remove(aside)

            self._given(QueuedWork(free, aside, after, "free", ()))

    def hand_out_freed(self) -> Stream:
        """The current stream allocates: whatever was freed on it may be written by its kernels from here on."""
        stream = self.current_stream()
        while stream.freed:
            self._given(QueuedWork(stream.freed.pop().poison, stream, (), "reuse", ()))
        return stream

    def _given(self, work: QueuedWork) -> QueuedWork:
        with self._changed:
            work.stream.queue.append(work)
            work.stream.last = work
        return work

    def progress(self) -> None:
        """Let the device do as much as the schedule says."""
        with self._changed:
            self.require_context()
            for _ in range(self.schedule.amount()):
                ready = [stream for stream in self.streams if stream.queue and _is_ready(stream.queue[0])]
                stream = self.schedule.choice(ready, self.default) if ready else None
                if stream is None:
                    break
                self._run(stream.queue[0])

    def wait_for(self, work: QueuedWork | None) -> None:
        """The host waits: what this work needs is run, and nothing else. For as long as a kernel before it spins.

        Raises RuntimeError as every call does once a kernel has failed.
        """
        with self._changed:
            needed, until_s = [work] if work is not None else [], time.monotonic() + _PATIENCE_S
            while needed:
                self.require_context()
                if needed[-1].done:
                    needed.pop()
                    continue
                head = needed[-1].stream.queue[0]
                if (blocker := head.blocker()) is not None:
                    needed.append(blocker)
                elif head.is_held():
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"waited {_PATIENCE_S:g} s behind the kernel of a {head.name} that spins")
                    self._changed.wait(_LOOK_S)
                else:
                    self.waited[threading.current_thread().name] += not head.is_mark
                    self._run(head)
            self.require_context()

    def synchronize(self, device: Any = None) -> None:
        """As `torch.cuda.synchronize`."""
        self.called("cudaDeviceSynchronize")
        for stream in list(self.streams):
            self.wait_for(stream.last)

    def _run(self, work: QueuedWork) -> None:
        work.stream.queue.popleft()
        self.executed += 1
        if any(block.is_freed for block in work.blocks):
            self.after_free.append(work.name)
        before, self._of_thread.runs = self.is_running_work, True
        try:
            work.run()
        except Exception as error:  # as on a GPU: it is for whoever asks next, and everybody after
            self.error = f"{work.name}: {error}"
        finally:
            self._of_thread.runs = before
        work.done, work.run, work.after, work.blocks = True, _nothing, [], ()
        self._changed.notify_all()

    # The runtime, as `torch.cuda.cudart()` gives it

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """As the runtime's.

        Args:
            address: Of the first byte.
            nbytes: How many.
            flags: Unused.
        """
        self.called("cudaHostRegister")
        self.memory.lock_pages(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """As the runtime's."""
        self.called("cudaHostUnregister")
        return 0 if self.memory.unlock_pages(address) else 1


def _is_ready(work: QueuedWork) -> bool:
    return work.blocker() is None and not work.is_held()


def _nothing() -> None:
    """Work that is done keeps nothing alive."""
