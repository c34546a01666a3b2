"""When a node leaves its job, and which processes hang: decisions, and what launcher and worker see of each other."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

from megatron.core.dist_checkpointing.moe.standby import heartbeat
from megatron.core.dist_checkpointing.moe.standby.heartbeat import (
    Activity,
    Heartbeat,
    HeartbeatReading,
    place_of,
    read_beat,
    stacks_signal,
)
from megatron.pretrain.spare_nodes import SpareHandler
from megatron.pretrain.standby import agent as agents
from megatron.pretrain.standby import health_agent, health_check
from megatron.pretrain.standby.health_agent import HealthAgent, HealthStandbyAgent, NodeExcluded, check_health
from megatron.pretrain.standby.health_check import FIRST, START, FailureCounter, is_to_blame, judge
from megatron.pretrain.standby.health_options import HealthOptions
from megatron.pretrain.standby.node_agent import NodeAgent
from megatron.pretrain.standby.run import parse_options

ROOT = Path(__file__).resolve().parents[3]

T = 100.0
NOW = 10_000.0


def beat(moved: float, alive: float = 0.0, doing: Activity = Activity.TRAINING) -> HeartbeatReading:
    """One that moved, and was seen to run, so many seconds ago."""
    return HeartbeatReading(NOW - moved, NOW - alive, doing)


def parsed(*arguments: str) -> HealthOptions:
    parser = argparse.ArgumentParser(exit_on_error=False)
    HealthOptions.add_flags(parser)
    return HealthOptions.of(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("text", "strikes", "within_s"), [("3/10m", 3, 600), ("1/90s", 1, 90), ("5/1.5h", 5, 5400), ("2/30", 2, 30)]
)
def test_strikes_are_a_number_and_a_time(text: str, strikes: int, within_s: float) -> None:
    options = parsed("--moe-ckpt-strikes", text)
    assert (options.strikes, options.within_s) == (strikes, within_s)


@pytest.mark.parametrize("text", ["3", "0/10m", "3/", "3/0s", "3/10d", "-1/10m", "three/10m", "3/10m "])
def test_strikes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="give failures and a time, such as 3/10m"):
        parsed(f"--moe-ckpt-strikes={text}")


def test_options_are_the_same_for_the_agents_that_a_launcher_starts() -> None:
    options = parsed("--moe-ckpt-strikes=3/10m", "--moe-ckpt-health-check=true", "--moe-ckpt-hang-timeout=30")
    parser = argparse.ArgumentParser()
    HealthOptions.add_flags(parser)
    assert HealthOptions.of(parser.parse_args(options.arguments())) == options
    assert not parsed()


@given(
    st.lists(st.floats(0, 50), max_size=30), st.integers(1, 5), st.floats(0.5, 100)
)  # gaps between failures, in seconds
def test_strikes_are_out_exactly_when_enough_failures_lie_within_the_time(
    gaps: list[float], most: int, within_s: float
) -> None:
    strikes, times, now = FailureCounter(most, within_s), list[float](), 0.0
    for gap in gaps:
        now += gap
        times.append(now)
        assert strikes.add(now) == sum(now - within_s <= at for at in times)
        assert strikes.are_out == (sum(now - within_s <= at for at in times) >= most)


@pytest.mark.parametrize(
    ("code", "doing", "blamed"),
    [
        (-signal.SIGKILL, Activity.TRAINING, True),
        (-signal.SIGSEGV, None, True),
        (-signal.SIGTERM, Activity.TRAINING, False),
        (1, Activity.LEFT, True),
        (1, Activity.STARTING, True),
        (1, Activity.LOST_A_PEER, False),
        (1, None, False),
        (0, Activity.LEFT, False),
        (2, Activity.STARTING, False),  # invalid flags, on all nodes
    ],
)
def test_a_node_is_blamed_for_what_went_wrong_on_it_and_not_for_a_lost_peer(
    code: int, doing: Activity | None, blamed: bool
) -> None:
    assert is_to_blame(code, None if doing is None else beat(0, doing=doing), signal.SIGTERM) is blamed


def test_ranks_that_make_progress_do_not_hang_whatever_the_others_say() -> None:
    assert not judge({1: beat(T - 1), 2: None, 3: beat(9 * T, doing=Activity.LOST_A_PEER)}, NOW, T).pids
    assert not judge({1: beat(99 * T, doing=Activity.STARTING)}, NOW, T).pids, "it has promised no iteration"
    assert not judge({1: beat(99 * T, 99 * T, Activity.LEFT)}, NOW, T).pids


def test_the_process_that_does_not_even_run_is_ended_and_those_that_wait_for_it_are_not() -> None:
    hung = judge({1: beat(T + 1), 2: beat(T + 1, T + 1), 3: beat(T + 1)}, NOW, T)
    assert hung.pids == {1, 2, 3}
    assert hung.to_kill == hung.silent == {2}


def test_where_all_processes_run_they_have_half_as_long_again_for_another_node_to_end_its_own() -> None:
    assert judge({1: beat(1.4 * T), 2: beat(1.4 * T)}, NOW, T).to_kill == frozenset()
    hung = judge({1: beat(1.6 * T), 2: beat(1.6 * T)}, NOW, T)
    assert (hung.to_kill, hung.silent) == ({1, 2}, frozenset())


@pytest.mark.parametrize("hang_s", [3.0, 6.0, 60.0])
@pytest.mark.parametrize("stopped_s", [0.0, 2.0, 4.0])
def test_a_rank_that_does_not_run_is_ended_before_those_of_other_nodes_that_wait_for_it(
    stopped_s: float, hang_s: float
) -> None:
    """It was stopped so long after its last iteration. Else its node is asked to restart before anything is charged."""

    def ended_s(alive_s: Callable[[float], float]) -> float:
        times = (tenth / 10 for tenth in range(2000))
        beats = ((now_s, HeartbeatReading(0.0, alive_s(now_s), Activity.TRAINING)) for now_s in times)
        return next(now_s for now_s, reading in beats if judge({1: reading}, now_s, hang_s).to_kill)

    stopped, waiting = ended_s(lambda now_s: min(now_s, stopped_s)), ended_s(lambda now_s: now_s)
    assert stopped + health_agent.LOOK_S + health_agent.STACKS_S + heartbeat.BEAT_S <= waiting


def test_a_rank_that_hangs_in_its_first_iteration_after_a_recovery_is_ended_though_it_has_longer_for_it() -> None:
    back = {1: beat(FIRST * T - 1, doing=Activity.REJOINED), 2: beat(FIRST * T - 1, doing=Activity.REJOINED)}
    assert not judge(back, NOW, T).pids, "it may have to connect and to compile"
    back = {1: beat(FIRST * T + 1, doing=Activity.REJOINED), 2: beat(FIRST * T + 1, FIRST * T, Activity.REJOINED)}
    hung = judge(back, NOW, T)
    assert (hung.pids, hung.to_kill, hung.silent) == ({1, 2}, {2}, {2})
    hung = judge({1: beat((FIRST + 0.6) * T, doing=Activity.REJOINED)}, NOW, T)
    assert (hung.to_kill, hung.silent) == ({1}, frozenset())


@pytest.mark.parametrize("doing", [Activity.STARTING, Activity.LOADING, Activity.LOST_A_PEER, Activity.REJOINED])
def test_a_process_that_does_not_run_is_ended_whatever_it_was_doing(doing: Activity) -> None:
    waiting = beat(T + 1, doing=Activity.LOADING)
    assert not judge({1: waiting, 2: beat(T + 1, T - 1, doing)}, NOW, T).pids
    hung = judge({1: waiting, 2: beat(T + 1, T + 1, doing)}, NOW, T)
    assert hung.pids == hung.to_kill == hung.silent == {2}
    assert hung.to_blame == ({2} if doing is not Activity.LOST_A_PEER else set()), "it may be slow to end"


def test_loading_and_recovering_may_take_a_multiple_of_the_timeout() -> None:
    assert not judge({1: beat(START * T - 1, doing=Activity.LOADING)}, NOW, T).pids
    hung = judge({1: beat(START * T + 1, doing=Activity.LOADING)}, NOW, T)
    assert (hung.pids, hung.to_kill) == ({1}, frozenset())
    assert judge({1: beat((START + 0.6) * T, doing=Activity.LOADING)}, NOW, T).to_kill == {1}


def test_ranks_that_wait_in_their_first_iteration_for_one_that_trains_again_outlive_it() -> None:
    stood = 1.6 * T
    hung = judge({1: beat(stood), 2: beat(stood, doing=Activity.REJOINED)}, NOW, T)
    assert hung.pids == hung.to_kill == {1}


@given(st.dictionaries(st.integers(1, 8), st.tuples(st.floats(0, 400), st.floats(0, 400), st.sampled_from(Activity))))
def test_only_processes_that_have_to_make_progress_and_stand_still_are_ever_ended(
    rows: dict[int, tuple[float, float, Activity]],
) -> None:
    hung = judge({pid: beat(*row) for pid, row in rows.items()}, NOW, T)
    assert hung.silent <= hung.pids
    assert hung.to_kill <= hung.pids
    longest = {Activity.TRAINING: T, Activity.REJOINED: FIRST * T, Activity.LOADING: START * T}
    for pid in hung.pids:
        moved, alive, doing = rows[pid]
        assert doing is not Activity.LEFT
        assert moved > longest.get(doing, math.inf) - 1e-6 or alive > T - 1e-6


def test_a_health_check_that_ends_well_lets_the_node_train() -> None:
    check_health("exit 0", 10.0)
    check_health("", 0.0)


def test_a_health_check_that_fails_makes_the_node_leave_in_one_line() -> None:
    with pytest.raises(NodeExcluded, match="leaves the job: its health check ended with exit code 3: exit 3") as found:
        check_health("exit 3", 10.0)
    assert "\n" not in str(found.value)


def test_a_health_check_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with pytest.raises(NodeExcluded, match=r"did not end within 0\.5 s"):
        check_health(f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/pid; wait", 0.5)
    assert time.monotonic() - begun_s < 20
    assert_gone(tmp_path / "pid")


def test_a_health_check_ends_with_the_launcher_that_is_told_to_end(tmp_path: Path) -> None:
    class Told(Exception):
        pass

    def end(number: int, frame: object) -> None:
        raise Told

    before = signal.signal(signal.SIGUSR1, end)
    check = f"echo $$ > {tmp_path}/pid; kill -USR1 {os.getpid()}; sleep 60"
    try:
        with pytest.raises(Told):
            check_health(check, 60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_gone(tmp_path / "pid")


def test_no_health_check_runs_where_its_launcher_is_told_to_end_before_it_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ToldAtOnce(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            (tmp_path / "pid").write_text(str(self.pid))
            if self.stdin is not None:
                self.stdin.close()  # as when the launcher has ended
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", ToldAtOnce)
    with pytest.raises(KeyboardInterrupt):
        check_health(f"touch {tmp_path}/ran", 60.0)
    assert_gone(tmp_path / "pid")
    assert not (tmp_path / "ran").exists()


def assert_gone(pid: Path) -> None:
    """The process whose number stands there has ended."""
    child, begun_s = Path(f"/proc/{int(pid.read_text())}"), time.monotonic()
    with contextlib.suppress(OSError):  # it is gone
        while "Z" not in (child / "stat").read_text().split()[2]:
            assert time.monotonic() - begun_s < 20
            time.sleep(0.02)


def test_a_launcher_sees_what_its_worker_says(tmp_path: Path) -> None:
    own = Heartbeat(str(tmp_path))
    found = read_beat(tmp_path, os.getpid())
    assert found is not None
    assert found.doing is Activity.STARTING
    for act, doing in (
        (own.loads, Activity.LOADING),
        (own.rejoined, Activity.REJOINED),
        (own.moved, Activity.TRAINING),
        (own.rejoined, Activity.TRAINING),  # it has run iterations again
        (lambda: own.rest(lost_a_peer=True), Activity.LOST_A_PEER),
        (lambda: own.rest(lost_a_peer=False), Activity.LOST_A_PEER),  # whatever failed then came of that
        (own.rejoined, Activity.REJOINED),
        (lambda: own.rest(lost_a_peer=False), Activity.LEFT),
    ):
        act()
        now = read_beat(tmp_path, os.getpid())
        assert now is not None
        assert now.doing is doing
        assert found.moved_s <= now.moved_s <= time.monotonic()


@given(content=st.binary(max_size=40))
def test_a_heartbeat_that_cannot_be_understood_is_none(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "1").write_bytes(content)
    found = read_beat(folder, 1)
    assert found is None or len(content) >= 24
    assert read_beat(folder, 2) is None


def test_a_place_is_the_innermost_function_and_the_line_of_megatron_that_called_it() -> None:
    space: dict[str, Any] = {"__name__": "megatron.training.training", "sys": sys, "found": []}
    source = "def barrier():\n    found.append(sys._getframe())\ndef training_log():\n    barrier()\ntraining_log()\n"
    exec(compile(source, "training.py", "exec"), space)
    assert place_of(space["found"][0]) == "barrier, called by training_log (megatron/training/training.py:4)"
    assert place_of(None) == ""


def test_a_place_in_a_collective_of_checkpoints_is_the_line_that_wants_it() -> None:
    engine = "megatron.core.dist_checkpointing.moe"
    transport: dict[str, Any] = {"__name__": f"{engine}.replication.tcp", "sys": sys, "found": []}
    exec("def wait():\n    found.append(sys._getframe())\ndef gather():\n    wait()\n", transport)
    taker: dict[str, Any] = {"__name__": f"{engine}.snapshot.memory_limit", "gather": transport["gather"]}
    exec("def room():\n    gather()\nroom()\n", taker)
    place = place_of(transport["found"][0])
    assert place == "wait, called by room (megatron/core/dist_checkpointing/moe/snapshot/memory_limit.py:2)"


def test_a_launcher_sees_where_its_worker_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    own = Heartbeat(str(tmp_path))
    deadline_s = time.monotonic() + 20
    while not (found := read_beat(tmp_path, os.getpid())) or not found.place:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    own.moved()
    kept = read_beat(tmp_path, os.getpid())
    assert kept is not None
    assert kept.place, "what it does is not written over where it is"


def test_a_stopped_worker_is_seen_not_to_run_and_one_that_runs_prints_its_stacks(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom moe_ckpt.megatron_core import skip_megatron_core\nskip_megatron_core()\n"
        "from megatron.core.dist_checkpointing.moe.standby import heartbeat\n"
        "heartbeat.BEAT_S = 0.05\nheartbeat.Heartbeat(sys.argv[1]).moved()\n"
        "def here_it_stands():\n    print('up', flush=True)\n    time.sleep(60)\nhere_it_stands()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None and worker.stderr is not None
    assert worker.stdout.readline() == "up\n"
    os.kill(worker.pid, stacks_signal())
    assert any("here_it_stands" in line for line in worker.stderr)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.2)
    stopped = read_beat(tmp_path, worker.pid)
    time.sleep(0.5)
    assert stopped is not None
    assert read_beat(tmp_path, worker.pid) == stopped
    worker.kill()
    worker.communicate()


class Watched:
    """An agent with one rank, a process that runs this code; `start_reading` in it reads what never comes."""

    HANG_S = 2.0
    CODE = (
        "import os, sys, time\nfrom moe_ckpt.megatron_core import skip_megatron_core\nskip_megatron_core()\n"
        "from megatron.core.dist_checkpointing.moe.standby import heartbeat\nheartbeat.BEAT_S = 0.05\n"
        "def start_reading():\n    print('up', flush=True)\n    open(sys.argv[1]).read()\n"
    )

    def __init__(self, what: str, fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_agent, "LOOK_S", 0.0)
        monkeypatch.setattr(health_agent, "STACKS_S", 0.2)
        monkeypatch.setattr(HealthAgent.__mro__[2], "__init__", lambda agent: None)
        monkeypatch.setattr(HealthAgent, "_pids", lambda agent: {0: self.process.pid} if self.is_there else {})
        self.agent = HealthAgent(hygiene=HealthOptions(hang_s=self.HANG_S))
        monkeypatch.setenv(heartbeat.FOLDER, os.environ[heartbeat.FOLDER])
        code = f"{self.CODE}{what}\nstart_reading()\n"
        command = [sys.executable, "-c", code, str(fifo)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    @property
    def is_there(self) -> bool:
        return self.process.poll() is None

    def watch(self, for_s: float) -> int | None:
        """Let the agent look again and again until the process has ended, or for so long; the exit code."""
        until_s = time.monotonic() + for_s
        while self.is_there and time.monotonic() < until_s:
            self.agent.kill_hung_ranks()
            time.sleep(0.05)
        return self.process.returncode


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Watched]]:
    os.mkfifo(tmp_path / "fifo")
    with contextlib.ExitStack() as ending:

        def start(what: str) -> Watched:
            one = Watched(what, tmp_path / "fifo", monkeypatch)
            ending.callback(one.process.wait)
            ending.callback(one.process.kill)
            return one

        yield start


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("", id="imports", marks=pytest.mark.ci),
        pytest.param("heartbeat.own_heartbeat()", id="starts", marks=pytest.mark.ci),
        pytest.param("heartbeat.own_heartbeat().loads()", id="loads", marks=pytest.mark.ci),
    ],
)
def test_a_rank_that_is_stopped_before_its_first_iteration_is_named_and_ended(
    what: str, watched: Callable[[str], Watched], caplog: pytest.LogCaptureFixture
) -> None:
    rank = watched(what)
    assert rank.watch(2 * rank.HANG_S) is None, "as long as it runs it may take longer than an iteration"
    os.kill(rank.process.pid, signal.SIGSTOP)
    assert rank.watch(60.0) == -signal.SIGKILL
    line = rf"local rank 0 \(process {rank.process.pid}, stopped, it does not answer\) has not come to an iteration for"
    (said,) = [text for text in caplog.messages if re.search(line, text)]
    assert ("; it was last in start_reading" in said) == bool(what), "it cannot say where it is now"


@pytest.mark.ci
def test_a_rank_that_reads_for_ever_before_its_first_iteration_is_told_of_first_and_ended_at_last(
    watched: Callable[[str], Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "START", 2.0)
    monkeypatch.setattr(health_check, "LEAST_GRACE_S", 1.0)
    rank = watched("heartbeat.own_heartbeat().loads()")
    with caplog.at_level(logging.WARNING):
        assert rank.watch(60.0) == -signal.SIGKILL
    first, last, *_ = caplog.messages
    who, where = rf"local rank 0 \(process {rank.process.pid}, sleeping\)", "it is in start_reading"
    assert re.search(rf"{who} has not come to its first iteration: for \d+ s {where}", first)
    assert re.search(rf"{who} has not come to an iteration for \d+ s; {where}", last)


def test_a_rank_that_stands_still_and_turns_out_not_to_run_is_named_as_such_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was stopped more than a second after its last iteration, so that it was seen to run since."""
    hang_s = 60.0
    process = subprocess.Popen(["sleep", "100"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(health_agent, "LOOK_S", 0.0)
    monkeypatch.setattr(health_agent, "STACKS_S", 0.0)
    monkeypatch.setattr(HealthAgent.__mro__[2], "__init__", lambda agent: None)
    monkeypatch.setattr(HealthAgent, "_pids", lambda agent: {0: process.pid})
    monkeypatch.setattr(health_agent, "started", lambda pid: 0)  # it could say all that before
    agent = HealthAgent(hygiene=HealthOptions(hang_s=hang_s))
    for alive_s in (4.0, 4.5, 6.0):
        now_s = time.monotonic()
        reading = HeartbeatReading(now_s - hang_s - 1, now_s - alive_s, Activity.TRAINING)
        monkeypatch.setattr(health_agent, "read_beat", lambda folder, pid, reading=reading: reading)
        agent.kill_hung_ranks()
    assert process.wait(60) == -signal.SIGKILL
    stood = [re.sub(r".*process \d+, (.*)\) has trained no iteration.*", r"\1", one) for one in caplog.messages]
    assert stood[:2] == ["stopped", "stopped, it does not answer"] and len(stood) == 3, caplog.messages


@pytest.mark.ci
def test_a_rank_of_a_node_that_was_suspended_has_all_of_its_time_again(watched: Callable[[str], Watched]) -> None:
    rank = watched("heartbeat.own_heartbeat().moved()")
    rank.watch(0.5)
    rank.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * rank.HANG_S)  # in which nobody looks
    went_on_s = time.monotonic()
    rank.agent.kill_hung_ranks()
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(0.5)
    assert rank.watch(60.0) == -signal.SIGKILL
    assert time.monotonic() - went_on_s >= rank.HANG_S


def test_a_launcher_that_always_looks_rarely_ends_a_rank_that_does_not_run(
    watched: Callable[[str], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, later_s = watched("heartbeat.own_heartbeat().moved()"), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(later_s), sleep=time.sleep)
    monkeypatch.setattr(health_agent, "time", clock)
    rank.process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        rank.agent.kill_hung_ranks()
        later_s.append(3 * rank.HANG_S)
    assert rank.process.wait(60.0) == -signal.SIGKILL


@pytest.mark.ci
def test_a_node_that_was_suspended_says_once_who_hangs(
    watched: Callable[[str], Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, later_s = watched("heartbeat.own_heartbeat().moved()"), [0.0]

    def suspended_once(printing_s: float) -> None:
        later_s[0] = max(later_s[0], 3 * rank.HANG_S)
        time.sleep(printing_s)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0], sleep=suspended_once)
    monkeypatch.setattr(health_agent, "time", clock)
    rank.process.send_signal(signal.SIGSTOP)
    assert rank.watch(60.0) == -signal.SIGKILL
    assert sum("stopped, it does not answer) has trained no" in one for one in caplog.messages) == 1, caplog.messages


def test_a_rank_that_runs_again_while_stacks_are_printed_is_not_killed(
    watched: Callable[[str], Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = watched("heartbeat.own_heartbeat().moved()")

    def runs_again(_: float) -> None:
        rank.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)

    monkeypatch.setattr(health_agent, "time", SimpleNamespace(monotonic=time.monotonic, sleep=runs_again))
    rank.process.send_signal(signal.SIGSTOP)
    assert rank.watch(2 * rank.HANG_S) is None
    assert "stopped, it does not answer) has trained no iteration for" in caplog.messages[0]


def test_nothing_of_an_earlier_process_of_its_number_is_known_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    hang_s = 2.0
    monkeypatch.setattr(health_agent, "LOOK_S", 0.0)
    monkeypatch.setattr(health_agent, "STACKS_S", 0.0)
    monkeypatch.setattr(HealthAgent.__mro__[2], "__init__", lambda agent: None)
    monkeypatch.setattr(HealthAgent, "_pids", lambda agent: {0: process.pid})
    agent = HealthAgent(hygiene=HealthOptions(hang_s=hang_s))
    with subprocess.Popen(["sleep", "100"]) as process:
        then_ns = time.monotonic_ns() - round(10 * hang_s * 1e9)
        said = struct.pack("<qqq", then_ns, then_ns, Activity.TRAINING)
        (Path(os.environ[heartbeat.FOLDER]) / str(process.pid)).write_bytes(said)
        vars(agent)["_killed"].add(process.pid)
        agent.kill_hung_ranks()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until_s:
            agent.kill_hung_ranks()
            time.sleep(0.05)
        killed = process.poll()
        process.kill()
    assert killed == -signal.SIGKILL, "that one was killed, not this one"


def agent_method(name: str) -> Callable[..., Any]:
    """What torch's loop calls of an agent."""
    return lambda agent, *arguments: methodcaller(name, *arguments)(agent)


class Slot:
    """A process that stays where it has left, and otherwise ends once it has to leave."""

    stays, finish_s, problem = True, 0.0, ""

    def __init__(self, pid: int, *, has_left: bool) -> None:
        self.pid, self.has_left, self.exit_code = pid, has_left, cast("int | None", None)

    def hear(self) -> None:
        pass

    def call_off(self) -> None:
        self.exit_code = 1


@pytest.mark.parametrize(("said", "is_charged"), [(Activity.LEFT, True), (Activity.TRAINING, False)])
def test_a_rank_that_fails_is_charged_once_though_its_neighbour_leaves_first_and_none_that_was_well_till_then(
    said: Activity, is_charged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HealthStandbyAgent.__mro__[2], "__init__", lambda agent, standbys: None)
    beats = {11: beat(0, doing=Activity.LOST_A_PEER), 12: beat(0, doing=said)}
    monkeypatch.setattr(health_agent, "read_beat", lambda folder, pid: beats[pid])
    monkeypatch.setattr(HealthStandbyAgent, "_environments", lambda agent, group: {0: {}, 1: {}})
    monkeypatch.setattr(agents, "_identity", str)
    agent = HealthStandbyAgent(standbys=1, hygiene=HealthOptions(strikes=2, within_s=60.0))
    note, failed, stay = map(agent_method, ("_note_failures", "_failures", "_those_that_stay"))
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=4), SimpleNamespace(global_rank=5)])
    for failures in (1, 2):
        slots: dict[int, Any] = {0: Slot(11, has_left=True), 1: Slot(12, has_left=False)}
        vars(agent).update(_slots=slots, _standbys=[], _wanted=1, _is_charged=False)
        note(agent, failed(agent, group, {0: 1}))
        assert not [one for one in caplog.messages if "rank 4" in one]
        with pytest.raises(NodeExcluded) if is_charged and failures == 2 else contextlib.nullcontext():
            assert list(stay(agent, group).values()) == [slots[0]]
        note(agent, failed(agent, group, {1: 1}) if is_charged else {})
        line = f"rank 5 ended with exit code 1, failure {failures} of 2 within 60 s"
        assert sum(line in one for one in caplog.messages) == is_charged, caplog.messages


