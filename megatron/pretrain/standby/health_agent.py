"""torch's elastic agent, on a node that leaves its job when it is sick, and that ends its ranks when they hang."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api as launcher

from megatron.core.dist_checkpointing.moe.boot_clock import since_boot_s, started
from megatron.core.dist_checkpointing.moe.standby.heartbeat import (
    FOLDER,
    Activity,
    HeartbeatReading,
    read_beat,
    stacks_signal,
)
from megatron.core.dist_checkpointing.moe.standby.verdict import kept_folder
from megatron.pretrain.processes import node_name
from megatron.pretrain.spare_nodes import SpareHandler
from megatron.pretrain.standby.agent import StandbyAgent
from megatron.pretrain.standby.health_check import SILENT_S, FailureCounter, HungRanks, is_to_blame, judge
from megatron.pretrain.standby.health_options import HealthOptions
from megatron.pretrain.standby.node_agent import NodeAgent
from megatron.pretrain.standby.process import SlotProcess

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often heartbeats are read."""
RECHECK_S = 60.0
"""After so long a node that is about to start ranks, such as a spare, is checked again."""
_TRAINED = (Activity.TRAINING, Activity.REJOINED)
STACKS_S = 1.0
"""How long processes may take to print their stacks before any is killed."""
_ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
"""Signals that end a launcher, as torch's own agents have them once they have started ranks."""
_TICKS = os.sysconf("SC_CLK_TCK")


