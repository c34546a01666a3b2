"""Megatron-Bridge's training loop, protected through its checkpoint manager; its own loop where its wheel is there."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from attempts import Cluster
from fault_hooks import once_sealed
from world import Outcome, World

JOB = Path(__file__).with_name("bridge_job.py")
RANKS, LAST, KILLED = 4, 12, 8

CameOut = dict[tuple[int, int], str]


@pytest.fixture(scope="module")
def plain(world: World) -> CameOut:
    """Loss and gradient norm of each rank and iteration, and the counts at the end, without protection."""
    outcome = world.start((), RANKS, script=JOB).wait()
    assert set(outcome.codes) == {0}, outcome.said
    found = came_out(outcome)
    assert len(found) == RANKS * (LAST + 1)
    return found


def came_out(*outcomes: Outcome) -> CameOut:
    """What each rank printed of each iteration, and of the end; what is run again has to come out the same."""
    found: CameOut = {}
    for outcome in outcomes:
        text = "\n".join(outcome.lines)
        for rank, iteration, said in re.findall(r"rank (\d+) (?:iteration (\d+): |counted )(.*)", text):
            key = int(rank), int(iteration or LAST + 1)
            assert found.setdefault(key, said) == said, key
    return found


def attempt(cluster: Cluster, flags: str, argv: Sequence[str] = (), protected: bool = True) -> Outcome:
    flags = f"{flags} --moe-ckpt-memory-dir {cluster.memory}"
    environments = [
        {"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": cluster.memory.name, "MOE_CKPT_FLAGS": flags}
        for rank in range(RANKS)
    ]
    argv = (*argv, "--protected") if protected else argv
    hooks = (once_sealed(cluster.memory, KILLED - 1, RANKS),)
    return cluster.world.start(argv, RANKS, hooks, environments, JOB).wait_or_restart()


def killed(cluster: Cluster, flags: str, argv: Sequence[str] = ()) -> Outcome:
    """An attempt in which rank 2 is killed after its step of iteration 8, once the one before it is in memory."""
    outcome = attempt(cluster, f"{flags} --moe-ckpt-inject-fault 2@{KILLED}:step", argv)
    assert -signal.SIGKILL in outcome.codes, outcome.said
    return outcome


def ended_well(outcome: Outcome) -> Outcome:
    assert set(outcome.codes) == {0}, outcome.said
    return outcome


def first_iteration(outcome: Outcome) -> int:
    return min(iteration for _, iteration in came_out(outcome))


@pytest.mark.parametrize("strategy", ["full", pytest.param("pec --moe-ckpt-pec-k-snapshot 4", marks=pytest.mark.ci)])
def test_after_a_kill_every_loss_and_every_count_is_that_of_the_unprotected_loop(
    strategy: str, plain: CameOut, cluster: Cluster
) -> None:
    flags = f"--moe-ckpt-strategy {strategy}"
    first = killed(cluster, flags)
    second = ended_well(attempt(cluster, flags))
    assert first_iteration(second) == KILLED, second.said
    assert came_out(first, second) == plain


@pytest.mark.ci
def test_memory_is_taken_where_it_is_newer_than_the_checkpoint_of_bridge(
    plain: CameOut, cluster: Cluster, tmp_path: Path
) -> None:
    first = killed(cluster, "--moe-ckpt-strategy full", ("--save", str(tmp_path)))
    second = ended_well(attempt(cluster, "--moe-ckpt-strategy full", ("--save", str(tmp_path))))
    assert first_iteration(second) == KILLED, second.said
    assert came_out(first, second) == plain
    assert {folder.name for folder in tmp_path.glob("iter_*")} >= {"iter_0000005", "iter_0000010"}


@pytest.mark.ci
def test_the_checkpoint_of_bridge_is_taken_where_memory_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    killed(cluster, "--moe-ckpt-strategy full", ("--save", str(tmp_path)))
    for folder in cluster.memory.iterdir():
        shutil.rmtree(folder)
    second = ended_well(attempt(cluster, "--moe-ckpt-strategy full", ("--save", str(tmp_path))))
    assert first_iteration(second) == 6, second.said


@pytest.mark.ci
def test_the_last_iteration_is_in_memory_where_bridge_leaves_early(plain: CameOut, cluster: Cluster) -> None:
    first = ended_well(attempt(cluster, "--moe-ckpt-strategy full", ("--leave-at", "6")))
    second = ended_well(attempt(cluster, "--moe-ckpt-strategy full"))
    assert first_iteration(second) == 7, second.said
    assert came_out(first, second) == plain


@pytest.mark.ci
def test_a_manager_that_is_only_named_gives_memory_back_when_training_is_over(cluster: Cluster) -> None:
    ended_well(attempt(cluster, "--moe-ckpt-strategy full", protected=False))
    assert not list(cluster.memory.glob("*/*/slot-*/segment-*"))
