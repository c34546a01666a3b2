"""A world of processes for training jobs: torch and Megatron-Core are imported once, each job forks from there.

Workers are not reused: core's data-parallel wrapper keeps its model, and with it every process group and its threads,
alive through autograd hooks that no garbage collection sees. A fork of the server that has imported everything costs a
tenth of a second and starts clean.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANG_TIMEOUT_S = 400.0
"""Far above what any job here takes: whoever waits longer waits for something that will not come."""
RECOVERY_TIMEOUT_S = 40.0
"""How much longer a job may take for each fault that it recovers from."""
SHUTDOWN_TIMEOUT_S = 120.0
"""How long the other ranks may take to end after one was lost."""

WITH_ENGINE = "WORLD_WITH_TRANSFORMER_ENGINE"
"""Environment variable by which the server is told."""

_OF_LIBRARIES = re.compile(r"\s|$|/\S+:\d+: \w*Warning: |(INFO|WARNING):megatron\.core")
"""And the source lines below them; loggers that core sets up."""
_PREFIX = re.compile(r"^\[moe-ckpt\](?: [A-Z]+:)? ", re.MULTILINE)
"""Of our own lines, see `megatron.pretrain.logs`: left out, so that tests name what a line says."""

Hook = Callable[[], AbstractContextManager[object]]
"""Changes something in a worker for the time of one job; pickled, so a module-level function or a partial of one."""


@dataclass(frozen=True)
class Job:
    """What one rank is asked to run: the driver's flags, its environment, and where its output goes.

    script: Of another program, which is run in place of the driver.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    stdout: Path
    stderr: Path
    hooks: tuple[Hook, ...]
    script: str = ""


@dataclass(frozen=True)
class Outcome:
    """Exit code, standard output and standard error of each rank."""

    codes: tuple[int, ...]
    out: tuple[str, ...]
    err: tuple[str, ...]

    @property
    def said(self) -> str:
        """All that all ranks printed, for failure messages."""
        texts = enumerate(zip(self.codes, self.out, self.err, strict=True))
        return "\n".join(f"--- rank {rank}, exit code {code}\n{out}{err}" for rank, (code, out, err) in texts)

    @property
    def lines(self) -> list[str]:
        """Everything that was printed, by any rank."""
        return [line for text in (*self.out, *self.err) for line in text.splitlines()]

    @property
    def warnings(self) -> list[str]:
        """Lines on standard error, of all ranks, but for Python warnings of libraries."""
        return [line for err in self.err for line in err.splitlines() if not _OF_LIBRARIES.match(line)]


class WorkersLost(Exception):
    """A worker hung or died; the text says for what was waited and what the ranks printed."""


class World:
    """Runs jobs on fresh processes of this machine.

    with_engine: They have Transformer Engine's Python, with kernels for the CPU. That is loaded before all else, so
    worlds with and without it, which take turns, have a server each.
    """

    def __init__(self, folder: Path, *, with_engine: bool = False) -> None:
        self._folder, self._with_engine = folder, with_engine
        self._workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._jobs = 0

    def start(
        self,
        argv: Sequence[str],
        ranks: int,
        hooks: Sequence[Hook] = (),
        environments: Sequence[Mapping[str, str]] = (),
        script: Path | None = None,
    ) -> Running:
        """Start a job on `ranks` new workers; `environments` changes what each rank's environment says."""
        workers = self._spawn(ranks)
        self._jobs += 1
        folder = self._folder / f"job-{self._jobs}"
        folder.mkdir()
        port = free_port()
        jobs = [_job(argv, rank, ranks, port, folder, tuple(hooks)) for rank in range(ranks)]
        if script is not None:
            jobs = [replace(job, script=str(script)) for job in jobs]
        for job, changes in zip(jobs, environments, strict=False):
            job.environment.update(changes)
        for (_, connection), job in zip(workers, jobs, strict=True):
            connection.send(job)
        return Running(self, workers, jobs)

    def run(self, argv: Sequence[str], ranks: int, hooks: Sequence[Hook] = ()) -> Outcome:
        """Run a job to its end."""
        return self.start(argv, ranks, hooks).wait()

    def kill(self) -> None:
        """End all workers of all jobs."""
        workers, self._workers = self._workers, []
        for process, connection in workers:
            process.kill()
            connection.close()
        for process, _ in workers:
            process.join()

    def _spawn(self, ranks: int) -> list[tuple[Any, multiprocessing.connection.Connection]]:
        # Descriptors of workers that have ended are given back.
        self._workers = [(process, connection) for process, connection in self._workers if process.is_alive()]
        context = multiprocessing.get_context("forkserver")
        _choose_server(self._with_engine)
        given = os.environ.get("PYTHONPATH", "")  # perhaps another release of Megatron-Core
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), str(ROOT), given)))}
        with _environment({**paths, "OMP_NUM_THREADS": "1", WITH_ENGINE: "1" if self._with_engine else ""}):
            spawned = []
            for _ in range(ranks):
                here, there = context.Pipe()
                # Not a daemon: those may not fork, as the background writer of checkpoints does.
                process = context.Process(target=_serve, args=(there,), daemon=False)
                process.start()
                there.close()
                spawned.append((process, here))
        self._workers += spawned
        return spawned


