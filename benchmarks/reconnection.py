"""What it takes all ranks of one machine to connect again after a fault: links of the watcher, and three transports."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport
from megatron.core.dist_checkpointing.moe.runtime.peer_links import PeerLinks

WAIT_S = 120.0
NAMES = ("control", "data", "recovery")
"""Of the transports of a rank, in the order in which a job makes them."""


def main() -> int:
    """Print one line for each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")  # before there is a thread
    results, port = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=connect_again, args=(rank, options.ranks, options.rounds, port, results))
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in ranks:
        port.put(store.port)
    found = [results.get(timeout=options.rounds * WAIT_S) for _ in ranks]
    for process in ranks:
        process.join()
    load = os.getloadavg()[0]
    print(f"{options.ranks} ranks, {os.cpu_count()} cores, one-minute load {load:.1f}")
    print(f"sockets of a rank: {statistics.median(one[1] for one in found):g}")
    for number, seconds in enumerate(zip(*(one[0] for one in found), strict=True)):
        links, transports = (max(one[part] for one in seconds) * 1e3 for part in range(2))
        cpu = statistics.median(one[2] for one in seconds) * 1e3
        print(f"round {number}: links {links:.0f} ms, transports {transports:.0f} ms, CPU of a rank {cpu:.1f} ms")
    return 0


def connect_again(rank: int, ranks: int, rounds: int, port: Any, results: Any) -> None:
    """One rank's part: in each round the seconds of both steps and of CPU, and in the end its sockets."""
    store = TCPStore("127.0.0.1", port.get(), is_master=False, timeout=timedelta(seconds=WAIT_S))
    transports, links, took = list[TcpTransport](), None, list[tuple[float, float, float]]()
    for number in range(rounds + 1):  # the first one connects
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        if links is not None:
            links.forget()
        links = PeerLinks(PrefixStore(f"round-{number}", store), rank, ranks, "127.0.0.1", WAIT_S)
        linked_s = time.monotonic()
        if not transports:
            transports = [TcpTransport(store.clone(), rank, ranks, name, WAIT_S) for name in NAMES]
        else:
            for transport in transports:
                transport.renew()
        for transport in transports:
            transport.total([1])  # connects to the ranks beside this one in the tree
        ended_s = time.monotonic()
        if number:
            took.append((linked_s - begun_s, ended_s - linked_s, time.process_time() - begun_cpu_s))
        transports[0].total([1])
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    connected = sum(os.path.islink(path) and os.readlink(path).startswith("socket:") for path in files)
    results.put((took, connected))
    transports[0].total([1])  # nobody leaves before all have counted


if __name__ == "__main__":
    sys.exit(main())
