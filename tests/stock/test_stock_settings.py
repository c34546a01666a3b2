"""Flags of a resumed job that are others than before: they take effect, or a line says which value does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from runs import metrics
from stock_jobs import ALONE, FULL, KILLED, Shape, StockJob
from world import Outcome

pytestmark = pytest.mark.ci

STANDS = 2
"""The iteration after which checkpoint and storage stand; memory has that, or the next one."""
OTHERS = ("--lr", 5e-3, "--min-lr", 1e-4, "--adam-beta2", 0.9, "--adam-eps", 1e-4)
OVERRIDE = "--override-opt_param-scheduler"

SOURCES = ["checkpoint", "memory", pytest.param("storage", marks=pytest.mark.full)]


@dataclass(frozen=True)
class Resumed:
    """What came of a job from STANDS on; rates: of learning, by iteration."""

    outcome: Outcome
    rates: dict[int, float]
    losses: dict[int, tuple[float, float]]


def rates(reports: Path) -> dict[int, float]:
    return {one["iteration"]: one["learning_rate"] for one in metrics(reports) if one["iteration"] > STANDS + 1}


def losses(reports: Path) -> dict[int, tuple[float, float]]:
    return {one["iteration"]: (one["lm_loss"], one["grad_norm"]) for one in metrics(reports)}


@pytest.fixture(scope="module")
def saved(new_job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of STANDS, which jobs only load."""
    folder = tmp_path_factory.mktemp("saved")
    new_job(ALONE).run(*FULL, "--save", folder, "--save-interval", STANDS, "--exit-interval", STANDS)
    return folder


@pytest.fixture
def resume(new_job, saved: Path, tmp_path: Path) -> Callable[..., Resumed]:
    """Runs a job to STANDS, and continues from there with other flags, with what lies in one place."""

    def run(source: str, *flags: object, codes: set[int] | None = None) -> Resumed:
        job: StockJob = new_job(ALONE)
        folder, reports = tmp_path / job.memory.name, tmp_path / f"{job.memory.name}.jsonl"
        loading = {
            "checkpoint": ("--load", saved),
            "storage": ("--moe-ckpt-persist-dir", folder, "--moe-ckpt-persist-interval", STANDS),
            "memory": (),
        }[source]
        if source == "memory":
            job.run(*FULL, "--moe-ckpt-inject-fault", f"0@{STANDS + 1}:end", codes={KILLED})
        elif source == "storage":
            folder.mkdir()
            job.run(*FULL, *loading, "--exit-interval", STANDS)
        outcome = job.run(*FULL, *loading, *flags, "--metrics-jsonl", reports, codes=codes)
        return Resumed(outcome, rates(reports), losses(reports)) if codes is None else Resumed(outcome, {}, {})

    return run


def line_with(outcome: Outcome, words: str) -> str:
    (line,) = [line for line in outcome.lines if words in line]
    return line


@pytest.fixture(scope="module")
def fresh(new_job, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[int, float]]:
    """The learning rates of jobs that had these flags from the beginning, and that had them never."""
    found = {}
    for has_others in (False, True):
        reports = tmp_path_factory.mktemp("fresh") / "reports"
        new_job(ALONE).run(*FULL, *(OTHERS if has_others else ()), "--metrics-jsonl", reports)
        found[has_others] = rates(reports)
    assert found[False] != found[True]
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_a_schedule_that_overrides_and_settings_of_adam_take_effect_from_the_first_iteration(
    source: str, resume: Callable[..., Resumed], fresh: dict[bool, dict[int, float]]
) -> None:
    found, without_adam = resume(source, *OTHERS, OVERRIDE), resume(source, *OTHERS[:4], OVERRIDE)
    assert found.rates == without_adam.rates == fresh[True]
    assert found.losses != without_adam.losses
    said = line_with(found.outcome, "flags are others than before")
    for words in (
        "--lr was 0.01 and is 0.005",
        "--adam-beta2 was 0.999 and is 0.9",
        "--adam-eps was 1e-08 and is 0.0001",
    ):
        assert words in said


@pytest.mark.full
def test_from_a_checkpoint_and_from_storage_other_flags_come_to_the_same_bits(resume: Callable[..., Resumed]) -> None:
    assert resume("checkpoint", *OTHERS, OVERRIDE).losses == resume("storage", *OTHERS, OVERRIDE).losses


