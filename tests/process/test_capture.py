"""Snapshots of real models, taken while training continues: right to the last bit, and enough to go back to."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from capture_hooks import BEFORE_SNAPSHOT, allocated_lazily, captured, counted
from effort import cases
from runs import Layout, Train, digest, exact, flags
from world import World

BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SCALED = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
GLOBAL = "--moe-router-load-balancing-type global_aux_loss"
DROPOUT = "--hidden-dropout 0.1"
ONE_DENSE = "--moe-layer-freq ([1]*2+[0]*1+[1]*1)"
CAPTURES = 3


@dataclass(frozen=True)
class Run:
    """One job: its layout, its flags besides the common ones."""

    layout: Layout
    text: str
    distributed: bool = True
    experts: bool = True

    def flags(self, corpus: str, *extra: object) -> list[str]:
        """All flags of the job."""
        given = flags(corpus, self.layout, *self.text.split(), *map(str, extra), distributed=self.distributed)
        pairs = zip(given, [*given[1:], ""], strict=True)
        of_experts = ("--num-experts", "--moe-", "--expert-")
        dropped = {at + one for at, (flag, _) in enumerate(pairs) if flag.startswith(of_experts) for one in (0, 1)}
        return given if self.experts else [word for at, word in enumerate(given) if at not in dropped]


RUNS = {
    "bf16, distributed, virtual stages, overlap, expert bias": Run(
        Layout(vpp=2), f"--bf16 {BIAS} {OVERLAP} {ONE_DENSE}"
    ),
    "fp16, distributed, untied, global loss": Run(Layout(), f"{SCALED} {UNTIED} {GLOBAL} {DROPOUT}"),
    "fp32, plain, tensor parallel, a dense layer": Run(
        Layout(tp=2, pp=1), f"--moe-layer-freq 2 {DROPOUT}", distributed=False
    ),
    "bf16, distributed, no experts": Run(Layout(pp=1, ep=1, ranks=1), "--bf16", experts=False),
}


@dataclass
class Seen:
    """What all ranks of one run wrote down."""

    run: Run
    ranks: list[dict[str, Any]]


def facts_of(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=cases(RUNS, fast=("bf16, distributed, virtual stages, overlap, expert bias",)))
def seen(request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("captured")
    outcome = world.run(run.flags(corpus), run.layout.ranks, [partial(captured, str(folder))])
    assert set(outcome.codes) == {0}, outcome.said
    return Seen(run, facts_of(folder, run.layout.ranks))


def test_a_snapshot_has_the_state_of_its_iteration_however_late_it_is_copied(seen: Seen) -> None:
    for facts in seen.ranks:
        at_the_last_moment, _, beside_training = facts["wrong records"]
        assert at_the_last_moment == []
        assert beside_training == []


def test_router_buffers_must_be_copied_before_the_next_forward_pass(seen: Seen) -> None:
    # What the global loss counts is zero again when an iteration has ended; an expert bias is never what it was.
    spoilt = ".router.expert_bias"
    for facts in seen.ranks:
        _, careless, _ = facts["wrong records"]
        assert set(careless) <= set(facts["buffers"])
        assert any(spoilt in key for key in careless) == (BIAS in seen.run.text)


@pytest.mark.parametrize("parts", ["full", "everything"])
def test_a_poisoned_state_is_restored_to_the_last_bit(seen: Seen, parts: str) -> None:
    for facts in seen.ranks:
        assert facts["differences"][parts] == []
        restored_bytes, expected_bytes = facts[f"{parts} bytes"]
        assert restored_bytes == expected_bytes > 0


def test_training_continues_from_a_restored_snapshot_as_it_did_before(seen: Seen) -> None:
    for facts in seen.ranks:
        iterations = facts["iterations"]
        first, again = iterations[BEFORE_SNAPSHOT : BEFORE_SNAPSHOT + CAPTURES], iterations[-CAPTURES:]
        assert [repr(one) for one in first] == [repr(one) for one in again]
        assert [one["trainer"]["iteration"] for one in again] == [BEFORE_SNAPSHOT + 1 + at for at in range(CAPTURES)]
        if "--fp16" in seen.run.text:
            assert len({repr(one["trainer"]["grad_scalers"]) for one in again}) > 1
            assert {one["skipped"] for one in again} == {True, False}


def test_trainer_state_that_lacks_anything_is_refused_and_nothing_changes(seen: Seen) -> None:
    for facts in seen.ranks:
        said = facts["refusals"]
        scalars, tensors = 6, 4
        assert len(said) >= scalars + tensors + 2
        for name in ("iteration", "consumed_train_samples", "scheduler", "grad_scalers", "param_groups"):
            assert any(name in sentence and "lacks" in sentence for sentence in said), name
        for name in ("random/numpy", "random/python", "random/torch", "random/device", "random/tracker/"):
            assert any(name in sentence and "lacks" in sentence for sentence in said), name
        assert any("random state torch has" in sentence for sentence in said)
        assert any("another scheduler" in sentence for sentence in said)


def test_every_rank_knows_all_operators_of_the_model(seen: Seen) -> None:
    everywhere = sorted({tuple(operator) for facts in seen.ranks for operator in facts["operators"]})
    for facts in seen.ranks:
        assert [tuple(operator) for operator in facts["of the model"]] == everywhere


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "text", "distributed"),
    [
        (Layout(pp=1, ranks=2), "--bf16", True),
        pytest.param(Layout(pp=1, ep=1, ranks=1), "--bf16", False, marks=pytest.mark.full),
        (Layout(pp=1, ep=1, ranks=1), "", False),
    ],
    ids=["distributed", "mixed precision", "fp32"],
)
def test_a_state_allocated_before_the_first_step_trains_as_one_that_was_not(
    train: Train, tmp_path: Path, layout: Layout, text: str, distributed: bool
) -> None:
    found = []
    for eagerly in (False, True):
        folder = tmp_path / str(eagerly)
        reports = tmp_path / f"{eagerly}.jsonl"
        kept = ("--save", folder, "--save-interval", 6, "--metrics-jsonl", reports)
        hooks = [partial(allocated_lazily, eagerly)]
        train(layout, *text.split(), *kept, hooks=hooks, distributed=distributed)
        found.append((exact(reports), digest(folder, 6)))
    assert len(found[0][0]) == 6
    assert found[0] == found[1]


COUNTED = {
    "tensor parallel, recomputed": Run(
        Layout(tp=2, pp=1),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "pipeline parallel": Run(Layout(), "--bf16"),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["pipeline parallel", pytest.param("tensor parallel, recomputed", marks=pytest.mark.full)]
)
def test_routed_tokens_are_counted_once_for_each_of_their_experts(
    name: str, world: World, corpus: str, tmp_path: Path
) -> None:
    run, iterations, sequence, topk = COUNTED[name], 3, 32, 2
    argv = run.flags(corpus, "--train-iters", iterations, "--eval-interval", 1, "--eval-iters", 2)
    outcome = world.run(argv, run.layout.ranks, [partial(counted, str(tmp_path))])
    assert set(outcome.codes) == {0}, outcome.said
    ranks = facts_of(tmp_path, run.layout.ranks)
    batch = int(argv[argv.index("--global-batch-size") + 1])
    for iteration in range(iterations):
        sums: dict[str, int] = defaultdict(int)
        for rank in ranks:
            for layer, row in rank[iteration].items():
                assert len(row) == 4
                sums[layer] += sum(row)
        assert sums == {"0": batch * sequence * topk, "1": batch * sequence * topk}
