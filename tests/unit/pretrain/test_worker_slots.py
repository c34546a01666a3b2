"""Slots: who takes which, and what launcher and worker say to each other."""

from __future__ import annotations

import argparse
import fcntl
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from descriptors import room_for_open_files
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore, run
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.standby import slot as slot_module
from megatron.core.dist_checkpointing.moe.standby.slot import DESCRIPTOR, VERSION, Channel, WorkerSlot
from megatron.core.dist_checkpointing.moe.standby.slot import LAUNCHER_VERSION as VERSION_OF
from megatron.core.dist_checkpointing.moe.stock import flags
from megatron.pretrain import rendezvous
from megatron.pretrain.standby import agent as agents
from megatron.pretrain.standby import process as process_module
from megatron.pretrain.standby.meeting import NodeRank, NodeRankAgreement, settled, workers_store
from megatron.pretrain.standby.process import SlotProcess, await_word, may_leave_idle_class
from megatron.pretrain.standby.run import meet_at_own_store, parse_options, refuse_what_cannot_start

Ends = tuple[Channel, socket.socket]
WAIT_S = 60.0


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), other
        other.close()
        for thread in threading.enumerate():
            if thread.name == "moe-ckpt-slot":
                thread.join(WAIT_S)  # a slot that listens to its launcher ends with it


def test_a_message_that_comes_in_pieces_is_one_message(ends: Ends) -> None:
    channel, other = ends
    other.sendall(b'{"slot": {"RA')
    assert channel.receive() == []
    other.sendall(b'NK": "3"}}\n{"ready": true}\n')
    assert channel.receive(1.0) == [{"slot": {"RANK": "3"}}, {"ready": True}]


def test_a_process_with_many_open_files_is_heard_too() -> None:
    one, other = socket.socketpair()
    with one, other, room_for_open_files(1100), socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, 1024)) as high:
        other.sendall(b'{"ready": true}\n')
        assert Channel(high).receive(1.0) == [{"ready": True}]


def test_what_was_said_before_the_other_end_was_gone_is_heard(ends: Ends) -> None:
    channel, other = ends
    other.sendall(b'{"ready": true}\n')
    other.close()
    assert channel.receive(1.0) == [{"ready": True}]
    with pytest.raises(ConnectionError):
        channel.receive(1.0)


def test_a_launcher_that_looks_seldom_notices_at_once_that_a_rank_leaves_and_that_one_ends(ends: Ends) -> None:
    channel, other = ends
    process = SlotProcess(psutil.Process(), channel)
    for does in (lambda: other.sendall(b'{"left": true}\n'), other.close):
        begun_s = time.monotonic()
        threading.Timer(0.05, does).start()
        await_word([process], 30.0)
        process.hear()
        assert time.monotonic() - begun_s < 15
    assert process.has_left
    assert process.is_silent
    await_word([process], 0.01)  # one that said its last word is no reason to look again and again


def test_a_process_without_a_launcher_with_slots_has_its_rank_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DESCRIPTOR, raising=False)
    slot = WorkerSlot.from_environment()
    slot.take(lambda: pytest.fail("there is nothing to wait for"))
    slot.training()
    assert slot.taken_s is None


