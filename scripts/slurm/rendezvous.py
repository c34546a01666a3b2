"""Keeps the store where the agents of a job meet, and writes down how it has ended: `rendezvous.py PORT FILE`."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, TCPStore

OUTCOME, NOTED = "moe-ckpt/outcome", "moe-ckpt/noted"
LISTENS = ".listens"
ANSWER_S, POLL_S = 30.0, 0.5


def main(port: int, file: Path) -> None:
    """Serve until SIGUSR1 comes; the first outcome that an agent reports goes to `file`. Beside it, with the suffix of
    `LISTENS`, is a file from when agents can come. Ends with a line where somebody else has the port."""
    # Slurm signals all steps of a job, and the agents need their store until they have ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: sys.exit())
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except DistNetworkError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"nothing can listen at port {port} here, set MOE_CKPT_RDZV_PORT to a free one: {reason}")
    file.with_name(file.name + LISTENS).touch()
    while not store.check([OUTCOME]):
        time.sleep(POLL_S)
    file.write_bytes(store.get(OUTCOME))
    store.set(NOTED, "")
    while True:
        signal.pause()


def report(endpoint: str, code: int, of_nodes: int = 1) -> None:
    """Tell the keeper at HOST:PORT how the job has ended, once `of_nodes` say so, and wait until it is noted.

    Raises DistError."""
    host, _, port = endpoint.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=ANSWER_S))
    if store.add(f"{OUTCOME}/{code}", 1) >= of_nodes:
        store.set(OUTCOME, str(code))
        store.wait([NOTED])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
