"""A resumed run computes what an undisturbed one computes, bit for bit, and each step of restoring is needed for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import Layout, Train, differences, digest, exact, metrics
from worker_hooks import poisoned_before_load, without_restoring

SAVED, LAST = 3, 6
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-shared-expert-intermediate-size 32"
).split()
FP16 = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1".split()
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
UNTIED = ["--untie-embeddings-and-output-weights"]
EVALUATION = "--eval-interval 2 --eval-iters 1".split()


def interrupted(
    train: Train, folder: Path, layout: Layout, *flags: str, distributed: bool = True, **kinds: Any
) -> tuple:
    """Digests of the last iteration and reports past the save, of an undisturbed run and of one that was resumed."""
    straight, resumed = folder / "straight", folder / "resumed"
    before, after = folder / "straight.jsonl", folder / "resumed.jsonl"
    if not straight.exists():
        saving = ["--save", straight, "--save-interval", SAVED, "--metrics-jsonl", before]
        train(layout, *flags, *saving, distributed=distributed)
    loading = ["--load", straight, "--ckpt-step", SAVED, "--save", resumed, "--metrics-jsonl", after]
    train(layout, *flags, *loading, distributed=distributed, **kinds)
    return digest(straight, LAST), digest(resumed, LAST), exact(before, after=SAVED), exact(after)


def assert_resumed_exactly(train: Train, folder: Path, layout: Layout, *flags: str, distributed: bool = True) -> None:
    state, resumed_state, reports, resumed_reports = interrupted(
        train, folder, layout, *flags, distributed=distributed, hooks=[poisoned_before_load]
    )
    assert reports == resumed_reports
    assert list(reports) == [4, 5, 6]
    assert differences(state, resumed_state) == []
    assert {"model weights", "exp_avg", "exp_avg_sq", "rng", "scheduler", "data position"} <= set(state)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=1, pp=2, ep=2), [*BIAS, *UNTIED]),
        (Layout(tp=1, pp=2, ep=2), ["--bf16", "--async-save", RESHARDABLE, *BIAS]),
        (Layout(tp=1, pp=1, ep=4), ["--async-save", *OVERLAP]),
        (Layout(tp=1, pp=1, ep=4), ["--bf16", RESHARDABLE, *UNTIED, *BIAS]),
        (Layout(tp=2, pp=1, ep=2), [RESHARDABLE]),
        (Layout(tp=2, pp=1, ep=2), ["--bf16", "--async-save", *BIAS]),
        (Layout(tp=1, pp=4, ep=1), ["--bf16", *OVERLAP]),
        (Layout(tp=1, pp=4, ep=1), ["--async-save", RESHARDABLE, *UNTIED, *BIAS]),
        (Layout(tp=1, pp=2, ep=2, ranks=8), ["--bf16", "--async-save", *OVERLAP, *BIAS]),
        (Layout(tp=1, pp=2, ep=2, ranks=8), [RESHARDABLE]),
        (Layout(tp=1, pp=2, ep=2, vpp=2), ["--bf16", "--async-save", *UNTIED, *OVERLAP]),
        (Layout(tp=1, pp=2, ep=2, vpp=2), [RESHARDABLE, *BIAS]),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else " ".join(value),
)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    layout: Layout, flags: list[str], train: Train, tmp_path: Path
) -> None:
    assert_resumed_exactly(train, tmp_path, layout, *flags)


@pytest.mark.parametrize(("precision", "saving"), [("fp32", []), ("bf16", ["--async-save"])])
def test_a_run_without_the_distributed_optimizer_resumes_exactly(
    precision: str, saving: list[str], train: Train, tmp_path: Path
) -> None:
    flags = [*saving, *([] if precision == "fp32" else [f"--{precision}"])]
    assert_resumed_exactly(train, tmp_path, Layout(), *flags, distributed=False)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "replicated"])
def test_a_run_that_skips_steps_for_overflows_resumes_exactly(distributed: bool, train: Train, tmp_path: Path) -> None:
    assert_resumed_exactly(train, tmp_path, Layout(), *FP16, distributed=distributed)
    skipped = [report["iteration"] for report in metrics(tmp_path / "straight.jsonl") if report["skipped"]]
    assert min(skipped) <= SAVED < max(skipped)
    assert len(skipped) < LAST


def test_a_run_with_sequence_auxiliary_and_router_losses_and_dropped_tokens_resumes_exactly(
    train: Train, tmp_path: Path
) -> None:
    losses = "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.01"
    dropping = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
    assert_resumed_exactly(train, tmp_path, Layout(), *losses.split(), *dropping.split())


def test_a_run_that_recomputes_activations_with_dropout_resumes_exactly(train: Train, tmp_path: Path) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1"
    assert_resumed_exactly(train, tmp_path, Layout(), *recompute.split())


def test_clipping_dropout_data_and_schedules_are_at_work_in_these_runs(train: Train, tmp_path: Path) -> None:
    plain, still = tmp_path / "plain.jsonl", tmp_path / "still.jsonl"
    train(Layout(), "--metrics-jsonl", plain)
    train(Layout(), "--metrics-jsonl", still, "--attention-dropout", 0)
    reports = metrics(plain)
    assert all(report["grad_norm"] > 0.5 for report in reports)
    assert len({report["learning_rate"] for report in reports}) == LAST
    assert len({report["lm_loss"] for report in reports}) == LAST
    assert exact(plain)[1] != exact(still)[1]


@pytest.mark.parametrize(
    ("step", "flags", "distributed"),
    [
        ("optimizer", BIAS, True),
        ("separate_steps", BIAS, True),
        ("separate_steps", [RESHARDABLE], True),
        ("separate_steps", [], False),
        ("separate_steps", ["--bf16"], False),
        ("scheduler", BIAS, True),
        ("rng", BIAS, True),
        ("rng tracker", BIAS, True),
        ("consumed_train_samples", BIAS, True),
        ("expert bias", BIAS, True),
        ("loss scale", FP16, True),
        ("loss scale", FP16, False),
    ],
)
def test_each_step_of_restoring_matters_for_the_losses(
    step: str, flags: list[str], distributed: bool, train: Train, tmp_path: Path
) -> None:
    state, resumed_state, reports, resumed_reports = interrupted(
        train, tmp_path, Layout(), *flags, distributed=distributed, hooks=[partial(without_restoring, step)]
    )
    assert differences(state, resumed_state)
    assert differences(reports, resumed_reports)


def test_the_position_in_the_validation_data_is_restored_and_matters(train: Train, tmp_path: Path) -> None:
    position = partial(without_restoring, "consumed_valid_samples")
    state, resumed_state, *_ = interrupted(train, tmp_path, Layout(), *EVALUATION, hooks=[position])
    assert differences(state, resumed_state) == ["data position"]
