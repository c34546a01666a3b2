"""Checkpoints of all contestants in turns, for `snapshot.py`: what each turn costs."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import BenchmarkJob
from peers import Contestant, NvrxLocal, TorchDistSaver, WithoutCheckpoints
from snapshot_session import Ours, sum_and_max

PEERS: dict[str, Callable[..., Contestant]] = {
    "torch_dist": lambda *where: TorchDistSaver(*where, background=False),
    "torch_dist async": lambda *where: TorchDistSaver(*where, background=True),
    "NVRx local": lambda *where: NvrxLocal(*where, background=False),
    "NVRx local async": lambda *where: NvrxLocal(*where, background=True),
}
MIN_ROUNDS = 2
"""Rounds that are measured even when time is up: quartiles need them."""


class Timed:
    """A contestant between two clocks: what the thread that trains spends in it is the stall.

    Calls of the loop that peers have no use for go to the session of `Ours`, or to one that protects nothing.
    """

    protects = True

    def __init__(self, contestant: Contestant) -> None:
        from megatron.core.dist_checkpointing.moe.runtime.session import Session

        self.contestant, self.stall_s = contestant, 0.0
        self.session: Any = getattr(contestant, "session", Session())
        self.report = contestant.report
        self.before_optimizer = self._timed(contestant.before_optimizer)
        self.step_end = self._timed(contestant.step_end)
        for name in ("passes", "reduced", "whole", "reported"):
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


def checkpoints_in_turns(job: BenchmarkJob, names: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Turns of all contestants and of training without checkpoints, in another order in each round."""
    return _in_turns(job, _contestants(job, names, settings["interval"]), settings)


def every_iteration(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """The same with a checkpoint after each iteration; and the bytes of each window of `sparse`, by name and rank."""
    import torch

    entered = _contestants(job, ("sparse", "sparse/4", "full", "torch_dist async"), interval=1)
    found = _in_turns(job, entered, settings)
    windows: dict[str, list[Any]] = {}
    for name, contestant in entered.items():
        if isinstance(contestant, Ours) and name.startswith("sparse"):
            windows[name] = [None] * job.world_size
            torch.distributed.all_gather_object(windows[name], contestant.windows())
    return {"checkpoints": found, "windows": windows}


def _contestants(job: BenchmarkJob, names: Sequence[str], interval: int) -> dict[str, Contestant]:
    """By name; `none` checkpoints nothing."""
    entered: dict[str, Contestant] = {"none": WithoutCheckpoints()}
    for name in names:
        if name in PEERS:
            entered[name] = PEERS[name](job.trainer, job.folder / name.replace(" ", "-"), interval)
        else:
            entered[name] = Ours(job, name, interval)
    return entered


def _in_turns(job: BenchmarkJob, contestants: dict[str, Contestant], settings: dict[str, Any]) -> dict[str, Any]:
    interval, per_turn = settings["interval"], settings["checkpoints_per_turn"]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    order, shuffled = list(contestants), random.Random(0)
    clocks = {name: Timed(contestant) for name, contestant in contestants.items()}
    loops = {name: job.iterating(job.trainer.managed(clock)) for name, clock in clocks.items()}
    until_s = time.monotonic() + settings["seconds"]
    for at in range(settings["rounds"] + 1):
        _, (late,) = sum_and_max([float(time.monotonic() > until_s)])
        if late and at > MIN_ROUNDS:
            break
        for name in order:
            turn = _turn(loops[name], clocks[name], interval, per_turn)
            if at:  # the first round fills caches
                rows[name].append(turn)
        if job.rank == 0:
            print(f"round {at}: " + ", ".join(f"{name} {r[-1]['turn_s']:.2f} s" for name, r in rows.items() if r))
        shuffled.shuffle(order)
    for contestant in contestants.values():
        contestant.close()
    return {"interval": interval, "checkpoints_per_turn": per_turn, "rows": rows}


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
    elapsed_s = time.perf_counter() - started_s
    cpu_s = _cpu_s() - cpu_s
    stall_s = clock.stall_s - stall_s
    contestant.settle()
    _rest()
    nbytes = contestant.written_bytes()
    contestant.tidy()
    (all_cpu_s, written, _), (_, _, most_stall_s) = sum_and_max([cpu_s, nbytes, stall_s])
    return {
        "turn_s": elapsed_s,
        "stall_s": most_stall_s / checkpoints,
        "cpu_s": all_cpu_s,
        "bytes": written,
    }


def _cpu_s() -> float:
    """Of this process and of children that it has joined."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


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