@pytest.mark.parametrize("source", SOURCES)
def test_a_schedule_of_the_checkpoint_stays_where_it_is_asked_for_and_the_flag_is_said_to_be_unused(
    source: str, resume: Callable[..., Resumed], fresh: dict[bool, dict[int, float]]
) -> None:
    found = resume(source, *OTHERS[:4], "--use-checkpoint-opt_param-scheduler")
    assert found.rates == fresh[False]
    assert "--lr stays 0.01 and is not 0.005" in line_with(found.outcome, "flags are others than before")


@pytest.mark.parametrize("source", SOURCES)
def test_another_schedule_is_refused_and_a_changed_batch_is_named_as_its_cause(
    source: str, resume: Callable[..., Resumed]
) -> None:
    said = resume(source, "--global-batch-size", 4, codes={2}).outcome.said
    assert "the schedules of this job are not" in said
    assert "--override-opt_param-scheduler" in said
    assert "--global-batch-size was 2 and is 4" in said


def test_the_same_flags_are_not_worth_a_line(resume: Callable[..., Resumed]) -> None:
    assert "others than before" not in resume("checkpoint").outcome.said


def test_the_folder_of_one_iteration_is_loaded_as_that_iteration(new_job, tmp_path: Path) -> None:
    new_job(ALONE).run(*FULL, "--save", tmp_path, "--save-interval", 2, "--exit-interval", 4)
    job = new_job(ALONE)
    outcome = job.run(*FULL, "--load", tmp_path / "iter_0000002")
    assert job.ran(0) == [3, 4, 5, 6]
    assert f"taken as --load {tmp_path} --ckpt-step 2" in outcome.said


def shape(*more: str) -> Shape:
    return Shape(ranks=2, pp=2, ep=1, more=("--bf16", *more))


AHEAD = shape("--mtp-num-layers", "1")
CHANGED = {
    "--mtp-num-layers was 1 and is 2": shape("--mtp-num-layers", "2"),
    "--mtp-num-layers was 1 and is None": shape(),
    "--optimizer was adam and is muon": shape("--mtp-num-layers", "1", "--optimizer", "muon"),
    "--moe-token-dispatcher-type was alltoall and is allgather": shape(
        "--mtp-num-layers", "1", "--moe-token-dispatcher-type", "allgather"
    ),
}
"""What a line says, and what is started."""


def test_a_feature_that_changes_is_refused_by_its_flag_and_the_job_of_before_continues_to_the_last_bit(
    new_job, undisturbed
) -> None:
    job: StockJob = new_job(AHEAD)
    given = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", 2, "--moe-ckpt-inject-fault", "1@5:step")
    job.run(*given, codes={KILLED, 1})
    for told, other in CHANGED.items():
        outcome = replace(job, shape=other).run(*given, codes={2})
        assert f"{told}, but " in line_with(outcome, " was "), outcome.said
        assert "number of parameters" not in outcome.said, "the model was built"
    job.run(*given)
    assert job.records() == undisturbed(AHEAD)
    assert 1 not in job.ran(1)[1:], "nothing begins again"


@pytest.mark.full
def test_a_feature_that_changes_is_refused_before_the_model_is_built_where_only_storage_has_the_state(
    resume: Callable[..., Resumed],
) -> None:
    outcome = resume("storage", "--mtp-num-layers", "1", codes={2}).outcome
    assert "--mtp-num-layers was None and is 1, but " in line_with(outcome, " was ")
    assert "number of parameters" not in outcome.said


def test_a_loss_scale_that_stays_is_refused_where_only_memory_has_the_newest_state_of_one_that_moves(
    new_job, tmp_path: Path
) -> None:
    """The older checkpoint would load, without a scaler, and memory would be freed."""
    job = new_job(Shape(ranks=1, pp=1, ep=1, more=("--fp16", "--initial-loss-scale", "2097152")))
    flags = (*FULL, "--save", tmp_path, "--load", tmp_path, "--save-interval", STANDS)
    job.run(*flags, "--moe-ckpt-inject-fault", f"0@{STANDS + 2}:step", codes={KILLED})
    outcome = job.run(*flags, "--loss-scale", 4096, codes={2})
    assert "has another grad_scalers" in outcome.said and "start with the flags of before" in outcome.said
    outcome = job.run(*flags)
    assert any(f"recovered iteration {STANDS + 1} exactly" in line for line in outcome.lines), outcome.said
