"""A job loses a node for good and goes on with fewer data-parallel replicas; later it takes a node back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, Train, reports_in
from runs import flags_of_own_loop as flags
from test_torchrun import LOST_NODE

pytestmark = pytest.mark.own_loop

BOTH, ONE = Layout(pp=1, ep=1, ranks=2), Layout(pp=1, ep=1, ranks=1)
SAME = "--global-batch-size 4 --attention-dropout 0 --dist-ckpt-optim-fully-reshardable".split()
PROTECTED = "--moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-elastic 1:2".split()


def losses(reports: Path) -> dict[int, list[str]]:
    """What each iteration computed, to the last bit, as often as it was run."""
    told = ("lm_loss", "grad_norm", "learning_rate", "consumed_train_samples")
    found: dict[int, list[str]] = {}
    for one in reports_in(reports):
        found.setdefault(one["iteration"], []).append(repr([one[name] for name in told]))
    return found


def run_elastic(
    launch: Launch, corpus: str, cluster: Cluster, folder: Path, options: str, iterations: int, alone_s: float = 0
) -> tuple[str, dict[int, list[str]]]:
    """A job on two nodes of which one is lost in iteration 4; what was said, and the losses."""
    saving = ["--save", str(folder), "--save-interval", "1", "--metrics-jsonl", str(folder / "reports")]
    saving += ["--train-iters", str(iterations), "--lr-decay-iters", "20", "--moe-ckpt-inject-fault", "1@4:step"]
    memory = ["--moe-ckpt-memory-dir", str(cluster.memory)]
    here = {"NPROC": "1", "NNODES": "1:2", "SCRIPT": str(LOST_NODE)}
    here |= {"MEMORY": str(cluster.memory), "ALONE_S": str(alone_s)}
    argv = flags(corpus, BOTH, *SAME, *PROTECTED, *memory, *saving)
    ended = launch(["scripts/train_cpu.sh", *argv], NODE_OPTIONS=options, **here)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    return said, losses(folder / "reports")


def assert_as_from(
    folder: Path, iteration: int, found: dict[int, list[str]], last: int, layout: Layout, train: Train
) -> None:
    """The losses after `iteration` are those of a job that was started in this layout from the same state."""
    reports = folder / f"from-{iteration}"
    flags = [*SAME, "--load", folder, "--ckpt-step", iteration, "--train-iters", last, "--lr-decay-iters", 20]
    train(layout, *flags, "--metrics-jsonl", reports)
    expected = losses(reports)
    assert sorted(expected) == list(range(iteration + 1, last + 1))
    assert {at: found[at][-1:] for at in expected} == expected


def test_a_job_that_loses_a_node_for_good_goes_on_as_one_that_was_started_with_what_is_left(
    launch: Launch, train: Train, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    said, found = run_elastic(launch, corpus, cluster, tmp_path, "--spares 0 --last-call-s 3", 6)
    assert re.search(r"node-\d is lost; the job goes on with 1 of 2 nodes", said)
    restored = re.search(r"iteration (\d) was stored in the layout world_size 2 and is restored in world_size 1", said)
    assert restored, said
    assert_as_from(tmp_path, int(restored[1]), found, 6, ONE, train)


@pytest.mark.full
def test_a_job_that_takes_a_node_back_repeats_no_iteration_and_goes_on_as_one_of_that_size(
    launch: Launch, train: Train, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    options = "--spares 1 --spare-after-s 30 --last-call-s 3"
    said, found = run_elastic(launch, corpus, cluster, tmp_path, options, 20, alone_s=1.5)
    left = re.search(r"leaving training at iteration (\d+): nodes wait to join", said)
    assert left, said
    assert f"iteration {left[1]} was stored in the layout world_size 1 and is restored in world_size 2" in said
    grown = int(left[1])
    assert grown >= 4, "the dense checkpoint of an earlier iteration may be that of two ranks, whose sums differ"
    assert all(len(found[at]) == 1 for at in range(grown + 1, max(found) + 1))
    assert_as_from(tmp_path, grown, found, 20, BOTH, train)
