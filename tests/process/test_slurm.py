"""Job files for Slurm on a cluster that is played on this machine: who is requeued, what is left behind."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
from runs import Layout, Train, differences, digest, flags, reports_in
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from world import HANG_TIMEOUT_S, ROOT, free_port

from megatron.core.dist_checkpointing.moe.standby.verdict import leave_early

SLURM = ROOT / "scripts" / "slurm"
STAND_INS = ROOT / "scripts" / "slurm" / "stand_ins"
TRAIN = "scripts/slurm/train.sbatch"
ITERATIONS = 45
JOIN_S = 10
WEIGHED = ("lm_loss", "grad_norm", "learning_rate", "consumed_train_samples")

PRETENDER = f"""#!{sys.executable} -S
# Plays the interpreter that runs the agents: what happens in run N of job J is the line N of the file `job-J`.
import os, signal, socket, sys, time
from pathlib import Path

sys.path.insert(0, {str(SLURM)!r})
import memory


def rendezvous(port, outcome):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit())
    listening = socket.create_server(("", int(port)))
    Path(outcome + ".listens").touch()
    signal.pause()


def told_to_end(*_):
    outcome.write_text("143")
    sys.exit(143)


def agent():
    play, run = Path(os.environ["PLAY"]), int(os.environ.get("SLURM_RESTART_COUNT", 0)) + 1
    with (play / f"found-{{run}}").open("a") as found:
        found.writelines(f"{{path}}\\n" for path in Path(os.environ["MOE_CKPT_MEMORY"]).glob("*/left"))
    memory.take()
    mine.mkdir(exist_ok=True)
    (play / "arguments").write_text("\\n".join(sys.argv[2:]))
    signal.signal(signal.SIGTERM, told_to_end)
    what = (play / f"job-{{os.environ['SLURM_JOB_ID']}}").read_text().splitlines()[run - 1]
    if what == "trained":
        outcome.write_text("0")
    elif what == "misused":
        outcome.write_text("2")
        sys.exit(2)
    elif what in ("undecided", "refused"):
        (mine / "left").touch()
        code = 1 if what == "undecided" else 2
        outcome.write_text("1" if what == "undecided" else "3")
        memory.keep()
        sys.exit(code)
    elif what == "failed":
        sys.exit(1)
    elif what == "left":
        outcome.write_text("4")
        sys.exit(4)
    elif what == "waiting":
        (mine / "left").touch()
        while len(list(mine.parent.glob("*/left"))) < int(os.environ["SLURM_JOB_NUM_NODES"]):
            time.sleep(0.05)  # as training does; a task that does not run yet is not told that time is up
        with open(sys.argv[-1], "a") as reports:
            reports.write('{{"iteration": 1}}\\n')
        while True:
            time.sleep(0.1)


if sys.argv[1].endswith("/rendezvous.py"):
    rendezvous(*sys.argv[2:])
elif sys.argv[1].endswith("/agent.py"):
    mine = Path(os.environ["MOE_CKPT_MEMORY"], os.environ["MOE_CKPT_NODE"])
    outcome = Path(os.environ["MOE_CKPT_MEMORY"], "outcome")
    code = 0
    try:
        agent()
    except SystemExit as end:
        code = end.code
    memory.give_back(mine.name, code)
    sys.exit(code)
else:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


