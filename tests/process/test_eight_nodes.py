"""32 ranks in eight played nodes lose one of them, with its memory: the other 28 keep their processes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, Start, differences, digest, flags
from torch.distributed import TCPStore

from megatron.pretrain.standby.meeting import KEY

NODES, EACH = 8, 4
LAYOUT = Layout(pp=4, ep=4, ranks=NODES * EACH)
LAUNCHER = [sys.executable, "-m", "megatron.pretrain.standby.run", "--nproc-per-node", str(EACH)]
LIMIT_S = 900.0
"""Of one job, on few cores."""


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_28_of_32_ranks_stay_where_a_node_is_lost_and_every_bit_is_equal(
    launch: Launch, start: Start, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    undisturbed = start(LAYOUT, "--save", tmp_path / "plain").wait(LIMIT_S)
    assert set(undisturbed.codes) == {0}, undisturbed.said

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no node has it, so any may be lost
    # Nodes that wait for the last one may start a standby, which is copied for each rank: few processes import torch.
    store.set(KEY.format("eight"), "taken")
    ready = tmp_path / "ready"
    ready.mkdir()
    meeting = f"--nnodes {NODES} --rdzv-backend c10d --rdzv-id eight --rdzv-endpoint 127.0.0.1:{store.port}"
    options = f"--max-restarts 2 --monitor-interval 0.1 --rdzv-conf is_host=0 --moe-ckpt-standbys 1 {meeting}".split()
    protect = ["--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory), "--moe-ckpt-replicas", "1"]
    argv = flags(corpus, LAYOUT, *protect, "--moe-ckpt-inject-fault", "5@4", "--save", str(tmp_path / "struck"))
    agent = shlex.join([*LAUNCHER, *options, str(Path(__file__).with_name("lost_node.py")), *argv])
    nodes = [f"MOE_CKPT_NODE=node-{number} {agent} & pids+=($!)" for number in range(NODES + 1)]
    until_ready = f'until [ "$(ls "$READY" | wc -l)" = {NODES - 1} ]; do sleep 0.2; done'
    wait = 'for pid in "${pids[@]}"; do wait "$pid"; echo "exit code $?"; done'
    script = "\n".join([*nodes[: NODES - 1], until_ready, *nodes[NODES - 1 :], wait])
    places = {"MEMORY": str(cluster.memory), "READY": str(ready)}
    ended = launch(["bash", "-c", script], timeout_s=LIMIT_S, NICE="10", **places)
    said = ended.stdout + ended.stderr
    assert ended.stdout.count("exit code 0") == NODES, said
    (recovery,) = re.findall(r"recovery took .* ranks kept their processes\).*", said)
    print(recovery)
    assert f"in place, {LAYOUT.ranks - EACH} ranks kept their processes" in recovery
    assert not differences(digest(tmp_path / "plain", 6), digest(tmp_path / "struck", 6))
