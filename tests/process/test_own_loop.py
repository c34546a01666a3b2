"""A training loop that is not the driver's, protected through `MoECheckpointManager` alone."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterator

import pytest
from attempts import Cluster
from world import ROOT, Outcome, World

LOOP = ROOT / "examples" / "own_loop"
RANKS = 4
LAST = 12


@pytest.fixture(scope="module")
def plain(world: World) -> dict[tuple[int, int], str]:
    """Loss and gradient norm of each rank and iteration, to the last bit, in the loop without protection."""
    outcome = world.start((), RANKS, script=LOOP / "train.py").wait()
    assert set(outcome.codes) == {0}, outcome.said
    found = came_out(outcome)
    assert len(found) == RANKS * LAST
    return found


def came_out(*outcomes: Outcome) -> dict[tuple[int, int], str]:
    """What each rank printed of each iteration; an iteration that is run again has to come out the same."""
    found: dict[tuple[int, int], str] = {}
    for outcome in outcomes:
        for rank, iteration, said in re.findall(r"rank (\d+) iteration (\d+): (.*)", "\n".join(outcome.lines)):
            assert found.setdefault((int(rank), int(iteration)), said) == said, f"{rank} {iteration}"
    return found


def killed_and_restarted(cluster: Cluster, strategy: str, fault: str) -> Iterator[Outcome]:
    for _ in range(2):
        flags = ("--moe-ckpt-strategy", strategy, "--moe-ckpt-inject-fault", fault)
        argv = (*flags, "--moe-ckpt-memory-dir", str(cluster.memory))
        environments = [{"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": cluster.memory.name} for rank in range(RANKS)]
        yield cluster.world.start(argv, RANKS, (), environments, LOOP / "protected.py").wait_or_restart()


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["full", "sparse"])
def test_after_a_kill_every_loss_of_a_loop_of_ones_own_is_that_of_the_unprotected_loop(
    strategy: str, plain: dict[tuple[int, int], str], cluster: Cluster
) -> None:
    first, second = killed_and_restarted(cluster, strategy, "2@8:step")
    assert -signal.SIGKILL in first.codes, first.said
    assert set(second.codes) == {0}, second.said
    assert any("recovered iteration" in line and "exactly" in line for line in second.lines), second.said
    assert came_out(first, second) == plain


def test_a_loop_of_sixty_lines_is_protected_with_fifteen_at_most() -> None:
    plain, protected = ((LOOP / name).read_text().splitlines() for name in ("train.py", "protected.py"))
    changes = difflib.unified_diff(plain, protected, n=0)
    added = [line for line in changes if line.startswith("+") and not line.startswith("+++")]
    assert 10 <= len(added) <= 15, "\n".join(added)
    assert len([line for line in plain if line.strip()]) <= 60
