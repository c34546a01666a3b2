"""Launchers with standbys: who takes the slots of ranks that are lost, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from attempts import Cluster
from runs import Launch, Layout, Train, differences, digest, flags
from world import HANG_TIMEOUT_S, ROOT, free_port

from megatron.pretrain.bound_store import bound_store

WORKER = Path(__file__).with_name("slot_worker.py")


Jobs = Callable[..., tuple[Path, subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def run_workers(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Runs two ranks, of which one is lost once, to the end; what was run so before is not run again."""

    @cache
    def run(behaviour: str, standbys: int) -> tuple[Path, subprocess.CompletedProcess[str]]:
        folder = tmp_path_factory.mktemp("slots")
        return folder, _run_workers(folder, behaviour, standbys)

    return run


LAUNCHER = """
import sys
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
from megatron.pretrain.standby import agent, run
agent.READY_S = 10
run.main(sys.argv[1:])
"""


def _run_workers(folder: Path, behaviour: str, standbys: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCHER, "--moe-ckpt-standbys", str(standbys)]
    command += f"--nproc-per-node 2 --max-restarts 2 --master-port {free_port()} --monitor-interval 0.05".split()
    return subprocess.run(
        [*command, str(WORKER), str(folder), behaviour],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S,
    )  # fmt: skip


def sitting(folder: Path, attempt: int) -> list[int]:
    """The pids of both ranks in an attempt."""
    return [int((folder / f"{attempt}-{rank}").read_text().split()[0]) for rank in range(2)]


def standbys(folder: Path) -> set[int]:
    """The pids of processes that waited for a slot."""
    return {int(path.name.removeprefix("ready-")) for path in folder.glob("ready-*")}


@pytest.mark.parametrize(
    ("behaviour", "number", "assigned"),
    [
        ("two standbys", 2, 2),
        pytest.param("one standby", 1, 1, marks=pytest.mark.full),
        pytest.param("standbys die", 2, 0, marks=pytest.mark.ci),
        pytest.param("no slots", 2, 0, marks=pytest.mark.ci),
        pytest.param("any", 0, 0, marks=pytest.mark.full),
    ],
)
def test_after_a_loss_standbys_take_the_slots_and_new_processes_those_that_are_left(
    behaviour: str, number: int, assigned: int, run_workers: Jobs
) -> None:
    folder, ended = run_workers(behaviour, number)
    assert ended.returncode == 0, ended.stderr
    before, after = sitting(folder, 0), sitting(folder, 1)
    assert not {*before} & {*after}
    assert len({*after} & standbys(folder)) == assigned, (after, standbys(folder), ended.stderr)


@pytest.mark.ci
def test_one_standby_that_can_be_copied_is_enough_for_all_slots_and_all_losses(run_workers: Jobs) -> None:
    folder, ended = run_workers("copies", 2)
    assert ended.returncode == 0, ended.stderr
    (standby,) = standbys(folder)
    pids = {attempt: sitting(folder, attempt) for attempt in range(3)}
    assert len({standby, *pids[0], *pids[1], *pids[2]}) == 7, "each slot of each attempt has a process of its own"
    warm = [(folder / f"{attempt}-{rank}").read_text().endswith("True") for attempt in range(3) for rank in range(2)]
    assert warm == [False, False, True, True, True, True]
    assert not Path(f"/proc/{standby}").exists()


@pytest.mark.ci
def test_slots_stay_empty_for_a_standby_that_is_about_to_be_ready_and_will_be_copied(run_workers: Jobs) -> None:
    folder, ended = run_workers("slow copies", 1)
    assert ended.returncode == 0, ended.stderr
    assert [(folder / f"1-{rank}").read_text().endswith("True") for rank in range(2)] == [True, True]
    assert not {*sitting(folder, 1)} & standbys(folder)


@pytest.mark.ci
def test_a_standby_that_hangs_is_killed_and_its_slots_get_new_processes(run_workers: Jobs) -> None:
    folder, ended = run_workers("standby hangs", 1)
    assert ended.returncode == 0, ended.stderr
    assert "not ready after 10 s; killed" in ended.stderr
    assert [(folder / f"1-{rank}").read_text().endswith("True") for rank in range(2)] == [False, False]
    assert not [pid for pid in standbys(folder) if Path(f"/proc/{pid}").exists()]


@pytest.mark.ci
def test_the_standby_of_a_spare_node_is_ready_before_a_node_is_lost_and_copied_for_all_its_slots(
    tmp_path: Path,
) -> None:
    store = bound_store("127.0.0.1")
    with agent(tmp_path, store.port) as first:
        before = {first.pid, *until(lambda: len(assigned(tmp_path)) == 2 and assigned(tmp_path))}
        with agent(tmp_path, store.port) as spare:
            (standby,) = until(lambda: standbys(tmp_path) & {one.pid for one in psutil.Process(spare.pid).children()})
            (tmp_path / "lost").touch()
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            assert spare.wait(HANG_TIMEOUT_S) == 0
    found = [(tmp_path / f"0-{rank}").read_text().split() for rank in range(2)]
    assert [is_warm for _, is_warm in found] == ["True", "True"], "new processes have no rank to wait for"
    assert len({standby, *before, *(int(pid) for pid, _ in found)}) == 6


