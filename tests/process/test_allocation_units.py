"""A node of an allocation unit is lost: the whole unit is replaced, and its snapshots come from other units."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, flags
from torch.distributed import TCPStore

UNITS = "aabbcc"
"""Of each node; the last two are spares."""


@pytest.mark.full
def test_a_unit_of_two_nodes_that_loses_one_is_replaced_by_two_standbys(
    launch: Launch, corpus: str, cluster: Cluster
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no node has it, so any may be lost
    argv = ["--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory), "--moe-ckpt-replicas", "1"]
    argv = flags(corpus, Layout(pp=1, ep=1, ranks=4), *argv, "--moe-ckpt-inject-fault", "0@4")
    meeting = f"--nnodes 4 --rdzv-backend c10d --rdzv-id units --rdzv-endpoint 127.0.0.1:{store.port}"
    options = f"--nproc-per-node 1 --max-restarts 2 --monitor-interval 0.1 --rdzv-conf is_host=0 {meeting}".split()
    script = str(Path(__file__).with_name("lost_node.py"))
    agent = shlex.join(
        [sys.executable, "-m", "megatron.pretrain.standby.run", *options, "--moe-ckpt-unit-nodes=2", script, *argv]
    )
    nodes = "\n".join(
        f"MOE_CKPT_NODE=node-{number} MOE_CKPT_UNIT=rack-{unit} {agent} & pids+=($!)"
        for number, unit in enumerate(UNITS)
    )
    wait = 'for pid in "${pids[@]}"; do wait "$pid"; echo "exit code $?"; done'
    ended = launch(["bash", "-c", f"{nodes}\n{wait}"], MEMORY=str(cluster.memory))
    said = ended.stdout + ended.stderr
    assert ended.stdout.count("exit code 0") == 5, said
    assert len(re.findall(r"recovered iteration [23] exactly", said)) == 1, said
    (line,) = re.findall(r"node-(\d): allocation unit rack-(\w) has 1 of 2 nodes; waiting as a spare", said)
    assert UNITS[int(line[0])] == line[1], said
