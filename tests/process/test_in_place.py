"""Ranks that lost a peer keep their processes: who stays, who comes, and that every bit is as without the fault."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from low_precision_rows import model
from runs import Launch, Layout, Train, differences, digest, flags
from slot_process import check_survivors, sitting
from world import HANG_TIMEOUT_S, RECOVERY_TIMEOUT_S, ROOT

FLAT = Layout(pp=2, ep=1, ranks=2)
Job = Callable[..., Path]


@pytest.fixture
def job(launch: Launch, corpus: str, tmp_path: Path) -> Job:
    """Runs a job with standbys that is struck, and returns the folder with what its processes left."""

    def run(
        layout: Layout, strategy: str, *more: str, faults: str = "", kills: str = "", nodes: int = 1, lost: bool = False
    ) -> Path:
        recoveries = len(faults.split()) + len(kills.split(","))
        slots, memory = tmp_path / "slots", tmp_path / "memory"
        slots.mkdir()
        memory.mkdir()
        argv = flags(
            corpus, layout, "--moe-ckpt-strategy", *strategy.split(), "--moe-ckpt-memory-dir", str(memory),
            *[part for fault in faults.split() for part in ("--moe-ckpt-inject-fault", fault)],
            "--save", str(tmp_path / "struck"), *more,
        )  # fmt: skip
        environment = {"NPROC": str(layout.ranks // nodes), "NNODES": str(nodes), "STANDBYS": "1"}
        environment |= {"SLOTS": str(slots), "KILLS": kills, "READY_STANDBYS": str(nodes), "MAX_RESTARTS": "999"}
        environment |= {"LOST_MEMORY": str(memory)} if lost else {}
        ended: subprocess.CompletedProcess[str] = launch(
            ["scripts/train_cpu.sh", *argv],
            MOE_CKPT_SCRIPT=str(ROOT / "tests" / "process" / "standby_job.py"),
            timeout_s=HANG_TIMEOUT_S + RECOVERY_TIMEOUT_S * recoveries,
            **environment,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr
        assert "ranks kept their processes)" in ended.stdout, ended.stdout
        anew = sum("kept their processes" not in line for line in ended.stdout.splitlines() if "recovery took" in line)
        assert ended.stdout.count("emergency save on failure:") <= 1 + anew, "measured while others wait"
        return slots

    return run


def check_state(train: Train, layout: Layout, tmp_path: Path, iterations: int = 6) -> None:
    straight = tmp_path / "straight"
    train(layout, "--save", straight, "--train-iters", str(iterations))
    assert not differences(digest(tmp_path / "struck", iterations), digest(straight, iterations))


@pytest.mark.parametrize(
    ("layout", "faults", "filled"),
    [
        pytest.param(FLAT, "0@4:forward-backward", [[0, 0], [1, 0]], id="PP=2", marks=pytest.mark.full),
        pytest.param(
            FLAT, "0@4:forward-backward 1@5:step", [[0, 0], [1, 0], [1, 1]], id="PP=2, twice", marks=pytest.mark.ci
        ),
        pytest.param(
            Layout(), "1@4:forward-backward 2@5:step", [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]],
            id="PP=2 x EP=2", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_ranks_of_other_stages_keep_their_state_where_it_is_and_nothing_is_copied_back(
    layout: Layout, faults: str, filled: list[list[int]], job: Job
) -> None:
    untied = "--untie-embeddings-and-output-weights"  # else all stages replay
    slots = job(layout, "sparse --moe-ckpt-window 2", untied, faults=faults)
    assert [[rank["filled"] for rank in sitting(slots, start, layout.ranks)] for start in range(len(filled))] == filled


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["sparse --moe-ckpt-window 2", "full"])
@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        (Layout(), 1), (Layout(), 2), (Layout(pp=4, ep=1), 1), (Layout(tp=2, ep=1), 1),
        (Layout(ep=1, ranks=2, vpp=2), 1), (Layout(pp=1, ranks=2), 1),
    ],
    ids=str,
)  # fmt: skip
def test_each_rank_may_be_lost_in_each_phase_of_an_iteration(
    layout: Layout, nodes: int, strategy: str, job: Job, train: Train, tmp_path: Path
) -> None:
    places = [(rank, phase) for phase in ("start", "forward-backward", "step", "end") for rank in range(layout.ranks)]
    faults = [f"{rank}@{5 + 2 * count}:{phase}" for count, (rank, phase) in enumerate(places)]
    iterations = 2 * len(places) + 6
    slots = job(layout, strategy, "--train-iters", str(iterations), faults=" ".join(faults), nodes=nodes)
    check_survivors(slots, layout.ranks, [{rank} for rank, _ in places])
    check_state(train, layout, tmp_path, iterations)


@pytest.mark.full
@pytest.mark.parametrize(("victim", "lost"), [(1, {0, 1}), (2, {2, 3})])
def test_ranks_of_the_other_node_keep_their_processes_while_a_spare_takes_the_place_of_a_lost_node(
    victim: int, lost: set[int], job: Job, train: Train, tmp_path: Path
) -> None:
    slots = job(Layout(), "sparse --moe-ckpt-window 2", faults=f"{victim}@5:forward-backward", nodes=2, lost=True)
    check_survivors(slots, Layout().ranks, [lost])
    check_state(train, Layout(), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("row", ["row 4", "row 5"])
def test_survivors_that_train_in_few_bits_keep_process_and_weights_and_every_bit_is_equal(
    row: str, job: Job, launch: Launch, corpus: str, tmp_path: Path
) -> None:
    layout, straight = Layout(), tmp_path / "straight"
    slots = job(layout, "sparse --moe-ckpt-window 2", *model(row), faults="1@4:forward-backward 2@5:step")
    check_survivors(slots, layout.ranks, [{1}, {2}])
    # By the launcher, too: in the pool of workers other kernels take the norm, which differs in the last bits.
    argv = flags(corpus, layout, *model(row), "--save", str(straight))
    ended = launch(["scripts/train_cpu.sh", *argv], NPROC=str(layout.ranks), timeout_s=HANG_TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not differences(digest(tmp_path / "struck", 6), digest(straight, 6))


RECOVERIES = int(os.environ.get("RECOVERIES", "40"))
"""What a process remembers of the newest manifests grows for some 40 of them, by 4 MB, and then no more: of 80 the last
40 add 0.3 MB."""


@pytest.mark.full
@pytest.mark.timeout(40 * RECOVERIES + 120)
def test_recoveries_one_after_the_other_leave_nothing_behind_in_a_survivor(job: Job) -> None:
    faults = " ".join(f"1@{2 * fault + 4}:forward-backward" for fault in range(RECOVERIES))
    iterations = str(2 * RECOVERIES + 4)
    slots = job(FLAT, "sparse --moe-ckpt-window 2", "--train-iters", iterations, faults=faults)
    check_survivors(slots, FLAT.ranks, [{1}] * RECOVERIES)
    survivor = [sitting(slots, start, FLAT.ranks)[0]["held"] for start in range(RECOVERIES + 1)]
    early, last = survivor[2], survivor[-1]  # the first recovery allocates what a recovery needs
    # Lanes open files for a moment: what stays is in all of the newest, and had been in all of the oldest.
    for name in ("descriptors", "sockets", "threads"):
        assert min(one[name] for one in survivor[-3:]) <= min(one[name] for one in survivor[2:5]), (name, survivor)
    assert last["mappings"] - early["mappings"] < RECOVERIES, survivor
    halfway = survivor[RECOVERIES // 2]
    assert last["allocated_kb"] - halfway["allocated_kb"] < 100 * (RECOVERIES // 2), survivor
    assert last["resident_kb"] - early["resident_kb"] < 200_000, survivor  # holes between what is allocated
