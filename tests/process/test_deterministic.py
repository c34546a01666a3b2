"""Whether iterations can be repeated to the bit is asked before training, and `--deterministic-mode` makes it so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from deterministic_hooks import any_algorithm_accepted, seems_to_be_on_gpus, told
from runs import Layout, Train, flags, reports_in
from world import Outcome, World

PAIR = Layout(1, 1, 2, ranks=2)
SET = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def start_on_gpus(
    world: World, corpus: str, folder: Path, *extra: str, environment: Mapping[str, str], other: Mapping[str, str] = SET
) -> Outcome:
    """A job under `sparse` that takes itself to be on GPUs; `other` is the environment of its second rank."""
    sparse = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-memory-dir", str(folder), "--train-iters", "2")
    argv = flags(corpus, PAIR, *sparse, *extra)
    return world.start(argv, PAIR.ranks, (seems_to_be_on_gpus, any_algorithm_accepted), (environment, other)).wait()


def test_with_nothing_set_a_job_on_gpus_is_refused_with_one_line_for_each_setting(
    world: World, corpus: str, tmp_path: Path
) -> None:
    outcome = start_on_gpus(world, corpus, tmp_path, environment={}, other={})
    assert outcome.codes == (2, 2), outcome.said
    for setting in ("deterministic_mode is off", "torch may use", "NCCL_ALGO is not set", "CUBLAS_WORKSPACE_CONFIG is"):
        assert sum(setting in line for line in outcome.lines) == 1, outcome.said
    assert not list(tmp_path.iterdir()), "memory was taken before the settings were judged"


def test_a_node_whose_environment_differs_ends_all_ranks(world: World, corpus: str, tmp_path: Path) -> None:
    wrong = SET | {"NCCL_ALGO": "Tree"}
    outcome = start_on_gpus(world, corpus, tmp_path, "--deterministic-mode", environment=SET, other=wrong)
    assert outcome.codes == (2, 2), outcome.said
    assert any("NCCL_ALGO is Tree" in line for line in outcome.lines), outcome.said


@pytest.mark.ci
def test_with_all_of_it_set_or_a_tolerance_it_trains(world: World, corpus: str, tmp_path: Path) -> None:
    outcome = start_on_gpus(world, corpus, tmp_path, "--deterministic-mode", environment=SET)
    assert outcome.codes == (0, 0), outcome.said
    tolerance = ("--moe-ckpt-replay-tolerance", "1e-3")
    outcome = start_on_gpus(world, corpus, tmp_path, *tolerance, environment={}, other={})
    assert outcome.codes == (0, 0), outcome.said


@pytest.mark.ci
def test_the_mode_reaches_torch_and_core_and_trains_to_the_same_bits_twice(train: Train, tmp_path: Path) -> None:
    losses = []
    for attempt in ("one", "two"):
        folder = tmp_path / attempt
        folder.mkdir()
        reports = ("--train-iters", "3", "--metrics-jsonl", folder / "reports")
        train(PAIR, "--deterministic-mode", "--bf16", *reports, hooks=(partial(told, str(folder)),))
        found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(PAIR.ranks)]
        assert found == [{"torch": True, "core": True}] * PAIR.ranks
        losses.append([report["lm_loss"] for report in reports_in(folder / "reports")])
    assert losses[0] == losses[1] and len(losses[0]) == 3
