"""Iterations that are run again run under the flags of the first time, or not at all."""

from __future__ import annotations

import pytest

from megatron.pretrain.checkpoint.protect import refuse_other_flags
from megatron.pretrain.errors import InvalidInput

BEFORE = ("--lr", "1e-3", "--clip-grad", "1.0", "--num-layers", "4", "--seq-length", "32", "--data-path", "here")


def test_the_same_flags_in_another_order_are_accepted() -> None:
    refuse_other_flags(BEFORE, (*BEFORE[4:], *BEFORE[:4]))


@pytest.mark.parametrize(
    "other", [("--log-interval", "5"), ("--moe-ckpt-window", "3"), ("--save", "there"), ("--data-path", "there")]
)
def test_flags_that_leave_iterations_as_they_are_may_change(other: tuple[str, str]) -> None:
    refuse_other_flags(BEFORE, (*BEFORE, *other))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("--clip-grad", "0.5"), "--clip-grad was 1.0 and is 0.5"),
        (("--override-opt_param-scheduler",), "--override-opt_param-scheduler was False and is True"),
        (("--hidden-dropout", "0.25"), "--hidden-dropout was 0.1 and is 0.25"),
        (("--seq-length", "64"), "--seq-length was 32 and is 64"),
        (("--moe-aux-loss-coeff", "0.5"), "--moe-aux-loss-coeff"),
    ],
)
def test_flags_that_shape_an_iteration_may_not(other: tuple[str, ...], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        refuse_other_flags(BEFORE, (*BEFORE, *other))
