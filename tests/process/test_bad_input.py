"""Flags and inputs that cannot work: one line from rank 0, exit code 2 on every rank, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Layout, Start

pytestmark = pytest.mark.own_loop

CASES = {
    "an unknown flag": (["--no-such-flag", "1"], "--no-such-flag"),
    "a value of the wrong type": (["--lr", "fast"], "fast"),
    "flags that contradict each other": (["--fp16", "--bf16"], "--fp16 and --bf16"),
    "a batch size that does not divide": (["--global-batch-size", "7"], "--global-batch-size 7"),
    "experts that do not divide": (["--num-experts", "5"], "--num-experts 5"),
    "ranks that do not divide": (["--pipeline-model-parallel-size", "3"], "4 ranks do not divide"),
    "a sequence longer than the corpus": (["--seq-length", "1000000"], "too small"),
    "a corpus that is not there": (["--data-path", "/nowhere/corpus"], "/nowhere/corpus"),
    "a split without training data": (["--split", "0,1,1"], "--split"),
    "a fault on a rank that is not there": (["--moe-ckpt-inject-fault", "4@1"], "rank 4"),
    "a fault that cannot be read": (["--moe-ckpt-inject-fault", "soon"], "soon"),
    "a report file that cannot be written": (["--metrics-jsonl", "/dev/null/reports"], "--metrics-jsonl"),
    "a board that cannot be written": (["--tensorboard-dir", "/dev/null/board"], "--tensorboard-dir"),
    "no GPU": (["--device", "cuda"], "--device cpu"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_in_one_line(case: str, start: Start) -> None:
    flags, part = CASES[case]
    outcome = start(Layout(), *flags).wait()
    assert set(outcome.codes) == {2}, outcome.said
    assert part in outcome.err[0]
    assert len(outcome.lines) == 1, outcome.said


def test_an_index_without_its_data_is_refused(start: Start, corpus: str, tmp_path: Path) -> None:
    prefix = tmp_path / "half"
    prefix.with_suffix(".idx").write_bytes(Path(f"{corpus}.idx").read_bytes())
    outcome = start(Layout(), "--data-path", prefix).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "half.bin" in line


def test_a_corpus_of_another_tokenizer_is_refused(start: Start) -> None:
    outcome = start(Layout(), "--tokenizer-type", "NullTokenizer", "--vocab-size", 64).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "token id" in line
