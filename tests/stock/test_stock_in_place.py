"""Ranks in the stock loop that lost a peer keep their processes, and every bit is as without the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from hybrid_model import hybrid_shape
from slot_process import check_survivors, survivors
from stock_jobs import FOUR, FULL, SHARED, TENSOR_PARALLEL, Records, Shape, StockJob
from world import HANG_TIMEOUT_S, RECOVERY_TIMEOUT_S, ROOT, run_to_end

pytestmark = pytest.mark.ci

NewJob = Callable[..., StockJob]
Undisturbed = Callable[[Shape], Records]

SPARSE = "sparse --moe-ckpt-window 2"
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "4", "--global-batch-size", "4")
INTERLEAVED = Shape(ranks=2, pp=2, ep=1, more=VIRTUAL)
OVERLAPPED = Shape(ranks=2, pp=1, ep=2, more=("--overlap-grad-reduce", "--overlap-param-gather"))
EVALUATED = Shape(ranks=4, pp=2, ep=2, more=("--eval-iters", "2", "--eval-interval", "2"))
DEEP = Shape(ranks=4, pp=4, ep=1)
STAGES = Shape(ranks=2, pp=2, ep=1)
AHEAD = Shape(ranks=3, pp=3, ep=1, more=("--mtp-num-layers", "1"))
MUON = Shape(ranks=4, pp=1, ep=2, more=("--bf16", "--optimizer", "muon"))
HYBRID = hybrid_shape("ME*M|E")
"""Layers are numbered again, with the process that has a new model."""
full = pytest.mark.full
needs_package = pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="it is not installed")


def struck(
    job: StockJob,
    strategy: str,
    faults: str,
    kills: str = "",
    more: Sequence[str] = (),
    script: str = "standby_stock_job.py",
    hang_s: float = 0.0,
    launches: Sequence[str] = (),
    **variables: str,
) -> tuple[Path, str]:
    """Run a job that is struck, under a launcher with standbys; the folder with what its processes left, and what was
    said. hang_s: after which the launcher ends ranks that hang, which they do once; 0: it does not, nor do they.
    launches: more flags of the launcher."""
    slots = job.folder / "slots"
    slots.mkdir()
    launcher = "-m megatron.pretrain.standby.run --moe-ckpt-standbys 1 --standalone --max-restarts 9".split()
    launcher += ["--monitor-interval", "0.1", "--nproc-per-node", str(job.shape.ranks)]
    launcher += [*["--moe-ckpt-hang-timeout", str(hang_s)] * bool(hang_s), *launches]
    protect = ["--moe-ckpt-strategy", *strategy.split(), "--moe-ckpt-memory-dir", str(job.memory)]
    protect += [part for fault in faults.split() for part in ("--moe-ckpt-inject-fault", fault)]
    path = str(ROOT / "tests" / "stock" / script)
    environment = {"RECORDS": str(job.folder), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    environment |= {"OMP_NUM_THREADS": "1", "SLOTS": str(slots), "READY_STANDBYS": "1", "KILLS": kills}
    environment |= variables
    recoveries = len(faults.split()) + len([kill for kill in kills.split(",") if kill]) + bool(hang_s)
    timeout_s = HANG_TIMEOUT_S + RECOVERY_TIMEOUT_S * recoveries + 1.5 * hang_s
    command = [sys.executable, *launcher, path, *job.shape.flags, *protect, *more]
    ended = run_to_end(command, timeout_s, stderr=subprocess.STDOUT, **environment)
    assert ended.returncode == 0, ended.stdout
    return slots, ended.stdout


@full
def test_a_second_fault_in_the_recovery_costs_no_other_rank_its_process_and_every_bit_is_equal(
    new_job: NewJob, undisturbed: Undisturbed
) -> None:
    job = new_job(FOUR)
    reports = job.folder / "reports.jsonl"
    faults, metrics = "3@4:forward-backward 1@6:forward-backward", ("--metrics-jsonl", str(reports))
    slots, said = struck(job, SPARSE, faults, "0@1:resume", metrics)
    assert survivors(slots, 4, 0, 2) == {1, 2}
    assert "ranks kept their processes)" in said, said
    assert job.records() == undisturbed(FOUR)
    told = [line["recovery"] for line in map(json.loads, reports.read_text().splitlines()) if "recovery" in line]
    assert len(told) == 2, "the process that reports went through both recoveries"


@pytest.mark.parametrize(
    ("shape", "strategy", "faults"),
    [  # none before a first snapshot can have been sealed, which leaves nothing to go back to, nor once training ends
        pytest.param(FOUR, SPARSE, "1@4:forward-backward 2@5:step 0@6:start", id="sparse, PP=2 x EP=2", marks=full),
        pytest.param(FOUR, "full", "2@4:forward-backward 0@5:step 3@5:end", id="full, PP=2 x EP=2", marks=full),
        pytest.param(
            FOUR, f"{SPARSE} --moe-ckpt-recovery global", "1@4:step", id="sparse, all stages replay", marks=full
        ),
        pytest.param(DEEP, SPARSE, "1@4:forward-backward 3@5:step", id="PP=4", marks=full),
        pytest.param(TENSOR_PARALLEL, SPARSE, "0@4:step 3@5:start 1@6:forward-backward", id="TP=2", marks=full),
        pytest.param(INTERLEAVED, SPARSE, "0@4:step 1@6:forward-backward", id="interleaved"),
        pytest.param(OVERLAPPED, "full", "0@4:forward-backward 1@5:step", id="overlapped, data parallel", marks=full),
        pytest.param(AHEAD, SPARSE, "1@4:forward-backward 2@5:step", id="predicting further tokens", marks=full),
        pytest.param(MUON, "full", "1@4:forward-backward 2@5:step", id="Muon", marks=[full, needs_package]),
        pytest.param(HYBRID, SPARSE, "1@4:forward-backward 0@5:step", id="a hybrid", marks=full),
        pytest.param(EVALUATED, SPARSE, "1@4:step 3@5:forward-backward", id="evaluated", marks=full),
    ],
)
def test_survivors_keep_process_and_weights_where_they_are_and_every_bit_is_equal(
    shape: Shape, strategy: str, faults: str, new_job: NewJob, undisturbed: Undisturbed
) -> None:
    job = new_job(shape)
    slots, _ = struck(job, strategy, faults)
    check_survivors(slots, shape.ranks, [{int(fault.split("@")[0])} for fault in faults.split()])
    assert job.records() == undisturbed(shape)


def test_survivors_of_a_job_that_went_back_go_on_with_new_ranks_that_read_the_same_flags(
    new_job: NewJob, tmp_path: Path
) -> None:
    new_job(STAGES).run(*FULL, "--save", tmp_path, "--save-interval", 1, "--exit-interval", 3)
    asked, job = new_job(STAGES), new_job(STAGES)
    asked.run(*FULL, "--load", tmp_path, "--ckpt-step", 2)
    back = ("--load", str(tmp_path), "--save", str(tmp_path), "--save-interval", "9", "--ckpt-step", "2")
    slots, _ = struck(job, "full", "1@5:forward-backward 0@6:step", more=back)
    check_survivors(slots, 2, [{1}, {0}])
    assert job.records() == asked.records()


@full
def test_who_waits_in_a_dispatch_that_a_shared_expert_overlaps_keeps_its_process(
    new_job: NewJob, undisturbed: Undisturbed
) -> None:
    """Else it would fail in its next forward pass, which the shared expert refuses to begin in the middle."""
    job = new_job(SHARED)
    slots, _ = struck(job, "full", "", script="dispatch_job.py", DISPATCHES="17")
    assert (slots / "killed").exists()
    check_survivors(slots, 2, [{1}])
    assert job.records() == undisturbed(SHARED)


@full
@pytest.mark.parametrize(
    ("second", "lost"),
    [
        ("2@1:connect", {1, 2}),
        ("3@1:connected", {1, 3}),
        ("1@1:build", {1}),
        ("1@1:built", {1}),
        ("1@1:data", {1}),
        ("1@1:resumed", {1}),
        ("0@1:replay", {0, 1}),
        ("2@1:rejoin", {1, 2}),
        ("1@1:rejoined", {1}),
    ],
)
def test_a_second_fault_at_any_point_of_the_recovery_costs_no_other_rank_its_process(
    second: str, lost: set[int], new_job: NewJob, undisturbed: Undisturbed
) -> None:
    job = new_job(FOUR)
    slots, _ = struck(job, SPARSE, "1@4:forward-backward", kills=second)
    assert survivors(slots, 4, 0, 2) == {0, 1, 2, 3} - lost
    assert job.records() == undisturbed(FOUR)


@full
@pytest.mark.parametrize(("first", "second"), [("0@5:step", "3@1:rejoin"), ("3@5:forward-backward", "0@1:rejoin")])
def test_a_replay_continues_where_it_is_when_a_stage_apart_from_it_loses_a_rank_half_a_second_later(
    first: str, second: str, new_job: NewJob, undisturbed: Undisturbed
) -> None:
    job = new_job(DEEP)
    slots, said = struck(job, SPARSE, first, kills=second, REPLAY_S="2", KILLS_AFTER_S="0.5")
    lost, other = int(first[0]), int(second[0])
    assert survivors(slots, 4, 0, 2) == {0, 1, 2, 3} - {lost, other}
    run = [tuple(map(int, line.split())) for line in (slots / f"replays-{lost}").read_text().splitlines()]
    assert {start for start, _ in run} == {1, 2}, f"the fault came between two iterations of the replay: {run}"
    assert len(run) == len({iteration for _, iteration in run}), f"begun again: {run}"
    if lost == 0:  # of information only rank 0 has a line
        assert f"replay: continued after iteration {run[0][1]}" in said, said
    assert job.records() == undisturbed(DEEP)


@pytest.mark.parametrize(
    ("stops", "faults", "place"),
    [
        pytest.param("1@0:start", "", "gathered_by_store, called by introduced", id="start", marks=full),
        pytest.param("1@1:resume", "0@4:step", "recovery/local_inventory.py", id="restore", marks=full),
        pytest.param("1@0:save", "", "all_done", id="save", marks=full),
    ],
)
def test_a_rank_that_is_stopped_is_named_within_the_limit_of_the_wait_and_no_bit_is_lost(
    stops: str, faults: str, place: str, new_job: NewJob, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = new_job(STAGES)
    more = ["--moe-ckpt-timeout-s", "10", "--save", str(tmp_path / "saved"), "--save-interval", "3"]
    _, said = struck(
        job, "full", faults, kills=stops, more=more, launches=("--shutdown-timeout", "3"), STOPS=stops, KILLS="",
        GROUP_TIMEOUT_S="30",
    )  # fmt: skip
    (line,) = (line for line in said.splitlines() if "peer failure: no answer from" in line)
    assert "no answer from rank 1: waited in " in line, line
    assert place in line, line
    assert int(line.partition("no progress for ")[2].partition(" s;")[0]) >= 9, "the limits are 10 s and more"
    assert "next: the launcher replaces ranks that end or do not answer by standbys or new processes" in line, line
    assert job.records() == undisturbed(STAGES)
