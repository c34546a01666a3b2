"""Every kind of model that the flags offer trains, saves and loads on real parallel layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from effort import cases
from runs import Layout, Train, metrics

PIPELINE = Layout(pp=2, ep=1, ranks=2)
EXPERTS = Layout(pp=1, ep=2, ranks=2)
TENSOR = Layout(tp=2, pp=1, ep=1, ranks=2)

OPTIONS = {
    "sequence-level auxiliary loss and z-loss": (
        PIPELINE,
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3",
    ),
    "several auxiliary losses at once": (
        EXPERTS,
        "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
    ),
    "sinkhorn": (EXPERTS, "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk 1"),
    "expert bias instead of an auxiliary loss": (
        EXPERTS,
        "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias",
    ),
    "capacity with dropped tokens and padding": (
        EXPERTS,
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position",
    ),
    "shared experts and a dense first layer": (
        PIPELINE,
        "--moe-shared-expert-intermediate-size 64 --moe-layer-freq ([0]*1+[1]*1)",
    ),
    "allgather dispatcher with router noise": (
        EXPERTS,
        "--moe-token-dispatcher-type allgather --moe-input-jitter-eps 1e-2 --moe-router-dtype fp32",
    ),
    "expert tensor parallelism": (TENSOR, "--expert-tensor-parallel-size 2"),
    "experts spread over tensor ranks": (Layout(tp=2, pp=1, ep=2, ranks=2), "--expert-tensor-parallel-size 1"),
    "grouped queries, learned positions and LayerNorm": (
        TENSOR,
        "--group-query-attention --num-query-groups 2 --position-embedding-type learned_absolute "
        "--normalization LayerNorm --qk-layernorm --add-qkv-bias",
    ),
    "full recomputation with dropout": (
        PIPELINE,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1",
    ),
    "attention and positions that restart at each document": (
        PIPELINE,
        "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss",
    ),
}


ELSEWHERE = {
    "sequence-level auxiliary loss and z-loss",
    "expert bias instead of an auxiliary loss",
    "capacity with dropped tokens and padding",
    "full recomputation with dropout",
    "shared experts and a dense first layer",
    "several auxiliary losses at once",
    "sinkhorn",
    "expert tensor parallelism",
}
"""Other tests train with these too."""


@pytest.mark.parametrize("option", cases(OPTIONS, fast=(), full=ELSEWHERE))
def test_a_model_trains_and_continues_from_its_checkpoint_with(option: str, train: Train, tmp_path: Path) -> None:
    layout, text = OPTIONS[option]
    path, save = tmp_path / "metrics.jsonl", tmp_path / "save"
    common = (*text.split(), "--save", str(save), "--load", str(save), "--metrics-jsonl", str(path))
    train(layout, *common, "--exit-interval", "2")
    train(layout, *common, "--exit-interval", "3")
    reports = metrics(path)
    assert [report["iteration"] for report in reports] == [1, 2, 3]
    assert all(math.isfinite(report["lm_loss"]) and report["grad_norm"] > 0 for report in reports)