class NodeExcluded(SignalException):
    """This node leaves the job, which continues without it: so torch ends the ranks and keeps the rendezvous open."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{node_name()} leaves the job: {why}", signal.SIGTERM)


class _HealthChecks(LocalElasticAgent if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into torch's agent, or ours. hygiene: what it watches for."""

    def __init__(self, *arguments: Any, hygiene: HealthOptions, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._hygiene, self._strikes = hygiene, FailureCounter(hygiene.strikes, hygiene.within_s)
        self._beats = Path(tempfile.mkdtemp(prefix="moe-ckpt-beats-"))
        os.environ[FOLDER] = str(self._beats)
        self._kept = contextlib.ExitStack()
        self._kept.enter_context(kept_folder(self._beats))
        self._looked_s, self._gap_s, self._woke_s = time.monotonic(), 0.0, 0.0
        self._began_s = dict[int, float]()
        self._ran_s, self._stands = dict[int, float](), dict[int, tuple[str, float]]()
        self._printed = set[tuple[int, bool]]()
        self._killed, self._blameless = set[int](), set[int]()
        self._checked_s, self._is_charged = 0.0, False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._check_health()
        if isinstance(handler := worker_group.spec.rdzv_handler, SpareHandler):
            handler.due_check = self._due_check
        super()._rendezvous(worker_group)
        self._began_s.clear()  # ranks are about to start, and may have numbers of some that have ended
        self._is_charged = False

    def _check_health(self) -> None:
        check_health(self._hygiene.health_check, self._hygiene.health_s)
        self._checked_s = time.monotonic()

    def _due_check(self) -> Callable[[], None] | None:
        """The health check, where the last one is too old for ranks to start."""
        is_due = self._hygiene.health_check and time.monotonic() > self._checked_s + RECHECK_S
        return self._check_health if is_due else None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.kill_hung_ranks()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and self._hygiene.strikes:
            self._note_failures(result.failures)
        return result

    def run(self, *arguments: Any, **options: Any) -> RunResult:
        """As torch's; its `_shutdown` is called at each restart too."""
        try:
            result: RunResult = super().run(*arguments, **options)
        except NodeExcluded as error:
            handler = self._worker_group.spec.rdzv_handler
            if isinstance(handler, SpareHandler):
                handler.keep_store(str(error))
            raise
        finally:
            self._kept.close()
            shutil.rmtree(self._beats, ignore_errors=True)
        return result

    def _pids(self) -> dict[int, int]:
        """Of the ranks of this node, by local rank."""
        raise NotImplementedError

    def _note_failures(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Count them, once between two starts, where a rank of this node is to blame. Raises NodeExcluded where that
        was once too often."""
        for rank, failure in sorted(failures.items()):
            pid, code = failure.pid, failure.exitcode
            if self._is_charged or pid in self._blameless or not is_to_blame(code, self._said(pid), signal.SIGTERM):
                continue
            self._is_charged = True
            count, most, within_s = self._strikes.add(time.monotonic()), self._hygiene.strikes, self._hygiene.within_s
            what = f"rank {rank} ended with exit code {code}"
            log.warning("%s: %s, failure %d of %d within %g s", node_name(), what, count, most, within_s)
            if self._strikes.are_out:
                raise NodeExcluded(f"its own ranks failed {count} times within {within_s:g} s, at last {what}")

    def kill_hung_ranks(self) -> None:
        """Look at the ranks of this node, kill those that hang, and say so."""
        ranks = {pid: local_rank for local_rank, pid in self._pids().items()}
        for pid in ranks.keys() - self._began_s.keys():
            self._begins(pid)
        now_s = time.monotonic()
        if not self._hygiene.hang_s or now_s - self._looked_s < LOOK_S:
            return
        gap_s = now_s - self._looked_s
        beats, self._gap_s = self._look(ranks, now_s), gap_s
        hung = judge(beats, now_s, self._hygiene.hang_s)
        if not hung.pids:
            if now_s - self._woke_s > self._hygiene.hang_s:  # before, none counts as hung, also of those named above
                self._printed.clear()
            self._tell_long_starts(ranks, beats, now_s)
            return
        self._print_stacks(ranks, beats, hung)
        now_s = time.monotonic()
        still = judge(self._look(ranks, now_s), now_s, self._hygiene.hang_s)
        for pid in (hung.to_kill & still.to_kill) - self._killed:
            self._killed.add(pid)
            log.error("%s: killed process %d (local rank %d): hang timeout", node_name(), pid, ranks[pid])
            if pid not in still.to_blame:
                self._blameless.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _begins(self, pid: int) -> None:
        """Note a rank that was not there before, of which nothing is known that was of an earlier process."""
        self._began_s[pid] = time.monotonic() - (since_boot_s() - started(pid) / _TICKS)
        self._killed.discard(pid)
        self._blameless.discard(pid)
        self._ran_s.pop(pid, None)
        self._stands.pop(pid, None)

    def _said(self, pid: int) -> HeartbeatReading | None:
        """What a rank said last, and not an earlier process with its number."""
        beat = read_beat(self._beats, pid)
        return beat if beat is not None and beat.alive_s >= self._began_s.get(pid, 0.0) else None

    def _look(self, ranks: Iterable[int], now_s: float) -> dict[int, HeartbeatReading]:
        """What ranks said last. Where nobody looked for much longer than usual, the whole node was suspended: it counts
        as said now, since they could not say more."""
        if now_s - self._looked_s > max(min(SILENT_S, self._hygiene.hang_s), 2 * LOOK_S, 2 * self._gap_s):
            self._woke_s = now_s
        self._looked_s = now_s
        beats = {pid: self._said(pid) or self._unheard(pid, now_s) for pid in ranks}
        return {
            pid: beat._replace(moved_s=max(beat.moved_s, self._woke_s), alive_s=max(beat.alive_s, self._woke_s))
            for pid, beat in beats.items()
        }

    def _unheard(self, pid: int, now_s: float) -> HeartbeatReading:
        """Of a process that says nothing, or not yet: whether it is stopped is all that is known."""
        if _state(pid) != psutil.STATUS_STOPPED:
            self._ran_s[pid] = now_s
        return HeartbeatReading(now_s, self._ran_s.setdefault(pid, now_s), Activity.STARTING)

    def _tell_long_starts(self, ranks: dict[int, int], beats: dict[int, HeartbeatReading], now_s: float) -> None:
        """Say which ranks stand in one place since long before their first iteration, such as a read of storage; once
        for each place."""
        for pid, beat in beats.items():
            place, since_s = self._stands.get(pid, ("", now_s))
            if beat.doing is not Activity.LOADING or beat.place != place:
                self._stands[pid] = beat.place, now_s
            elif place and now_s - since_s > self._hygiene.hang_s:
                self._stands[pid] = place, math.inf
                log.warning(
                    "%s: local rank %d (process %d, %s) has not come to its first iteration: for %.0f s it is in %s",
                    node_name(), ranks[pid], pid, _state(pid), now_s - since_s, place,
                )  # fmt: skip

    def _print_stacks(self, ranks: dict[int, int], beats: dict[int, HeartbeatReading], hung: HungRanks) -> None:
        """Say who stands still, and have all ranks of the node print where they are; once for each time, and again
        where it turns out that one does not even run, which is why it is killed."""
        standing = {(pid, pid in hung.silent) for pid in hung.pids}
        if standing <= self._printed:
            return
        self._printed |= standing
        now_s = time.monotonic()
        for pid in sorted(hung.pids, key=ranks.__getitem__):
            beat, state = beats[pid], _state(pid)
            stood_s = now_s - min(beat.moved_s, beat.alive_s)
            what = "has trained no iteration for" if beat.doing in _TRAINED else "has not come to an iteration for"
            log.error(
                "%s: local rank %d (process %d, %s) %s %.0f s%s", node_name(), ranks[pid], pid,
                f"{state}, it does not answer" if pid in hung.silent else state, what, stood_s,
                f"; it {'was last' if pid in hung.silent else 'is'} in {beat.place}" if beat.place else "",
            )  # fmt: skip
        others = ranks.keys() - hung.pids  # in a recovery, or at its end: the hung ones may wait for them
        for pid in sorted(others, key=ranks.__getitem__):
            if beats[pid].place:
                log.error("%s: local rank %d (process %d) is in %s", node_name(), ranks[pid], pid, beats[pid].place)
        for pid in beats:
            if self._said(pid) is not None:  # else it has no handler, and the signal would end it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, stacks_signal())
        time.sleep(STACKS_S)


class HealthAgent(_HealthChecks, NodeAgent):
    """torch's own agent."""

    def _pids(self) -> dict[int, int]:
        return dict(self._pcontext.pids()) if self._pcontext is not None else {}


class HealthStandbyAgent(_HealthChecks, StandbyAgent):
    """That with standbys."""

    def _pids(self) -> dict[int, int]:
        return {slot: process.pid for slot, process in self._slots.items()}

    def _those_that_stay(self, group: WorkerGroup) -> dict[str, SlotProcess]:
        # A rank that fails says so, hangs up, and takes a while to end: its neighbours leave first. The others have to
        # leave now, and may end with errors for want of connections.
        failing = [slot for slot, one in self._slots.items() if one.exit_code or self._has_failed(one.pid)]
        staying = super()._those_that_stay(group)
        if self._hygiene.strikes:
            codes = {slot: code for slot in failing if (code := self._slots[slot].exit_code)}
            self._note_failures(self._failures(group, codes))
        return staying

    def _has_failed(self, pid: int) -> bool:
        said = self._said(pid)
        return said is not None and said.doing is Activity.LEFT


@contextlib.contextmanager
def own_agents(standbys: int, hygiene: HealthOptions) -> Iterator[None]:
    """In this block torch's launchers, `run` and `elastic_launch`, slot workers if there are standbys, and leave or end
    ranks as the options say. A signal raises SignalException once, and so ends all processes, also before there are
    any, and where no agent of torch's own has started them.

    Args:
        standbys: Standby processes to keep waiting on this node.
        hygiene: When ranks are ended, and when a node leaves the job.
    """
    own, torchs = launcher.LocalElasticAgent, processes._terminate_process_handler
    # Ignored signals stay so, such as SIGHUP below `nohup`.
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: one for number, one in handlers.items() if one not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _raise_once)
    processes._terminate_process_handler = _raise_once
    kinds = {
        (True, True): partial(HealthStandbyAgent, standbys=standbys, hygiene=hygiene),
        (True, False): partial(StandbyAgent, standbys=standbys),
        (False, True): partial(HealthAgent, hygiene=hygiene),
        (False, False): NodeAgent,
    }
    launcher.LocalElasticAgent = kinds[standbys > 0, bool(hygiene)]
    try:
        yield
    finally:
        launcher.LocalElasticAgent, processes._terminate_process_handler = own, torchs
        NodeAgent.told_to_end = None
        for number, handled_by in before.items():
            if signal.getsignal(number) is _raise_once:  # else one has come, and this process ends undisturbed
                signal.signal(number, handled_by)


def _raise_once(number: int, frame: object) -> NoReturn:
    """As torch's own, which raises again wherever the next one finds it, such as within logging or while ranks are told
    to end. One Ctrl-C may come twice: to all of a terminal, and from `timeout` or the launcher of several agents; and
    SIGTERM may follow it."""
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    # Logging swallows errors raised in it, as while its reader stands still: then the agent raises this again.
    NodeAgent.told_to_end = SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))
    raise NodeAgent.told_to_end


def check_health(command: str, timeout_s: float) -> None:
    """Run a health check.

    Args:
        command: A command of a shell; an empty one is well.
        timeout_s: Seconds that it may take.

    Raises:
        NodeExcluded: It fails, or takes too long.
    """
    if not command:
        return
    # The shell waits for a line: a signal may end this launcher before it knows the process that it would have to kill.
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _ && exec /bin/sh -c "$0" < /dev/null', command], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.communicate(b"\n", timeout_s)
    except subprocess.TimeoutExpired:
        raise NodeExcluded(f"its health check did not end within {timeout_s:g} s: {command}") from None
    finally:
        if process.returncode is None:  # also where a signal ends this launcher
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise NodeExcluded(f"its health check ended with exit code {process.returncode}: {command}")


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
