"""A resumed run computes what an undisturbed one computes, bit for bit, and each step of restoring is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import Layout, Start, Train, differences, digest, exact, metrics
from runs import flags_of_own_loop as flags
from worker_hooks import poisoned_before_load, without_restoring
from world import Hook, World

pytestmark = pytest.mark.own_loop

SAVED, LAST = 3, 6
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-shared-expert-intermediate-size 32"
).split()
FP16 = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1".split()
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
UNTIED = ["--untie-embeddings-and-output-weights"]
full = pytest.mark.full
EVALUATION = "--eval-interval 2 --eval-iters 1".split()


@dataclass(frozen=True)
class Ran:
    """State after the last iteration, by component, and the reports of the iterations past the save."""

    state: dict[str, str]
    reports: dict[int, str]


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
def undisturbed_and_resumed(straight: Straight, train: Train, tmp_path: Path) -> Callable[..., tuple[Ran, Ran]]:
    """Two runs with the same flags: one without a break, one from the checkpoint in the middle on, under `hooks`."""

    def run(layout: Layout, *flags: str, hooks: Sequence[Hook], distributed: bool = True) -> tuple[Ran, Ran]:
        folder = straight(layout, *flags, distributed=distributed)
        loading = ["--load", folder, "--ckpt-step", SAVED, "--save", tmp_path, "--metrics-jsonl", tmp_path / "reports"]
        train(layout, *flags, *loading, distributed=distributed, hooks=hooks)
        undisturbed = Ran(digest(folder, LAST), exact(folder / "reports", after=SAVED))
        return undisturbed, Ran(digest(tmp_path, LAST), exact(tmp_path / "reports"))

    return run


@pytest.fixture
def assert_resumed_exactly(undisturbed_and_resumed: Callable[..., tuple[Ran, Ran]]) -> Callable[..., None]:
    def check(layout: Layout, *flags: str, distributed: bool = True) -> None:
        hooks = [poisoned_before_load]
        undisturbed, resumed = undisturbed_and_resumed(layout, *flags, hooks=hooks, distributed=distributed)
        assert list(undisturbed.reports) == [4, 5, 6]
        assert resumed.reports == undisturbed.reports
        assert differences(undisturbed.state, resumed.state) == []
        assert {"model weights", "exp_avg", "exp_avg_sq", "rng", "scheduler", "data position"} <= set(resumed.state)

    return check


# Each layout with two sets of flags; a sample has every kind of parallelism and every flag.
SAMPLE: list[tuple[Layout, list[str]]] = [
    (Layout(tp=1, pp=2, ep=2), ["--bf16", "--async-save", RESHARDABLE, *BIAS]),
    (Layout(tp=2, pp=1, ep=2), [RESHARDABLE]),
    (Layout(tp=1, pp=2, ep=2, vpp=2), ["--bf16", "--async-save", *UNTIED, *OVERLAP]),
]
OTHERS: list[tuple[Layout, list[str]]] = [
    (Layout(tp=1, pp=1, ep=4), ["--async-save", *OVERLAP, *UNTIED]),
    (Layout(tp=1, pp=4, ep=1), ["--bf16", *OVERLAP]),
    (Layout(tp=1, pp=2, ep=2), BIAS),
    (Layout(tp=1, pp=1, ep=4), ["--bf16", RESHARDABLE, *UNTIED, *BIAS]),
    (Layout(tp=2, pp=1, ep=2), ["--bf16", "--async-save", *BIAS]),
    (Layout(tp=1, pp=4, ep=1), ["--async-save", RESHARDABLE, *UNTIED, *BIAS]),
    (Layout(tp=1, pp=2, ep=2, ranks=8), ["--bf16", "--async-save", *OVERLAP, *BIAS]),
    (Layout(tp=1, pp=2, ep=2, ranks=8), [RESHARDABLE]),
    (Layout(tp=1, pp=2, ep=2, vpp=2), [RESHARDABLE, *BIAS]),
]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [*SAMPLE, *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS)],
    ids=lambda value: str(value) if isinstance(value, Layout) else " ".join(value),
)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    layout: Layout, flags: list[str], assert_resumed_exactly: Check
) -> None:
    assert_resumed_exactly(layout, *flags)


@pytest.mark.parametrize("flags", [pytest.param([], marks=full), ["--bf16", "--async-save"]], ids=" ".join)
def test_a_run_without_the_distributed_optimizer_resumes_exactly(
    flags: list[str], assert_resumed_exactly: Check
) -> None:
    assert_resumed_exactly(Layout(), *flags, distributed=False)


@pytest.mark.parametrize(
    "distributed", [pytest.param(True, id="distributed"), pytest.param(False, id="replicated", marks=full)]
)
def test_a_run_that_skips_steps_for_overflows_resumes_exactly(
    distributed: bool, assert_resumed_exactly: Check, straight: Straight
) -> None:
    assert_resumed_exactly(Layout(), *FP16, distributed=distributed)
    reports = metrics(straight(Layout(), *FP16, distributed=distributed) / "reports")
    skipped = [report["iteration"] for report in reports if report["skipped"]]
    assert min(skipped) <= SAVED < max(skipped)
    assert len(skipped) < LAST


@pytest.mark.full
def test_a_run_with_sequence_losses_router_noise_and_dropped_tokens_resumes_exactly(
    assert_resumed_exactly: Check,
) -> None:
    losses = "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.01"
    dropping = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
    assert_resumed_exactly(Layout(), *losses.split(), *dropping.split())


@pytest.mark.full
def test_a_run_that_recomputes_activations_with_dropout_resumes_exactly(assert_resumed_exactly: Check) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1"
    assert_resumed_exactly(Layout(), *recompute.split())


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
        ("scheduler", BIAS, True),
        pytest.param("rng", BIAS, True, marks=full),
        ("rng tracker", BIAS, True),
        ("consumed_train_samples", BIAS, True),
        ("expert_bias", BIAS, True),
        ("loss scale", FP16, True),
        pytest.param("loss scale", FP16, False, marks=full),
    ],
)
def test_each_step_of_restoring_matters_for_the_losses(
    step: str, flags: list[str], distributed: bool, undisturbed_and_resumed: Callable[..., tuple[Ran, Ran]]
) -> None:
    hooks = [partial(without_restoring, step)]
    undisturbed, resumed = undisturbed_and_resumed(Layout(), *flags, hooks=hooks, distributed=distributed)
    assert differences(undisturbed.state, resumed.state)
    assert differences(undisturbed.reports, resumed.reports)


def test_the_position_in_the_validation_data_is_restored_and_matters(
    undisturbed_and_resumed: Callable[..., tuple[Ran, Ran]], assert_resumed_exactly: Check
) -> None:
    assert_resumed_exactly(Layout(), *EVALUATION, *OVERLAP)
    hooks = [partial(without_restoring, "consumed_valid_samples")]
    undisturbed, resumed = undisturbed_and_resumed(Layout(), *EVALUATION, *OVERLAP, hooks=hooks)
    assert differences(undisturbed.state, resumed.state) == ["data position"]


def test_adam_cannot_go_on_without_the_step_counts_that_loading_sets_apart(straight: Straight, start: Start) -> None:
    loading = ["--load", straight(Layout(), *BIAS), "--ckpt-step", SAVED]
    outcome = start(Layout(), *BIAS, *loading, hooks=[partial(without_restoring, "separate_steps")]).wait()
    assert set(outcome.codes) == {1}
    assert "KeyError: 'step'" in outcome.said
