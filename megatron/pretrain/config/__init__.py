"""The command line of the driver: frozen dataclasses in, one validated value out."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, add_flags, from_namespace
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES
from megatron.pretrain.config.fp8 import Fp8Config
from megatron.pretrain.config.model import ModelConfig, MoEConfig
from megatron.pretrain.config.parallel import ParallelConfig
from megatron.pretrain.config.training import CheckpointConfig, DataConfig, OptimizerFlags, TrainingConfig
from megatron.pretrain.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Everything that the command line decides.

    `flat` holds the same values under Megatron's argument names: what `common.pt` of a checkpoint records. `argv` are
    the flags as they were given.
    """

    model: ModelConfig
    moe: MoEConfig
    parallel: ParallelConfig
    optimizer: OptimizerFlags
    fp8: Fp8Config
    training: TrainingConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    moe_checkpoint: MoECheckpointConfig
    flat: argparse.Namespace
    argv: tuple[str, ...] = ()

    def groups(self) -> tuple[Any, ...]:
        """The parts, each a frozen dataclass of flags."""
        return tuple(getattr(self, name) for name in _GROUPS)


_GROUPS = {
    "model": (ModelConfig, "model"),
    "moe": (MoEConfig, "mixture of experts"),
    "parallel": (ParallelConfig, "device and parallel layout"),
    "optimizer": (OptimizerFlags, "optimizer, precision and schedules"),
    "fp8": (Fp8Config, "eight-bit training"),
    "training": (TrainingConfig, "training loop, evaluation and logs"),
    "data": (DataConfig, "data"),
    "checkpoint": (CheckpointConfig, "checkpoints"),
    "moe_checkpoint": (MoECheckpointConfig, "checkpoint subsystem"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see --help")


def parse_config(argv: Sequence[str]) -> PretrainConfig:
    """Parse flags without judging them; raises InvalidInput for an unknown flag or a value of the wrong type."""
    parser = _Parser(
        prog="pretrain_gpt_moe.py",
        description="Train a GPT with Mixture-of-Experts layers on Megatron-Core; flags are Megatron's own.",
        allow_abbrev=False,
    )
    for config, title in _GROUPS.values():
        choices = {"strategy": ("none", *STRATEGIES)} if config is MoECheckpointConfig else {}
        add_flags(parser, config, title, getattr(config, "PREFIX", ""), choices)
    flat = parser.parse_args(argv)
    groups: dict[str, Any] = {
        name: from_namespace(config, flat, prefix=getattr(config, "PREFIX", ""))
        for name, (config, _) in _GROUPS.items()
    }
    return PretrainConfig(**groups, flat=flat, argv=tuple(argv))
