"""Real launchers, real SIGKILL: what is lost is computed again, and comes out as if nothing had happened."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, Train, UndisturbedRun, differences, digest, exact, flags, metrics
from world import HANG_TIMEOUT_S, free_port

LOST_NODE = Path(__file__).with_name("lost_node.py")


def assert_same_losses_after_a_kill(straight: Path, killed: Path, recomputed: int) -> None:
    """The disturbed run reported `recomputed` iterations twice, and every report is that of the undisturbed one."""
    reports, expected = metrics(killed), exact(straight)
    assert len(expected) == 6
    assert len(reports) == len(expected) + recomputed
    assert exact(killed) == expected
    assert all(repr(report) == expected[report["iteration"]] for report in reports)


# Real starts of Python with torch cost seconds each: two ranks show what four do.
TWO_RANKS = Layout(pp=2, ep=1, ranks=2)
full = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "nodes", "killed"),
    [
        pytest.param(TWO_RANKS, 2, 0, id="two nodes", marks=full),
        pytest.param(Layout(), 1, 2, id="one node of four ranks", marks=full),
        pytest.param(Layout(), 2, 1, id="two nodes of two ranks", marks=full),
    ],
)
def test_a_killed_worker_is_restarted_and_nothing_is_lost(
    layout: Layout, nodes: int, killed: int, launch: Launch, train: Train, corpus: str, tmp_path: Path
) -> None:
    straight, reports, save = tmp_path / "straight", tmp_path / "reports", str(tmp_path / "save")
    train(layout, "--metrics-jsonl", straight)
    saving = ["--save", save, "--load", save, "--save-interval", "2", "--moe-ckpt-inject-fault", f"{killed}@4"]
    argv = flags(corpus, layout, *saving, "--metrics-jsonl", str(reports))
    ended = launch(["scripts/train_cpu.sh", *argv], NPROC=str(layout.ranks // nodes), NNODES=str(nodes))
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert len(re.findall(r"successfully loaded checkpoint .* at iteration 2", said)) == 1, said
    assert_same_losses_after_a_kill(straight, reports, recomputed=1)


@full
def test_plain_torchrun_restarts_a_killed_worker_too(launch: Launch, train: Train, corpus: str, tmp_path: Path) -> None:
    straight, reports, save = tmp_path / "straight", tmp_path / "reports", str(tmp_path / "save")
    layout = Layout(pp=2, ep=1, ranks=2)
    train(layout, "--metrics-jsonl", straight)
    saving = ["--save", save, "--load", save, "--save-interval", "2", "--moe-ckpt-inject-fault", "0@5:step"]
    argv = flags(corpus, layout, *saving, "--metrics-jsonl", str(reports))
    torchrun = f"-m torch.distributed.run --nproc-per-node 2 --max-restarts 1 --master-port {free_port()}".split()
    ended = launch([sys.executable, *torchrun, "pretrain_gpt_moe.py", *argv])
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert len(re.findall(r"successfully loaded checkpoint .* at iteration 4", said)) == 1, said
    assert exact(reports) == exact(straight)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [pytest.param(TWO_RANKS, 1, marks=pytest.mark.ci), pytest.param(Layout(), 2, marks=full)],
    ids=["one rank each", "two each"],
)
def test_a_node_that_is_lost_with_its_memory_is_replaced_by_a_spare_and_nothing_is_lost(
    layout: Layout,
    victim: int,
    launch: Launch,
    undisturbed_run: UndisturbedRun,
    corpus: str,
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    straight, killed = undisturbed_run(layout), tmp_path / "killed"
    protect = ["--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "3", "--moe-ckpt-memory-dir", str(cluster.memory)]
    saving = ["--save", str(killed), "--metrics-jsonl", str(killed / "reports"), "--moe-ckpt-inject-fault"]
    saving.append(f"{victim}@6:step")
    here = {
        "NPROC": str(layout.ranks // 2),
        "NNODES": "2",
        "MOE_CKPT_SCRIPT": str(LOST_NODE),
        "MEMORY": str(cluster.memory),
    }
    ended = launch(["scripts/train_cpu.sh", *flags(corpus, layout, *protect, *saving)], **here)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert "node-1 lost; replaced by node-2" in said or "node-0 lost; replaced by node-2" in said
    assert "recovered iteration 3 exactly" in said
    assert "peer memory" in said
    assert not differences(digest(killed, 6), digest(straight, 6))


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        pytest.param(["--keep-last", "3"], "--keep-last is no flag", id="seen by the launcher"),
        pytest.param(["--num-layers", "3"], "invalid Megatron-LM arguments", id="seen by the workers", marks=full),
    ],
)
def test_what_cannot_work_is_said_once_and_not_restarted(
    wrong: list[str], part: str, launch: Launch, corpus: str
) -> None:
    ended = launch(["scripts/train_cpu.sh", *flags(corpus, TWO_RANKS, *wrong)], NPROC="2", EP="1")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count(part) == 1, ended.stderr


@pytest.mark.ci
def test_nodes_of_which_one_has_left_for_good_do_not_wait_for_each_other(launch: Launch, corpus: str) -> None:
    script = str(Path(__file__).with_name("verdict_rank.py"))
    argv = ["scripts/train_cpu.sh", *flags(corpus, Layout(pp=1, ep=1, ranks=3))]
    ended = launch(argv, timeout_s=HANG_TIMEOUT_S, NPROC="1", NNODES="3", MOE_CKPT_SCRIPT=script)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "ranks exited with a permanent error; other nodes are still running after 10 s" in ended.stderr


@pytest.mark.ci
def test_a_worker_that_dies_again_and_again_ends_the_job_with_a_reason(launch: Launch, corpus: str) -> None:
    faults = ["--moe-ckpt-inject-fault", "0@1", "--moe-ckpt-inject-fault", "0@1:end"]
    layout = Layout(pp=1, ep=1, ranks=1)
    ended = launch(["scripts/train_cpu.sh", *flags(corpus, layout, *faults)], NPROC="1", MAX_RESTARTS="1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "training failed after 1 restarts" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.full
def test_nodes_of_moe_ckpt_run_recover_at_the_first_restart_with_nothing_set_and_a_spare_ends_well(
    launch: Launch, corpus: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    argv = ["--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory), "--moe-ckpt-replicas", "1"]
    argv = flags(corpus, TWO_RANKS, *argv, "--moe-ckpt-inject-fault", "0@4")
    meeting = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id two-and-a-spare"
    run = (
        f"-m megatron.pretrain.standby.run --nproc-per-node 1 --max-restarts 1 --monitor-interval 0.1 {meeting}".split()
    )
    agent = shlex.join([sys.executable, *run, "pretrain_gpt_moe.py", *argv])
    nodes = "\n".join(f"MOE_CKPT_NODE=node-{number} {agent} & pids+=($!)" for number in range(3))
    ended = launch(["bash", "-c", f'{nodes}\nfor pid in "${{pids[@]}}"; do wait "$pid"; echo "exit code $?"; done'])
    said = ended.stdout + ended.stderr
    assert ended.stdout.count("exit code 0") == 3, said
    assert len(re.findall(r"recovered iteration [23] exactly", said)) == 1, said


OF_A_USER = """
from megatron.core.dist_checkpointing.moe import stock
from megatron.core.dist_checkpointing.moe.errors import UsageError
def pretrain():
    print("started", flush=True)
    {0}
