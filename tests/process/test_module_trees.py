"""Models that are no plain GPT, killed and brought back in loops of their own: a staged vision model, and MTP."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path

import pytest
from attempts import Cluster
from test_own_loop import came_out
from world import ROOT, Outcome, World

pytestmark = pytest.mark.ci

VISION = ROOT / "examples" / "vision_moe" / "train.py"
AHEAD = Path(__file__).with_name("mtp_loop.py")
RANKS, LAST = 2, 12

Losses = dict[tuple[int, int], str]


@cache
def undisturbed(world: World, loop: Path) -> Losses:
    """Loss and gradient norm of each rank and iteration, to the last bit, without protection."""
    outcome = world.start((), RANKS, script=loop).wait()
    assert set(outcome.codes) == {0}, outcome.said
    found = came_out(outcome)
    assert len(found) == RANKS * LAST
    return found


def attempt(cluster: Cluster, loop: Path, *strategy: str) -> Outcome:
    argv = (*strategy, "--moe-ckpt-inject-fault", "1@9:step", "--moe-ckpt-memory-dir", str(cluster.memory))
    environments = [{"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": cluster.memory.name} for rank in range(RANKS)]
    return cluster.world.start(argv, RANKS, (), environments, loop).wait_or_restart()


FULL, SPARSE = ("full", "--moe-ckpt-interval", "2"), ("sparse", "--moe-ckpt-window", "3")


@pytest.mark.parametrize(
    ("loop", "strategy"),
    [
        pytest.param(VISION, FULL, id="vision-full"),
        pytest.param(AHEAD, SPARSE, id="mtp-sparse"),
        pytest.param(VISION, SPARSE, id="vision-sparse", marks=pytest.mark.full),
        pytest.param(AHEAD, FULL, id="mtp-full", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_of_another_module_tree_continues_to_the_last_bit(
    loop: Path, strategy: tuple[str, ...], cluster: Cluster
) -> None:
    first, second = (attempt(cluster, loop, "--moe-ckpt-strategy", *strategy) for _ in range(2))
    assert -signal.SIGKILL in first.codes, first.said
    assert set(second.codes) == {0}, second.said
    assert any("recovered iteration" in line and "exactly" in line for line in second.lines), second.said
    assert came_out(first, second) == undisturbed(cluster.world, loop)
    if "sparse" in strategy:
        assert any("the state is dense again" in line for line in second.lines), second.said
