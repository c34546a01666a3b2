"""Statistics of tensors, and the progress bar of long work."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest
import torch

from moe_ckpt.checkpoints.inspect_tensors import Statistics, statistics
from moe_ckpt.report.progress import PATIENCE_S, progress


def test_a_tensor_of_several_blocks_has_the_statistics_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    values = 1e4 + torch.randn((1 << 22) + 1001, generator=generator)
    values[5], values[-1] = -7.0, 2e4
    found, exact = statistics([values]), values.double()
    assert (found.minimum, found.maximum, found.non_finite) == (-7.0, 2e4, 0)
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-12)
    assert found.std == pytest.approx(exact.std(correction=0).item(), rel=1e-9)


def test_infinities_and_nan_are_counted_and_left_out() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf"), -float("inf")])
    assert statistics([values]) == Statistics(1.0, 3.0, 2.0, 1.0, 3)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_has_none(shape: tuple[int, ...]) -> None:
    assert statistics([torch.empty(shape)]) == Statistics(None, None, None, None, 0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_every_kind_of_number_is_looked_at(dtype: torch.dtype) -> None:
    found = statistics([torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)])
    assert found == Statistics(0.0, 1.0, 0.5, 0.5, 0)


def test_complex_numbers_count_as_their_two_parts() -> None:
    assert statistics([torch.tensor([1 + 3j, 1 + 3j])]) == Statistics(1.0, 3.0, 2.0, 1.0, 0)


def test_no_bar_is_drawn_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("work_s", [0.0, 1.2 * PATIENCE_S], ids=["short", "long"])
def test_on_a_terminal_a_bar_is_drawn_for_long_work_only(work_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress("reading tensors", 2_000_000) as advance:
            time.sleep(work_s)
            advance(1_000_000)
        stderr.write("end")
        stderr.flush()
        drawn = ""
        while not drawn.endswith("end"):
            drawn += os.read(controller, 10_000).decode()
    os.close(controller)
    assert ("reading tensors" in drawn) == bool(work_s)
