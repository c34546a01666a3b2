"""A process beside a trainer that continues persisting when the trainer has died (MoC 5.2's agent).

While the trainer lives it writes to storage itself, and tells this process what it is writing: one line with all orders
when it begins, an empty one when it has ended. The process does nothing but wait, with no more than Python's standard
library loaded, for which it is started by its file. When the trainer has died, or has closed the connection, and orders
are open, it carries them out: the snapshots are sealed in shared memory, from which it reads them, and each is
published by the same code and the same single act as in the trainer. Then, and after `limit_s` at the latest, it ends.

It holds a lock in the trainer's folder of the memory tier for as long as it runs; the trainer takes it and hands it
over, so that there is no moment without. A restart waits for the locks in all such folders of its node before it looks
at storage, since a rank may come back in another one: two processes never write what one rank owns, and all ranks see
the same.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...snapshot.persisting import CopyOrder

log = logging.getLogger(__name__)

LOCK = "persisting.lock"
TELL_S, MARGIN_S = 1.0, 5.0
"""How long its last line waits for a reader; and how much longer than its limit a restart waits for an agent, which may
first have to start."""
LONGEST_WAIT_S = 60.0
"""How long a job waits for the agent of an attempt that had one, if it has none itself."""
SAYING_S = 10.0
"""How long it may take until the process has taken in what it is told."""
CHECK_S = 1.0
"""How often it looks who has the lease of storage."""
_CLOSED = b"closed"
_TICK_S = 0.02


class PersistAgent:
    """The trainer's end. Sequence: `announce` any number of times, then `close`, or death.

    Args:
        directory: The trainer's slot of the memory tier.
        place: Storage, a folder or a URL.
        rank: Of the trainer.
        limit_s: How long the process may take when the trainer is gone.
        secret: Of the job, if it has one.
    """

    def __init__(self, directory: Path, place: str, rank: int, limit_s: float, secret: bytes | None) -> None:
        """Raises OSError where no process can be started."""
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with suppress(BlockingIOError):  # one of an earlier attempt has it: the process waits for that
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # In a session of its own: what ends the trainer's group must not end this one.
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid())],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[lock],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(lock)
        from ...errors import StoreFailure, UsageError
        from ...storage.lease import name_in

        lease = None  # not known: then it is nobody's
        with suppress(StoreFailure, UsageError):
            lease = name_in(place)
        facts = {"slot": str(directory), "place": place, "rank": rank, "limit_s": limit_s, "lock": lock, "lease": lease}
        assert process.stdin is not None
        self._pipe, self._mutex = process.stdin, threading.Lock()
        threading.Thread(target=process.wait, name="moe-ckpt-persist-agent", daemon=True).start()  # no zombie stays
        os.set_blocking(self._pipe.fileno(), False)
        self._say(json.dumps(facts | {"secret": None if secret is None else secret.hex()}).encode() + b"\n")

    def announce(self, orders: Sequence[CopyOrder]) -> None:
        """What is being written from here on; none: all that was announced has come to an end."""
        from ...snapshot.persisting import line_of

        self._say(line_of(orders))

    def close(self) -> None:
        """Let the process finish what was announced last, and end; it is not waited for."""
        self._say(_CLOSED + b"\n")  # a data loader that was forked since then keeps the connection open
        with self._mutex, suppress(OSError):
            self._pipe.close()

    def _say(self, line: bytes) -> None:
        rest, until_s = memoryview(line), time.monotonic() + SAYING_S
        with self._mutex:
            if self._pipe.closed:
                return
            try:
                room = select.poll()  # not `select`, which takes no descriptor from 1024 on: trainers have many sockets
                room.register(self._pipe, select.POLLOUT)
                while rest:
                    if not room.poll(1000 * max(0.0, until_s - time.monotonic())):
                        raise TimeoutError(f"it does not listen for {SAYING_S:g} s")
                    rest = rest[os.write(self._pipe.fileno(), rest) :]
            except OSError as error:
                from ...errors import format_error

                log.error("persist agent lost, uploads end with this process: %s", format_error(error))
                self._pipe.close()


def wait_for_agent(directory: Path, limit_s: float | None) -> None:
    """Wait until no agent of an earlier attempt of the job works on this node.

    For this slot or another one: a restart may give this rank another slot than its agent works for.

    Args:
        directory: This process's slot of the memory tier, there or not.
        limit_s: How long agents of this job may take; the wait is `MARGIN_S` longer. None: `LONGEST_WAIT_S`. After it,
            an error is logged for each slot with an agent.
    """
    waits_s = LONGEST_WAIT_S if limit_s is None else limit_s + MARGIN_S
    until_s = time.monotonic() + waits_s
    for path in sorted(directory.parent.glob(f"*/{LOCK}")):
        while _is_locked(path):
            if time.monotonic() > until_s:
                log.error("%s: still held by another persist agent after %g s; continuing", path.parent, waits_s)
                break
            time.sleep(_TICK_S)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it was removed meanwhile
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: other ranks of the node look, too
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def last_line(parent: int) -> bytes:
    """The last whole line that a trainer said until it was gone, or had closed the connection; empty for none."""
    last, rest = b"", bytearray()
    life = os.pidfd_open(os.getppid())
    is_alive = os.getppid() == parent
    while True:
        # By the process and not by the connection alone: a data loader that outlives the trainer keeps that open.
        ready, _, _ = select.select([0, life] if is_alive else [0], [], [], None if is_alive else 0.0)
        if 0 in ready:
            content = os.read(0, 1 << 20)
            if not content:
                return last
            ended, newline, begun = content.rpartition(b"\n")
            if not newline:
                rest += content
                continue
            whole = bytes(rest + ended).split(b"\n")
            if _CLOSED in whole:
                return [last, *whole][whole.index(_CLOSED)]
            last, rest = whole[-1], bytearray(begun)
        elif is_alive:
            is_alive = False  # what it said before may still be on its way
        else:
            return last


def main(parent: int) -> int:
    """What the process does; its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The first line is read apart: the lock has to be held before anything is begun.
    facts = json.loads(_first_line())
    fcntl.flock(facts["lock"], fcntl.LOCK_EX)  # of the trainer, who holds it unless an earlier attempt's process does
    orders = last_line(parent)
    if orders in (b"", b"[]"):
        return 0
    begun_s, rank, place, limit_s = time.monotonic(), facts["rank"], facts["place"], facts["limit_s"]

    def tell_unfinished(why: str) -> None:
        _tell(f"rank {rank}: what its trainer was persisting when it ended was NOT finished: {why}; older copies stay")

    ended = threading.Lock()  # of whoever comes to an end first

    def give_up() -> None:
        # No exception: backends catch those, and may hang again as they clean up. Unsealed files are swept later.
        if ended.acquire(blocking=False):
            tell_unfinished(f"not within {limit_s:g} s")
            os._exit(1)

    limit = threading.Timer(limit_s, give_up)
    limit.daemon = True
    limit.start()
    try:
        iterations = _finish(orders, facts)
    except Exception as error:
        ended.acquire()
        tell_unfinished((str(error) or repr(error)).splitlines()[0])
        return 1
    ended.acquire()
    took = f"{time.monotonic() - begun_s:.2f} s"
    _tell(f"rank {rank}: its trainer ended while it persisted {iterations}; that was finished in {place}, {took}")
    return 0


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        one = os.read(0, 1)
        if not one:
            sys.exit(0)
        line += one
    return line


