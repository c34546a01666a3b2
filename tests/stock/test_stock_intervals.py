"""A recovered job does what the loop does by intervals, and once after its start, on all ranks or on none.

Jobs of the other tests have Megatron-LM's own interval of logging, which none of them reaches.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version

import pytest
from stock_jobs import FOUR, FULL, KILLED, PAIR, Records, Shape, StockJob
from stock_recording import unprotected
from test_stock_in_place import struck
from world import ROOT

NewJob = Callable[..., StockJob]
Undisturbed = Callable[[Shape], Records]

TABLE = ROOT / "docs" / "internals" / "decisions" / "067-iterations-since-train.md"
WINDOWED = "sparse --moe-ckpt-window 2"
SPARSE = ("--moe-ckpt-strategy", *WINDOWED.split())
GLOBAL = (*SPARSE, "--moe-ckpt-recovery", "global")
LATE, EARLY = "3@5:step", "1@4:forward-backward"


def drawn(seed: int) -> list[str]:
    """Intervals of all that the loop does at some iterations only, drawn from those that matter to a short job."""
    draw = random.Random(seed)
    logged = draw.choice("1237")
    flags = ["--log-interval", logged, "--log-memory-interval", logged]
    flags += ["--distributed-timeout-seconds-after-init", "300"]
    flags += ["--eval-iters", draw.choice("12"), "--eval-interval", draw.choice("1234")]
    flags += ["--manual-gc", "--manual-gc-interval", draw.choice("0123")]
    flags += ["--train-sync-interval", draw.choice("123")]
    return flags + draw.choice([["--log-params-norm"], ["--log-num-zeros-in-grad"], ["--exit-duration-in-mins", "60"]])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("interval", "protection", "faults"),
    [
        pytest.param("100", SPARSE, [LATE], id="as-megatron-logs-one-stage-replays"),
        pytest.param("7", SPARSE, [EARLY, LATE], id="7-two-faults", marks=pytest.mark.full),
        pytest.param("20", GLOBAL, [LATE], id="20-all-stages-replay", marks=pytest.mark.full),
        pytest.param("100", FULL, [EARLY, LATE], id="100-full", marks=pytest.mark.full),
        pytest.param("1", SPARSE, [EARLY, LATE], id="1-two-faults", marks=pytest.mark.full),
    ],
)
def test_a_job_that_logs_seldom_continues_after_its_recovery(
    new_job: NewJob, undisturbed: Undisturbed, interval: str, protection: Sequence[str], faults: Sequence[str]
) -> None:
    job = new_job(FOUR)
    flags = [*protection, "--log-interval", interval]
    flags += [part for fault in faults for part in ("--moe-ckpt-inject-fault", fault)]
    for _ in faults:
        job.run(*flags, codes={KILLED, 1})
    outcome = job.run(*flags)
    assert job.records() == undisturbed(FOUR)
    assert not job.began_again()
    logged = [line for line in outcome.lines if " iteration   " in line]
    assert len(logged) == 1 or interval == "1", outcome.said


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "strategy", "faults"),
    [
        pytest.param(PAIR, WINDOWED, "1@4:forward-backward 0@5:step", id="sparse, PP=2"),
        pytest.param(FOUR, WINDOWED, "1@4:forward-backward 2@5:step", id="sparse"),
        pytest.param(FOUR, "full", "1@4:forward-backward 2@5:step", id="full"),
    ],
)
def test_a_job_that_logs_seldom_continues_where_ranks_keep_their_processes(
    new_job: NewJob, undisturbed: Undisturbed, shape: Shape, strategy: str, faults: str
) -> None:
    job = new_job(shape)
    struck(job, strategy, faults, more=("--distributed-timeout-seconds-after-init", "300"))
    assert job.records() == undisturbed(shape)


@pytest.mark.ci
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, *range(2, 12)))])
def test_whatever_is_done_at_intervals_a_recovered_job_does_on_all_ranks_or_on_none(new_job: NewJob, seed: int) -> None:
    flags = drawn(seed)
    whole, job = new_job(FOUR), new_job(FOUR)
    whole.run(*flags, hooks=[unprotected])
    fault = ("--moe-ckpt-inject-fault", random.Random(seed).choice([LATE, EARLY, "0@6:start"]))
    job.run(*SPARSE, *flags, *fault, codes={KILLED, 1})
    job.run(*SPARSE, *flags, *fault)
    assert job.records() == whole.records(), flags
    assert not job.began_again()


@pytest.mark.full
def test_ranks_that_wait_for_each_other_in_different_places_are_named_with_both_and_the_job_recovers(
    new_job: NewJob, undisturbed: Undisturbed
) -> None:
    job, at = new_job(PAIR), "4"  # of as few ranks as there are places: this job starts three times
    fault = f"1@{at}:forward-backward"
    variables = {"APART_AT": at, "READY_STANDBYS": "0"}  # the fault waits for nothing, which would count as a hang
    _, said = struck(job, WINDOWED, fault, script="apart_job.py", hang_s=12, **variables)
    hung = [line for line in said.splitlines() if "has trained no iteration for" in line]
    places = {line.partition(" is in ")[2] for line in said.splitlines() if "local rank " in line and " is in " in line}
    assert any("training_log (megatron/training/training.py:" in place for place in places), "\n".join(sorted(places))
    # The rank that replayed continues to where all ranks agree on memory for the next window.
    assert any("called by room (megatron/core/dist_checkpointing/moe/snapshot/" in place for place in places), hung
    assert job.records() == undisturbed(PAIR)


def test_all_that_the_loop_carries_into_its_iterations_is_in_the_table_of_what_depends_on_the_entry() -> None:
    from megatron.training import training

    tree = ast.parse(textwrap.dedent(inspect.getsource(training.train)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    (loop,) = [part for part in body if isinstance(part, ast.While)]
    before = names_in(body[: body.index(loop)], ast.Store)
    carried = before & (names_in([loop], ast.Load) | names_in([loop], ast.Store))
    rows = re.findall(r"^\| (`.*?) \|", TABLE.read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert carried <= told, "a name that the table of decision 067 does not have"
    if version("megatron-core").startswith("0.19"):
        assert told == carried


def names_in(parts: Sequence[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    """Variables that these statements read or set."""
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
