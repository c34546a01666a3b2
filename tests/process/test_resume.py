"""A resumed run computes what an undisturbed one computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import Layout, Train, differences, digest, exact, flags, metrics
from worker_hooks import left_out, poisoned_before_load
from world import World

SAVED, LAST = 3, 6
ONE = Layout(tp=1, pp=1, ep=1, ranks=1)
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
ASYNC = ["--async-save", "--async-strategy", "mcore"]
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-shared-expert-intermediate-size 32"
).split()
FP16 = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1".split()
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
UNTIED = ["--untie-embeddings-and-output-weights"]
APART = ["--data-parallel-random-init"]
EVALUATION = "--eval-interval 2 --eval-iters 1".split()
LOSSES = "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.01".split()
DROPPING = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity".split()
RECOMPUTED = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1"
).split()
DISTRIBUTED, REPLICATED = True, False

Straight = Callable[..., Path]
Check = Callable[..., None]


@pytest.fixture(scope="module")
def straight(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Where an undisturbed run with these flags left its checkpoints and reports; each is made once."""
    made: dict[Any, Path] = {}

    def run(layout: Layout, *extra: str, distributed: bool = True) -> Path:
        key = layout, extra, distributed
        if key not in made:
            folder = tmp_path_factory.mktemp("straight")
            saving = ["--save", str(folder), "--save-interval", str(SAVED), "--metrics-jsonl", str(folder / "reports")]
            argv = flags(corpus, layout, *extra, *saving, distributed=distributed)
            outcome = world.run(argv, layout.ranks)
            assert set(outcome.codes) == {0}, outcome.said
            made[key] = folder
        return made[key]

    return run


@pytest.fixture
def assert_resumed_exactly(straight: Straight, train: Train, tmp_path: Path) -> Check:
    """Of two runs, one without a break and one from the checkpoint in its middle on."""

    def check(layout: Layout, *flags: str, distributed: bool = True) -> None:
        folder = straight(layout, *flags, distributed=distributed)
        loading = ["--load", folder, "--ckpt-step", SAVED, "--save", tmp_path, "--metrics-jsonl", tmp_path / "reports"]
        train(layout, *flags, *loading, distributed=distributed, hooks=[poisoned_before_load])
        assert list(exact(tmp_path / "reports")) == [4, 5, 6]
        assert exact(tmp_path / "reports") == exact(folder / "reports", after=SAVED)
        state = digest(tmp_path, LAST)
        assert differences(digest(folder, LAST), state) == []
        assert {"model weights", "exp_avg", "exp_avg_sq", "rng", "scheduler", "data position"} <= set(state)

    return check


# Tensor parallelism and a replicated optimizer are loaded in `test_partial_saves.py` too.
SAMPLE = [
    (Layout(tp=1, pp=2, ep=2), ["--bf16", *ASYNC, RESHARDABLE, *BIAS], DISTRIBUTED),
    pytest.param(Layout(tp=1, pp=2, ep=1, vpp=2), [*APART, *UNTIED, *OVERLAP], DISTRIBUTED, marks=pytest.mark.ci),
]
OTHERS: list[tuple[Layout, list[str], bool]] = [
    (Layout(tp=2, pp=1, ep=2), ["--bf16", *EVALUATION], REPLICATED),
    (Layout(tp=2, pp=1, ep=2), [RESHARDABLE], DISTRIBUTED),
    (Layout(tp=1, pp=2, ep=2, vpp=2), ["--bf16", *ASYNC, *UNTIED, *OVERLAP], DISTRIBUTED),
    (Layout(tp=1, pp=1, ep=4), [*ASYNC, *OVERLAP, *UNTIED], DISTRIBUTED),
    (Layout(tp=1, pp=4, ep=1), ["--bf16", *OVERLAP], DISTRIBUTED),
    (Layout(tp=1, pp=2, ep=2), BIAS, DISTRIBUTED),
    (Layout(tp=1, pp=1, ep=4), ["--bf16", RESHARDABLE, *UNTIED, *BIAS], DISTRIBUTED),
    (Layout(tp=2, pp=1, ep=2), ["--bf16", *ASYNC, *BIAS], DISTRIBUTED),
    (Layout(tp=1, pp=4, ep=1), [*ASYNC, RESHARDABLE, *UNTIED, *BIAS], DISTRIBUTED),
    (Layout(tp=1, pp=2, ep=2, ranks=8), ["--bf16", *ASYNC, *OVERLAP, *BIAS], DISTRIBUTED),
    (Layout(tp=1, pp=2, ep=2, ranks=8), [RESHARDABLE], DISTRIBUTED),
    (Layout(tp=1, pp=2, ep=2, vpp=2), [RESHARDABLE, *BIAS], DISTRIBUTED),
    (Layout(), [], REPLICATED),
    (Layout(), ["--bf16", *ASYNC], REPLICATED),
    (Layout(), [*LOSSES, *DROPPING], DISTRIBUTED),
    (Layout(), RECOMPUTED, DISTRIBUTED),
    (Layout(), [*EVALUATION, *OVERLAP], DISTRIBUTED),
]


@pytest.mark.parametrize(
    ("layout", "flags", "distributed"),
    [*SAMPLE, *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    layout: Layout, flags: list[str], distributed: bool, assert_resumed_exactly: Check
) -> None:
    assert_resumed_exactly(layout, *flags, distributed=distributed)


@pytest.mark.ci
@pytest.mark.parametrize(
    "distributed",
    [pytest.param(True, id="distributed"), pytest.param(False, id="replicated", marks=pytest.mark.full)],
)
def test_a_run_that_skips_steps_for_overflows_resumes_exactly(
    distributed: bool, assert_resumed_exactly: Check, straight: Straight
) -> None:
    assert_resumed_exactly(Layout(), *FP16, distributed=distributed)
    reports = metrics(straight(Layout(), *FP16, distributed=distributed) / "reports")
    skipped = [report["iteration"] for report in reports if report["skipped"]]
    assert min(skipped) <= SAVED < max(skipped)
    assert len(skipped) < LAST


def test_clipping_dropout_data_and_schedules_are_at_work_in_these_runs(
    straight: Straight, train: Train, tmp_path: Path
) -> None:
    plain, still = straight(ONE) / "reports", tmp_path / "still"
    train(ONE, "--metrics-jsonl", still, "--attention-dropout", 0, "--train-iters", 1)
    reports = metrics(plain)
    assert all(report["grad_norm"] > 0.5 for report in reports)
    assert len({report["learning_rate"] for report in reports}) == LAST
    assert len({report["lm_loss"] for report in reports}) == LAST
    assert exact(plain)[1] != exact(still)[1]


@pytest.mark.parametrize("step", ["stock.hooks.restore_random", "megatron_state.optimizer_state.separate_steps"])
def test_each_step_that_is_added_to_megatrons_loading_matters_for_the_losses(
    step: str, straight: Straight, train: Train, tmp_path: Path
) -> None:
    dropout, hook = ("--hidden-dropout", "0.1"), partial(left_out, f"megatron.core.dist_checkpointing.moe.{step}")
    folder = straight(ONE, *dropout)
    loading = ["--load", folder, "--ckpt-step", SAVED, "--metrics-jsonl", tmp_path / "reports"]
    train(ONE, *dropout, *loading, hooks=[hook])
    assert differences(exact(folder / "reports", after=SAVED), exact(tmp_path / "reports"))
