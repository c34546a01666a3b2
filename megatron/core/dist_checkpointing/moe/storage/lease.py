"""A lease on a folder in which one job at a time may write: a small file that says who does, renewed while it lives.

    .moe-ckpt-lease.json    {"job": "run-12", "host": "node-3", "process": [4711, 90210], ..., "beat": 17}

A process that finds the lease of another one takes it over where that is provably gone: its machine is this one and
the process is not there any more, or its launcher is one of this run's, which starts a rank only when the one before
has ended. Else the newcomer watches: a lease that is renewed is refused, one that is not for `STALE_S` is taken. What
counts is that the file changes, never what time it tells: clocks of two hosts are not compared.
"""

from __future__ import annotations

import enum
import logging
import os
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ..boot_clock import ProcessKey, is_there, machine, started
from ..errors import MAY_PASS, NO_SPACE, MoECheckpointError, StoreFailure, UsageError, format_error
from .lease_files import LEASE, FolderPlace, LeasePlace

log = logging.getLogger(__name__)

RENEW_S = 10.0
"""How often a holder renews its lease."""
STALE_S = 60.0
"""For how long a newcomer has to see none of that before it takes a lease over."""
POLL_S = 1.0
_BEAT_DIGITS = 20
_UNFOUND = "another job that writes there would not be found"