class Play:
    """A folder with a space in its name, and dry runs in which agents do what `runs` says, job by job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.python = folder / "python"
        self.python.write_text(PRETENDER)
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def run(self, *arguments: str, runs: tuple[tuple[str, ...], ...], **settings: str) -> tuple[int, str]:
        """Exit code of the dry run with these arguments, and what was said."""
        for number, of_job in enumerate(runs, start=1):
            (self.folder / f"job-{number}").write_text("\n".join(of_job) + "\n")
        own = {"PLAY": str(self.folder), "MOE_CKPT_PYTHON": str(self.python), **settings}
        return dry_run("--folder", str(self.folder / "dry run"), *arguments, **own)

    @property
    def arguments(self) -> list[str]:
        """What the agents were given in the last run."""
        return (self.folder / "arguments").read_text().splitlines()

    @property
    def found(self) -> set[str]:
        """Nodes of which agents found something in the job's memory when the second run began."""
        return {Path(line).parent.name for line in (self.folder / "found-2").read_text().splitlines()}

    @property
    def steps(self) -> list[str]:
        """What each step of srun was asked for."""
        return [path.read_text() for path in sorted((self.folder / "dry run").glob("cluster/jobs/*/step-*"))]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path / "with space")


def dry_run(*arguments: str, limit_s: float = HANG_TIMEOUT_S, **settings: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [str(SLURM / "dry_run.sh"), *arguments], env=os.environ | settings, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGTERM)
        pytest.fail(f"did not end; it said:\n{(error.output or b'').decode()}")  # others may hold its output open
    return process.returncode, said


def submit(*options: str) -> tuple[str, ...]:
    return ("--", "sbatch", "--nodes=3", *options, TRAIN)


def test_a_job_that_has_trained_ends_well_and_gives_its_memory_back(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("trained",),))
    assert code == 0, said
    assert said.count("starts on") == 1
    assert "training has ended" in said


def test_a_job_whose_time_is_up_tells_its_ranks_and_is_requeued(play: Play) -> None:
    code, said = play.run("--stop", "1", *submit(), runs=(("waiting", "trained"),))
    assert code == 0, said
    assert "time was up; requeued" in said
    assert "run 2 on 2 of node-0,node-1,node-2, 1 spare" in said


@pytest.mark.ci
def test_a_job_that_is_cancelled_is_not_requeued(play: Play) -> None:
    code, said = play.run("--cancel", "1", *submit(), runs=(("waiting", "trained"),))
    assert code == 143, said
    assert said.count("starts on") == 1


@pytest.mark.ci
def test_a_job_that_cannot_work_ends_with_code_2_and_is_not_requeued(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("misused", "trained"),), MOE_CKPT_MIN_RUN_S="0")
    assert code == 2, said
    assert said.count("starts on") == 1


@pytest.mark.ci
@pytest.mark.parametrize("why", ["undecided", "refused"])
def test_a_job_whose_ranks_leave_the_decision_to_a_user_keeps_its_memory_and_is_held(play: Play, why: str) -> None:
    _, said = play.run(*submit(), runs=((why, "trained"),), MOE_CKPT_MIN_RUN_S="0")
    assert said.count("starts on") == 1
    assert "run scontrol update JobId=1 ReqNodeList=node-0,node-1,node-2, and scontrol release 1" in said
    assert "left in memory: moe-ckpt-job-1" in said


def test_a_chain_ends_where_ranks_leave_the_decision_to_a_user(play: Play) -> None:
    chain = ("--", "scripts/slurm/chain.sh", "2", "--job-name=run", "--nodes=3", TRAIN)
    code, said = play.run(*chain, runs=(("undecided",), ("trained",)), MOE_CKPT_MIN_RUN_S="0")
    assert code == 1, said
    assert "job 2 starts" not in said
    assert "left in memory: moe-ckpt-job-1" in said


