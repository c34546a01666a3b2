"""Agents of the nodes of a Slurm job: what they say of how it ends, whose memory stays, and how they meet."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from world import HANG_TIMEOUT_S, ROOT, free_port

from megatron.core.dist_checkpointing.moe.extensions import AGENT_LOCK
from megatron.core.dist_checkpointing.moe.standby.verdict import leave_early, note_iteration
from megatron.pretrain.spare_nodes import SpareHandler

SLURM = ROOT / "scripts" / "slurm"
JOIN_S = 5
NOTED, OUTCOME = "moe-ckpt/noted", "moe-ckpt/outcome"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what Slurm is asked for; the batch node is down unless the file `state` says otherwise."""
    does = {name: f'echo "{name} $*" >> "{tmp_path}/asked"' for name in ("scontrol", "scancel")}
    does |= {"squeue": "echo node-0", "sinfo": f'cat "{tmp_path}/state" 2>/dev/null || echo "down*"'}
    for name, what in does.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{what}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.syspath_prepend(SLURM)
    return tmp_path / "asked"


@pytest.fixture
def store() -> TCPStore:
    """The meeting point of a job, where the batch script has noted what is said."""
    found = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found.set(NOTED, "")
    found.set(f"{NOTED}/3", "")
    return found


def options(store: TCPStore, script: str = __file__) -> list[str]:
    return ["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", *script.split()]


