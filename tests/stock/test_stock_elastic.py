"""A job in the stock loop loses a node for good and continues with fewer data-parallel replicas, or takes one back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from runs import reports_in
from stock_jobs import Shape
from world import ROOT

SAME = "--global-batch-size 4 --attention-dropout 0 --dist-ckpt-optim-fully-reshardable --lr-decay-iters 20".split()
BOTH = Shape(ranks=2, pp=1, ep=1, more=tuple(SAME))
ONE = Shape(ranks=1, pp=1, ep=1, more=tuple(SAME))
PROTECTED = "--moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-elastic 1:2".split()
LOST_NODE = Path(__file__).parent / "lost_stock_node.py"
TIMEOUT_S = 280.0


def losses(reports: Path) -> dict[int, list[str]]:
    """What each iteration computed, to the last bit, as often as it was run."""
    told = ("lm_loss", "grad_norm", "learning_rate", "consumed_train_samples")
    found: dict[int, list[str]] = {}
    for one in reports_in(reports):
        found.setdefault(one["iteration"], []).append(repr([one[name] for name in told]))
    return found


@dataclass(frozen=True)
class Elastic:
    """A job on two nodes of one rank each, of which one is lost in iteration 4.

    memory: a folder on a tmpfs. folder: for checkpoints and reports.
    """

    memory: Path
    folder: Path
    options: tuple[str, ...]
    iterations: int
    alone_s: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> tuple[str, dict[int, list[str]]]:
        """What was said, and the losses."""
        command = [sys.executable, "-m", "megatron.pretrain.launch", "--nproc-per-node", "1", "--nnodes", "1:2"]
        command += ["--last-call-s", "3", *self.options, str(LOST_NODE), *BOTH.flags, *PROTECTED]
        command += ["--moe-ckpt-memory-dir", str(self.memory), "--moe-ckpt-inject-fault", "1@4:step"]
        command += ["--save", str(self.folder), "--save-interval", "1", "--train-iters", str(self.iterations)]
        command += ["--metrics-jsonl", str(self.folder / "reports")]
        own = {"MEMORY": str(self.memory), "ALONE_S": str(self.alone_s), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
        return said, losses(self.folder / "reports")


@pytest.fixture
def continues_as_from(new_job, tmp_path: Path) -> Callable[[Shape, int, dict[int, list[str]], int], None]:
    def check(shape: Shape, iteration: int, found: dict[int, list[str]], last: int) -> None:
        """The losses after `iteration` are those of a job that was started in this layout from the same state."""
        reports = tmp_path / f"from-{iteration}"
        where = ["--load", tmp_path, "--ckpt-step", iteration, "--train-iters", last]
        new_job(shape).run(*where, "--metrics-jsonl", reports)
        expected = losses(reports)
        assert sorted(expected) == list(range(iteration + 1, last + 1))
        assert {at: found[at][-1:] for at in expected} == expected

    return check


@pytest.mark.ci
def test_a_job_that_loses_a_node_for_good_continues_as_one_that_was_started_with_what_is_left(
    new_job, continues_as_from, tmp_path: Path
) -> None:
    said, found = Elastic(new_job(BOTH).memory, tmp_path, ("--spares", "0"), 6).run()
    assert re.search(r"node-\d lost; continuing with 1 of 2 nodes", said)
    restored = re.search(r"iteration (\d) from layout world_size 2 to world_size 1", said)
    assert restored, said
    continues_as_from(ONE, int(restored[1]), found, 6)


@pytest.mark.ci
def test_a_job_that_takes_a_node_back_repeats_no_iteration_and_continues_as_one_of_that_size(
    new_job, continues_as_from, tmp_path: Path
) -> None:
    options = ("--spares", "1", "--spare-after-s", "15")
    said, found = Elastic(new_job(BOTH).memory, tmp_path, options, 20, alone_s=1.5).run()
    left = re.search(r"elastic: pausing at iteration (\d+), nodes are waiting to join", said)
    assert left, said
    assert f"resharding: iteration {left[1]} from layout world_size 1 to world_size 2" in said
    grown = int(left[1])
    assert grown >= 4, "the dense checkpoint of an earlier iteration may be that of two ranks, whose sums differ"
    assert all(len(found[at]) == 1 for at in range(grown + 1, max(found) + 1))
    continues_as_from(BOTH, grown, found, 20)


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
