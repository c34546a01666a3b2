"""What a conversion keeps of the flags that a job was started with."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from megatron_flags import options

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.flags import print_arguments_once
from megatron.pretrain.loop import flag_errors
from moe_ckpt.commands.convert import _DROPPED, recorded

GIVEN = (
    "--num-layers 4 --save old --save-interval=5 --async-save --ckpt-format torch --load-main-params-from-ckpt "
    "--non-persistent-ckpt-type local --replication --replication-jump 2 --logits-save-dir logits "
    "--data-path 1 one 2 other --load old --finetune --moe-ckpt-inject-fault 0@1 --moe-ckpt-inject-fault=1@2 "
    "--moe-ckpt-replicate gradients --moe-ckpt-strict --moe-ckpt-window 3 --lr -1 --exit-interval 7 --bf16"
)


@pytest.mark.parametrize("attempt", [0, 1])
def test_only_the_first_attempt_of_a_job_prints_all_arguments(
    attempt: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.training import arguments

    name = "_print_args"
    monkeypatch.setattr(arguments, name, getattr(arguments, name))
    print_arguments_once(attempt)
    getattr(arguments, name)("arguments", Namespace(lr=0.5))
    assert ("lr ....." in capsys.readouterr().out) == (attempt == 0)


def test_flags_of_saving_ending_and_faults_are_left_out_with_their_values() -> None:
    kept = "--num-layers 4 --data-path 1 one 2 other --moe-ckpt-window 3 --lr -1 --bf16"
    assert recorded(GIVEN.split()) == kept.split()


def test_what_is_converted_has_all_of_the_state_though_checkpoints_of_the_job_had_not() -> None:
    assert recorded("--no-save-optim --bf16 --no-save-rng".split()) == ["--bf16"]


def test_numbers_and_network_of_the_job_are_left_alone() -> None:
    given = "--metrics-textfile job.prom --metrics-port=9400 --moe-ckpt-interface ib0 --bf16"
    assert recorded(given.split()) == ["--bf16"]


def test_a_job_whose_model_is_read_from_a_checkpoint_still_names_it() -> None:
    given = "--use-checkpoint-args --load old --pretrained-checkpoint=base --finetune".split()
    assert recorded(given) == given[:-1]
    assert recorded(given[1:]) == []


def test_a_start_that_megatron_ends_over_the_checkpoint_with_its_flags_is_no_good_end() -> None:
    there: dict[str, Any] = {"__name__": "megatron.training.checkpointing"}
    exec("def load_args_from_checkpoint():\n    raise SystemExit", there)
    with pytest.raises(InvalidInput, match="ended over the checkpoint of --use-checkpoint-args"), flag_errors():
        there["load_args_from_checkpoint"]()
    with pytest.raises(SystemExit), flag_errors():
        raise SystemExit  # as --help


@pytest.mark.parametrize("name", _DROPPED)
def test_each_flag_that_is_left_out_is_one_of_the_loop_with_so_many_values(name: str) -> None:
    action = options()[name]
    assert (0 if action.nargs == 0 else 1) == _DROPPED[name]
