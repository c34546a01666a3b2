"""A checkpoint of one parallel layout continues under another, if its optimizer state was saved for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout, Train, flags, metrics
from world import Outcome, World

pytestmark = pytest.mark.ci

# 192 pads the vocabulary of bytes to 384 whether it is shared by one rank or two.
SAME = "--global-batch-size 8 --attention-dropout 0 --make-vocab-size-divisible-by 192".split()
SAVED_WITH = Layout(tp=1, pp=2, ep=2)
UNTIED = ("--untie-embeddings-and-output-weights",)
FULL = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "10")
"""Checkpoints are verified when they are loaded."""


@pytest.fixture(
    scope="module", params=[pytest.param((), id="tied"), pytest.param(UNTIED, id="untied", marks=pytest.mark.full)]
)
def reshardable(
    request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """A folder with the checkpoint of iteration 3 and the reports of a run, and the flags of its model."""
    folder = tmp_path_factory.mktemp("reshardable")
    saving = ["--save", str(folder), "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable"]
    saving += [*FULL, "--moe-ckpt-memory-dir", str(folder), "--metrics-jsonl", str(folder / "reports")]
    outcome = world.run(flags(corpus, SAVED_WITH, *SAME, *request.param, *saving), SAVED_WITH.ranks)
    assert set(outcome.codes) == {0}, outcome.said
    return folder, request.param


def loaded(outcome: Outcome, iteration: int) -> bool:
    return f"at iteration {iteration}\n" in outcome.said and "successfully loaded checkpoint" in outcome.said


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(tp=1, pp=1, ep=4), marks=pytest.mark.full), Layout(tp=2, pp=1, ep=2)], ids=str
)
def test_a_reshardable_checkpoint_continues_under_another_layout(
    layout: Layout, reshardable: tuple[Path, tuple[str, ...]], train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    folder, model = reshardable
    loading = [*FULL, "--moe-ckpt-memory-dir", cluster.memory, "--load", folder, "--ckpt-step", 3]
    loading += ["--dist-ckpt-optim-fully-reshardable", "--metrics-jsonl", tmp_path / "reports"]
    outcome = train(layout, *SAME, *model, *loading)
    assert loaded(outcome, 3), outcome.said
    expected, reports = metrics(folder / "reports")[3:], metrics(tmp_path / "reports")
    assert [report["iteration"] for report in reports] == [4, 5, 6]
    for one, other in zip(expected, reports, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.full
def test_weights_alone_load_under_any_layout(train: Train, save: Path, cluster: Cluster) -> None:
    protected = (*SAME, *FULL, "--moe-ckpt-memory-dir", cluster.memory)
    train(SAVED_WITH, *protected, "--save", save, "--train-iters", 2)
    outcome = train(
        Layout(tp=1, pp=1, ep=4), *protected, "--load", save, "--no-load-optim", "--no-load-rng", "--train-iters", 3
    )
    assert loaded(outcome, 2), outcome.said
