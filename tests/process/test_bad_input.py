"""Flags and inputs that cannot work: one line from rank 0, exit code 2 on every rank, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Layout, Start
from world import Outcome

LAYOUT = Layout(pp=2, ep=1, ranks=2)
ASSERTED = "invalid Megatron-LM arguments: "
CASES = {
    "an unknown flag": (["--no-such-flag", "1"], "--no-such-flag"),
    "flags that contradict each other": (["--fp16", "--bf16"], f"{ASSERTED}assert not args.bf16"),
    "a sequence longer than the corpus": (
        ["--seq-length", "200000", "--max-position-embeddings", "200000"],
        f"{ASSERTED}no sample to consume",
    ),
    "a corpus that is not there": (["--data-path", "/nowhere/corpus"], "/nowhere/corpus"),
    "a fault on a rank that is not there": (["--moe-ckpt-inject-fault", "4@1"], "rank 4"),
    "a fault that cannot be read": (["--moe-ckpt-inject-fault", "soon"], "soon"),
    "no GPU": (["--device", "cuda"], "--device cpu"),
    "a value of the wrong type": (["--lr", "fast"], "fast"),
    "a batch size that does not divide": (["--global-batch-size", "7", "--micro-batch-size", "2"], ASSERTED),
    "experts that do not divide": (["--num-experts", "5", "--expert-model-parallel-size", "2"], ASSERTED),
    "layers that do not divide": (["--num-layers", "3"], f"{ASSERTED}Number of layers should be divisible"),
    "ranks that do not divide": (["--pipeline-model-parallel-size", "3"], f"{ASSERTED}world size (2)"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_in_one_line(case: str, start: Start) -> None:
    flags, part = CASES[case]
    assert part in refused(start(LAYOUT, *flags).wait())


def test_an_index_without_its_data_is_refused(start: Start, corpus: str, tmp_path: Path) -> None:
    prefix = tmp_path / "half"
    prefix.with_suffix(".idx").write_bytes(Path(f"{corpus}.idx").read_bytes())
    assert str(prefix) in refused(start(LAYOUT, "--data-path", prefix).wait())


def refused(outcome: Outcome) -> str:
    """The one line on standard error with which all ranks ended."""
    assert set(outcome.codes) == {2}, outcome.said
    assert "Traceback" not in outcome.said
    (line,) = outcome.warnings
    assert line in outcome.err[0]
    return line
