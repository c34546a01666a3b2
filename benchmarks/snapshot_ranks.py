"""What each rank of `snapshot.py` and `every_iteration.py` does: copies alone, and checkpoints in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from harness import SETTINGS, BenchmarkJob, start
from peers import PEERS, WithoutCheckpoints, import_peers


def measured(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """What was asked for."""
    found = {"state": _state_facts(job)}
    if settings["copies"]:
        found["bandwidth"] = _bandwidth(job, settings["copies"])
    return found | _in_turns(job, settings)


def sum_and_max(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Element by element the sum and the largest value of all ranks."""
    import torch

    total = torch.tensor(values, dtype=torch.float64)
    most = total.clone()
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return total.tolist(), most.tolist()


def _live_tensors(job: BenchmarkJob) -> tuple[Any, ...]:
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    return state_tensors(job.trainer.chunks, job.trainer.optimizer, read_topology(job.world_size))


def _state_facts(job: BenchmarkJob) -> dict[str, Any]:
    """Bytes of the training state, by part: each value once, on the first of the ranks that have it."""
    sizes: dict[str, int] = {}
    for live in _live_tensors(job):
        own = live.holders[0] == job.rank if live.holders else True
        name = live.part.name.lower()
        sizes[name] = sizes.get(name, 0) + own * live.tensor.nbytes
    parts = ("master", "moments", "compute")
    total, _ = sum_and_max([sizes.get(name, 0) for name in parts])
    facts = {f"{name}_bytes": int(size) for name, size in zip(parts, total, strict=True)}
    return facts | {"total_bytes": int(sum(total)), "ranks": job.world_size}


