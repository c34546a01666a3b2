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
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Layout, Train, differences, digest, flags, reports_in
from world import HANG_TIMEOUT_S, ROOT

SLURM = ROOT / "scripts" / "slurm"
STAND_INS = ROOT / "scripts" / "slurm" / "stand_ins"
TRAIN = "scripts/slurm/train.sbatch"
ITERATIONS = 45
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
    elif what in ("failed", "untrained"):
        if what == "untrained":
            outcome.write_text("5")
        sys.exit(1)
    elif what == "left":
        outcome.write_text("4")
        sys.exit(4)
    elif what == "survived":
        if mine.name != "node-0":  # that of the batch script is not lost
            os.environ["RANK"] = "0"
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sys.argv[-1], "a") as reports:
            reports.write('{{"iteration": 1}}\\n')
        time.sleep(3)
        (mine / "left").touch()
        outcome.write_text("1")
        memory.keep()
        sys.exit(1)
    elif what == "lingering":
        outcome.write_text("0")
        while mine.name == "node-2":
            time.sleep(0.1)
    elif what in ("waiting", "deaf"):
        if what == "deaf" and mine.name == "node-2":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
def test_a_job_whose_time_is_up_is_requeued_although_a_node_does_not_end(play: Play) -> None:
    waits = submit("--signal=B:USR1@25")
    code, said = play.run("--stop", "1", *waits, runs=(("deaf", "trained"),), MOE_CKPT_LEAD_S="25")
    assert code == 0, said
    assert "a node has not left in time" in said
    assert "time was up; requeued" in said


@pytest.mark.ci
def test_a_job_that_has_trained_ends_although_a_node_does_not(play: Play) -> None:
    code, said = play.run(*submit(), runs=(("lingering",),), MOE_CKPT_LEAVE_S="2")
    assert code == 1, said  # for the memory of that node, which is left to the epilog
    assert "training has ended" in said and "job 1 has ended with exit code 0" in said
    assert "left in memory: moe-ckpt-job-1" in said


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
def test_a_job_that_is_held_does_not_ask_for_a_node_that_it_has_lost(play: Play) -> None:
    _, said = play.run("--lose", "1", *submit(), runs=(("survived",),), MOE_CKPT_LEAVE_S="2")
    lost = re.search(r"(node-\d) is lost", said)
    assert lost is not None, said
    left = ",".join(node for node in ("node-0", "node-1", "node-2") if node != lost[1])
    assert f"ReqNodeList={left}, and scontrol release 1" in said


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
def test_a_job_of_which_no_start_came_to_an_iteration_is_held(play: Play) -> None:
    _, said = play.run(*submit(), runs=(("untrained", "trained"),), MOE_CKPT_MIN_RUN_S="0")
    assert said.count("starts on") == 1
    assert "no start came to an iteration, see above; requeued and held" in said


@pytest.mark.ci
def test_a_chain_goes_on_where_no_start_came_to_an_iteration(play: Play) -> None:
    chain = ("--", "scripts/slurm/chain.sh", "2", "--job-name=run", "--nodes=3", TRAIN)
    code, said = play.run(*chain, runs=(("untrained",), ("trained",)), MOE_CKPT_MIN_RUN_S="0")
    assert code == 0, said
    assert "job 1 has ended with exit code 1" in said
    assert "job 2: training has ended" in said


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


@pytest.mark.ci
def test_what_a_site_sets_reaches_the_nodes_and_what_is_watched_for_the_agents(play: Play, tmp_path: Path) -> None:
    sourced = f"{tmp_path}/sourced$1-$MOE_CKPT_MIN_RUN_S-$SLURMD_NODENAME"
    site = f'here=/nowhere\nPATHS=/opt/lib:$NOT_SET_HERE\nfalse\nset -- $*-of-site\ntouch "{sourced}"\n'
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
