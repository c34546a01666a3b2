"""What `--load` names, where that is nearly a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_ckpt.dense.names import COMMON, FORMAT, INDEX, ITERATION, RELEASE, TRACKER

from ..errors import UsageError
from .directory import CheckpointDirectory


def one_iteration(args: Any) -> str:
    """Let `--load` of one iteration's folder mean that iteration; returns what is said of it, empty if it is none.

    Megatron-LM looks for a tracker there, finds none, and begins anew. Raises UsageError for a folder that holds
    something else than its checkpoints.
    """
    given, here = args.load, Path(args.load or "").absolute()
    if given is None or "://" in given or (here / TRACKER).exists() or not here.is_dir():
        return ""
    if ITERATION.fullmatch(here.name) and any((here / name).exists() for name in (INDEX, FORMAT, COMMON)):
        args.load, args.ckpt_step = str(here.parent), int(here.name.removeprefix("iter_"))
        return f"--load {given} is one iteration: taken as --load {args.load} --ckpt-step {args.ckpt_step}"
    if here.name == RELEASE:
        raise UsageError(f"--load {given} is what {TRACKER} of a released model names: give the folder above it")
    if any(here.glob("iter_*-rank_*")):
        raise UsageError(f"--load {given} holds snapshots, not checkpoints: give it as --moe-ckpt-persist-dir")
    if (here / "config.json").exists() and any(here.glob("*.safetensors")):
        raise UsageError(f"--load {given} is a Hugging Face model: moe-ckpt convert --from hf makes a checkpoint of it")
    if left := CheckpointDirectory(here).iterations():
        return (
            f"--load {given} has no {TRACKER}, so training begins anew; to go on from its iteration {left[0]} give"
            f" --ckpt-step {left[0]}"
        )
    return ""