def _bandwidth(job: BenchmarkJob, copies: int) -> dict[str, Any]:
    """Capture of all of a rank's state into the memory tier against one memcpy of as many bytes, in pairs."""
    import torch

    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState, NoLoopState
    from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
    from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
    from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
    from megatron.core.dist_checkpointing.moe.types.snapshots import full_plan

    trainer_state = LiveTrainerState(job.trainer.optimizer, job.trainer.scheduler, NoLoopState())
    capturer = LiveCapturer(_live_tensors(job), trainer_state, ThreadEngine())
    layout = capturer.layout(full_plan(1, sorted(capturer.operators)), trainer=True)
    folder = job.folder / "bandwidth"
    folder.mkdir(exist_ok=True)
    store = MemoryStore(folder, "bandwidth", job.rank, [layout.nbytes] * 2)
    arrays = np.zeros(layout.nbytes, np.uint8), np.ones(layout.nbytes, np.uint8)
    result: dict[str, Any] = {"bytes": layout.nbytes, "tensors": len(layout.fields)}
    result["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    for name, ranks in (("alone", 1), ("all ranks at once", job.world_size)):
        torch.distributed.barrier()
        rows = []
        if job.rank < ranks:
            rows = [_copied(capturer, store, layout, arrays, 1 + at) for at in range(copies)][2:]
        torch.distributed.barrier()
        memcpy, capture = ([layout.nbytes / row[at] / 1e9 for row in rows] for at in (0, 1))
        result[name] = {"memcpy_gb_per_s": memcpy, "capture_gb_per_s": capture}
    torch.distributed.barrier()
    store.remove()
    return result


def _copied(capturer: Any, store: Any, layout: Any, arrays: tuple[Any, Any], iteration: int) -> tuple[float, float]:
    """Seconds of a memcpy and of a capture, in turn the one or the other first."""
    from megatron.core.dist_checkpointing.moe.ports import SnapshotId

    def memcpy() -> None:
        np.copyto(*arrays)

    def capture() -> None:
        capturer.begin([(layout, writer)])
        capturer.end(60.0)

    times = {}
    with store.reserve(SnapshotId(iteration, 0), layout) as writer:
        for work in (memcpy, capture) if iteration % 2 else (capture, memcpy):
            started_s = time.perf_counter()
            work()
            times[work] = time.perf_counter() - started_s
    return times[memcpy], times[capture]


class Ours:
    """A real session of `--moe-ckpt-strategy` around the loop; several may live in one process here.

    name: the strategy; `sparse/4` is `sparse` with windows of 4 iterations, `full, replica, storage` keeps a replica
        at the other rank and writes every snapshot to storage, too.
    """

    is_replaying = False

    def __init__(self, job: BenchmarkJob, name: str, interval: int) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, ProcessInfo
        from megatron.core.dist_checkpointing.moe.runtime import protected_session

        strategy, *parts = name.split(", ")
        strategy, _, window = strategy.partition("/")
        own_name = name.replace("/", "-").replace(", ", "-")
        folder = job.folder / own_name
        folder.mkdir(exist_ok=True)
        config = MoECheckpointConfig(
            strategy=strategy,
            interval=interval,
            window=window or "auto",
            memory_dir=str(folder),
            replicas=int("replica" in parts),
            **({"persist_dir": str(folder / "storage"), "persist_interval": interval} if "storage" in parts else {}),
        )
        place = ProcessInfo.from_environment()
        place = dataclasses.replace(place, job_id=f"{place.job_here}-{own_name}")
        # Sessions name their connections alike, as a job has only one: here each gets a part of the store for itself.
        own = PrefixStore(f"benchmark-{own_name}-{interval}", _get_default_store())
        with mock.patch.object(protected_session, "_get_default_store", return_value=own):
            manager = job.trainer.managed(config=config, place=place)
            manager.resume()
        manager.detach()  # iterations have a manager of their own around this session
        self.session = manager._session
        self.before_optimizer = self.session.before_optimizer
        self._newest_bytes, self._windows, self._span = 0, dict[range, list[int]](), range(0)
        self._note_spans(self.session.strategy)

    def step_end(self, iteration: int, journal: Any) -> None:
        """As the session's coordinator, which is there once the first turn has begun."""
        self.session.coordinator.step_end(iteration, journal)

    def report(self) -> Any:
        """As the session."""
        report = self.session.report()
        self._newest_bytes = report.snapshot_bytes or self._newest_bytes
        if report.snapshot_bytes:
            self._windows.setdefault(self._span, []).append(report.snapshot_bytes)
        return report

    def windows(self) -> list[list[int]]:
        """Bytes that this rank copied in each iteration of each window that became whole."""
        return [copied for span, copied in self._windows.items() if len(copied) == len(span)]

    def begin_turn(self) -> None:
        """What others did since the last turn is no time of an iteration of this training."""
        if self.session.coordinator is not None:  # before the first turn nothing is protected yet
            self.session.coordinator._step_ended_s = time.monotonic()

    def settle(self) -> None:
        """What was copied goes to the lanes beside training; the turn waits until those rest."""
        self.session.before_optimizer()

    def written_bytes(self) -> int:
        """Bytes of this rank's newest snapshot."""
        return self._newest_bytes

    def tidy(self) -> None:
        """Snapshots replace each other."""

    def close(self) -> None:
        """End the session and give its memory back."""
        self.session.shutdown(keep_memory=False)

    def _note_spans(self, strategy: Any) -> None:
        pieces_of = strategy.pieces

        def noting(plan: Any) -> Any:
            pieces = pieces_of(plan)
            self._span = pieces[0].span
            return pieces

        strategy.pieces = noting


class Timed:
    """A contestant between two clocks: what the thread that trains spends in it is the stall.

    Calls of the loop that peers have no use for go to the session of `Ours`, or to one that protects nothing.
    """

    protects = True

    def __init__(self, contestant: Any) -> None:
        from megatron.core.dist_checkpointing.moe.runtime.session import Session

        self.contestant, self.stall_s = contestant, 0.0
        self.session: Any = getattr(contestant, "session", Session())
        self.report = contestant.report
        self.before_optimizer = self._timed(contestant.before_optimizer)
        self.coordinator = SimpleNamespace(step_end=self._timed(contestant.step_end))
        for name in ("passes", "reduced", "on_state_consistent", "reported"):
            setattr(self, name, self._timed(getattr(self.session, name)))

    def __getattr__(self, name: str) -> Any:
        """What takes no time: the state of the session, its communicator, its block around the optimizer's step."""
        return getattr(self.session, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.stall_s += time.perf_counter() - started_s

        return timed


def _in_turns(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """Turns of all contestants and of training without checkpoints, in another order in each round; and the bytes of
    each window of `sparse`, by name and rank."""
    import torch

    interval, per_turn = settings["interval"], settings["checkpoints_per_turn"]
    contestants: dict[str, Any] = {"none": WithoutCheckpoints()}
    for name in settings["contestants"]:
        folder = job.folder / name.replace(" ", "-")
        contestants[name] = PEERS[name](job.trainer, folder, interval) if name in PEERS else Ours(job, name, interval)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    order, shuffled = list(contestants), random.Random(0)
    clocks = {name: Timed(contestant) for name, contestant in contestants.items()}
    loops = {name: job.iterating(job.trainer.managed(clock)) for name, clock in clocks.items()}
    for at in range(settings["rounds"] + 1):
        for name in order:
            turn = _turn(loops[name], clocks[name], interval, per_turn)
            if at:  # the first round fills caches
                rows[name].append(turn)
        if job.rank == 0:
            print(f"round {at}: " + ", ".join(f"{name} {r[-1]['turn_s']:.2f} s" for name, r in rows.items() if r))
        shuffled.shuffle(order)
    windows: dict[str, list[Any]] = {}
    for name, contestant in contestants.items():
        if name.startswith("sparse"):
            windows[name] = [None] * job.world_size
            torch.distributed.all_gather_object(windows[name], contestant.windows())
        contestant.close()
    found = {"interval": interval, "checkpoints_per_turn": per_turn, "rows": rows}
    return {"checkpoints": found} | ({"windows": windows} if windows else {})


def _turn(iterate: Callable[[], None], clock: Timed, interval: int, checkpoints: int) -> dict[str, float]:
    """Time iterations with `checkpoints` checkpoints in steady state: what is still written of the one before the first
    is inside, what is written after the last is not."""
    import torch

    contestant = clock.contestant
    if isinstance(contestant, Ours):
        contestant.begin_turn()
    for _ in range(interval):
        iterate()
    stall_s = clock.stall_s
    torch.distributed.barrier()
    cpu_s, started_s = _cpu_s(), time.perf_counter()
    for _ in range(interval * checkpoints):
        iterate()
    torch.distributed.barrier()
    elapsed_s, cpu_s, stall_s = time.perf_counter() - started_s, _cpu_s() - cpu_s, clock.stall_s - stall_s
    contestant.settle()
    _rest()
    nbytes = contestant.written_bytes()
    contestant.tidy()
    (all_cpu_s, written, _), (_, _, most_stall_s) = sum_and_max([cpu_s, nbytes, stall_s])
    return {"turn_s": elapsed_s, "stall_s": most_stall_s / checkpoints, "cpu_s": all_cpu_s, "bytes": written}


def _cpu_s() -> float:
    """Of this process, of children that it has joined, and of those that live on, as writers of a peer do."""
    joined, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    for task in Path("/proc/self/task").iterdir():
        children = ""
        with contextlib.suppress(OSError):  # threads and children may have ended since
            children = (task / "children").read_text()
        for child in children.split():
            with contextlib.suppress(OSError):
                ticks += sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return time.process_time() + joined.ru_utime + joined.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _rest(quiet_s: float = 0.1, at_most_s: float = 10.0) -> None:
    """Wait until no thread of any rank works any more."""
    import torch

    until_s = time.monotonic() + at_most_s
    worked_s = quiet_s
    while worked_s > quiet_s / 20 and time.monotonic() < until_s:
        before_s = time.process_time()
        time.sleep(quiet_s)
        worked_s = time.process_time() - before_s
    torch.distributed.barrier()


if __name__ == "__main__":
    # Before Megatron-Core is imported, which looks for it once.
    import_peers(Path(json.loads(os.environ[SETTINGS])["peers"]))
    start(lambda: 2, measured)