def test_standbys_are_given_up_for_those_that_die_in_a_row_not_for_some_within_weeks() -> None:
    class Standby:
        def __init__(self, *, dies: bool) -> None:
            self.pid, self.is_ready, self.exit_code, self._dies = 7, False, None, dies

        def hear(self) -> None:
            if self._dies:
                self.exit_code = 1
            else:
                self.is_ready = True

    agent: Any = object.__new__(agents.StandbyAgent)
    standbys: list[Standby] = []
    vars(agent).update(_slots={}, _standbys=standbys, _wanted=2, _quick_deaths=0)
    for dies, in_a_row in ((True, 1), (True, 2), (False, 0), (True, 1), (True, 2), (True, 3)):
        standbys.append(Standby(dies=dies))  # beside one that waits since it was ready
        methodcaller("_hear")(agent)
        assert vars(agent)["_quick_deaths"] == in_a_row


def test_a_node_that_has_waited_for_long_is_checked_again_before_its_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HealthAgent.__mro__[2], "__init__", lambda agent: None)
    handler, later_s, ran = object.__new__(SpareHandler), [0.0], tmp_path / "ran"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(later_s))
    monkeypatch.setattr(health_agent, "time", clock)

    def waits(agent: object, group: object) -> None:
        assert handler.due_check() is None
        for times in (2, 3):
            later_s.append(health_agent.RECHECK_S)
            check = handler.due_check()
            assert check is not None
            if times == 3:
                (tmp_path / "sick").touch()
            check()
            assert handler.due_check() is None
            assert ran.read_text() == "\n" * times

    monkeypatch.setattr(HealthAgent.__mro__[2], "_rendezvous", waits)
    agent = HealthAgent(hygiene=HealthOptions(health_check=f"echo >> {ran}; test ! -e {tmp_path}/sick"))
    with pytest.raises(NodeExcluded, match="health check ended with exit code 1"):
        agent_method("_rendezvous")(agent, SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)))
    assert ran.read_text() == "\n" * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_does_not_disturb_a_launcher_that_ends(number: signal.Signals) -> None:
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {one: signal.getsignal(one) for one in handled}
    try:
        with health_agent.own_agents(0, parsed()):
            ranks = start_processes("rank", "sleep", {0: ("100",)}, {0: {}}, DefaultLogsSpecs())
            try:
                with pytest.raises(SignalException):
                    signal.raise_signal(number)
                signal.raise_signal(number)  # as `timeout` does once all of its group have it
            finally:
                ranks.close()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class Reader(io.StringIO):
    """A terminal at which a signal arrives while it is written to."""

    def write(self, text: str) -> int:
        signal.raise_signal(signal.SIGTERM)
        return len(text)


