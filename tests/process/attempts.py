"""Jobs that are killed and started again, as an elastic launcher does: same job, same memory, perhaps other places."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runs import Layout, flags
from world import Hook, Outcome, World

MAX_ATTEMPTS = 12

Between = Callable[[int], None]
"""Called with the number of the attempt that has failed, before the next one is started."""


@dataclass(frozen=True)
class Nodes:
    """On which node each rank runs in each attempt; the last attempt's places hold for all later ones.

    `lost[i]` is the node that is lost, memory and all, when attempt i has failed.
    """

    places: tuple[tuple[str, ...], ...]
    lost: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def one(cls, ranks: int) -> Nodes:
        """All ranks on one node, always."""
        return cls((("node-0",) * ranks,))

    def environments(self, attempt: int) -> list[dict[str, str]]:
        """What each rank's environment says of its place."""
        nodes = self.places[min(attempt, len(self.places) - 1)]
        return [
            {"MOE_CKPT_NODE": node, "LOCAL_RANK": str(nodes[:rank].count(node)), "TORCHELASTIC_RESTART_COUNT": "0"}
            for rank, node in enumerate(nodes)
        ]


@dataclass(frozen=True)
class Cluster:
    """Where jobs run: `memory` is a folder on a tmpfs, with one folder for each node."""

    world: World
    corpus: str
    memory: Path

    def run(
        self,
        layout: Layout,
        *extra: object,
        nodes: Nodes | None = None,
        hooks: Sequence[Hook] = (),
        distributed: bool = True,
        between: Between = lambda attempt: None,
        job: str = "job",
        forgiven: str = "",
    ) -> list[Outcome]:
        """Run a job with snapshots in memory until an attempt ends well; the outcomes of all attempts.

        An attempt that fails without a killed rank fails the test, unless it is worth a restart and says what is
        `forgiven`.
        """
        nodes, outcomes = nodes or Nodes.one(layout.ranks), []
        places = ["--moe-ckpt-memory-dir", str(self.memory)]
        argv = flags(self.corpus, layout, *places, *map(str, extra), distributed=distributed)
        for attempt in range(MAX_ATTEMPTS):
            environments = [
                {**one, "TORCHELASTIC_RUN_ID": f"{job}-{self.memory.name}"} for one in nodes.environments(attempt)
            ]
            running = self.world.start(argv, layout.ranks, hooks, environments)
            outcomes.append(running.wait_or_restart())
            codes = outcomes[-1].codes
            if not any(codes):
                return outcomes
            is_forgiven = forgiven and forgiven in outcomes[-1].said and set(codes) == {1}
            assert is_forgiven or -signal.SIGKILL in codes, outcomes[-1].said
            if attempt in nodes.lost:
                shutil.rmtree(self.memory / nodes.lost[attempt])
            between(attempt)
        raise AssertionError(f"still failing after {MAX_ATTEMPTS} attempts: {outcomes[-1].said}")


def recovered(outcome: Outcome) -> list[str]:
    """The lines of the recovery table, without times."""
    table: list[str] = []
    for line in outcome.lines:
        if line.startswith("recovered iteration"):
            table.append(line)
        elif table and not line.startswith("  "):
            break
        elif table:
            table.append(line)
    return [re.split(r" in | \(\w+ rollback\)", line)[0] for line in table]
