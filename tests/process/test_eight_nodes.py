"""32 ranks in eight played nodes lose one of them, with its memory: the other 28 keep their processes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, differences, digest, flags
from torch.distributed import TCPStore

NODES, EACH = 8, 4
LAYOUT = Layout(pp=4, ep=4, ranks=NODES * EACH)
LAUNCHER = [sys.executable, "-m", "megatron.pretrain.standby.run", "--nproc-per-node"]
LIMIT_S = 900.0
"""Of one job: each process imports torch and Megatron-Core on few cores."""


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_28_of_32_ranks_stay_where_a_node_is_lost_and_every_bit_is_equal(
    launch: Launch, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    protect = ["--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory), "--moe-ckpt-replicas", "1"]
    script, plain = str(Path(__file__).with_name("lost_node.py")), str(tmp_path / "plain")
    alone = [*LAUNCHER, str(LAYOUT.ranks), "--standalone", script, *flags(corpus, LAYOUT, "--save", plain)]
    undisturbed = launch(alone, timeout_s=LIMIT_S)
    assert undisturbed.returncode == 0, undisturbed.stderr

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no node has it, so any may be lost
    meeting = f"--nnodes {NODES} --rdzv-backend c10d --rdzv-id eight --rdzv-endpoint 127.0.0.1:{store.port}"
    options = f"--max-restarts 2 --monitor-interval 0.1 --rdzv-conf is_host=0 --moe-ckpt-standbys 1 {meeting}".split()
    argv = flags(corpus, LAYOUT, *protect, "--moe-ckpt-inject-fault", "5@4", "--save", str(tmp_path / "struck"))
    agent = shlex.join([*LAUNCHER, str(EACH), *options, script, *argv])
    nodes = "\n".join(f"MOE_CKPT_NODE=node-{number} {agent} & pids+=($!)" for number in range(NODES + 1))
    wait = 'for pid in "${pids[@]}"; do wait "$pid"; echo "exit code $?"; done'
    ended = launch(["bash", "-c", f"{nodes}\n{wait}"], timeout_s=LIMIT_S, MEMORY=str(cluster.memory))
    said = ended.stdout + ended.stderr
    assert ended.stdout.count("exit code 0") == NODES, said
    assert re.findall(r"(\d+) ranks kept their processes", said)[0] == str(LAYOUT.ranks - EACH), said
    assert not differences(digest(tmp_path / "plain", 6), digest(tmp_path / "struck", 6))