def _choose_server(with_engine: bool) -> None:
    """Workers are forked from the server of this kind of world from here on; Python has one for all."""
    of_python: Any = multiprocessing.forkserver
    if with_engine not in _SERVERS:
        _SERVERS[with_engine] = of_python.ForkServer()
        _SERVERS[with_engine].set_forkserver_preload(["world_preload"])
    of_python._forkserver = _SERVERS[with_engine]
    of_python.connect_to_new_process = _SERVERS[with_engine].connect_to_new_process


_SERVERS: dict[bool, Any] = {}


class Running:
    """A job under way."""

    def __init__(self, world: World, workers: list[tuple[Any, Any]], jobs: list[Job]) -> None:
        self._world, self._workers, self._jobs = world, workers, jobs

    def process_id(self, rank: int) -> int:
        """The process that plays `rank`."""
        pid: int = self._workers[rank][0].pid
        return pid

    def wait(self, timeout_s: float = HANG_TIMEOUT_S) -> Outcome:
        """The outcome of all ranks. Raises WorkersLost, and ends the world, if one hangs or dies."""
        deadline, codes = time.monotonic() + timeout_s, dict[int, int]()
        for rank, (_, connection) in enumerate(self._workers):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise self._lost(f"rank {rank} did not end within {timeout_s:.0f} s; ended: {codes}")
                codes[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._lost(f"the process of rank {rank} died; exit codes so far: {codes}") from None
        return self._outcome(codes)

    def wait_or_restart(self) -> Outcome:
        """The outcome when some rank may be killed: the others then have a while to end, as a launcher grants them.

        A rank that was killed has the code -9. Raises WorkersLost if one neither ends nor dies.
        """
        deadline, codes = time.monotonic() + HANG_TIMEOUT_S, dict[int, int]()
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ended: list[Any] = multiprocessing.connection.wait(list(waiting), left_s)
            if not ended:
                raise self._lost(f"ranks {sorted(waiting.values())} did not end in time; ended: {codes}")
            for connection in ended:
                rank = waiting.pop(connection)
                try:
                    codes[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    codes[rank] = -signal.SIGKILL
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + SHUTDOWN_TIMEOUT_S)
        for process, _ in self._workers:  # as a launcher does before it starts the job again
            process.join(SHUTDOWN_TIMEOUT_S)
        return self._outcome(codes)

    def _outcome(self, codes: dict[int, int]) -> Outcome:
        for _, connection in self._workers:
            connection.close()
        ranks = range(len(self._jobs))
        return Outcome(
            tuple(codes.get(rank, -1) for rank in ranks),
            tuple(_PREFIX.sub("", _text(job.stdout)) for job in self._jobs),
            tuple(_PREFIX.sub("", _text(job.stderr)) for job in self._jobs),
        )

    def _lost(self, what: str) -> WorkersLost:
        for process, _ in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR2)  # prints where it stands
        time.sleep(1.0)
        self._world.kill()
        return WorkersLost(f"{what}\nflags: {' '.join(self._jobs[0].argv)}\n{self._outcome({}).said}")


def _job(argv: Sequence[str], rank: int, ranks: int, port: int, folder: Path, hooks: tuple[Hook, ...]) -> Job:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"world-{os.getpid()}-{folder.name}",
    }
    return Job(tuple(argv), environment, folder / f"out-{rank}", folder / f"err-{rank}", hooks)


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """What a worker does: one job."""
    faulthandler.enable()  # a broken heap ends a process without a word of where
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        job = connection.recv()
    except EOFError:
        return
    connection.send(_perform(job))


def _perform(job: Job) -> int:
    import pretrain_gpt_moe

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with _environment(job.environment), _output(job), contextlib.ExitStack() as stack:
            try:
                for hook in job.hooks:
                    stack.enter_context(hook())
                if job.script:
                    sys.argv = [job.script, *job.argv]
                    runpy.run_path(job.script, run_name="__main__")
                    return 0
                return pretrain_gpt_moe.main(list(job.argv))
            except SystemExit as ending:
                return ending.code if isinstance(ending.code, int) else 1
            except Exception:
                # As the interpreter would at the end of a process.
                traceback.print_exc()
                return 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output(job: Job) -> Iterator[None]:
    """Send everything that this process prints to files, from whatever language it comes."""
    streams = ((sys.stdout, 1, job.stdout), (sys.stderr, 2, job.stderr))
    kept = [os.dup(number) for _, number, _ in streams]
    for stream, number, path in streams:
        stream.flush()
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for (stream, number, _), original in zip(streams, kept, strict=True):
            stream.flush()
            os.dup2(original, number)
            os.close(original)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def node_memory() -> Iterator[Path]:
    """A folder in the memory of this node."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-test-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def run_to_end(
    command: Sequence[str], timeout_s: float, *, stderr: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository; nothing that it started outlives it."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} did not end within {timeout_s:g} s; it said:\n{out}\n{err}"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that the kernel gives to connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
