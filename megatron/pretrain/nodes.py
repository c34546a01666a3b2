"""Plays several nodes on this machine: one elastic agent each, and a spare for a node that is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from torch.distributed import TCPStore

from megatron.pretrain.initialize import NODE_NAME

log = logging.getLogger(__name__)

POLL_S = 0.1


def run_nodes(command: Sequence[str], endpoint: str, nodes: int, spares: int) -> int:
    """Run `command` as the agent of each node until all have ended; 1 if any failed, else 0.

    The rendezvous is kept here and not by an agent, so that it survives the loss of any node. An agent that is killed
    is a node that is lost: another one, with another name and so with an empty memory tier, takes its place, `spares`
    times at most.
    """
    host, _, port = endpoint.rpartition(":")
    rendezvous = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    agents = {f"node-{number}": _start(command, f"node-{number}") for number in range(nodes)}

    def forward(number: int, _frame: FrameType | None) -> None:
        for agent in agents.values():
            agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    failed, started = False, nodes
    while agents:
        time.sleep(POLL_S)
        for name, agent in list(agents.items()):
            code = agent.poll()
            if code is None:
                continue
            del agents[name]
            if code == -signal.SIGKILL and started < nodes + spares:
                spare = f"node-{started}"
                log.warning("%s is lost; %s takes its place", name, spare)
                agents[spare] = _start(command, spare)
                started += 1
            else:
                failed = failed or code != 0
    del rendezvous
    return int(failed)


def _start(command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, NODE_NAME: name})
