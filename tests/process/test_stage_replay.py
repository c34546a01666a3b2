"""Some pipeline stages run iterations again without the others, from what those sent: not a bit differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from effort import cases
from frozen_hooks import ITERATIONS
from runs import Layout, flags
from stage_hooks import overlapped_sends, replayed_alone
from world import World

UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SCALED = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
GLOBAL = "--moe-router-load-balancing-type global_aux_loss"
DROPOUT = "--hidden-dropout 0.1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARED = "--moe-shared-expert-intermediate-size 32"
UNFUSED = "--no-bias-dropout-fusion"
PER_TOKEN = "--calculate-per-token-loss --eod-mask-loss"

Segments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """One job: its layout, which stages are lost together, its flags besides the common ones."""

    layout: Layout
    segments: Segments
    text: str
    microbatches: int = 4
    distributed: bool = True
    overlapped: bool = False

    def flags(self, corpus: str) -> list[str]:
        """All flags of the job."""
        replicas = self.layout.ranks // (self.layout.tp * self.layout.pp)
        batch = ["--global-batch-size", str(self.microbatches * replicas)]
        return flags(corpus, self.layout, UNFUSED, *batch, *self.text.split(), distributed=self.distributed)

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        return self.layout.vpp or 1


SAMPLE = {
    "two stages, expert parallel, bf16, untied, overlap, 4 microbatches": Run(
        Layout(), ((0,), (1,)), f"--bf16 {UNTIED} {OVERLAP} {DROPOUT}"
    ),
    "virtual stages, bf16, overlapped sends, 8 microbatches": Run(
        Layout(vpp=2, ep=1, ranks=2), ((0,), (1,)), f"--bf16 {UNTIED} {OVERLAP}", microbatches=8, overlapped=True
    ),
    "tensor and sequence parallel, bf16": Run(Layout(tp=2, ep=1), ((0,), (1,)), f"--bf16 {UNTIED} {GLOBAL}"),
}
REST = {
    "four stages, fp16, tied, expert bias, 8 microbatches": Run(
        Layout(pp=4, ep=1), ((1,), (2,), (1, 2), (0, 3)), f"{SCALED} {BIAS}", microbatches=8
    ),
    "virtual stages, fp32, plain, per token": Run(
        Layout(vpp=2, ep=1, ranks=2), ((0,), (1,)), f"{UNTIED} {PER_TOKEN} {DROPOUT}", distributed=False
    ),
    "four stages, bf16, untied, per token, 4 microbatches": Run(
        Layout(pp=4, ep=1),
        ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 2), (0, 1, 2)),
        f"--bf16 {UNTIED} {PER_TOKEN} {OVERLAP}",
    ),
    "four stages, expert parallel, fp16, untied, overlap": Run(
        Layout(pp=4, ranks=8), ((0,), (2,), (1, 2), (3,)), f"{SCALED} {UNTIED} {OVERLAP} {DROPOUT}"
    ),
    "four virtual stages, bf16, untied": Run(
        Layout(pp=4, ep=1, vpp=2), ((0,), (1,), (3,), (1, 2)), f"--bf16 {UNTIED} {DROPOUT}"
    ),
    "four virtual stages, fp16, tied, overlapped sends, 8 microbatches": Run(
        Layout(pp=4, ep=1, vpp=2), ((1,), (2,), (0, 3)), f"{SCALED} {BIAS} {OVERLAP}", microbatches=8, overlapped=True
    ),
    "data parallel, fp16, plain, untied, 8 microbatches": Run(
        Layout(ep=1),
        ((0,), (1,)),
        f"{SCALED} {UNTIED} {DROPOUT} {PER_TOKEN} --initial-loss-scale 2048",
        microbatches=8,
        distributed=False,
    ),
    "data parallel, fp32, tied, 4 stages": Run(
        Layout(pp=4, ep=1, ranks=8), ((1,), (0, 3), (1, 2)), f"{SHARED} --moe-z-loss-coeff 1e-3 --clip-grad 0"
    ),
    "tensor and expert parallel, fp16, recomputed": Run(
        Layout(tp=2, ranks=8), ((0,), (1,)), f"{SCALED} {UNTIED} {RECOMPUTED} {BIAS} --num-layers 4"
    ),
    "every second layer with experts, bf16, jitter": Run(
        Layout(), ((0,), (1,)), f"--bf16 {UNTIED} --moe-layer-freq 2 --num-layers 4 --moe-input-jitter-eps 0.01"
    ),
    "no experts, fp16, learned positions": Run(
        Layout(ep=1, ranks=2, experts=None),
        ((0,), (1,)),
        f"{SCALED} {UNTIED} {DROPOUT} --position-embedding-type learned_absolute --max-position-embeddings 32",
    ),
}
RUNS = SAMPLE | REST
CASES = cases(RUNS, fast=(), full=REST)


@dataclass(frozen=True)
class Seen:
    """What all ranks of one run wrote down."""

    run: Run
    ranks: list[dict[str, Any]]

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank * self.run.layout.pp // self.run.layout.ranks

    def losses(self) -> Iterator[tuple[int, str, bool, dict[str, Any]]]:
        """Rank, stages that were lost, whether it was among them, and what it saw then."""
        for rank, facts in enumerate(self.ranks):
            for name, found in facts["segments"].items():
                yield rank, name, str(self.stage(rank)) in name.split("+"), found


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("alone")
    hooks = [partial(replayed_alone, str(folder), run.segments), *([overlapped_sends] if run.overlapped else [])]
    outcome = world.run(run.flags(corpus), run.layout.ranks, hooks)
    assert set(outcome.codes) == {0}, outcome.said
    return Seen(run, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(run.layout.ranks)])


def test_stages_that_replay_alone_come_out_as_in_training(seen: Seen) -> None:
    for _, _, is_lost, found in seen.losses():
        if is_lost:
            assert found["dense"] == []


def test_stages_that_replay_alone_from_a_sparse_checkpoint_come_out_as_in_training(seen: Seen) -> None:
    for _, _, is_lost, found in seen.losses():
        if is_lost:
            assert found["sparse"] == []


def test_what_was_sent_in_another_iteration_would_make_a_difference(seen: Seen) -> None:
    pairs = [(name, found) for _, name, is_lost, found in seen.losses() if is_lost]
    for segment in {name for name, _ in pairs}:
        assert any(found["confused"] for name, found in pairs if name == segment)


def test_the_other_stages_run_nothing_and_keep_what_they_have(seen: Seen) -> None:
    passes = seen.run.microbatches * seen.run.chunks
    assert {facts["passes"] for facts in seen.ranks} == {passes * ITERATIONS}
    for _, _, is_lost, found in seen.losses():
        if is_lost:
            assert found["done"]["forward_step"] == found["done"]["backward_step"] == passes * found["replayed"]
        else:
            assert set(found["done"].values()) == {0}
            assert found["replayed"] == 0
            assert found["others"] == []


def test_training_continues_together_as_if_nothing_had_been_lost(seen: Seen) -> None:
    assert all(found["rejoined"] == [] for _, _, _, found in seen.losses())


def test_no_two_tensors_that_were_sent_are_alike(seen: Seen) -> None:
    for facts in seen.ranks:
        assert len(facts["checksums"]) >= seen.run.microbatches * ITERATIONS
        assert len(set(facts["checksums"])) == len(facts["checksums"])


def test_a_skipped_step_was_among_those_that_were_replayed(seen: Seen) -> None:
    skipped = {journal["skipped"] for facts in seen.ranks for journal in facts["journals"]}
    assert skipped == ({True, False} if SCALED in seen.run.text else {False})


def test_a_journal_without_the_number_of_tokens_is_refused_where_gradients_are_divided_by_it(seen: Seen) -> None:
    for facts in seen.ranks:
        assert ("--calculate-per-token-loss" in facts["refused"]) == (PER_TOKEN in seen.run.text)
