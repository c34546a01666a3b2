"""The calls of Megatron-Bridge's training loop, in their order, where Megatron-Bridge cannot be installed.

Lines are those of Megatron-Bridge 0.6.2. `bridge_job` runs the real loop instead where it is there; the same tests pass
with either. What dense checkpoints are is a stand-in in both: one file of `torch.save` per rank.
"""

from __future__ import annotations

import sys
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

TRACKER = "latest_train_state.pt"
LAYERS = ("megatron.bridge", "megatron.bridge.training")


@dataclass
class TrainState:
    """training/state.py:42"""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: int = 0


class GlobalState:
    """training/state.py:114"""

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.train_state = cfg, TrainState()


@dataclass
class CheckpointContext:
    """training/checkpointing.py:553 and 582"""

    state: Any
    model: Any
    optimizer: Any
    opt_param_scheduler: Any
    module_name: str | None = None


class DefaultCheckpointManager:
    """training/checkpointing.py:647"""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpointing_context: dict[str, Any] = {}

    def save(self, ctx: Any, callback_manager: Any) -> None:
        save_dense(ctx.state, ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        if torch.distributed.get_rank() == 0:
            torch.save(asdict(ctx.state.train_state), Path(ctx.state.cfg.checkpoint.save, TRACKER))

    def load(self, ctx: Any) -> tuple[int, int]:
        ctx.state.train_state = TrainState(**torch.load(Path(ctx.state.cfg.checkpoint.load, TRACKER)))
        load_dense(ctx.state, ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        return ctx.state.train_state.step, ctx.state.train_state.floating_point_operations_so_far

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Nothing is saved in the background."""


def save_dense(state: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
    """What is trained, and the random state; where they belong in a folder of this iteration."""
    file = _file(state, state.cfg.checkpoint.save, state.train_state.step)
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {"model": [chunk.state_dict() for chunk in model], "scheduler": scheduler.state_dict()}
    inner = [part.optimizer.state_dict() for part in optimizer.chained_optimizers]
    shards = [[p.detach() for g in part.optimizer.param_groups for p in g["params"]] for part in _parts(optimizer)]
    torch.save({**parts, "optimizer": inner, "shards": shards, "random": torch.get_rng_state()}, file)
    torch.distributed.barrier()


def load_dense(state: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
    saved = torch.load(_file(state, state.cfg.checkpoint.load, state.train_state.step), weights_only=False)
    for chunk, values in zip(model, saved["model"], strict=True):
        chunk.load_state_dict(values)
    for part, values, shards in zip(_parts(optimizer), saved["optimizer"], saved["shards"], strict=True):
        part.optimizer.load_state_dict(values)
        own = [p for group in part.optimizer.param_groups for p in group["params"]]
        for parameter, shard in zip(own, shards, strict=True):
            parameter.data.copy_(shard)
    scheduler.num_steps = 0
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])


def _parts(optimizer: Any) -> Any:
    return optimizer.chained_optimizers


def _file(state: Any, folder: str, iteration: int) -> Path:
    return Path(folder, f"iter_{iteration:07}", f"rank-{torch.distributed.get_rank()}.pt")


def should_load_checkpoint(cfg: Any, manager: Any) -> bool:
    """training/setup.py:154"""
    local = manager.checkpointing_context.get("local_checkpoint_manager")
    return (local is not None and local.find_latest() != -1) or (
        cfg.checkpoint.load is not None and Path(cfg.checkpoint.load, TRACKER).exists()
    )


def resolve_checkpoint_iteration(load_dir: str | None, ckpt_step_override: int | None) -> tuple[int, bool]:
    """training/checkpointing.py:3308"""
    if ckpt_step_override is not None:
        if not Path(load_dir or "", f"iter_{ckpt_step_override:07}").is_dir():
            raise FileNotFoundError(f"ckpt_step={ckpt_step_override} specified but checkpoint directory does not exist")
        return ckpt_step_override, False
    tracker = None if load_dir is None else Path(load_dir, TRACKER)
    return (-1 if tracker is None or not tracker.exists() else int(torch.load(tracker)["step"])), False


def install() -> None:
    """Make the modules that the adapter imports of Bridge these functions."""
    checkpointing, setup = (types.ModuleType(f"{LAYERS[1]}.{name}") for name in ("checkpointing", "setup"))
    vars(checkpointing).update(
        DefaultCheckpointManager=DefaultCheckpointManager, _resolve_checkpoint_iteration=resolve_checkpoint_iteration
    )
    vars(setup).update(_should_load_checkpoint=should_load_checkpoint)
    for module in (*map(types.ModuleType, LAYERS), checkpointing, setup):
        sys.modules[module.__name__] = module


def train(
    forward_step: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    samples: Any,
    state: Any,
    checkpoint_manager: Any,
    reported: Any,
) -> None:
    """training/train.py:125"""
    cfg = state.cfg
    while state.train_state.step < cfg.train.train_iters:
        checkpoint_manager.finalize_async_saves(state=state, blocking=False)  # 389
        losses, norm = _train_step(forward_step, model, optimizer, scheduler, samples, cfg)  # 482
        reported(state.train_state.step + 1, losses, norm)  # 497
        state.train_state.step += 1  # 562
        state.train_state.consumed_train_samples += cfg.train.global_batch_size  # 569
        state.train_state.floating_point_operations_so_far += cfg.operations  # 606
        if cfg.checkpoint.save and state.train_state.step % cfg.checkpoint.save_interval == 0:  # 1419
            checkpoint_manager.save(CheckpointContext(state, model, optimizer, scheduler), None)  # 1331
        if cfg.train.exit_interval and state.train_state.step % cfg.train.exit_interval == 0:  # 1486
            for _ in (782, 798):
                checkpoint_manager.finalize_async_saves(state=state, blocking=True, terminate=True)
            sys.exit(0)  # 805
    checkpoint_manager.finalize_async_saves(state=state, blocking=True, terminate=True)  # 782


def _train_step(
    forward_step: Any, model: Any, optimizer: Any, scheduler: Any, samples: Any, cfg: Any
) -> tuple[list[dict[str, torch.Tensor]], float]:
    """training/train.py:824"""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=samples,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=cfg.model.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    scheduler.step(increment=cfg.train.global_batch_size)
    return losses, float(norm)
