"""Fine-tuning with frozen experts in the stock loop: saved once, restored exactly, and never trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stock_jobs import KILLED, Shape
from stock_recording import unprotected

from moe_ckpt.dense.dense import open_dense

FROZEN = Shape(ranks=2, pp=1, ep=2, more=("--bf16", "--freeze-experts"))
HIDDEN, LAYERS, EXPERTS_OF_RANK = 32, 2, 2
EXPERT_BYTES = LAYERS * EXPERTS_OF_RANK * 3 * HIDDEN * HIDDEN * 2
"""Weights of a rank's experts in bf16; they have neither master weights nor moments."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "protection",
    [
        pytest.param("--moe-ckpt-strategy full", id="full"),
        pytest.param("--moe-ckpt-strategy sparse --moe-ckpt-window 2", id="sparse", marks=pytest.mark.full),
    ],
)
def test_frozen_experts_are_copied_once_and_come_back_to_the_bit(new_job, tmp_path: Path, protection: str) -> None:
    whole, job, reports = new_job(FROZEN), new_job(FROZEN), tmp_path / "reports"
    whole.run("--save", tmp_path / "whole", "--save-interval", 2, hooks=[unprotected])
    flags = (*protection.split(), "--moe-ckpt-inject-fault", "1@5:step", "--metrics-jsonl", reports)
    job.run(*flags, codes={KILLED, 1})
    job.run(*flags)
    assert job.records() == whole.records()
    assert job.began_again() == []
    copied: dict[int, int] = {}
    for line in map(json.loads, reports.read_text().splitlines()):
        if line.get("snapshot_bytes"):
            copied.setdefault(line["iteration"], line["snapshot_bytes"])
    width = 2 if "sparse" in protection else 1
    first, *others = [sum(copied[at + part] for part in range(width)) for at in range(1, 5, width)]
    assert set(others) == {first - EXPERT_BYTES}, copied
    assert_experts_stayed(tmp_path / "whole", 2, 6)


def test_a_model_without_experts_is_refused_in_one_line(new_job) -> None:
    outcome = new_job(FROZEN).run("--moe-layer-freq", "[0]*2", codes={2})
    assert len([line for line in outcome.lines if "--freeze-experts needs --num-experts" in line]) == 1, outcome.said


def assert_experts_stayed(folder: Path, first: int, last: int) -> None:
    """From one dense checkpoint to another; all else was trained."""
    before, after = (weights(folder / f"iter_{iteration:07d}") for iteration in (first, last))
    experts = {name for name in before if ".mlp.experts." in name}
    assert experts
    assert {name for name in before if torch.equal(before[name], after[name])} == experts


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model in a dense checkpoint."""
    dense = open_dense(folder)
    return {
        name: torch.cat([block.flatten() for block in dense.read_blocks(name)])
        for name in dense.tensors
        if name.startswith(("decoder.", "embedding."))
    }
