"""Jobs with Transformer Engine's own Python, on the CPU: grouped experts and FusedAdam are protected like all else."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import engine_hooks
import pytest
from attempts import Cluster
from digested_runs import Seen, examined
from runs import Layout
from sparse_runs import BF16, LENGTH, SAVE_INTERVAL, Case, Run, assert_identical, assert_replayed, killed
from sparse_runs import fault_free as run_fault_free
from world import World

ENGINE = (*BF16, "--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
CASE = Case(Layout(pp=1, ep=2, ranks=2), ENGINE, window="3")


@pytest.fixture(scope="module")
def undisturbed(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The training of `CASE` without faults and protection."""
    return run_fault_free(engine_world, corpus, CASE, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
def test_killed_jobs_replay_with_frozen_grouped_experts_and_end_as_if_nothing_had_happened(
    engine_cluster: Cluster, undisturbed: Run, tmp_path: Path
) -> None:
    run = killed(engine_cluster, CASE, tmp_path / "killed")
    assert len(run.outcomes) == 3
    assert_replayed(run, int(CASE.window))
    assert_identical(run, undisturbed)


@pytest.mark.ci
def test_killed_jobs_with_full_snapshots_end_as_if_nothing_had_happened(
    engine_cluster: Cluster, undisturbed: Run, tmp_path: Path
) -> None:
    faults = [part for fault in CASE.faults for part in ("--moe-ckpt-inject-fault", fault)]
    saving = ["--save", tmp_path, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", tmp_path / "reports"]
    outcomes = engine_cluster.run(CASE.layout, *LENGTH, *ENGINE, *saving, "--moe-ckpt-strategy", "full", *faults)
    assert len(outcomes) == 3
    for outcome in outcomes[1:]:
        assert re.search(r"recovered iteration \d+ exactly", outcome.said)
    assert_identical(Run(tmp_path, tuple(outcomes)), undisturbed)


@pytest.fixture(scope="module")
def seen(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("examined")
    hooked = [partial(engine_hooks.examined, str(folder))]
    return examined(engine_world, corpus, CASE.layout, folder, ENGINE, hooked)


def test_a_model_has_the_layers_and_the_optimizer_that_it_has_on_gpus(seen: Seen) -> None:
    for facts in seen:
        assert set(facts["optimizers"]) == {"transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"}
        layers = {
            "TEGroupedMLP",
            "TERowParallelGroupedLinear",
            "TELayerNormColumnParallelLinear",
            "TEDotProductAttention",
        }
        assert layers <= set(facts["modules"])


def test_layers_of_transformer_engine_add_to_gradient_buffers_without_apex(seen: Seen) -> None:
    for facts in seen:
        assert len(facts["fused"]) == 8
        assert all(facts["fused"])


def test_the_state_of_a_fused_adam_is_complete_whatever_tables_it_keeps(seen: Seen) -> None:
    for facts in seen:
        assert {"dtype_to_range_map", "multi_tensor_adam"} <= set(facts["tables"])
        assert facts["verdicts"]["as it is"] == ""


def test_state_of_a_fused_adam_that_is_not_known_is_refused_by_name(seen: Seen) -> None:
    for facts in seen:
        verdicts = facts["verdicts"]
        assert "_scales.0.exp_avg" in verdicts["a scale beside the state"]
        assert ".inner.param_groups[0].params[0]" in verdicts["an optimizer inside"]
        assert "new_moment of " in verdicts["a new kind of moment"]
        assert "averages[0], 3 elements" in verdicts["averages in the optimizer"]
        for field in ("compute", "master", "exp_avg", "exp_avg_sq"):
            assert "belongs to no operator" in verdicts[f"without {field}"]


def test_grouped_layers_keep_their_gradient_buffers_over_passes_in_which_they_are_frozen(
    seen: Seen,
) -> None:
    for facts in seen:
        assert len(facts["buffers"]) == 8
        assert all(facts["buffers"].values()), facts["buffers"]


def test_a_poisoned_state_comes_back_from_copies_to_the_last_bit(seen: Seen) -> None:
    for facts in seen:
        assert facts["differences"]["trained on"]
        assert facts["differences"]["nothing"]
        assert facts["differences"]["everything"] == facts["differences"]["full parts, recast"] == []


def test_step_counts_of_a_fused_adam_come_back_with_the_trainer_state(seen: Seen) -> None:
    for facts in seen:
        steps = facts["steps"]
        assert steps["trained on"] == [count + 1 for count in steps["at the snapshot"]]
        assert steps["restored"] == steps["at the snapshot"]
        assert set(steps["restored"]) == {4}
