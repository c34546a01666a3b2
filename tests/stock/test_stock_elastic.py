"""A job in the stock loop loses a node for good and continues with fewer data-parallel replicas, or takes one back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from runs import reports_in
from stock_jobs import Shape
from stock_recording import documents
from world import ROOT

SAME = "--attention-dropout 0 --dist-ckpt-optim-fully-reshardable --lr-decay-iters 20".split()


def shape(ranks: int, ep: int = 1, batch: int = 4, experts: int = 4) -> Shape:
    """Of one of the sizes of a job, whose batch stays; with the data of processes that are started outside of tests."""
    sizes = ("--global-batch-size", str(batch), "--num-experts", str(experts))
    return Shape(ranks=ranks, pp=1, ep=ep, more=(*sizes, *SAME), hooks=(partial(documents, 100_000),))


BOTH, ONE = shape(2), shape(1)
COMES_BACK = ("--spares", "1", "--spare-after-s", "15")
LOST_NODE = Path(__file__).parent / "lost_stock_node.py"
TIMEOUT_S = 500.0


def losses(reports: Path) -> dict[int, list[str]]:
    """What each iteration computed, to the last bit, as often as it was run."""
    told = ("lm_loss", "grad_norm", "learning_rate", "consumed_train_samples")
    found: dict[int, list[str]] = {}
    for one in reports_in(reports):
        found.setdefault(one["iteration"], []).append(repr([one[name] for name in told]))
    return found


@dataclass(frozen=True)
class Elastic:
    """A job on nodes of which the last one is lost in an iteration.

    memory: a folder on a tmpfs. folder: for checkpoints and reports. alone_s, alone_to: what fewer ranks wait behind
    each iteration, from which on. most: ranks with all nodes.
    """

    memory: Path
    folder: Path
    options: tuple[str, ...]
    iterations: int
    alone_s: float = 0.0
    most: Shape = BOTH
    nodes: tuple[int, int] = (1, 2)
    protected: tuple[str, ...] = ("full",)
    fault: int = 4
    save_interval: int = 1
    alone_to: int = 0

    def run(self) -> tuple[str, dict[int, list[str]]]:
        """What was said, and the losses."""
        (least, nodes), ranks = self.nodes, self.most.ranks
        each = ranks // nodes
        command = [sys.executable, "-m", "megatron.pretrain.launch", "--nproc-per-node", str(each)]
        command += ["--nnodes", f"{least}:{nodes}", "--last-call-s", "3", *self.options, str(LOST_NODE)]
        command += [*self.most.flags, "--moe-ckpt-interval", "1", "--moe-ckpt-strategy", *self.protected]
        command += ["--moe-ckpt-elastic", f"{least * each}:{ranks}", "--moe-ckpt-memory-dir", str(self.memory)]
        command += ["--moe-ckpt-inject-fault", f"{ranks - 1}@{self.fault}:step", "--save", str(self.folder)]
        command += ["--save-interval", str(self.save_interval), "--train-iters", str(self.iterations)]
        command += ["--metrics-jsonl", str(self.folder / "reports")]
        own = {"MEMORY": str(self.memory), "ALONE_S": str(self.alone_s), "MOST_RANKS": str(ranks)}
        own["ALONE_TO"] = str(self.alone_to)
        ended = subprocess.run(
            command,
            env=os.environ | own | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S * max(1, ranks // 4),
            check=False,
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
        return said, losses(self.folder / "reports")


type Check = Callable[..., None]


@pytest.fixture
def continues_as_from(new_job, tmp_path: Path) -> Check:
    def check(
        shape: Shape, iteration: int, found: dict[int, list[str]], last: int, end: int, where: Path = tmp_path
    ) -> None:
        """The losses from `iteration` to `last` are those of a job that was started in this layout from the same
        state, of which `where` has a checkpoint. end: of the whole training, which schedules follow."""
        reports = tmp_path / f"from-{iteration}"
        ends = ("--train-iters", end, "--exit-interval", last)
        new_job(shape).run("--load", where, "--ckpt-step", iteration, *ends, "--metrics-jsonl", reports)
        expected = losses(reports)
        assert sorted(expected) == list(range(iteration + 1, last + 1))
        assert {at: found[at][-1:] for at in expected} == expected

    return check


@pytest.mark.full
def test_a_job_that_loses_a_node_for_good_continues_as_one_that_was_started_with_what_is_left(
    new_job, continues_as_from, tmp_path: Path
) -> None:
    said, found = Elastic(new_job(BOTH).memory, tmp_path, ("--spares", "0"), 6).run()
    assert re.search(r"node-\d lost; continuing with 1 of 2 nodes", said)
    restored = re.search(r"iteration (\d) from layout world_size 2 to world_size 1", said)
    assert restored, said
    continues_as_from(ONE, int(restored[1]), found, 6, 6)


@pytest.mark.full
def test_a_job_that_takes_a_node_back_repeats_no_iteration_and_continues_as_one_of_that_size(
    new_job, continues_as_from, tmp_path: Path
) -> None:
    said, found = Elastic(new_job(BOTH).memory, tmp_path, COMES_BACK, 20, alone_s=1.5).run()
    left = re.search(r"elastic: pausing at iteration (\d+), nodes are waiting to join", said)
    assert left, said
    assert f"resharding: iteration {left[1]} from layout world_size 1 to world_size 2" in said
    grown = int(left[1])
    assert grown >= 4, "the dense checkpoint of an earlier iteration may be that of two ranks, whose sums differ"
    assert all(len(found[at]) == 1 for at in range(grown + 1, max(found) + 1))
    continues_as_from(BOTH, grown, found, 20, 20)


SPARSE = ("sparse", "--moe-ckpt-window", "2")
SELECTIVE = ("selective", "--moe-ckpt-budget-local", "1B", "--moe-ckpt-budget-remote", "1B")
TWO_ONE_TWO = (BOTH, ONE, (1, 2))
FOUR_TWO_FOUR = (shape(4, ep=2), shape(2, ep=2), (1, 2))
LONG = pytest.mark.timeout(1200)
"""22 processes and more import torch and Megatron-Core, on two cores, before others train the same."""
EIGHT_SIX_EIGHT = (shape(8, ep=2, batch=24), shape(6, ep=2, batch=24), (3, 4))
OF_EIGHT_EXPERTS = (shape(8, ep=2, batch=24, experts=8), shape(6, ep=2, batch=24, experts=8), (3, 4))
"""Of four, those ranks of eight that have the same ones would keep them all in one iteration, and lose nothing."""


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        pytest.param(TWO_ONE_TWO, SPARSE, id="2-1-2-sparse", marks=pytest.mark.ci),
        pytest.param(FOUR_TWO_FOUR, SPARSE, id="4-2-4-sparse", marks=[pytest.mark.full, LONG]),
        pytest.param(
            FOUR_TWO_FOUR,
            (*SPARSE, "--moe-ckpt-replay-tolerance", "1e-3"),
            id="4-2-4-sparse-replayed-here",
            marks=pytest.mark.full,
        ),
        pytest.param(FOUR_TWO_FOUR, SELECTIVE, id="4-2-4-selective", marks=pytest.mark.full),
        pytest.param(FOUR_TWO_FOUR, ("pec",), id="4-2-4-pec", marks=pytest.mark.full),
        pytest.param(EIGHT_SIX_EIGHT, SPARSE, id="8-6-8-sparse", marks=[pytest.mark.full, LONG]),
        pytest.param(OF_EIGHT_EXPERTS, SELECTIVE, id="8-6-8-selective", marks=[pytest.mark.full, LONG]),
    ],
)
def test_a_job_of_parts_of_states_shrinks_and_grows_as_jobs_that_were_started_with_these_sizes(
    sizes: tuple[Shape, Shape, tuple[int, int]],
    strategy: tuple[str, ...],
    new_job,
    continues_as_from: Check,
    tmp_path: Path,
) -> None:
    most, least, nodes = sizes
    where = new_job(most).memory, tmp_path, COMES_BACK, 16, 1.5
    loads = (*strategy, "--load", str(tmp_path))
    elastic = Elastic(*where, most, nodes, loads, fault=5, save_interval=7, alone_to=9)
    said, found = elastic.run()
    left = re.search(r"elastic: pausing at iteration (\d+), nodes are waiting to join", said)
    assert left, said
    grown = int(left[1])
    continues_as_from(least, 7, found, grown, 16)  # pec and selective: the state is nowhere before
    assert all(len(found[at]) == 1 for at in range(8, max(found) + 1)), "an iteration was trained twice"
    continues_as_from(most, grown, found, 16, 16)
    if strategy != SPARSE:
        assert f"from layout world_size {most.ranks}, ep 2 to world_size {least.ranks}, ep 2, from memory" in said
    if strategy[0] != "sparse":
        assert "recovered iteration 4 with lost tokens" in said and "all faults so far: " in said
    if strategy == SPARSE:
        # What fewer ranks began from is, to the bit, what all had made.
        converted = re.search(r"converting iterations \d+ to (\d+) of the layout", said)
        assert converted, said
        first = int(converted[1])
        saves = ("--save", tmp_path / "before", "--save-interval", 1)
        new_job(most).run(*saves, "--train-iters", 16, "--exit-interval", first)
        continues_as_from(least, first, found, 7, 16, tmp_path / "before")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--moe-ckpt-elastic 2:4", "1 ranks make 1 data-parallel replicas; start as many nodes as it allows"),
        ("--moe-ckpt-elastic 1:3", "--global-batch-size 4 does not divide by --micro-batch-size 1 x 3 replicas"),
        ("--moe-ckpt-elastic 1:2 --moe-ckpt-replicas 2", "--moe-ckpt-replicas 2 needs as many peers"),
        ("--moe-ckpt-elastic 2:1", "must be MIN:MAX data-parallel replicas"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(new_job, flags: str, said: str) -> None:
    outcome = new_job(ONE).run("--moe-ckpt-strategy", "full", *flags.split(), codes={2})
    (line,) = [line for line in outcome.lines if "--moe-ckpt-elastic" in line]
    assert said in line
