"""Iterations with frozen operators, in real jobs: what is active comes out to the last bit as if nothing was frozen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from effort import cases
from frozen_hooks import begun_frozen, frozen
from runs import Layout, Train, differences, digest, exact, flags
from world import World

from moe_ckpt.dense.components import OTHER

UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SCALED = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
GLOBAL = "--moe-router-load-balancing-type global_aux_loss"
SHARED = "--moe-shared-expert-intermediate-size 32"
DROPPING = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --moe-z-loss-coeff 1e-3"
DROPOUT = "--hidden-dropout 0.1"
UNFUSED = "--no-bias-dropout-fusion"
"""With it compiled, gradients flow everywhere."""
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Run:
    """One job: its layout, its flags besides the common ones."""

    layout: Layout
    text: str
    distributed: bool = True
    biased: bool = False

    def flags(self, corpus: str) -> list[str]:
        """All flags of the job."""
        given = flags(corpus, self.layout, UNFUSED, *self.text.split(), distributed=self.distributed)
        return [flag for flag in given if not (self.biased and flag == "--disable-bias-linear")]


SAMPLE = {
    "expert parallel, bf16, untied, deep": Run(Layout(pp=1, ranks=2), f"--bf16 {UNTIED} {DROPOUT} --num-layers 3"),
    "virtual stages, fp16, plain, untied, recomputed": Run(
        Layout(vpp=2, ep=1, ranks=2),
        f"{SCALED} {UNTIED} --recompute-granularity selective --recompute-modules moe {BIAS}",
        distributed=False,
    ),
}
REST = {
    "two tensor partitions, fp32, tied, selectively recomputed": Run(
        Layout(tp=2, pp=1, ep=1, ranks=2), f"--recompute-granularity selective --recompute-modules core_attn {SHARED}"
    ),
    "pipeline and experts, bf16, tied, bias": Run(Layout(), f"--bf16 {BIAS} {SHARED}"),
    "four tensor partitions, fp32, tied, selectively recomputed": Run(
        Layout(tp=4, pp=1, ep=1), f"--recompute-granularity selective --recompute-modules core_attn {SHARED}"
    ),
    "tensor parallel, fp32, plain, capacity": Run(
        Layout(tp=2, pp=1), f"{DROPPING} {SHARED} --moe-layer-freq 2", distributed=False
    ),
    "deep pipeline, fp16, untied, overlap": Run(Layout(pp=4, ep=1), f"{SCALED} {UNTIED} {OVERLAP} {GLOBAL}"),
    "virtual stages, bf16, tied, overlap": Run(Layout(vpp=2), f"--bf16 {OVERLAP} {DROPOUT} --calculate-per-token-loss"),
    "tensor parallel, fp16, untied, recomputed": Run(
        Layout(tp=2, pp=1), f"{SCALED} {UNTIED} {RECOMPUTED} {BIAS} --num-layers 3"
    ),
    "expert parallel, fp32, two samples": Run(
        Layout(pp=1, ranks=2), f"--num-layers 3 --micro-batch-size 2 --global-batch-size 8 {UNTIED} {SHARED}"
    ),
    "experts on several ranks, bf16, jitter, overlap": Run(
        Layout(pp=1), f"--bf16 {OVERLAP} --moe-input-jitter-eps 0.01 --moe-router-dtype fp32 --hidden-dropout 0.1"
    ),
    "pipeline, bf16, plain, clipping nothing": Run(
        Layout(ep=1, ranks=2), f"--bf16 --clip-grad 0 {UNTIED} --num-layers 4", distributed=False
    ),
    "pipeline, fp16, no experts, biases": Run(
        Layout(ep=1, ranks=4, experts=None),
        f"{SCALED} --num-layers 4 --normalization LayerNorm {DROPOUT}"
        " --position-embedding-type learned_absolute --max-position-embeddings 32",
        biased=True,
    ),
}
RUNS = SAMPLE | REST
CASES = cases(RUNS, fast=(), full=REST)


@dataclass(frozen=True)
class Seen:
    """What all ranks of one run wrote down."""

    run: Run
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("frozen")
    outcome = world.run(run.flags(corpus), run.layout.ranks, [partial(frozen, str(folder))])
    assert set(outcome.codes) == {0}, outcome.said
    return Seen(run, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(run.layout.ranks)])


def test_active_operators_come_out_as_in_training_and_frozen_ones_are_untouched(seen: Seen) -> None:
    for facts in seen.ranks:
        assert len(facts["differences"]) >= 12
        assert {name: found for name, found in facts["differences"].items() if found} == {}


def test_training_continues_after_a_thaw_as_if_nothing_had_been_frozen(seen: Seen) -> None:
    for facts in seen.ranks:
        assert facts["thawed"] == []
        assert facts["twice"] == []


def test_no_weight_gradient_is_computed_for_frozen_weights(seen: Seen) -> None:
    for facts in seen.ranks:
        gemms = facts["gemms"]
        forward, training = gemms["forward"], gemms["as ever"]
        assert gemms["all active"] == training > 0
        # A weight gradient costs as much as the forward pass through that weight.
        of_experts, of_the_rest = training - gemms["no experts"], training - gemms["only experts"]
        if seen.run.layout.experts:
            assert of_experts + of_the_rest == forward
            assert of_experts > 0
        if UNTIED in seen.run.text:
            assert training - gemms["only the embedding"] == forward


def test_nothing_flows_back_below_the_lowest_active_layer(seen: Seen) -> None:
    for facts in seen.ranks:
        gemms = facts["gemms"]
        if RECOMPUTED in seen.run.text or "modules moe" in seen.run.text:
            # Routers count tokens when they are recomputed, which only gradients make happen.
            assert gemms["nothing"] > gemms["forward"]
        else:
            assert gemms["nothing"] == gemms["forward"]


def test_a_skipped_step_was_among_those_that_were_repeated(seen: Seen) -> None:
    skipped = {journal["skipped"] for facts in seen.ranks for journal in facts["journals"]}
    assert skipped == ({True, False} if SCALED in seen.run.text else {False})


def test_what_cannot_be_frozen_is_refused_with_the_reason(seen: Seen) -> None:
    for facts in seen.ranks:
        said = facts["refusals"]
        assert said["as it is"] == ""
        assert "parameters have no operator" in said["a parameter of no operator"]
        assert "four bits" in said["fp4"]
        assert "SGD" in said["SGD"]
        assert ("--clip-grad" in said["no norm"]) == ("--clip-grad 0" not in seen.run.text)
        assert ("loss scale" in said["skipped"]) == (SCALED not in seen.run.text)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "text"),
    [
        pytest.param(Layout(pp=1, ranks=2), f"--fp16 {OVERLAP} {UNTIED}", id="expert parallel"),
        pytest.param(Layout(vpp=2), f"--bf16 {OVERLAP}", id="virtual stages", marks=pytest.mark.full),
    ],
)
def test_a_job_that_begins_with_frozen_operators_trains_as_one_that_does_not(
    train: Train, tmp_path: Path, layout: Layout, text: str
) -> None:
    found = []
    for hooks in ([], [begun_frozen]):
        folder, reports = tmp_path / str(len(hooks)), tmp_path / f"{len(hooks)}.jsonl"
        kept = ("--save", folder, "--save-interval", 6, "--metrics-jsonl", reports)
        train(layout, *text.split(), *kept, hooks=hooks)
        found.append((exact(reports), digest(folder, 6)))
    assert len(found[0][0]) == 6
    (reported, saved), (reported_after, saved_after) = found
    assert reported == reported_after
    # Megatron-LM's rerun state machine has counted the losses of the iterations before, too.
    assert set(differences(saved, saved_after)) <= {OTHER}