@pytest.mark.parametrize(("fails", "code"), [(2, 0), (9, 1)])
def test_slurm_is_asked_again_where_it_refuses_for_a_while(fails: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> asked\n[ "$(wc -l < asked)" -gt {fails} ]\n')
    (tmp_path / "scontrol").chmod(0o700)
    script = (
        f"set -e; say() {{ echo \"$*\" >&2; }}; eval \"$(sed -n '/^again()/,/^}}/p' '{SLURM}/job.sh')\";"
        " again ./scontrol requeue 7"
    )
    environment = os.environ | {"MOE_CKPT_RETRY_S": "0"}
    asked = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert asked.returncode == code
    assert (tmp_path / "asked").read_text() == "requeue 7\n" * min(fails + 1, 5)
    assert asked.stderr.count("scontrol requeue 7 failed, try") == min(fails, 4)


def test_a_chain_goes_on_behind_a_job_whose_ranks_were_asked_to_leave(play: Play) -> None:
    chain = ("--", "scripts/slurm/chain.sh", "3", "--job-name=run", "--nodes=3", TRAIN)
    code, said = play.run(*chain, runs=(("left",), ("trained",), ("trained",)))
    assert code == 0, said
    assert re.search("job 1: left before its last iteration, after .*; the next job of the chain continues", said), said
    assert "job 2: training has ended" in said


@pytest.mark.ci
@pytest.mark.parametrize(("least_s", "runs"), [("0", 2), ("600", 1)])
def test_a_job_whose_ranks_were_asked_to_leave_is_requeued_but_not_at_once(play: Play, least_s: str, runs: int) -> None:
    code, said = play.run(*submit(), runs=(("left", "trained"),), MOE_CKPT_MIN_RUN_S=least_s)
    assert code == 0, said
    assert said.count("starts on") == runs
    assert ("submit it again to continue" in said) is (runs == 1)


@pytest.mark.ci
def test_a_job_that_fails_soon_after_its_start_is_not_requeued(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("failed", "trained"),))
    assert code == 1, said
    assert said.count("starts on") == 1
    assert "would fail again" in said


@pytest.mark.ci
def test_a_job_that_fails_after_a_while_is_requeued(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("failed", "trained"),), MOE_CKPT_MIN_RUN_S="0")
    assert code == 0, said
    assert said.count("starts on") == 2


@pytest.mark.ci
def test_a_requeued_job_finds_no_memory_of_its_last_run(play: Play) -> None:
    code, said = play.run("--stop", "1", *submit(), runs=(("waiting", "trained"),))
    assert code == 0, said
    assert not play.found


@pytest.mark.ci
def test_a_requeued_job_that_asked_for_it_finds_the_memory_of_its_last_run(play: Play) -> None:
    code, said = play.run("--stop", "1", *submit(), runs=(("waiting", "trained"),), MOE_CKPT_KEEP_MEMORY="1")
    assert code == 0, said
    assert play.found


@pytest.mark.ci
def test_a_chain_continues_after_each_job_and_ends_with_the_training(play: Play) -> None:
    chain = ("--", "scripts/slurm/chain.sh", "3", "--job-name=run", "--nodes=3", TRAIN)
    code, said = play.run("--stop", "1", *chain, runs=(("waiting",), ("trained",), ("trained",)))
    assert code == 0, said
    assert "job 1: time was up; the next job of the chain continues" in said
    assert "job 2 starts" in said
    assert "job 3 starts" not in said
    assert "requeued" not in said


@pytest.mark.parametrize("behind", [(), ("--job-name=run",)])
def test_a_chain_without_a_name_of_its_own_is_refused(behind: tuple[str, ...], tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(SLURM / "chain.sh"), "3", "--nodes=3", TRAIN, *behind], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PATH": f"{STAND_INS}:{os.environ['PATH']}", "STAND_IN_CLUSTER": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "--job-name" in ended.stderr
    assert not [*tmp_path.iterdir()]


def test_settings_reach_the_nodes_where_sbatch_hands_on_only_some_variables(play: Play) -> None:
    given = "--export=PLAY," + ",".join(
        f"MOE_CKPT_{name}" for name in ("PYTHON", "NPROC", "TMPFS", "RDZV_HOST", "RDZV_PORT")
    )
    code, said = play.run(*submit(given), "--moe-ckpt-strategy", "sparse", runs=(("trained",),))
    assert code == 0, said