def assigned(folder: Path) -> list[int]:
    """The pids of the ranks that sit."""
    return [int(text.split()[0]) for path in folder.glob("0-*") if (text := path.read_text())]


def until(done: Callable[[], Any]) -> Any:
    """What `done` gives, once that is anything."""
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@contextmanager
def agent(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A node of a job that one node trains at a time."""
    command = [
        sys.executable,
        "-m",
        "megatron.pretrain.standby.run",
        "--moe-ckpt-standbys",
        "1",
        "--nproc-per-node",
        "2",
    ]
    command += f"--nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id {folder.name}".split()
    command += ["--rdzv-conf", "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3", "--monitor-interval", "0.05"]
    with subprocess.Popen([*command, str(WORKER), str(folder), "spare"], cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()
            for pid in standbys(folder) | {*assigned(folder)}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.ci
def test_where_standbys_die_again_and_again_no_more_are_started_and_a_line_says_so(run_workers: Jobs) -> None:
    said = run_workers("standbys die", 2)[1].stderr
    assert said.count("exited with code") == 3, said
    assert "3 standbys exited before they were ready: standbys disabled" in said


@pytest.mark.ci
def test_workers_of_another_release_train_without_standbys_and_a_line_says_so(run_workers: Jobs) -> None:
    folder, ended = run_workers("another release", 2)
    assert ended.returncode == 0, ended.stderr
    assert "standbys disabled" in ended.stderr
    assert "version 99" in ended.stderr
    assert not standbys(folder)


def test_no_standby_is_left_when_the_job_has_ended(run_workers: Jobs) -> None:
    folder, _ = run_workers("two standbys", 2)
    assert not [pid for pid in standbys(folder) if Path(f"/proc/{pid}").exists()]


@pytest.mark.ci
@pytest.mark.parametrize(("worker", "code"), [("import this", 0), ("raise MemoryError", 1)])
def test_no_destructor_of_torch_changes_the_exit_code_of_moe_ckpt_run(worker: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(worker)
    abort = "import atexit, os; atexit.register(os.abort); from megatron.pretrain.standby.run import main; main()"
    command = [sys.executable, "-c", abort, "--nproc-per-node=1", str(tmp_path / "worker.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)
    assert ended.returncode == code, ended.stderr
    assert ("ChildFailedError" in ended.stderr) == bool(code)


@pytest.mark.ci
def test_invalid_input_ends_moe_ckpt_run_in_one_line_without_a_restart(tmp_path: Path) -> None:
    worker = "import sys; from megatron.pretrain.loop import in_worker; sys.exit(in_worker([], print))"
    (tmp_path / "worker.py").write_text(worker)
    command = [sys.executable, "-m", "megatron.pretrain.standby.run", "--nproc-per-node=1", "--max-restarts=1"]
    ended = subprocess.run(
        [*command, str(tmp_path / "worker.py")], cwd=ROOT, env=os.environ | {"MOE_CKPT_PATIENCE_S": "60s"},
        capture_output=True, text=True, timeout=HANG_TIMEOUT_S,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("MOE_CKPT_PATIENCE_S 60s must be a positive number of seconds\n") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("wrong", [["--tee", "3"], pytest.param(["--redirects", "1"], marks=pytest.mark.full)])
def test_what_torchrun_does_at_the_start_of_a_rank_is_refused_with_standbys(wrong: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron.pretrain.standby.run", "--moe-ckpt-standbys", "1", *wrong, str(WORKER)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)
    assert ended.returncode == 2
    assert f"{wrong[0]} is done when a process starts" in ended.stderr


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        pytest.param("sparse --moe-ckpt-window 2", Layout(pp=2, ep=1, ranks=2), id="sparse"),
        pytest.param("full", Layout(), id="full"),
    ],
)
@pytest.mark.full
def test_a_job_that_a_copy_of_a_standby_continues_with_ends_in_the_state_of_one_without_faults(
    strategy: str, layout: Layout, launch: Launch, train: Train, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    straight, killed, slots = tmp_path / "straight", tmp_path / "killed", tmp_path / "slots"
    slots.mkdir()
    train(layout, "--save", straight)
    protect = ["--moe-ckpt-strategy", *strategy.split(), "--moe-ckpt-memory-dir", str(cluster.memory)]
    fault = ["--moe-ckpt-inject-fault", f"{layout.ranks - 1}@5"]
    saving = ["--save", str(killed)]
    environment = {"STANDBYS": "1", "READY_STANDBYS": "1", "SLOTS": str(slots)}
    environment |= {"NPROC": str(layout.ranks), "MOE_CKPT_SCRIPT": str(ROOT / "tests" / "process" / "standby_job.py")}
    ended = launch(["scripts/train_cpu.sh", *flags(corpus, layout, *protect, *fault, *saving)], **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(slots.glob("assigned-*"))) == layout.ranks
    assert "exactly" in ended.stdout, ended.stdout + ended.stderr
    assert not differences(digest(killed, 6), digest(straight, 6))
