"""Flags of the loop that is gone are refused with what to use in place of each."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from megatron_flags import options

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.old_flags import OLD_FLAGS, refuse_old_flags
from pretrain_gpt_moe import train


@pytest.mark.parametrize("flag", OLD_FLAGS)
@pytest.mark.parametrize("form", ["{} 3", "{}=3"])
def test_an_old_flag_is_refused_in_one_line_with_what_to_use(flag: str, form: str) -> None:
    with pytest.raises(InvalidInput) as error:
        refuse_old_flags(["--lr", "1e-3", *form.format(flag).split()])
    assert str(error.value) == f"{flag} is no flag of Megatron-LM's loop: {OLD_FLAGS[flag]}"


def test_no_old_flag_is_one_of_the_loop_and_those_to_use_are() -> None:
    known = options().keys()
    assert not OLD_FLAGS.keys() & known
    to_use = set(re.findall(r"--[a-z][\w-]+", " ".join(OLD_FLAGS.values())))
    assert to_use - known == {"--to"}, "which is one of moe-ckpt convert"


def test_each_of_several_old_flags_is_named_once() -> None:
    with pytest.raises(InvalidInput) as error:
        refuse_old_flags(["--keep-last", "2", "--hf-model", "there", "--keep-last", "3", "--no-export-hf"])
    found = re.findall(r"(--\S+) is no flag", str(error.value))
    assert found == ["--keep-last", "--hf-model", "--no-export-hf"]


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """The driver sends its lines to the streams that it finds, which are this test's."""
    names = ("pretrain", "core.dist_checkpointing.moe", "pretrain.metrics", "core.rerun_state_machine")
    loggers = [logging.getLogger(f"megatron.{name}") for name in names]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.mark.usefixtures("logging_as_before")
def test_the_entry_ends_with_the_code_of_usage_errors(capfd: pytest.CaptureFixture[str]) -> None:
    assert train(["--keep-last", "2"]) == 2
    assert "--keep-last is no flag" in capfd.readouterr().err


def test_other_flags_and_values_that_look_like_old_ones_pass() -> None:
    refuse_old_flags(["--save", "--keep", "hf-model", "--freeze-experts", "--save-retain-interval", "4"])
