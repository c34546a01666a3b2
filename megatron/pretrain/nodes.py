"""Plays several nodes on this machine: one elastic agent each, and a spare for a node that is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType

from torch.distributed import TCPStore

from megatron.pretrain.processes import NODE_NAME, kill_processes_with

log = logging.getLogger(__name__)

POLL_S = 0.1
RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable in which an agent tells its workers the job's name."""

Agent = subprocess.Popen[bytes]


def run_nodes(command: Sequence[str], endpoint: str, nodes: int, spares: int, *, run_id: str, patience_s: float) -> int:
    """Run `command` as the agent of each node until all have ended; 0, the exit code of one that failed, or 128 + N
    when signal N told this process to end.

    The rendezvous is kept here and not by an agent, so that it survives the loss of any node. An agent that is killed
    is a node that is lost: what is left of its workers, of job `run_id`, is killed too, and another agent, with another
    name and so with an empty memory tier, takes its place, `spares` times at most. When an agent fails for good the
    others cannot go on: they have `patience_s` to see that by themselves, then they are told to end, then killed.
    """
    host, _, port = endpoint.rpartition(":")
    rendezvous = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    fleet = _Fleet(command, nodes, spares, run_id)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, fleet.forward)
    ends = [
        (patience_s, "told to end", lambda agent: agent.send_signal(signal.SIGTERM)),
        (2 * patience_s, "killed", lambda agent: agent.kill()),
    ]
    while fleet.agents:
        time.sleep(POLL_S)
        fleet.poll()
        if fleet.waited_s and ends and fleet.waited_s > ends[0][0]:
            limit_s, what, act = ends.pop(0)
            fleet.end(f"did not end within {limit_s:.0f} s after the job had failed; {what}", act)
    del rendezvous
    return 128 + fleet.stopped_by if fleet.stopped_by else fleet.failure


class _Fleet:
    """The agents that run. failure: the exit code of the first that failed for good. stopped_by: the signal that ended
    all. started: how many nodes there were so far."""

    def __init__(self, command: Sequence[str], nodes: int, spares: int, run_id: str) -> None:
        self._command, self._run_id, self._most = command, run_id, nodes + spares
        self.started, self.failure, self.stopped_by = 0, 0, 0
        self._failed_at_s = 0.0
        self.agents: dict[str, Agent] = {}
        for _ in range(nodes):
            self._start()

    @property
    def waited_s(self) -> float:
        """Since an agent failed for good; 0 while none has."""
        return time.monotonic() - self._failed_at_s if self._failed_at_s else 0.0

    def poll(self) -> None:
        """Note who has ended, and replace whom that helps."""
        for name, agent in list(self.agents.items()):
            code = agent.poll()
            if code is None:
                continue
            del self.agents[name]
            if code == -signal.SIGKILL:
                # What a real node takes along when it is lost.
                kill_processes_with({NODE_NAME: name, RUN_ID: self._run_id})
            if code == -signal.SIGKILL and self.started < self._most and not self.stopped_by and not self.failure:
                log.warning("%s is lost; node-%d takes its place", name, self.started)
                self._start()
            elif code and not self.failure:
                if code == -signal.SIGKILL and not self.stopped_by:
                    log.error("%s is lost, and all %d nodes have been used up", name, self._most)
                self.failure, self._failed_at_s = max(code, 1), time.monotonic()

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Hand a signal on to all agents; no node is replaced from here on."""
        self.stopped_by = number
        for agent in list(self.agents.values()):
            agent.send_signal(number)

    def end(self, why: str, act: Callable[[Agent], None]) -> None:
        """Act on all agents that are left."""
        for name, agent in list(self.agents.items()):
            log.error("%s %s", name, why)
            act(agent)

    def _start(self) -> None:
        name = f"node-{self.started}"
        self.started += 1
        self.agents[name] = subprocess.Popen(self._command, env={**os.environ, NODE_NAME: name})