stock.protected(pretrain)()
"""
REFUSES = 'raise UsageError("nothing fits")'
STANDBY, ENDED = ("--moe-ckpt-standbys", "1"), "ended with exit code 2: not restarted"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ends", "says", "standbys"),
    [
        pytest.param(REFUSES, "nothing fits", (), id="a refusal"),
        pytest.param(REFUSES, "nothing fits", STANDBY, id="a refusal, standbys", marks=pytest.mark.full),
        pytest.param("raise SystemExit(2)", ENDED, STANDBY, id="argparse, standbys"),
        pytest.param("raise SystemExit(2)", ENDED, (), id="argparse", marks=pytest.mark.full),
    ],
)
def test_what_cannot_work_in_the_script_of_a_user_ends_the_job_in_one_line(
    ends: str, says: str, standbys: tuple[str, ...], launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_A_USER.format(ends))
    command = ["-m", "megatron.pretrain.standby.run", *standbys, "--nproc-per-node=1", "--max-restarts=3", str(script)]
    ended = launch([sys.executable, *command])
    assert ended.returncode == 2, ended.stderr
    assert (ended.stdout.count("started"), ended.stderr.count(says)) == (1, 1), ended.stderr
    assert "Traceback" not in ended.stderr


MEETS = """
import os, socket
port = int(os.environ["MASTER_PORT"])
with socket.socket() as joining:
    answers = not joining.connect_ex((os.environ["MASTER_ADDR"], port))
print("meets", os.environ["TORCHELASTIC_USE_AGENT_STORE"], answers, port, flush=True)
raise SystemExit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


@pytest.mark.parametrize("node", ["--standalone", "--master-port {}"])
def test_where_workers_meet_nobody_else_can_listen_before_they_come(node: str, launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    node = node.format(free_port())
    command = f"-m megatron.pretrain.standby.run {node} --nproc-per-node 1 --max-restarts 1 {script}"
    ended = launch([sys.executable, *command.split()])
    starts = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("meets")]
    assert ended.returncode == 0 and [start[:2] for start in starts] == [["True", "True"]] * 2, ended.stderr
    assert starts[0] != starts[1], "what an earlier start wrote is not found again"