def test_a_signal_that_logging_takes_ends_the_launcher_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {one: signal.getsignal(one) for one in handled}
    try:
        with health_agent.own_agents(0, parsed()):
            logging.StreamHandler(Reader()).handle(logging.makeLogRecord({"msg": "hello"}))
            with pytest.raises(SignalException):
                methodcaller("_monitor_workers", None)(object.__new__(NodeAgent))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert NodeAgent.told_to_end is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_with_standbys_ends_its_ranks_at_a_signal_as_one_without(number: signal.Signals) -> None:
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    # A shell starts its background jobs with an ignored SIGINT, which would stay so.
    before = {one: signal.signal(one, signal.SIG_DFL) for one in handled}
    try:
        with health_agent.own_agents(1, parsed()):
            assert signal.getsignal(number) != signal.SIG_DFL, "it would end here, and its ranks with it at once"
            with pytest.raises(SignalException) as raised:
                signal.raise_signal(number)
        for other in handled:  # as from a terminal and from a scheduler, while ranks are told to end
            signal.raise_signal(other)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert raised.value.sigval == number


def test_a_launcher_leaves_signals_ignored_that_it_was_started_to_ignore() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with health_agent.own_agents(1, parsed()):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_the_examples_for_kubernetes_give_the_launcher_options_that_it_takes(name: str) -> None:
    text = (ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text()
    start = text.index("command: [moe-ckpt-run]")
    arguments = re.findall(r"^ +- (--?\S.*|moe-ckpt-pretrain)$", text[start : text.index(" env:", start)], re.MULTILINE)
    options = parse_options(arguments)
    watched = HealthOptions.of(options)
    assert (watched.strikes, watched.within_s, watched.hang_s) == (3, 600, 900)
    assert (options.nnodes, options.training_script, options.no_python) == ("4", "moe-ckpt-pretrain", True)
    assert "--moe-ckpt-strategy=full" in options.training_script_args