def test_a_name_that_does_not_lead_to_the_first_node_ends_the_job_with_what_to_set(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("trained",),), MOE_CKPT_RDZV_HOST="nowhere.invalid", MOE_CKPT_ANSWER_S="1")
    assert code == 1, said
    assert re.search(r"nowhere.invalid:\d+ does not answer on this node after 1 s: set MOE_CKPT_RDZV_HOST to", said)


def test_whoever_else_listens_at_the_port_is_not_taken_for_the_meeting_point(play: Play) -> None:
    with socket.create_server(("", 0)) as another:
        port = str(another.getsockname()[1])
        code, said = play.run(*submit(), runs=(("trained",),), MOE_CKPT_RDZV_PORT=port)
    assert code == 1, said
    assert re.search(rf"no rendezvous on \S+:{port}; the lines above say why", said)
    assert "Address already in use" in said


@pytest.mark.ci
def test_a_meeting_point_whose_port_is_taken_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as another:
        port = str(another.getsockname()[1])
        command = [sys.executable, str(SLURM / "rendezvous.py"), port, str(tmp_path / "outcome")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)
    assert ended.returncode == 1
    assert "set MOE_CKPT_RDZV_PORT to a free one" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.ci
def test_nodes_of_a_dry_run_meet_at_a_port_that_the_kernel_gives_to_no_connection(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("trained",),))
    assert code == 0, said
    port = next(one.rpartition(":")[2] for one in play.arguments if one.startswith("--rdzv-endpoint="))
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert int(port) < max(lowest, 30_000)


@pytest.mark.ci
def test_arguments_with_spaces_reach_the_ranks_as_they_are(play: Play) -> None:
    code, said = play.run(*submit(), "--save", "a folder", runs=(("trained",),))
    assert code == 0, said
    assert "a folder" in play.arguments


@pytest.mark.ci
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--moe-ckpt-strategy", "sparse"), 1),
        (("--moe-ckpt-strategy=pec",), 1),
        pytest.param(("--moe-ckpt-strategy", "none"), 0, marks=pytest.mark.full),
        pytest.param(("--moe-ckpt-strategy=none", "--moe-ckpt-strategy", "full"), 1, marks=pytest.mark.full),
        (("--moe-ckpt-strategy", "full", "--moe-ckpt-strategy=none"), 0),
    ],
)
def test_only_jobs_with_snapshots_are_told_where_memory_is(given: tuple[str, ...], expected: int, play: Play) -> None:
    code, said = play.run(*submit(), *given, runs=(("trained",),))
    assert code == 0, said
    assert play.arguments.count("--moe-ckpt-memory-dir") == expected


@pytest.mark.ci
def test_in_a_container_all_steps_see_the_repository_and_the_memory_where_they_are(play: Play) -> None:
    code, said = play.run(
        *submit(), runs=(("trained",),), MOE_CKPT_IMAGE="/images/a b.sqsh", MOE_CKPT_MOUNTS="/data:/data"
    )
    assert code == 0, said
    assert len(play.steps) == 2
    for step in play.steps:
        assert "container-image=/images/a b.sqsh\n" in step
        mounts = re.search(r"^container-mounts=(.*)$", step, re.MULTILINE)
        assert mounts is not None
        assert re.fullmatch(rf"{ROOT}:{ROOT},(/dev/shm/[^:]+):\1,/data:/data", mounts[1])