class Holder(msgspec.Struct, frozen=True):
    """Who has a lease, as its file says.

    Attributes:
        job: Id of the job.
        host: Name of the host, for people.
        machine: Boot of the machine and namespace of process numbers, in which `process` means something.
        process: Rank 0.
        launcher: What starts it again when it fails; None where nothing is known to.
        run: The launchers of all ranks, each with its machine.
        since: When the lease was taken, for people.
        name: Of this lease; no other has the same.
        beat: Counts renewals.
        left: Whether the process has left it to the next attempt of the job.
    """

    job: str
    host: str
    machine: str
    process: ProcessKey
    launcher: ProcessKey | None
    run: tuple[str, ...]
    since: str
    name: str
    beat: int = 0
    left: bool = False

    @classmethod
    def here(cls, job: str, launcher: ProcessKey | None = None, run: tuple[str, ...] = ()) -> Holder:
        """This process.

        Args:
            job: Id of the job.
            launcher: What starts this process again when it fails; None: nothing is known to.
            run: The launchers of all ranks, each with its machine.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        own = os.getpid()
        return cls(
            job, socket.gethostname(), machine(), (own, started(own)), launcher, run, since, uuid.uuid4().hex[:16]
        )

    def __str__(self) -> str:
        # Of a file that others may have written: no line of theirs is printed as one of this job.
        host, since = (ascii(text)[1:-1] for text in (self.host, self.since))
        return f"job {self.job!a:.80} (process {self.process[0]} on {host:.80}, since {since:.40})"

    def is_same_run(self, other: Holder) -> bool:
        """Whether one launcher at least has started both, which it does only one after the other."""
        return self.job == other.job and bool(set(self.run) & set(other.run))

    @property
    def is_gone(self) -> bool:
        """Whether provably neither its process is there, unless that has left it, nor what starts that again."""
        may_write = (None if self.left else self.process, self.launcher)
        return self.machine == machine() and not any(one is not None and is_there(one) for one in may_write)


class Verdict(enum.Enum):
    """What to do about the lease of another process."""

    TAKE = "it is gone"
    REFUSE = "it is alive"
    WATCH = "only watching tells"


def judged(found: Holder, own: Holder, is_there: Callable[[ProcessKey], bool] = is_there) -> Verdict:
    """What is known of a holder at a look.

    Args:
        found: The holder that the lease names.
        own: This process.
        is_there: Whether a process of this machine runs.
    """
    if found.is_same_run(own):
        return Verdict.TAKE
    if found.machine != own.machine:
        return Verdict.WATCH
    if found.process != own.process and not found.left and is_there(found.process):
        return Verdict.REFUSE
    is_started_again = found.launcher is not None and is_there(found.launcher)
    return Verdict.REFUSE if is_started_again else Verdict.TAKE


def place_of(where: str) -> LeasePlace:
    """Of a folder or a URL. Raises StoreFailure, UsageError."""
    if "://" not in where:
        return FolderPlace(Path(where))
    from .lease_files import ObjectPlace  # fsspec is for those who use it

    return ObjectPlace(where)


def decoded(content: bytes | None) -> Holder | None:
    """Who has the lease with this content; None where it is none."""
    try:
        return msgspec.json.decode(content or b"", type=Holder)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def holder_of(where: str) -> Holder | None:
    """Who has the lease of a folder or URL, dead or alive; None where nobody does, or it cannot be read."""
    with suppress(OSError, MoECheckpointError):
        return decoded(place_of(where).read())
    return None


def name_in(where: str) -> str:
    """The name of who has the lease of a folder or URL, as this node sees it; empty: nobody. Raises StoreFailure and
    UsageError where it cannot be read."""
    with suppress(NotADirectoryError), _reading(where):
        found = decoded(place_of(where).read())
        return found.name if found is not None else ""
    return ""


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError:
        raise  # nobody can write there
    except OSError as error:
        kind = StoreFailure if error.errno in MAY_PASS else UsageError
        raise kind(
            f"{where}/{LEASE}, which says who writes there, cannot be read: {error.strerror or error}"
        ) from error


def writer_of(where: str) -> str:
    """A sentence on who has the lease of a folder or URL; empty where nobody does who may be alive."""
    found = holder_of(where)
    if found is None or found.is_gone:
        return ""
    return f"{found} writes here; if that has ended, remove {where.rstrip('/')}/{LEASE}"


def refuse_writer(where: str) -> None:
    """Raises StoreFailure where something is to be freed, and a job that may be alive has begun to write."""
    if writer := writer_of(where):
        raise StoreFailure(f"{writer}: nothing more is freed")


class Lease:
    """Of this process on one place, from `acquire` on; renewed by a thread until `release` or `leave`.

    Args:
        where: The folder or URL.
        own: This process.
        forced: Id of a job whose lease is taken though it may be alive; empty for none.
        place: Where the file is.
        wait: Waits for seconds.
    """

    def __init__(
        self,
        where: str,
        own: Holder,
        forced: str = "",
        *,
        place: LeasePlace | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._where, self._own, self._forced, self._wait = where, own, forced, wait
        self._place = place or place_of(where)
        # A daemon: a renewal that hangs in a dead file system must not keep the process from ending.
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._keep, daemon=True)
        self._thread.name = "moe-ckpt-lease"
        self.lost, self._is_told = "", False
        self._is_held = self._is_inherited = False
        self._free: bytes | None = None  # until it is held: what it may be put in place of

    @property
    def name(self) -> str:
        """Of this process in its file; empty while it has none."""
        return self._own.name if self._is_held and self._thread.is_alive() else ""

    def acquire(self) -> None:
        """Take the lease and begin to renew it; waits for `STALE_S` at most where only watching tells.

        A place in which nothing can be written has none: that is a warning. Where that may pass, as on a device that is
        full, each renewal tries again. Raises UsageError where another job, or another start of this one, has it, or
        others are faster at each try for `STALE_S`; StoreFailure where it cannot be read now.
        """
        seen, quiet_s, missed = None, 0.0, 0
        while True:
            begun_s = time.monotonic()
            try:
                with _reading(self._where):
                    content = self._place.read()
            except NotADirectoryError as error:
                self._warn(error)
                return
            took_s, found = time.monotonic() - begun_s, decoded(content)
            if content is None or self._is_free(found, is_quiet=content == seen and quiet_s >= STALE_S):
                try:
                    if self._is_taken(content, found):
                        self._is_held = True
                        self._thread.start()
                        return
                except (OSError, StoreFailure) as error:
                    self._warn(error)
                    if isinstance(error, StoreFailure) or error.errno in NO_SPACE + MAY_PASS:
                        self._free, self._is_told = content, True
                        self._thread.start()
                    return
                # Another process was faster, or its file cannot be seen yet, as in a stale cache of NFS.
                missed += 1
                if missed > STALE_S / POLL_S:
                    raise UsageError(f"{self._where}/{LEASE} cannot be taken: it changed at each of {missed} tries")
                self._wait(POLL_S)
                continue
            if found is not None and (judged(found, self._own) is Verdict.REFUSE or seen not in (None, content)):
                raise UsageError(self._refusal(found))
            if seen is None:
                said = found or "somebody"
                log.info("%s is leased by %s: waiting %g s for a sign of life", self._where, said, STALE_S)
            # After a look that took long the device stood still, perhaps for the holder as well: watch again.
            quiet_s = quiet_s + POLL_S if content == seen and took_s < RENEW_S else 0.0
            seen = content
            self._wait(POLL_S)

    def _warn(self, error: Exception) -> None:
        log.warning(f"%s has no lease of this job (%s): {_UNFOUND}", self._where, format_error(error))

    def renew(self) -> bool:
        """Show once more that this process lives; False where another one has the place by now."""
        self._own = msgspec.structs.replace(self._own, beat=self._own.beat + 1)
        try:
            if not self._place.renew(self._content(self._own)):
                return self._is_restored()
            self._is_held = True
            return True
        except (OSError, StoreFailure) as error:
            if not self._is_told:
                log.warning("cannot renew the lease of %s: %s", self._where, format_error(error))
            self._is_told = True
            return True

    def check(self) -> None:
        """Raises UsageError where another job has taken the place over: nothing must be written there any more."""
        if self.lost:
            raise UsageError(self.lost)

    def give_back(self) -> None:
        """As it was found, since training did not begin: an earlier attempt of this job left it to the next one."""
        self.leave() if self._is_inherited else self.release()

    def release(self) -> None:
        """Let other jobs write there."""
        if self._stopped():
            with suppress(OSError, StoreFailure):
                self._place.remove()

    def leave(self) -> None:
        """Let the next attempt of this job take it, and nobody else as long as its launcher lives."""
        if self._stopped():
            with suppress(OSError, StoreFailure):
                self._place.renew(self._content(msgspec.structs.replace(self._own, left=True)))
                self._place.let_go()

    def _is_free(self, found: Holder | None, *, is_quiet: bool) -> bool:
        if found is None:
            return is_quiet  # nothing that anybody could read
        return is_quiet or found.job == self._forced or judged(found, self._own) is Verdict.TAKE

    def _is_taken(self, content: bytes | None, found: Holder | None) -> bool:
        """Put it there instead of `content`; False where another process was faster."""
        own = self._content(self._own)
        if not self._place.take(own, content):
            return False
        if self._place.settle_s and not (found is not None and found.is_same_run(self._own)):
            self._wait(self._place.settle_s)
            if self._place.read() != own:
                return False
        self._is_inherited = found is not None and found.is_same_run(self._own)
        if found is not None and found.job != self._own.job:
            log.warning("%s: taking over the expired lease of %s", self._where, found)
        return True

    def _refusal(self, found: Holder) -> str:
        if found.job == self._own.job:
            which, do = "this very job runs already", "end that run, or wait for its end"
        else:
            which, do = "another job writes there", "give this job a folder of its own, or end that one"
        job = shlex.quote(found.job) if found.job.isprintable() else ascii(found.job)
        return (
            f"{self._where} is in use by {found}: {which}; {do} (--moe-ckpt-take-over {job:.80} takes the folder from"
            " it all the same)"
        )

    @staticmethod
    def _content(holder: Holder) -> bytes:
        """Of the same length for all beats: a file is renewed in place, also on a device that is full."""
        content = msgspec.json.encode(holder)
        nbytes = len(msgspec.json.encode(msgspec.structs.replace(holder, beat=0, left=False))) + _BEAT_DIGITS
        return content.ljust(nbytes) + b"\n"

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S) and self.renew():
            pass

    def _is_restored(self) -> bool:
        """Take it again where the file was only deleted, is this one's own of before a new mount, or is the one that
        `acquire` found free and could not replace; else say whose it is, once. Raises OSError and StoreFailure: nobody
        is known to have it, and the next beat tries again."""
        self._place.let_go()
        content = self._place.read()
        found = decoded(content)
        is_free = content is None or (not self._is_held and content == self._free)
        if is_free or (found is not None and found.name == self._own.name):
            self._is_held |= self._place.take(self._content(self._own), content)
            return True  # where another was faster, the next beat reads of it
        self.lost = f"{self._where} was taken over by {found or 'another job'}: this one ends"
        log.critical("%s", self.lost)
        return False

    def _stopped(self) -> bool:
        """End the thread; whether the lease was held until now."""
        self._ended.set()
        if not self._thread.is_alive():
            return False
        self._thread.join(RENEW_S)
        if self._thread.is_alive():  # it hangs in storage, as the next call would
            log.error("%s does not answer for %g s: its lease stays", self._where, RENEW_S)
            return False
        return not self.lost
