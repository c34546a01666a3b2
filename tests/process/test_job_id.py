"""Nodes that plain torchrun started, with no id of the job, are one job all the same, also after one was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout, Train, differences, digest, flags
from torch.distributed import TCPStore
from world import HANG_TIMEOUT_S, ROOT

LOST_NODE = Path(__file__).with_name("lost_node.py")
LAYOUT = Layout(pp=2, ep=1, ranks=2)


class Agents:
    """Torchrun on each node of a job, all on this machine; they meet at a store that no node has."""

    def __init__(self, folder: Path, memory: Path, argv: Sequence[str]) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._folder, self._memory, self._argv = folder, memory, argv
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        """Start torchrun on a node, as it is in every manual, but for a store of its own and less patience."""
        meeting = f"localhost:{self._store.port}"
        patience = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60,last_call_timeout=1"
        torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.1"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-conf", patience]
        environment = os.environ | {
            "MOE_CKPT_NODE": node, "MEMORY": str(self._memory), "TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        command = [sys.executable, *torchrun.split(), *rendezvous, str(LOST_NODE), *self._argv]
        with (self._folder / f"{node}.log").open("wb") as log:
            self.running[node] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for_one(self) -> tuple[str, int]:
        """The node whose agent ended first, and its exit code."""
        deadline = time.monotonic() + HANG_TIMEOUT_S
        while True:
            for node, agent in self.running.items():
                code = agent.poll()
                if code is not None:
                    del self.running[node]
                    return node, code
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    @property
    def said(self) -> str:
        return "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log")))

    def kill(self) -> None:
        for agent in self.running.values():
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


@pytest.fixture
def agents(corpus: str, cluster: Cluster, tmp_path: Path) -> Iterator[Agents]:
    protect = ["--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "3", "--moe-ckpt-memory-dir", str(cluster.memory)]
    saving = ["--save", str(tmp_path / "killed"), "--moe-ckpt-inject-fault", "1@6:step"]
    folder = tmp_path / "agents"
    folder.mkdir()
    made = Agents(folder, cluster.memory, flags(corpus, LAYOUT, *protect, *saving))
    yield made
    made.kill()


@pytest.mark.full
def test_a_node_that_is_lost_comes_back_from_the_memory_of_its_peer(
    agents: Agents, train: Train, tmp_path: Path
) -> None:
    for node in ("node-0", "node-1"):
        agents.start(node)
    lost, code = agents.wait_for_one()
    assert code == -signal.SIGKILL, agents.said
    agents.start("node-2")
    ended = dict(agents.wait_for_one() for _ in range(2))
    assert set(ended.values()) == {0}, agents.said
    assert lost not in ended
    assert "recovered iteration 3 exactly" in agents.said
    assert "peer memory" in agents.said
    straight = tmp_path / "straight"
    train(LAYOUT, "--save", straight)
    assert not differences(digest(tmp_path / "killed", 6), digest(straight, 6))
