"""Keeps the store where the agents of a job meet, and writes down how it has ended: `rendezvous.py PORT FILE`."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, DistNetworkError, TCPStore

OUTCOME, NOTED, TRAINED = "moe-ckpt/outcome", "moe-ckpt/noted", "moe-ckpt/trained"
LISTENS = ".listens"
REFUSED, REFUSED_WITH_STATE, LEFT_EARLY, UNTRAINED = 2, 3, 4, 5
"""What agents report where ranks refuse flags or inputs, the second one where snapshots in memory wait for that; where
ranks have ended well, as they were asked to, before the last iteration; and where no start came to an iteration."""
ANSWER_S, POLL_S = 30.0, 0.5


def main(port: int, file: Path) -> None:
    """Serve until SIGUSR1 comes; the first outcome that an agent reports goes to `file`, but snapshots on any node
    outweigh that another one refuses without some. Beside it, with the suffix of `LISTENS`, is a file from when agents
    can come. Ends with a line where somebody else has the port."""
    # Slurm signals all steps of a job, and the agents need their store until they have ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _leave)
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except DistNetworkError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"nothing can listen at port {port} here, set MOE_CKPT_RDZV_PORT to a free one: {reason}")
    reserved = file.with_name(file.name + LISTENS)
    reserved.write_bytes(b"none")  # room that a tmpfs full of snapshots may not have at the end
    while not store.check([OUTCOME]):
        time.sleep(POLL_S)
    code = store.get(OUTCOME)
    with reserved.open("r+b") as outcome:
        outcome.truncate(outcome.write(code))
    reserved.rename(file)
    store.set(NOTED, "")
    while not store.check([f"{OUTCOME}/{REFUSED_WITH_STATE}"]):
        time.sleep(POLL_S)
    if int(code) == REFUSED:
        with file.open("r+b") as outcome:
            outcome.write(str(REFUSED_WITH_STATE).encode())
    store.set(f"{NOTED}/{REFUSED_WITH_STATE}", "")  # only now does the agent that says so end, and `job.sh` read it
    while True:
        signal.pause()


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # `job.sh` repeats it
    sys.exit()


def report(endpoint: str, code: int, of_nodes: int = 1) -> None:
    """Tell the keeper at HOST:PORT how the job has ended, once `of_nodes` say so, and wait until it is noted. That none
    has trained is not reported where any did: it may be gone since.

    Raises DistError."""
    store = _client(endpoint)
    if code == UNTRAINED and store.check([TRAINED]):
        return
    if store.add(f"{OUTCOME}/{code}", 1) >= of_nodes:
        store.set(OUTCOME, str(code))
        store.wait([f"{NOTED}/{code}" if code == REFUSED_WITH_STATE else NOTED])


def note_trained(endpoint: str) -> None:
    """Tell the keeper at HOST:PORT that ranks of this run have trained an iteration. Raises DistError."""
    _client(endpoint).set(TRAINED, "")


def outcome_at(endpoint: str) -> int | None:
    """How the job has ended, as the keeper at HOST:PORT has been told by now or is soon; None where nobody says."""
    try:
        return int(_client(endpoint).get(OUTCOME))  # waits for it
    except DistError:
        return None


def _client(endpoint: str) -> TCPStore:
    host, _, port = endpoint.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=ANSWER_S))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