def test_a_standby_warms_up_says_so_and_takes_the_rank_that_it_is_told(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, other = ends
    launcher = Channel(other)
    monkeypatch.delenv("RANK", raising=False)
    slot, done = WorkerSlot(channel), []

    def warm_up() -> None:
        done.append("warm")
        launcher.send({"slot": {"RANK": "3", "WORLD_SIZE": "4"}})

    with monkeypatch.context() as scratch:
        scratch.setattr(os, "environ", dict(os.environ))
        slot.take(warm_up, copies=False)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
    slot.training()
    slot.training()
    assert done == ["warm"]
    assert slot.taken_s is not None
    ready = {"version": VERSION, "pid": os.getpid(), "ready": True, "copies": False}
    begun = {"version": VERSION, "will_copy": False}
    assert launcher.receive(1.0) == [begun, ready, {"training": True}]


def test_a_slot_that_comes_with_a_copy_which_nobody_waits_for_any_more_is_taken(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, other = ends
    monkeypatch.delenv("RANK", raising=False)
    launcher, (read, write) = Channel(other), os.pipe()
    os.close(read)
    launcher.send({"copy": True}, write)
    launcher.send({"slot": {"RANK": "3", "WORLD_SIZE": "4"}})
    os.close(write)
    with monkeypatch.context() as scratch:
        scratch.setattr(os, "environ", dict(os.environ))
        WorkerSlot(channel).take(lambda: None, copies=False)
        assert os.environ["RANK"] == "3"


def test_a_standby_whose_launcher_ends_ends_too(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = ends
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ending:
        WorkerSlot(channel).take(other.close)
    assert not ending.value.code


def test_a_rank_whose_launcher_is_gone_trains_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = ends
    monkeypatch.setenv("RANK", "0")
    other.close()
    slot = WorkerSlot(channel)
    slot.take()
    slot.training()
    assert slot.taken_s is None


def test_a_negative_number_of_standbys_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--moe-ckpt-standbys", "-1", "train.py"])
    assert "--moe-ckpt-standbys -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "variable", "restarts"), [([], None, 20), ([], "4", 4), (["--max-restarts", "0"], "4", 0)]
)
def test_ranks_are_restarted_unless_it_is_said_how_often(
    given: list[str], variable: str | None, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends a job at its first fault."""
    monkeypatch.delenv("PET_MAX_RESTARTS", raising=False)
    if variable is not None:
        monkeypatch.setenv("PET_MAX_RESTARTS", variable)
    assert parse_options([*given, "--moe-ckpt-standbys", "1", "train.py"]).max_restarts == restarts


def test_options_that_torch_does_not_know_yet_are_taken_and_ranks_count_on_what_they_get(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = argparse.ArgumentParser()
    for name in ("--nnodes", "--nproc-per-node", "training_script"):
        older.add_argument(name, default="1")
    monkeypatch.setattr(run, "get_args_parser", lambda: older)
    monkeypatch.setenv("MOE_CKPT_PATIENCE_S", "150")
    parse_options(["--signals-to-handle=SIGINT", "--shutdown-timeout=150", "train.py"])
    assert "has no --shutdown-timeout: ranks get 30 s to end, not 150" in capsys.readouterr().err
    assert "MOE_CKPT_PATIENCE_S" not in os.environ


@pytest.mark.parametrize(
    ("given", "is_warned"),
    [
        ("--nnodes 16 --node-rank 3 --master-addr first", True),
        ("--nnodes 16 --rdzv-backend c10d --rdzv-endpoint first:29400", False),
        ("--nproc-per-node 8", False),
    ],
)
def test_a_launch_in_which_no_spare_could_join_says_so(
    given: str, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_what_cannot_start(parse_options([*given.split(), "--no-python", "train"]))
    assert (
        "no spare can replace a node that is lost; give --rdzv-backend c10d" in capsys.readouterr().err
    ) is is_warned


@pytest.mark.parametrize(("own", "expected"), [(None, "90"), ("60", "60")])
def test_ranks_know_how_long_they_may_take_to_end(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | ({"MOE_CKPT_PATIENCE_S": own} if own else {}))
    parse_options(["--shutdown-timeout=90", "train.py"])
    assert os.environ["MOE_CKPT_PATIENCE_S"] == expected


def test_a_flag_of_the_script_that_stands_before_it_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--moe-ckpt-strategy", "full", "train.py"])
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("no such option before SCRIPT: --moe-ckpt-strategy; give flags of SCRIPT behind it")
    assert len(said) == 2, "and the usage in one line"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nothing.py"], "SCRIPT nothing.py is no file"),
        (["--nproc-per-node", "x", __file__], "--nproc-per-node x: Unsupported nproc_per_node value: x"),
        (["--nproc-per-node", "cuda", __file__], "--nproc-per-node cuda: "),
        (["--nnodes", "1:2:3", __file__], "--nnodes 1:2:3: "),
        (["--nnodes", "many", __file__], "--nnodes many: "),
        (["--nnodes", "0", __file__], "--nnodes 0: give 1 at least"),
        (["--nnodes", "2:1", __file__], "--nnodes 2:1: "),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node 0: give 1 at least"),
        (["--max-restarts=-1", __file__], "--max-restarts -1: give 0 at least"),
    ],
)
def test_a_launch_that_no_rank_could_survive_is_refused_in_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        refuse_what_cannot_start(parse_options(given))
    assert capsys.readouterr().err.startswith(f"moe-ckpt-run: error: {said}")


@pytest.mark.parametrize("given", [[__file__], ["--module", "nothing"], ["--no-python", "nothing"]])
def test_modules_and_commands_are_left_to_torchrun(given: list[str]) -> None:
    refuse_what_cannot_start(parse_options(given))


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ("", "c10d"),
        ("--nnodes 2", "static"),
        ("--nnodes 1:2", "static"),
        ("--master-port 29500", "static"),
        ("--rdzv-endpoint host:29400", "static"),
        ("--rdzv-backend etcd", "etcd"),
    ],
)
def test_a_single_node_keeps_the_id_that_it_was_given_for_all_starts(given: str, backend: str) -> None:
    options = parse_options([*given.split(), "--rdzv-id", "run-12", __file__])
    endpoint = options.rdzv_endpoint
    meet_at_own_store(options)
    assert (options.rdzv_backend, options.rdzv_id) == (backend, "run-12")
    assert options.rdzv_endpoint == ("localhost:0" if backend == "c10d" else endpoint)


@pytest.mark.skipif(not may_leave_idle_class(), reason="this user's processes cannot leave the class for idle time")
def test_a_standby_runs_where_nothing_else_wants_to_until_it_has_a_slot() -> None:
    standby = SlotProcess.started([sys.executable, "-c", "input()"], os.environ, idle=True)
    try:
        assert os.sched_getscheduler(standby.pid) == os.SCHED_IDLE
        standby.sit({"RANK": "0"})
        assert os.sched_getscheduler(standby.pid) == os.SCHED_OTHER
    finally:
        standby.end(signal.SIGKILL)
        assert standby.wait(WAIT_S)
    assert standby.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("idle", [True, False])
def test_a_standby_has_no_rank_also_where_its_launcher_was_given_one(idle: bool, tmp_path: Path) -> None:
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "7"}
    command = ["sh", "-c", f"env > '{tmp_path}/found'"]
    process = SlotProcess.started(command, os.environ | given, idle=idle)
    process.hurry()
    assert process.wait(WAIT_S)
    found = {line.partition("=")[0] for line in (tmp_path / "found").read_text().splitlines()}
    assert found & given.keys() == (set() if idle else given.keys())


@pytest.mark.parametrize("does", ["time.sleep(60)", "sys.exit()"])
def test_a_standby_that_does_not_answer_is_not_copied(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "COPY_S", 0.1)
    monkeypatch.setattr(process_module, "adopt_orphans", lambda: None)  # else this process does, for ever
    standby = SlotProcess.started([sys.executable, "-c", f"import sys, time; {does}"], os.environ, idle=False)
    try:
        assert standby.copy() is None
    finally:
        standby.end(signal.SIGKILL)
        assert standby.wait(WAIT_S)


def test_a_standby_is_not_copied_where_the_system_lets_nobody_adopt_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PermissionError("prctl")

    monkeypatch.setattr(process_module, "adopt_orphans", refused)
    standby = SlotProcess.started([sys.executable, "-c", "input()"], os.environ, idle=False)
    try:
        assert standby.copy() is None
    finally:
        standby.end(signal.SIGKILL)
        assert standby.wait(WAIT_S)


def test_a_process_with_a_thread_beside_its_own_is_not_copied() -> None:
    script = "import threading; from megatron.core.dist_checkpointing.moe.standby.slot import may_be_copied as may; "
    script += "print(may()); threading.Thread(target=threading.Event().wait, daemon=True).start(); print(may())"
    script = f"from moe_ckpt.megatron_core import skip_megatron_core; skip_megatron_core(); {script}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["True", "False"], ended.stderr


def test_a_process_that_uses_a_gpu_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["1"])  # one thread
    assert slot_module.may_be_copied()
    monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
    assert not slot_module.may_be_copied()


def test_where_there_is_a_gpu_nobody_waits_for_a_standby_to_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "DEVICES", tmp_path)
    (tmp_path / "null").touch()
    assert slot_module.can_be_copied_later()
    (tmp_path / "nvidia0").touch()
    assert not slot_module.can_be_copied_later()


@pytest.mark.ci
def test_ends_of_adopted_processes_are_noted_and_those_of_own_ones_left_to_who_asks() -> None:
    script = """
import os, subprocess, sys, time
from megatron.pretrain.standby.process import adopt_orphans, let_orphans_go
def ended(pid): return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] == "Z"
adopt_orphans()
orphan = int(subprocess.run(["sh", "-c", "sleep 0.1 >&2 & echo $!"], stdout=-1).stdout)
own = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
until = time.monotonic() + 60
while not (ended(orphan) and ended(own.pid)) and time.monotonic() < until:
    time.sleep(0.01)
assert int(open(f"/proc/{orphan}/stat").read().split(")")[1].split()[1]) == os.getpid()
let_orphans_go([own.pid])  # the one that ended first may hide the other
assert own.wait() == 7
let_orphans_go([])
print(os.path.exists(f"/proc/{orphan}"))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "False\n", ended.stderr


def test_flags_of_the_loop_are_read_once_the_process_has_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(flags, "wait_for_rank", lambda: taken.append("a slot"))
    flags.arguments(argparse.ArgumentParser())
    assert taken == ["a slot"]


def kept_slot(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerSlot, Channel, list[str]]:
    """A slot whose launcher keeps survivors, the launcher's end, and what was hung up."""
    hung_up: list[str] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    slot, launcher = WorkerSlot(ends[0], may_stay=True), Channel(ends[1])
    slot.keep(lambda: hung_up.append("all"))
    return slot, launcher, hung_up


def test_a_rank_that_lost_a_peer_leaves_and_takes_the_rank_that_it_is_told(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, launcher, hung_up = kept_slot(ends, monkeypatch)
    slot.training()
    launcher.send({"slot": {"RANK": "1", "MASTER_PORT": "7"}})
    slot.leave(WAIT_S)
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("1", "7")
    assert slot.taken_s is not None
    slot.training()
    assert launcher.receive(1.0) == [{"stays": True}, {"training": True}, {"left": True}, {"training": True}]
    assert not hung_up


def test_a_rank_that_waits_for_others_hangs_up_when_its_launcher_calls_it_off(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, launcher, hung_up = kept_slot(ends, monkeypatch)
    launcher.send({"leave": True})
    until = time.monotonic() + WAIT_S
    while not hung_up and time.monotonic() < until:
        time.sleep(0.01)
    assert slot.is_called_off
    launcher.send({"slot": {"RANK": "1"}})
    slot.leave(WAIT_S)
    assert hung_up == ["all"]
    assert not slot.is_called_off


def test_a_rank_that_runs_iterations_again_says_so_and_keeps_its_connections_until_it_is_done_with_one(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, launcher, hung_up = kept_slot(ends, monkeypatch)
    slot.finishes_first(True)
    launcher.send({"leave": True})
    heard = launcher.receive(WAIT_S)
    heard += launcher.receive(WAIT_S if len(heard) < 2 else 0.0)
    assert heard == [{"stays": True}, {"finishes": slot_module.FINISH_S}]
    assert slot.is_called_off
    assert not hung_up
    slot.finishes_first(False)
    launcher.send({"slot": {"RANK": "1"}})
    slot.leave(WAIT_S)
    assert hung_up == ["all"]


def test_a_slot_that_is_called_off_before_it_is_taken_is_given_back_for_the_next(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, launcher, hung_up = kept_slot(ends, monkeypatch)

    def another_is_lost() -> None:
        launcher.send({"slot": {"RANK": "1", "MASTER_PORT": "7"}})
        launcher.send({"leave": True})
        until = time.monotonic() + WAIT_S
        while not hung_up and time.monotonic() < until:
            time.sleep(0.01)
        assert slot.is_called_off
        assert launcher.receive(1.0) == [{"stays": True}, {"left": True}, {"left": True}]
        launcher.send({"slot": {"RANK": "2", "MASTER_PORT": "8"}})

    slot.leave(WAIT_S, meanwhile=another_is_lost)
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("2", "8")
    assert not slot.is_called_off


def test_a_slot_that_is_called_off_while_it_is_taken_stays_called_off(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, launcher, hung_up = kept_slot(ends, monkeypatch)
    launcher.send({"slot": {"RANK": "1"}})

    def slowly() -> float:
        launcher.send({"leave": True})
        until = time.monotonic() + WAIT_S
        while not hung_up and time.monotonic() < until:
            time.sleep(0.01)
        return 7.0

    monkeypatch.setattr(slot_module, "since_boot_s", slowly)
    slot.leave(WAIT_S)
    assert slot.is_called_off


def test_a_rank_whose_launcher_does_not_answer_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, _, _ = kept_slot(ends, monkeypatch)
    with pytest.raises(PeerLost, match=r"did not let this rank resume within 0\.1 s"):
        slot.leave(0.1)


def test_a_rank_whose_launcher_has_ended_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, _, _ = kept_slot(ends, monkeypatch)
    ends[1].close()
    with pytest.raises(PeerLost, match="launcher died"):
        slot.leave(WAIT_S)


@pytest.mark.parametrize("knows", [True, False])
def test_ranks_have_their_local_rank_whatever_release_of_torch_starts_them(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows:
        monkeypatch.delattr(local_elastic_agent.LocalElasticAgent, "_set_local_rank_env", raising=False)
    rendezvous_of_job = SimpleNamespace(get_run_id=lambda: "job")
    spec = SimpleNamespace(
        role="r", local_world_size=2, max_restarts=3, rdzv_handler=rendezvous_of_job, virtual_local_rank=False
    )
    workers = [SimpleNamespace(global_rank=4 + one, local_rank=one, role_rank=one, world_size=8, role_world_size=8)
               for one in range(2)]  # fmt: skip
    group = SimpleNamespace(
        spec=spec, workers=workers, group_rank=2, group_world_size=4, master_addr="first", master_port=7
    )
    agent = object.__new__(agents.StandbyAgent)
    vars(agent).update(_workers=SimpleNamespace(start=1))
    found = methodcaller("_environments", group)(agent)
    assert [(one["LOCAL_RANK"], one["RANK"], one["WORLD_SIZE"]) for one in found.values()] == [
        ("0", "4", "8"),
        ("1", "5", "8"),
    ]


def test_connections_that_cannot_be_closed_keep_no_rank_from_its_slot(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    slot, launcher = WorkerSlot(ends[0], may_stay=True), Channel(ends[1])
    slot.keep(fails)
    launcher.send({"leave": True})
    launcher.send({"slot": {"RANK": "1"}})
    slot.leave(WAIT_S)
    assert os.environ["RANK"] == "1"
    assert "changed size during iteration" in caplog.text


def test_survivors_whose_ranks_other_nodes_have_now_end_before_others_build_in_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(2)]
    order: list[object] = []

    def process(pid: int) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, exit_code=None, is_ready=True, sit=lambda _: order.append(f"{pid} begins"))

    for name in ("_setup_local_watchdog", "_setup_healthcheck", "_hear"):
        monkeypatch.setattr(agents.StandbyAgent, name, lambda *_, **__: None)
    monkeypatch.setattr(agents, "_identity", lambda environment: environment["RANK"] + environment["WORLD_SIZE"])
    monkeypatch.setattr(agents.StandbyAgent, "_environments", lambda *_: dict(enumerate(places)))
    monkeypatch.setattr(agents.StandbyAgent, "_await_standby", lambda _, missing: order.append(f"{missing} missing"))
    monkeypatch.setattr(agents.StandbyAgent, "_standby", lambda agent: (vars(agent)["_standbys"].pop(), "is a standby"))
    monkeypatch.setattr(
        agents.StandbyAgent, "_end", lambda _, ended, number, __: order.extend((one.pid, number) for one in ended)
    )
    agent = object.__new__(agents.StandbyAgent)
    vars(agent).update(_survivors={"03": process(1), "12": process(2)}, _standbys=[process(3)], _slots={})
    assert methodcaller("_start_workers", None)(agent) == {0: 1, 1: 3}
    assert order == [(2, signal.SIGKILL), "1 missing", "1 begins", "3 begins"]


@pytest.mark.parametrize("version", [None, "1"])
def test_a_launcher_of_another_release_keeps_nobody(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here:
        monkeypatch.setattr(
            os, "environ", {DESCRIPTOR: str(there.detach())} | ({VERSION_OF: version} if version else {})
        )
        assert not WorkerSlot.from_environment().may_stay


@given(st.lists(st.none() | st.builds(NodeRank, st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_nodes_keep_their_numbers_where_they_can_and_each_gets_one(found: list[NodeRank | None]) -> None:
    nodes = len(found)
    numbers = settled(found, nodes)
    assert sorted(numbers) == list(range(nodes))
    first: set[int] = set()
    for place, number in zip(found, numbers, strict=True):
        if place is not None and place.nodes == nodes and place.number < nodes and place.number not in first:
            first.add(place.number)
            assert number == place.number


def test_a_store_at_an_ipv4_address_sees_ipv4_addresses_which_a_file_of_hosts_may_name() -> None:
    store = workers_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("::1", store.port))
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"


def test_nodes_that_meet_again_look_often_and_then_as_seldom_as_torchrun() -> None:
    pause = vars(dynamic_rendezvous)["_delay"]  # a function of that module that has no name for others
    begun_s = time.monotonic()
    with rendezvous.pausing_at_most(0.02):
        pause(seconds=5)
    assert time.monotonic() - begun_s < 4
    pause(seconds=0.1)
    assert time.monotonic() - begun_s >= 0.1


def test_agents_of_two_nodes_agree_on_numbers_and_on_where_their_workers_meet() -> None:
    store = HashStore()
    had = {0: None, 1: NodeRank(0, 2)}  # a spare, which came first, and the node that had been the first one
    with ThreadPoolExecutor() as agents:
        numbers = list(agents.map(lambda index: NodeRankAgreement(store, index, 2).number(had[index]), range(2)))
        assert numbers == [1, 0]
        places = list(
            agents.map(
                lambda one: NodeRankAgreement(store, one[0], 2).workers(one[1], 3 * one[1], "localhost"),
                enumerate(numbers),
            )
        )
    assert {(place.address, place.port, place.start) for place in places} == {("localhost", places[1].port, 3)}
    assert [place.kept is None for place in places] == [True, False]


def test_a_step_of_a_rendezvous_is_named_after_its_method_without_a_look_at_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step() -> str:
        return record()

    def record() -> str:
        return str(vars(dynamic_rendezvous)["get_method_name"]())

    monkeypatch.setattr(inspect, "stack", lambda *_: pytest.fail("reads sources"))
    assert step() == "step"
