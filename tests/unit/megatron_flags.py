"""Flags as a rank of a job judges them, without the job: by the parser and the checks of Megatron-LM and our own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any
from unittest import mock

import torch

from megatron.core.dist_checkpointing.moe.contradictions import contradictions
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.stock import flags
from megatron.pretrain import low_precision
from megatron.pretrain.device import device_of
from megatron.pretrain.flags import cache_docstrings
from megatron.pretrain.loop import add_flags, flag_errors
from megatron.pretrain.testing import cpu_device
from megatron.training import arguments

HOPPER = (9, 0)
WITHOUT_ENGINE = ("--no-rope-fusion",)
"""Rotary angles are fused by default, which Megatron-LM refuses where Transformer Engine is missing, as it is here."""


@cache
def parser() -> ArgumentParser:
    """The one of a job: Megatron-LM's, with the flags of the driver and of checkpoints."""
    cache_docstrings()
    return add_flags(arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def options() -> Mapping[str, Action]:
    """What `parser` knows, by the name of each flag."""
    return parser()._option_string_actions


def judged(argv: Sequence[str], ranks: int, **environment: str) -> Namespace:
    """The arguments as a job of so many ranks has them; with `--device cuda`, on GPUs.

    Args:
        argv: The flags.
        ranks: Of the job.
        environment: More variables of each rank.

    Raises:
        InvalidInput: Megatron-LM refuses them, or the driver does.
        UsageError: They do not go with the protection that they ask for.
    """
    device = device_of(argv)
    fused = device == "cuda" and importlib.util.find_spec("transformer_engine") is None
    given = ["", *argv, *WITHOUT_ENGINE * fused]
    cache_docstrings()
    # All arguments are printed when they are checked.
    said = redirect_stdout(io.StringIO())
    with (
        mock.patch.object(sys, "argv", given),
        _job(RANK="0", WORLD_SIZE=str(ranks), **environment),
        _on(device),
        flag_errors(),
        said,
    ):
        args: Namespace = arguments.parse_args(add_flags)
        arguments.validate_args(args)
        arguments.core_transformer_config_from_args(args)
    low_precision.check(args)
    _judge_protection(args)
    return args


def _judge_protection(args: Namespace) -> None:
    config = flags.read(args)
    if config.strategy == "none":
        flags.check_unused(config, args)
        return
    flags.check(config, args, importlib.metadata.version("megatron-core"))
    found = contradictions(
        config,
        world_size=args.world_size,
        num_experts=args.num_experts or 0,
        use_distributed_optimizer=args.use_distributed_optimizer,
        stages=args.pipeline_model_parallel_size,
    )
    if sentences := "; ".join(found):
        raise UsageError(sentences)


def model_of(args: Namespace) -> Any:
    """Megatron-Core's configuration of the model that these arguments are of."""
    with _on(args.device):
        return arguments.core_transformer_config_from_args(args)


@contextmanager
def _job(**environment: str) -> Iterator[None]:
    """A rank's environment. `--deterministic-mode` adds to it, and sets a mode of torch."""
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _on(device: str) -> Iterator[None]:
    """Megatron-LM asks for the kind of GPU, which is told here where there is none."""
    if device == "cpu":
        with cpu_device.installed():
            yield
        return
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=HOPPER),
        mock.patch.object(arguments, "get_device_arch_version", return_value=HOPPER[0]),
    ):
        yield
