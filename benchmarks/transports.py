"""Transports beside training: a message of 256 MiB from one process to another, over each kind and over gloo itself.

Two processes of one machine, over its loopback. In each turn every kind moves the same message once, one after the
other in an order that turns, so whatever else the machine does hits all; a transfer ends when the receiver has every
byte.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from harness import Benchmark, spread, start
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo

from megatron.core.dist_checkpointing.moe.replication.staged import StagedTransport
from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport

BENCHMARK = Benchmark("transports", 15)
TIMEOUT_S = 120.0
KINDS = ("gloo", "tcp", "process-group")

Move = Callable[[memoryview], None]


def main() -> int:
    """Exit code 1 where bytes did not arrive as they were."""
    return BENCHMARK.run(__doc__, measured, report, lambda result: bool(result["equal"]))


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """Seconds of each turn by kind."""
    nbytes = (16 if quick else 256) << 20
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = context.SimpleQueue()
        ranks = [context.Process(target=_play, args=(rank, folder, turns, nbytes, answers)) for rank in range(2)]
        for process in ranks:
            process.start()
        found: dict[str, Any] = answers.get()
        for process in ranks:
            process.join()
    return {"bytes": nbytes, **found}


def report(result: dict[str, Any]) -> list[str]:
    """Medians and quartiles, and how each kind does against gloo turn by turn."""
    lines = [f"{result['bytes'] >> 20} MiB between two processes, GB/s: median (quartiles); against gloo, turn by turn"]
    for kind, times_s in result["seconds"].items():
        rates = [result["bytes"] / 1e9 / time_s for time_s in times_s]
        ratio = statistics.median(b / a for a, b in zip(times_s, result["seconds"]["gloo"], strict=True))
        lines.append(f"{kind:14} {spread(rates, 2)}  x {ratio:.2f}")
    return lines


def _play(rank: int, folder: str, turns: int, nbytes: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", 2)
    control = TcpTransport(store, rank, 2, "control", TIMEOUT_S)
    moves: dict[str, Move] = {"gloo": _over_gloo(store, rank)}
    for kind, transport in (("tcp", TcpTransport), ("process-group", StagedTransport)):
        moves[kind] = _over(transport(store, rank, 2, kind, TIMEOUT_S), rank)
    sent = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    memory = sent.copy() if rank == 0 else np.empty(nbytes, np.uint8)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    equal = True
    for turn in range(-1, turns):  # the first one connects
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            if rank:
                memory[:] = 0
            control.least([0])
            begun_s = time.perf_counter()
            moves[kind](memoryview(memory))
            control.least([0])
            if turn >= 0:
                seconds[kind].append(time.perf_counter() - begun_s)
            equal = equal and bool((memory == sent).all())
    if rank:
        answers.put({"equal": equal, "seconds": seconds})
    control.least([0])
    os._exit(0)


def _over(transport: TcpTransport, rank: int) -> Move:
    def move(memory: memoryview) -> None:
        (transport.receive(0, memory) if rank else transport.send(1, memory)).wait()

    return move


def _over_gloo(store: FileStore, rank: int) -> Move:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options)

    def move(memory: memoryview) -> None:
        parts = torch.from_numpy(np.frombuffer(memory, np.uint8)).split(64 << 20)
        post = group.recv if rank else group.send
        for work in [post([part], 1 - rank, at) for at, part in enumerate(parts)]:
            work.wait()

    return move


if __name__ == "__main__":
    start(main)