@pytest.fixture
def lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Path) -> Callable[[int, str], int]:
    """Exit code of an agent whose ranks leave this verdict, with its meeting point at that endpoint."""
    own = {"MOE_CKPT_NODE": "node-0", "MOE_CKPT_MEMORY": str(tmp_path / "memory"), "MOE_CKPT_MIN_RUN_S": "0"}
    monkeypatch.setattr(os, "environ", os.environ | own)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    agent, orphaned = importlib.import_module("agent"), importlib.import_module("orphaned")
    monkeypatch.setattr(agent, "register_backend", lambda handler: setattr(handler, "was_made", True))
    monkeypatch.setattr(orphaned, "PATIENCE_S", 0.2)
    monkeypatch.setattr(importlib.import_module("rendezvous"), "ANSWER_S", 0.2)

    def led(verdict: int, endpoint: str) -> int:
        def run(_options: object) -> None:
            (tmp_path / "memory" / "node-0").mkdir(exist_ok=True)
            Path(os.environ["MOE_CKPT_LAUNCH_VERDICT"]).write_text(str(verdict))

        monkeypatch.setattr(agent, "run", run)
        code: int = agent.main(["--nnodes=2", f"--rdzv-endpoint={endpoint}", __file__])
        return code

    return led


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--moe-ckpt-strikes=3/10min agent.py", "'3/10min': give failures and a time"),
        ("--moe-ckpt-standbys=two agent.py", "invalid int value: 'two'"),
        ("--moe-ckpt-unit=slurm agent.py", "Slurm gives no $SLURM_TOPOLOGY_ADDR"),
        ("nowhere.py", "SCRIPT nowhere.py is no file"),
    ],
)
def test_a_job_cannot_work_once_more_nodes_refuse_their_settings_than_are_spare(
    given: str,
    says: str,
    store: TCPStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(SLURM)
    monkeypatch.chdir(SLURM)
    own = {"MOE_CKPT_SPARES": "1", "MOE_CKPT_NODE": "node-0", "MOE_CKPT_MEMORY": str(tmp_path / "memory")}
    monkeypatch.setattr(os, "environ", os.environ | own)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    agent = importlib.import_module("agent")
    found = []
    for _ in range(2):
        assert agent.main(options(store, given)) == 2
        assert says in capsys.readouterr().err
        found.append(store.check([OUTCOME]))
    assert found == [False, True]
    assert store.get(OUTCOME) == b"2"


def test_an_agent_keeps_the_memory_of_ranks_that_leave_the_decision_to_a_user(
    lead: Callable[[int, str], int], store: TCPStore, tmp_path: Path
) -> None:
    assert lead(1, f"localhost:{store.port}") == 1
    assert store.get(OUTCOME) == b"1"
    assert (tmp_path / "memory" / "node-0").is_dir()
    assert (tmp_path / "memory" / "keep").exists()


@pytest.mark.parametrize("sealed", [False, True])
def test_an_agent_keeps_memory_with_snapshots_where_ranks_refuse_to_start(
    sealed: bool, lead: Callable[[int, str], int], tmp_path: Path
) -> None:
    """A spare may lack what the others have: what they keep is not given up for that."""
    if sealed:
        slot = tmp_path / "memory" / "node-0" / "slurm-7" / "slot-000"
        slot.mkdir(parents=True)
        (slot / "segment-000.iter_0000004-rank_00000-snapshot.json").touch()
    assert lead(2, f"localhost:{free_port()}") == 2
    assert (tmp_path / "memory" / "keep").exists() is (tmp_path / "memory" / "node-0").is_dir() is sealed


@pytest.mark.parametrize(("outcome", "sealed"), [("2", True), ("2", False), ("0", True)])
def test_an_agent_keeps_its_snapshots_where_another_node_has_refused_to_go_on(
    outcome: str,
    sealed: bool,
    lead: Callable[[int, str], int],
    store: TCPStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = importlib.import_module("agent")
    store.set(OUTCOME, outcome)
    slot = tmp_path / "memory" / "node-0" / "slurm-7" / "slot-000"
    slot.mkdir(parents=True)
    if sealed:
        (slot / "segment-000.iter_0000004-rank_00000-snapshot.json").touch()

    def closed(_options: object) -> None:
        raise RendezvousClosedError

    monkeypatch.setattr(agent, "run", closed)
    kept = sealed and outcome == "2"
    assert agent.main(options(store)) == (2 if kept else 1)
    assert store.get(OUTCOME) == (b"3" if kept else outcome.encode())
    assert slot.is_dir() is kept


def test_an_agent_tells_ranks_that_were_asked_to_leave_early_from_ranks_that_have_trained(
    lead: Callable[[int, str], int], store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_KEEP_MEMORY": "1"})
    agent = importlib.import_module("agent")
    (tmp_path / "memory" / "node-0").mkdir(parents=True)
    monkeypatch.setattr(agent, "run", lambda _options: leave_early())
    assert agent.main(options(store)) == 4
    assert store.get(OUTCOME) == b"4"
    assert (tmp_path / "memory" / "node-0").is_dir()


@pytest.mark.usefixtures("lead")
@pytest.mark.parametrize(
    ("error", "had_a_place", "tells", "trained", "held"),
    [
        (ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "")}), True, True, False, True),
        (RendezvousClosedError(), True, True, False, True),
        (RendezvousTimeoutError(), True, True, False, False),
        (RendezvousClosedError(), False, True, False, False),
        (RendezvousClosedError(), True, False, False, False),
        (RendezvousClosedError(), True, True, True, False),
    ],
    ids=["failed", "another failed", "too few nodes", "a spare", "another loop", "trained"],
)
def test_a_job_is_held_where_ranks_of_all_nodes_failed_and_none_trained(
    error: Exception,
    had_a_place: bool,
    tells: bool,
    trained: bool,
    held: bool,
    store: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, found = importlib.import_module("agent"), list[bool]()
    monkeypatch.setattr(vars(agent)["_Handler"], "had_a_place", had_a_place)

    def run(_options: object) -> None:
        note_iteration.cache_clear()
        if trained:
            note_iteration()
        raise error

    monkeypatch.setattr(agent, "run", run)
    for _ in range(2):
        assert agent.main([*options(store), *(("--moe-ckpt-memory-dir", "memory") if tells else ())]) == 1
        found.append(store.check([OUTCOME]))
    assert found == [False, held]
    assert not held or store.get(OUTCOME) == b"5"


@pytest.mark.usefixtures("lead")
def test_no_job_is_held_in_whose_run_a_node_has_trained_that_is_gone(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = importlib.import_module("agent")
    handler: Any = vars(agent)["_Handler"]
    monkeypatch.setattr(SpareHandler, "num_nodes_waiting", lambda _: 0)
    monkeypatch.setattr(handler, "had_a_place", True)
    monkeypatch.setattr(handler, "has_told", False)
    told = list[bool]()

    def run_well(_options: object) -> None:
        asking = object.__new__(handler)
        note_iteration.cache_clear()
        for trains in (lambda: None, note_iteration):
            trains()
            assert asking.num_nodes_waiting() == 0
            told.append(store.check(["moe-ckpt/trained"]))
        raise RendezvousTimeoutError  # as of a node that is lost

    def run_ill(_options: object) -> None:
        raise RendezvousClosedError

    for run in (run_well, run_ill, run_ill):
        monkeypatch.setattr(agent, "run", run)
        assert agent.main([*options(store), "--moe-ckpt-memory-dir", "memory"]) == 1
    assert told == [False, True]
    assert not store.check([OUTCOME])


@pytest.mark.usefixtures("lead")
def test_memory_of_a_failed_run_stays_until_persist_agents_have_written_it(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, there = importlib.import_module("agent"), list[bool]()
    lock = tmp_path / "memory" / "node-0" / "job" / "slot-0" / AGENT_LOCK
    lock.parent.mkdir(parents=True)
    held = lock.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def write() -> None:
        there.append(lock.exists())
        held.close()

    def run(_options: object) -> None:
        threading.Timer(1.0, write).start()
        raise agent.RendezvousError("no node is left")

    monkeypatch.setattr(agent, "run", run)
    assert agent.main([*options(store), "--moe-ckpt-persist-agent-s", "60"]) == 1
    assert (there, (tmp_path / "memory").exists()) == ([True], False)


@pytest.mark.usefixtures("lead")
def test_a_spare_that_was_not_needed_leaves_kept_memory_to_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_KEEP_MEMORY": "1"})
    agent = importlib.import_module("agent")
    (tmp_path / "memory" / "node-0").mkdir(parents=True)

    def run(_options: object) -> None:
        raise agent.SpareNotNeeded

    monkeypatch.setattr(agent, "run", run)
    assert agent.main(["--nnodes=2", "--rdzv-endpoint=localhost:1", __file__]) == 0
    assert (tmp_path / "memory" / "node-0").is_dir()


def test_a_spare_that_was_not_needed_frees_kept_memory_where_training_has_ended(
    lead: Callable[[int, str], int], store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_KEEP_MEMORY": "1"})
    agent = importlib.import_module("agent")
    store.set(OUTCOME, "0")
    (tmp_path / "memory" / "node-0").mkdir(parents=True)

    def run(_options: object) -> None:
        raise agent.SpareNotNeeded

    monkeypatch.setattr(agent, "run", run)
    assert agent.main(options(store)) == 0
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("verdict", [0, 1, 2])
def test_what_ranks_have_decided_is_not_run_again_when_the_batch_script_is_gone(
    verdict: int, lead: Callable[[int, str], int], asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lead(verdict, f"localhost:{free_port()}") == verdict
    said = f"so that the job has ended with {verdict} is not known there; run scancel 7: "
    assert said in capsys.readouterr().err
    # Where memory waits for a user, the job stays; else its nodes would be idle to the end of its time.
    assert (asked.read_text() if asked.exists() else "") == ("" if verdict == 1 else "scancel 7\n")


@pytest.mark.parametrize(("on_stop", "command"), [("requeue", "scontrol requeue 7"), ("end", "scancel 7")])
def test_nodes_whose_batch_script_is_gone_have_the_job_requeued(
    on_stop: str, command: str, asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_CKPT_ON_STOP", on_stop)
    orphaned = importlib.import_module("orphaned")
    monkeypatch.setattr(orphaned, "PATIENCE_S", 0.2)
    with socket.create_server(("localhost", 0)) as there:
        endpoint = f"localhost:{there.getsockname()[1]}"
        assert not orphaned.requeue_if_orphaned(endpoint, 601.0)
    assert not orphaned.requeue_if_orphaned(endpoint, 599.0)
    assert "what fails within 600 s would fail again" in capsys.readouterr().err
    assert not asked.exists()
    assert orphaned.requeue_if_orphaned(endpoint, 601.0)
    assert asked.read_text() == f"{command}\n"
    assert f"the batch node is down: {command} asked for" in capsys.readouterr().err


def test_a_node_that_alone_does_not_reach_the_batch_node_leaves_the_job_to_the_others(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orphaned = importlib.import_module("orphaned")
    monkeypatch.setattr(orphaned, "PATIENCE_S", 0.2)
    monkeypatch.setattr(orphaned, "GONE_S", 0.2)
    (asked.parent / "state").write_text("mixed\n")
    assert not orphaned.requeue_if_orphaned(f"localhost:{free_port()}", 601.0)
    assert "Slurm does not call the batch node down, so this node leaves alone" in capsys.readouterr().err
    assert not asked.exists()


def test_one_node_that_is_told_to_end_does_not_decide_how_the_job_has_ended(
    lead: Callable[[int, str], int], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_SPARES": "1"})
    agent = importlib.import_module("agent")

    def told(_options: object) -> None:
        raise agent.SignalException("told", signal.SIGTERM)

    with monkeypatch.context() as scratch:
        scratch.setattr(agent, "run", told)
        assert agent.main(options(store)) == 143
    assert not store.check([OUTCOME])
    assert lead(0, f"localhost:{store.port}") == 0
    assert store.get(OUTCOME) == b"0"


@pytest.mark.parametrize("reports", [(2, 3), (3, 2), (2,)])
def test_snapshots_of_one_node_outweigh_that_others_have_none(reports: tuple[int, ...], tmp_path: Path) -> None:
    port, outcome = free_port(), tmp_path / "outcome"
    keeper = subprocess.Popen([sys.executable, str(SLURM / "rendezvous.py"), str(port), str(outcome)])
    try:
        until((tmp_path / "outcome.listens").exists)
        client = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=HANG_TIMEOUT_S))
        for report in reports:
            client.add(f"moe-ckpt/outcome/{report}", 1)
            client.set("moe-ckpt/outcome", str(report))
        client.wait([f"moe-ckpt/noted{'/3' if 3 in reports else ''}"])
        assert outcome.read_text() == str(max(reports))
    finally:
        keeper.send_signal(signal.SIGUSR1)
        assert keeper.wait(HANG_TIMEOUT_S) == 0


IMPATIENT = f"""
import sys
sys.path.insert(0, {str(SLURM)!r})
import agent, orphaned
orphaned.GONE_S = 0.2
from megatron.pretrain import rendezvous
orphaned.PATIENCE_S = rendezvous.PAUSE_S = 0.2
sys.exit(agent.main(sys.argv[1:]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("reached", [True, False])
def test_only_a_node_that_has_reached_the_meeting_point_says_that_the_batch_script_is_gone(
    reached: bool, asked: Path, tmp_path: Path
) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if reached else None
    port = store.port if store is not None else free_port()
    agent = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, "--nnodes=2", "--rdzv-id=job", f"--rdzv-endpoint=localhost:{port}",
         "--rdzv-conf=is_host=0,join_timeout=300,read_timeout=2", __file__],
        env=os.environ | {"MOE_CKPT_NODE": "node-0", "MOE_CKPT_MEMORY": str(tmp_path / "memory")}
        | {"MOE_CKPT_MIN_RUN_S": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    if store is not None:
        until(lambda: store.check(["torch.rendezvous.job"]))
        del store
    assert agent.wait(HANG_TIMEOUT_S) == 1
    assert asked.exists() == reached


SAVING = """
import os, signal, sys, time
from pathlib import Path
folder, agent = Path(sys.argv[1]), os.getppid()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
(folder / "training").touch()
while not told and os.getppid() == agent:
    time.sleep(0.05)
(folder / "saving").touch()
time.sleep(3)
(folder / "saved").touch()
"""


class Node:
    """The agent of a node, started and signalled as Slurm does it, and the job's meeting point."""

    def __init__(self, folder: Path, *, nodes: int) -> None:
        self.folder, self.memory, self.outcome = folder, folder / "memory", folder / "outcome"
        (folder / "saving.py").write_text(SAVING)
        port = str(free_port())
        self.keeper = subprocess.Popen([sys.executable, str(SLURM / "rendezvous.py"), port, str(self.outcome)])
        self.agent = subprocess.Popen(
            [str(SLURM / "node.sh"), f"--nnodes={nodes}", "--nproc-per-node=1", "--shutdown-timeout=60",
             "--rdzv-id=job", f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=is_host=0,join_timeout=300",
             str(folder / "saving.py"), str(folder)],
            env=os.environ | {"SLURMD_NODENAME": "node-0"}
            | {"MOE_CKPT_PYTHON": sys.executable, "MOE_CKPT_MEMORY": str(self.memory)},
        )  # fmt: skip
        self.store = TCPStore("localhost", int(port), is_master=False, timeout=timedelta(seconds=HANG_TIMEOUT_S))

    def reaches(self, milestone: str) -> None:
        until((self.folder / milestone).exists)

    def tell(self) -> None:
        """SIGTERM to what Slurm has started."""
        self.agent.send_signal(signal.SIGTERM)


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[[int], Node]]:
    started: list[Node] = []

    def start(nodes: int) -> Node:
        started.append(Node(tmp_path, nodes=nodes))
        return started[0]

    yield start
    for node in started:
        node.agent.kill()
        node.keeper.kill()
        node.agent.wait()
        node.keeper.wait()


@pytest.mark.ci
def test_ranks_that_save_when_a_node_is_told_to_end_are_let_finish_however_often_it_is_told(
    start_node: Callable[[int], Node],
) -> None:
    node = start_node(1)
    node.reaches("training")
    node.tell()
    node.reaches("saving")
    for _ in range(4):
        node.tell()
        time.sleep(0.3)
    assert node.agent.wait(HANG_TIMEOUT_S) == 128 + signal.SIGTERM
    assert (node.folder / "saved").exists()
    assert node.outcome.read_text() == "143"
    assert not node.memory.exists()


@pytest.mark.ci
def test_a_node_that_is_told_to_end_while_it_waits_for_others_gives_its_memory_back(
    start_node: Callable[[int], Node],
) -> None:
    node = start_node(2)
    until(lambda: node.store.check(["torch.rendezvous.job"]))
    assert node.memory.is_dir()
    node.tell()
    assert node.agent.wait(HANG_TIMEOUT_S) == 128 + signal.SIGTERM
    assert not node.memory.exists()


@pytest.mark.ci
def test_spares_wait_as_long_as_it_takes_and_make_nobody_meet_again(handlers: list[DynamicRendezvousHandler]) -> None:
    with ThreadPoolExecutor() as pool:
        joining = {pool.submit(handler.next_rendezvous): handler for handler in handlers}
        training = two_of(joining)
        for _ in range(2):
            left, other = training
            joining[pool.submit(left.next_rendezvous)] = left
            until(other.num_nodes_waiting)
            joining[pool.submit(other.next_rendezvous)] = other
            training = two_of(joining)
            assert [handler.num_nodes_waiting() for handler in training] == [0, 0]
        (spare,) = joining
        assert not wait([spare], timeout=JOIN_S + 1).done
        for handler in training:
            handler.shutdown()
        assert name_of_error(spare) == "SpareNotNeeded"


@pytest.mark.ci
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
def test_a_node_that_has_lost_its_place_is_not_needed_when_the_job_ends(
    handlers: list[DynamicRendezvousHandler], waits: bool
) -> None:
    with ThreadPoolExecutor() as pool:
        joining = {pool.submit(handler.next_rendezvous): handler for handler in handlers}
        left, other = two_of(joining)
        joining[pool.submit(left.next_rendezvous)] = left
        until(lambda: other.num_nodes_waiting() == 2)  # that one, and the spare that could take its place
        joining[pool.submit(other.next_rendezvous)] = other
        training = two_of(joining)
        ((spare, handler),) = joining.items()
        if waits:
            until(lambda: is_redundant(handler))
        for one in training:
            one.shutdown()
        assert name_of_error(spare) == "SpareNotNeeded"


@pytest.mark.parametrize("ends_well", [True, False])
@pytest.mark.parametrize("has_trained", [True, False], ids=["in the last round", "elsewhere"])
def test_a_node_that_comes_when_the_job_has_ended_is_not_needed_and_learns_how_it_ended(
    has_trained: bool, ends_well: bool, handlers: list[DynamicRendezvousHandler]
) -> None:
    """A pod starts its launcher again behind a failure, too: to end with 0 then would say that training is done."""
    with ThreadPoolExecutor() as pool:
        joining = {pool.submit(handler.next_rendezvous): handler for handler in handlers[:2]}
        for handler in two_of(joining):
            vars(handler)["has_ended_well"] = ends_well
            handler.shutdown()
        if not has_trained:
            vars(vars(handlers[2])["_executor"])["_own"] = ("another", "")
        late = pool.submit(handlers[2].next_rendezvous)
        assert name_of_error(late) == "SpareNotNeeded"
        assert str(late.exception()) == (
            "" if ends_well else "job 'job' has failed; to continue it, restart its store too"
        )


@pytest.mark.ci
def test_a_node_that_meets_again_when_another_has_failed_for_good_fails_with_it(
    handlers: list[DynamicRendezvousHandler],
) -> None:
    with ThreadPoolExecutor() as pool:
        joining = {pool.submit(handler.next_rendezvous): handler for handler in handlers[:2]}
        failed, other = two_of(joining)
        failed.shutdown()
        assert name_of_error(pool.submit(other.next_rendezvous)) == "RendezvousClosedError"


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[DynamicRendezvousHandler]:
    """Those of three nodes of a job in which two train."""
    monkeypatch.syspath_prepend(str(SLURM))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    kind: type[DynamicRendezvousHandler] = importlib.import_module("agent").SpareHandler
    store = TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
    backend = C10dRendezvousBackend(store, "job")
    timeout = RendezvousTimeout(join=timedelta(seconds=JOIN_S))
    return [
        kind.from_backend("job", store.clone(), backend, 2, 2, "localhost", timeout, keep_alive_interval=1)
        for _ in range(3)
    ]


def two_of(joining: dict[Future[RendezvousInfo], DynamicRendezvousHandler]) -> list[DynamicRendezvousHandler]:
    """The first two that join, which are taken out."""
    joined: list[DynamicRendezvousHandler] = []
    while len(joined) < 2:
        for future in wait(joining, HANG_TIMEOUT_S, return_when=FIRST_COMPLETED).done:
            future.result()
            joined.append(joining.pop(future))
    return joined


def name_of_error(future: Future[RendezvousInfo]) -> str:
    """Of a class that is imported in one test only."""
    return type(future.exception(HANG_TIMEOUT_S)).__name__


def is_redundant(handler: DynamicRendezvousHandler) -> bool:
    """Whether the others know that this node waits, and that there is no place for it."""
    state = handler._state_holder.state
    return handler._this_node in state.redundancy_list and handler._this_node not in state.wait_list


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + HANG_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