def test_an_example_in_a_container_finds_its_data_and_keeps_what_it_saves(tmp_path: Path) -> None:
    stand_in = tmp_path / "sbatch"
    stand_in.write_text('#!/bin/sh\nprintf %s "$MOE_CKPT_MOUNTS"\n')
    stand_in.chmod(0o755)
    given = {
        "DATA": str(tmp_path / "data" / "corpus"),
        "SAVE": str(tmp_path / "run"),
        "MOE_CKPT_IMAGE": "a",
        "MOE_CKPT_MOUNTS": "/a:/b",
    }
    ended = subprocess.run(
        [str(ROOT / "examples/gpt-125m-8e/train.sh")], capture_output=True, text=True, check=True,
        env=os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ended.stdout == f"/a:/b,{tmp_path}/run:{tmp_path}/run,{tmp_path}/data:{tmp_path}/data"
    assert (tmp_path / "run").is_dir()


@pytest.mark.ci
def test_a_job_of_spares_only_is_refused_with_what_to_change(play: Play) -> None:
    code, said = play.run("--", "sbatch", "--nodes=1", TRAIN, runs=(("trained",),))
    assert code == 2, said
    assert "of 1 nodes 1 are spares, so none can train: raise --nodes" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"MOE_CKPT_NPROC": "eight"}, "MOE_CKPT_NPROC 'eight' is no number of ranks per node"),
        ({"MOE_CKPT_ENV_FILE": "/nowhere/env.sh"}, "MOE_CKPT_ENV_FILE /nowhere/env.sh cannot be read"),
        (
            {"MOE_CKPT_LOG_DIR": "logs", "MOE_CKPT_STANDBYS": "2"},
            "MOE_CKPT_LOG_DIR and MOE_CKPT_STANDBYS exclude each other",
        ),
        (
            {"MOE_CKPT_ON_STOP": "end", "MOE_CKPT_KEEP_MEMORY": "1"},
            "MOE_CKPT_KEEP_MEMORY=1 keeps memory for a requeued",
        ),
        ({"SLURM_ARRAY_JOB_ID": "1"}, "submit each training by an sbatch of its own, without --array"),
    ],
)
def test_settings_that_cannot_work_end_the_job_with_what_to_change(
    settings: dict[str, str], says: str, play: Play
) -> None:
    code, said = play.run(*submit(), runs=(("trained",),), **settings)
    assert code == 2, said
    assert says in said


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
    given: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SLURM)
    monkeypatch.chdir(SLURM)
    own = {"MOE_CKPT_SPARES": "1", "MOE_CKPT_NODE": "node-0", "MOE_CKPT_MEMORY": str(tmp_path / "memory")}
    monkeypatch.setattr(os, "environ", os.environ | own)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    agent, keeper = importlib.import_module("agent"), importlib.import_module("rendezvous")
    store, found = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), []
    store.set(keeper.NOTED, "")
    for _ in range(2):
        assert agent.main(["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", *given.split()]) == 2
        assert says in capsys.readouterr().err
        found.append(store.check([keeper.OUTCOME]))
    assert found == [False, True]
    assert store.get(keeper.OUTCOME) == b"2"


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