def _finish(line: bytes, facts: dict[str, object]) -> str:
    """Carry out the orders of a line, as often as training would; the iterations that they were of, in words."""
    _skip_megatron_core()
    from megatron.core.dist_checkpointing.moe.snapshot.persisting import retried

    return retried(partial(_carry_out, line, facts), time.sleep)


def _carry_out(line: bytes, facts: dict[str, object]) -> str:
    from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, StoreFailure, UnreadableCheckpoint
    from megatron.core.dist_checkpointing.moe.snapshot.persisting import carry_out, orders_from
    from megatron.core.dist_checkpointing.moe.storage.lease import holder_of, name_in
    from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret
    from megatron.core.dist_checkpointing.moe.storage.objects import open_durable
    from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader

    secret = facts["secret"]
    use_secret(None if secret is None else bytes.fromhex(str(secret)))
    orders, memory = orders_from(line), SlotReader(Path(str(facts["slot"])))
    with ExitStack() as stack:
        readers = {
            source: stack.enter_context(memory.open(source))
            for source in {one for order in orders for one in order.sources}
        }
        storage = open_durable(str(facts["place"]), int(str(facts["rank"])))
        stack.callback(storage.close)
        checked_s = 0.0

        def check(order: CopyOrder, pause_s: float = CHECK_S) -> None:
            # An attempt that began elsewhere may have sealed the same iteration since: that is not replaced by one of a
            # past that it gave up. One that begins here waits for this process, and has sealed none.
            nonlocal checked_s
            if time.monotonic() - checked_s < pause_s:
                return
            try:
                name: str | None = name_in(str(facts["place"]))
            except StoreFailure:
                name = None  # not known now: then only what lies there counts
            checked_s = time.monotonic()
            if name in ("", facts["lease"]):
                return
            with suppress(UnreadableCheckpoint), storage.open(order.manifest.snapshot):
                who = holder_of(str(facts["place"])) or "another attempt"
                # No StoreFailure, which would be tried again.
                raise MoECheckpointError(f"{who} has written the {order.manifest.snapshot} to {facts['place']} since")

        for order in orders:
            check(order, 0.0)
            carry_out(order, [readers[source] for source in order.sources], storage, partial(check, order))
    iterations = sorted({order.manifest.snapshot.iteration for order in orders})
    return f"iteration{'s' * (len(iterations) > 1)} {', '.join(map(str, iterations))}"


def _skip_megatron_core() -> None:
    """Make the engine importable in this process without the packages above it, which would import torch."""
    above = Path(__file__).resolve().parents[3:6]
    for folder, name in zip(
        above[::-1], ("megatron", "megatron.core", "megatron.core.dist_checkpointing"), strict=True
    ):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def _tell(line: str) -> None:
    with suppress(OSError, ValueError):
        if select.select([], [2], [], TELL_S)[1]:  # a pipe that nobody reads would hold this process
            os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))  # at once: threads of a backend may hang, and Python would wait for them
