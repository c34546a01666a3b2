"""Training in eight bits in the stock loop, with masters and moments of few bits: killed, it comes back to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effort import cases
from engine import world_with_engine
from stock_jobs import KILLED, OVERFLOWING, Shape, StockJob
from stock_recording import unprotected
from world import World, node_memory

ENGINE = "--transformer-impl transformer_engine --moe-grouped-gemm --bf16"
EIGHT_BITS = (
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max --fp8-param-gather"
)
IN_FP8 = "--use-precision-aware-optimizer --fp8-main-params"
PRECISION_AWARE = "--use-precision-aware-optimizer --main-params-dtype fp16"
ROWS = {
    "row 1": "--transformer-impl transformer_engine --moe-grouped-gemm --fp16 --initial-loss-scale 1024"
    f" --accumulate-allreduce-grads-in-fp32 {PRECISION_AWARE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    "row 2": f"{ENGINE} {EIGHT_BITS}",
    "row 3": f"{ENGINE} {EIGHT_BITS} {PRECISION_AWARE} --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32",
    "row 4": f"{ENGINE} {EIGHT_BITS} {PRECISION_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
    "row 5": f"{ENGINE} {EIGHT_BITS} {IN_FP8} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
}


@pytest.fixture(scope="module")
def engine_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from world_with_engine(tmp_path_factory.mktemp("stock-engine-world"))


@pytest.fixture
def memory() -> Iterator[Path]:
    with node_memory() as folder:
        yield folder


@pytest.mark.parametrize("row", cases(ROWS, fast=(), full=("row 2", "row 3", "row 4")))
def test_a_killed_job_in_few_bits_ends_as_the_undisturbed_one_to_the_last_bit(
    row: str, engine_world: World, memory: Path, tmp_path: Path
) -> None:
    shape = Shape(ranks=2, pp=2, ep=1, more=tuple(ROWS[row].split()))
    protection = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "3", "--moe-ckpt-inject-fault", "1@5:step")
    jobs = {}
    for name in ("undisturbed", "killed"):
        of_job = memory / f"{memory.name}-{name}"  # what names the job
        of_job.mkdir()
        (tmp_path / name).mkdir()
        jobs[name] = StockJob(engine_world, of_job, tmp_path / name, shape)
    jobs["undisturbed"].run(hooks=[unprotected])
    jobs["killed"].run(*protection, codes={KILLED, 1})
    jobs["killed"].run(*protection)
    assert jobs["killed"].records() == jobs["undisturbed"].records()
    assert jobs["killed"].began_again() == []


@pytest.mark.ci
def test_a_job_that_has_made_no_step_yet_is_saved_and_continues_exactly(new_job, undisturbed, tmp_path: Path) -> None:
    """Without Transformer Engine core cannot save the counts of an optimizer that was never stepped."""
    job, save = new_job(OVERFLOWING), tmp_path / "save"
    job.run("--save", save, "--save-interval", 2, "--exit-interval", 2)
    job.run("--load", save)
    assert job.ran(0) == [1, 2, 3, 4, 5, 6]
    steps = {at: record for at, record in job.records().items() if "end" not in at}
    assert all(record["skipped"] for record in steps.values())
    assert steps == {at: record for at, record in undisturbed(OVERFLOWING).items() if "end" not in at}
