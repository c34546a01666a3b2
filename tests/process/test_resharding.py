"""A checkpoint of one parallel layout continues under another, if its optimizer state was saved for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Layout, Start, Train, metrics
from runs import flags_of_own_loop as flags
from world import World

pytestmark = pytest.mark.own_loop

# 192 pads the vocabulary of bytes to 384 whether it is shared by one rank or two.
SAME = "--global-batch-size 8 --attention-dropout 0 --make-vocab-size-divisible-by 192".split()
SAVED_WITH = Layout(tp=1, pp=2, ep=2)


UNTIED = ("--untie-embeddings-and-output-weights",)


@pytest.fixture(
    scope="module", params=[pytest.param((), id="tied"), pytest.param(UNTIED, id="untied", marks=pytest.mark.full)]
)
def reshardable(
    request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """A folder with the checkpoint of iteration 3 and the reports of a run, and the flags of its model."""
    folder = tmp_path_factory.mktemp("reshardable")
    saving = ["--save", str(folder), "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable"]
    argv = flags(corpus, SAVED_WITH, *SAME, *request.param, *saving, "--metrics-jsonl", str(folder / "reports"))
    outcome = world.run(argv, SAVED_WITH.ranks)
    assert set(outcome.codes) == {0}, outcome.said
    return folder, request.param


@pytest.mark.parametrize("layout", [Layout(tp=1, pp=1, ep=4), Layout(tp=2, pp=1, ep=2)], ids=str)
def test_a_reshardable_checkpoint_continues_under_another_layout(
    layout: Layout, reshardable: tuple[Path, tuple[str, ...]], train: Train, tmp_path: Path
) -> None:
    folder, model = reshardable
    loading = ["--load", folder, "--ckpt-step", 3, "--metrics-jsonl", tmp_path / "reports"]
    outcome = train(layout, *SAME, *model, *loading)
    (warning,) = outcome.warnings
    assert "random states" in warning
    expected, reports = metrics(folder / "reports")[3:], metrics(tmp_path / "reports")
    assert [report["iteration"] for report in reports] == [4, 5, 6]
    for one, other in zip(expected, reports, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_a_checkpoint_for_one_layout_only_is_refused_under_another(start: Start, train: Train, save: Path) -> None:
    train(SAVED_WITH, *SAME, "--save", save, "--train-iters", 2)
    outcome = start(Layout(tp=1, pp=1, ep=4), *SAME, "--load", save, "--train-iters", 2).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "dp_reshardable" in line
    assert "--dist-ckpt-optim-fully-reshardable" in line


def test_weights_alone_load_under_any_layout(train: Train, save: Path) -> None:
    train(SAVED_WITH, *SAME, "--save", save, "--train-iters", 2)
    outcome = train(Layout(tp=1, pp=1, ep=4), *SAME, "--load", save, "--no-load-optim", "--train-iters", 3)
    assert "loaded checkpoint of iteration 2" in outcome.out[0]


def test_a_vocabulary_padded_otherwise_is_refused_with_the_flag_that_pads_it_equally(
    start: Start, train: Train, save: Path
) -> None:
    same = ["--global-batch-size", 8, "--train-iters", 1]
    train(SAVED_WITH, *same, "--save", save)
    outcome = start(Layout(tp=2, pp=1, ep=2), *same, "--load", save).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "--make-vocab-size-divisible-by 192" in line