def test_an_agent_keeps_the_memory_of_ranks_that_leave_the_decision_to_a_user(
    lead: Callable[[int, str], int], tmp_path: Path
) -> None:
    store, keeper = (
        TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
        importlib.import_module("rendezvous"),
    )
    store.set(keeper.NOTED, "")
    assert lead(1, f"localhost:{store.port}") == 1
    assert store.get(keeper.OUTCOME) == b"1"
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
    outcome: str, sealed: bool, lead: Callable[[int, str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, keeper = importlib.import_module("agent"), importlib.import_module("rendezvous")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set(keeper.OUTCOME, outcome)
    store.set(f"{keeper.NOTED}/3", "")
    slot = tmp_path / "memory" / "node-0" / "slurm-7" / "slot-000"
    slot.mkdir(parents=True)
    if sealed:
        (slot / "segment-000.iter_0000004-rank_00000-snapshot.json").touch()

    def closed(_options: object) -> None:
        raise RendezvousClosedError

    monkeypatch.setattr(agent, "run", closed)
    kept = sealed and outcome == "2"
    assert agent.main(["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", __file__]) == (2 if kept else 1)
    assert store.get(keeper.OUTCOME) == (b"3" if kept else outcome.encode())
    assert slot.is_dir() is kept


def test_an_agent_tells_ranks_that_were_asked_to_leave_early_from_ranks_that_have_trained(
    lead: Callable[[int, str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_KEEP_MEMORY": "1"})
    agent, keeper = importlib.import_module("agent"), importlib.import_module("rendezvous")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set(keeper.NOTED, "")
    (tmp_path / "memory" / "node-0").mkdir(parents=True)
    monkeypatch.setattr(agent, "run", lambda _options: leave_early())
    assert agent.main(["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", __file__]) == 4
    assert store.get(keeper.OUTCOME) == b"4"
    assert (tmp_path / "memory" / "node-0").is_dir()


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
    lead: Callable[[int, str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_KEEP_MEMORY": "1"})
    agent, keeper = importlib.import_module("agent"), importlib.import_module("rendezvous")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set(keeper.OUTCOME, "0")
    (tmp_path / "memory" / "node-0").mkdir(parents=True)

    def run(_options: object) -> None:
        raise agent.SpareNotNeeded

    monkeypatch.setattr(agent, "run", run)
    assert agent.main(["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", __file__]) == 0
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("verdict", [0, 1, 2])
def test_what_ranks_have_decided_is_not_run_again_when_the_batch_script_is_gone(
    verdict: int, lead: Callable[[int, str], int], asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lead(verdict, f"localhost:{free_port()}") == verdict
    said = f"so that the job has ended with {verdict} is not known there; run scancel 7: "
    assert said in capsys.readouterr().err
    assert not asked.exists()


@pytest.mark.ci
def test_what_a_site_sets_reaches_the_nodes_and_what_is_watched_for_the_agents(play: Play, tmp_path: Path) -> None:
    sourced = f"{tmp_path}/sourced$1-$MOE_CKPT_MIN_RUN_S-$SLURMD_NODENAME"
    site = f'PATHS=/opt/lib:$NOT_SET_HERE\nfalse\nset -- $*-of-site\ntouch "{sourced}"\n'
    (tmp_path / "env.sh").write_text(site)  # a variable that is not set, a command that fails, arguments of its own
    watched = {
        "MOE_CKPT_STRIKES": "3/10m",
        "MOE_CKPT_HEALTH_CHECK": "nvidia-smi -L",
        "MOE_CKPT_HEALTH_TIMEOUT_S": "120",
        "MOE_CKPT_HANG_S": "600",
        "MOE_CKPT_LOG_DIR": str(tmp_path / "logs"),
        "MOE_CKPT_LEAD_S": "600",
    }
    code, said = play.run(*submit(), runs=(("trained",),), MOE_CKPT_ENV_FILE=str(tmp_path / "env.sh"), **watched)
    assert code == 0, said
    assert len(list(tmp_path.glob("sourced-of-site-600-*"))) == 3
    expected = {
        "--moe-ckpt-strikes=3/10m", "--moe-ckpt-health-check=nvidia-smi -L", "--moe-ckpt-hang-timeout=600", "--tee=3",
        "--moe-ckpt-health-timeout=120", f"--log-dir={tmp_path / 'logs'}",
        # Nodes that meet wait for one that waits for its ranks.
        "--shutdown-timeout=570", "--rdzv-conf=is_host=0,join_timeout=690",
    }  # fmt: skip
    assert expected <= {*play.arguments}


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
    lead: Callable[[int, str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MOE_CKPT_SPARES": "1"})
    store, keeper = (
        TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
        importlib.import_module("rendezvous"),
    )
    store.set(keeper.NOTED, "")
    agent = importlib.import_module("agent")

    def told(_options: object) -> None:
        raise agent.SignalException("told", signal.SIGTERM)

    with monkeypatch.context() as scratch:
        scratch.setattr(agent, "run", told)
        assert agent.main(["--nnodes=2", f"--rdzv-endpoint=localhost:{store.port}", __file__]) == 143
    assert not store.check([keeper.OUTCOME])
    assert lead(0, f"localhost:{store.port}") == 0
    assert store.get(keeper.OUTCOME) == b"0"


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


def test_a_job_file_that_is_submitted_from_elsewhere_says_so(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["bash", str(ROOT / TRAIN)],
        env=os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "submit from the root of the repository" in ended.stderr


def test_the_signal_comes_as_early_as_the_job_takes_it_to_come() -> None:
    signalled = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", (ROOT / TRAIN).read_text(), re.MULTILINE)
    expected = re.search(r"LEAD_S:=(\d+)", (SLURM / "job.sh").read_text())
    assert signalled is not None
    assert expected is not None
    assert signalled[1] == expected[1]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Memory of a node with folders of jobs 1 to 4, and a cluster in which 2 runs, 3 waits and 4 has ended."""
    for number in range(1, 5):
        (tmp_path / f"moe-ckpt-job-{number}" / "node-0").mkdir(parents=True)
    for number, state in enumerate(["COMPLETING", "RUNNING", "PENDING", "COMPLETED"], start=1):
        job = tmp_path / "cluster" / "jobs" / str(number)
        job.mkdir(parents=True)
        (job / "record.json").write_text(f'{{"state": "{state}"}}')
    return tmp_path


def epilog(tmpfs: Path, job: str) -> list[str]:
    """Which jobs have memory left after the epilog of one of them, which slurmd runs without a PATH."""
    commands = f"{STAND_INS}:{Path(sys.executable).parent}"
    own = {
        "MOE_CKPT_TMPFS": str(tmpfs),
        "STAND_IN_CLUSTER": str(tmpfs / "cluster"),
        "SLURM_JOB_ID": job,
        "MOE_CKPT_SLURM_BIN": commands,
    }
    subprocess.run(["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in own.items()), SLURM / "epilog.sh"],
                   check=True)  # fmt: skip
    return sorted(path.name.removeprefix("moe-ckpt-job-") for path in tmpfs.glob("moe-ckpt-job-*"))


def test_the_epilog_frees_what_its_own_and_ended_jobs_left_and_nothing_else(tmpfs: Path) -> None:
    (tmpfs / "moe-ckpt-job-9").mkdir()  # nobody knows it any more
    assert epilog(tmpfs, "1") == ["2", "3"]


def test_the_epilog_leaves_what_a_requeued_job_wants_to_find(tmpfs: Path) -> None:
    (tmpfs / "moe-ckpt-job-1" / "keep").touch()
    assert epilog(tmpfs, "1") == ["1", "2", "3"]


def test_the_epilog_follows_no_link_that_somebody_has_put_there(tmpfs: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "outcome").touch()
    (tmpfs / "moe-ckpt-job-5").symlink_to(precious)
    epilog(tmpfs, "5")
    assert (precious / "outcome").exists()


@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"])
def test_the_epilog_frees_what_jobs_left_that_slurm_has_ended(state: str, tmpfs: Path) -> None:
    (tmpfs / "cluster" / "jobs" / "4" / "record.json").write_text(f'{{"state": "{state}"}}')
    assert epilog(tmpfs, "1") == ["2", "3"]


def test_the_stand_ins_refuse_options_that_they_do_not_play(tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(STAND_INS / "srun"), "--no-kil", "true"], env=os.environ | {"STAND_IN_CLUSTER": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "unrecognized option '--no-kil'" in ended.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--nodes=5  # four and a spare", {"nodes": "5"}),
        ("--nodes=5 --job-name='run 12' --exclusive", {"nodes": "5", "job-name": "run 12", "exclusive": ""}),
        ("--nodes 5", "unrecognized option '--nodes', or not given as --name=value"),
        ("-N 5", "unrecognized option '-N', or not given as --name=value"),
        ("--exclusive 5 --nodes=5", "'5' is no option: give --name=value"),
    ],
)
def test_options_in_a_job_file_are_read_or_refused(
    line: str, found: dict[str, str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    cluster = importlib.import_module("cluster")
    job = tmp_path / "job.sbatch"
    job.write_text(f"#!/bin/bash\n#SBATCH --mem=0\n#SBATCH {line}\necho ran\n#SBATCH --time=1\n")
    if isinstance(found, dict):
        assert cluster.directives(job) == {"mem": "0"} | found
    else:
        with pytest.raises(cluster.SubmissionRefused, match=re.escape(found)):
            cluster.directives(job)


def test_a_job_that_asks_for_no_nodes_gets_one(tmp_path: Path) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text("#!/bin/bash\necho ran on $SLURM_JOB_NUM_NODES\n")
    command = [str(ROOT / "scripts/slurm/dry_run.sh"), "--folder", str(tmp_path / "run"), "--", "sbatch", str(job)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "ran on 1\n" in ended.stdout


def test_a_dry_run_says_which_options_it_leaves_out_and_refuses_nodes_that_are_not_there(tmp_path: Path) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text("#!/bin/bash\necho ran\n")
    command = [str(ROOT / "scripts/slurm/dry_run.sh"), "--folder", str(tmp_path / "run"), "--", "sbatch"]
    ended = subprocess.run(
        [*command, "--nodes=33", "--partition=h100", str(job)], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "sbatch: not played: --partition=h100" in ended.stderr
    assert "job 1 asks for 33 nodes, and 32 are played" in ended.stdout


def test_shell_scripts_have_no_findings_of_shellcheck() -> None:
    scripts = [path for ending in ("sh", "sbatch") for path in ROOT.glob(f"[!.]*/**/*.{ending}")]
    assert scripts
    checker = Path(sys.executable).with_name("shellcheck")
    ended = subprocess.run([str(checker), "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


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


def test_a_node_that_comes_when_the_job_has_ended_is_not_needed(handlers: list[DynamicRendezvousHandler]) -> None:
    with ThreadPoolExecutor() as pool:
        joining = {pool.submit(handler.next_rendezvous): handler for handler in handlers[:2]}
        for handler in two_of(joining):
            handler.shutdown()
        assert name_of_error(pool.submit(handlers[2].next_rendezvous)) == "SpareNotNeeded"


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


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_lost_node_and_a_requeue_leave_every_loss_and_the_last_checkpoint_as_they_were(
    train: Train, corpus: str, tmp_path: Path
) -> None:
    layout = Layout(pp=2, ep=1, ranks=2)
    length = ("--train-iters", str(ITERATIONS), "--untie-embeddings-and-output-weights")
    train(layout, *length, "--save", tmp_path / "straight", "--metrics-jsonl", tmp_path / "straight.jsonl")
    save = str(tmp_path / "struck")
    protect = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "3", "--save", save, "--load", save)
    argv = flags(corpus, layout, *length, *protect)
    code, said = dry_run(
        "--folder", str(tmp_path), "--lose", "5", "--stop", "12", *submit(), *argv,
        limit_s=2 * HANG_TIMEOUT_S, MOE_CKPT_PYTHON=sys.executable, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert code == 0, said
    assert "is lost; node-0 and the others continue" in said
    assert said.count("recovered iteration") == 1, said
    assert "job 1 is requeued" in said
    assert said.count("successfully loaded checkpoint") == 1, said
    expected = {report["iteration"]: weighed(report) for report in reports_in(tmp_path / "straight.jsonl")}
    struck = reports_in(tmp_path / "reports.jsonl")
    assert {report["iteration"] for report in struck} == expected.keys()
    assert all(weighed(report) == expected[report["iteration"]] for report in struck)
    assert not differences(digest(tmp_path / "struck", ITERATIONS), digest(tmp_path / "straight", ITERATIONS))


def weighed(report: dict[str, object]) -> str:
    return repr([report[name] for name in WEIGHED])
