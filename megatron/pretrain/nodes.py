"""Plays several nodes on this machine: one elastic agent each, and a spare for a node that is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.processes import NODE_LEAVES, NODE_NAME, end_processes_with

log = logging.getLogger(__name__)

POLL_S = 0.1
GONE_S = 30.0
"""How long the end of the processes of a lost node may take."""
RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable in which an agent hands the job's name to its workers."""


@dataclass(frozen=True)
class NodeRange:
    """Fewest and most nodes of a job."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """N or MIN:MAX. Raises ValueError."""
        least, _, most = text.partition(":")
        found = cls(int(least), int(most or least))
        if not 1 <= found.least <= found.most:
            raise ValueError(text)
        return found

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Nodes:
    """How many nodes are played: at the start, how few may be left, how many may take the place of lost ones, and how
    many seconds after these were lost."""

    most: int
    least: int
    spares: int
    spare_after_s: float = 0.0


def run_nodes(command: Sequence[str], nodes: Nodes, *, run_id: str, patience_s: float) -> int:
    """Run `command` as the agent of each node until all have ended.

    An agent that is killed, or leaves the job (NODE_LEAVES), is a node that is lost: what is left of its workers is
    killed too, and another agent, with another name and so with an empty memory tier, takes its place, as often as
    there are spares. When an agent fails for good, or too few are left, the others cannot continue: they have
    `patience_s` to see that by themselves, then get SIGTERM, then SIGKILL.

    Args:
        run_id: of the job; its workers are found by it.

    Returns:
        0, the exit code of the agent that failed first, or 128 + N when signal N ended this process. The code for
        invalid flags and inputs, if any agent ends with it: that is why the others failed.
    """
    agents = _Agents(command, nodes, run_id)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, agents.forward)
    steps = [(patience_s, "told to end", signal.SIGTERM), (2 * patience_s, "killed", signal.SIGKILL)]
    while agents.running or agents.awaits_spares:
        time.sleep(POLL_S)
        agents.poll()
        if steps and agents.failed_since_s > steps[0][0]:
            limit_s, what, number = steps.pop(0)
            for name in agents.running:
                log.error("%s did not exit %.0f s after the job failed; %s", name, limit_s, what)
            agents.send(number)
    if agents.stopped_by:
        return 128 + agents.stopped_by
    return agents.failure


class _Agents:
    """The agents that run. failure: the exit code of the first that failed for good, or found invalid inputs.
    stopped_by: the signal that ended all."""

    def __init__(self, command: Sequence[str], nodes: Nodes, run_id: str) -> None:
        self._command, self._run_id, self._nodes = command, run_id, nodes
        self._most, self._due_s = nodes.most + nodes.spares, list[float]()
        self._started = self.failure = self.stopped_by = 0
        self._failed_at_s, self._told = 0.0, frozenset[str]()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(nodes.most):
            self._start()

    @property
    def awaits_spares(self) -> bool:
        """Whether a node is still to come."""
        return bool(self._due_s) and not self._is_over

    @property
    def _is_over(self) -> bool:
        """Whether no node is started any more."""
        return bool(self.stopped_by or self._failed_at_s)

    @property
    def failed_since_s(self) -> float:
        """Seconds since an agent failed for good; 0 while none has."""
        return time.monotonic() - self._failed_at_s if self._failed_at_s else 0.0

    def poll(self) -> None:
        """Note which have ended, and replace those that were lost."""
        for name, agent in list(self.running.items()):
            code = agent.poll()
            if code is None:
                continue
            del self.running[name]
            is_lost = code in (-signal.SIGKILL, NODE_LEAVES)
            # What a real node takes along when it is lost.
            if is_lost and (alive := end_processes_with({NODE_NAME: name, RUN_ID: self._run_id}, GONE_S)):
                log.error("processes %s of %s still alive %g s after SIGKILL", alive, name, GONE_S)
            if is_lost and self._may_replace():
                after_s = self._nodes.spare_after_s
                when = f" in {after_s:g} s" if after_s else ""
                log.warning("%s lost; replaced by node-%d%s", name, self._started + len(self._due_s), when)
                self._due_s.append(time.monotonic() + after_s)
            elif is_lost and len(self.running) >= self._nodes.least and not self._is_over:
                left = len(self.running)
                log.warning("%s lost; continuing with %d of %d nodes", name, left, self._nodes.most)
            elif code and (not self.failure or code == InvalidInput.exit_code):
                if is_lost and not self.stopped_by:
                    log.error("%s lost; no nodes left of %d", name, self._most)
                self.failure, self._failed_at_s = max(code, 1), self._failed_at_s or time.monotonic()

        while self._due_s and self._due_s[0] <= time.monotonic():
            self._due_s.pop(0)
            if not self._is_over:
                self._start()

    def _may_replace(self) -> bool:
        return self._started + len(self._due_s) < self._most and not self._is_over

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Hand a signal on to all agents; no node is replaced from here on."""
        self.stopped_by, self._told = number, frozenset(self.running)
        self.send(number)

    def send(self, number: int) -> None:
        """A signal to all agents that run."""
        for agent in list(self.running.values()):
            agent.send_signal(number)

    def _start(self) -> None:
        name = f"node-{self._started}"
        self._started += 1
        self.running[name] = subprocess.Popen(self._command, env={**os.environ, NODE_NAME: name})
        if self.stopped_by and name not in self._told:  # the signal came while this one was being started
            self.running[name].send_signal(self.stopped_by)
