"""The step counts of torch's Adam while core loads a checkpoint: without Transformer Engine and Apex it loses them.

Core (0.17 to 0.19) keeps one count in checkpoints, in the groups of an optimizer, and asks an optimizer that has made
no step for it in vain. What it loads it hands to all weights as one tensor, which torch's Adam would count up once for
each of them; its distributed optimizer then overwrites that with the count from before loading (`dp_reshardable`), or
fails for want of it (`fully_reshardable`). So counts are out of the way while core loads, and come back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from .optimizer_state import allocate_adam, optimizer_members, step_count


def torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Those inside Megatron's optimizer; none where fused ones of Apex or Transformer Engine serve."""
    return [member.optimizer for member in _members_with_adam(optimizer)]


def allocate_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give each weight the state of Adam before its first step: core cannot save where no step was made yet, as with
    fp16 whose first iterations are all skipped."""
    for adam in torch_adams(optimizer):
        allocate_adam(adam)


@contextmanager
def loading_step_counts(optimizer: MegatronOptimizer) -> Iterator[None]:
    """A block in which core loads a checkpoint into an optimizer, whether that has made a step or not."""
    allocate_step_counts(optimizer)
    handles = set_steps_aside_in_loads(optimizer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        separate_steps(optimizer)


def set_steps_aside_in_loads(optimizer: MegatronOptimizer) -> list[RemovableHandle]:
    """From here on core can load; `separate_steps` has to follow. For an optimizer whose state is allocated."""
    handles = []
    for member in _members_with_adam(optimizer):
        handles.append(member.optimizer.register_load_state_dict_pre_hook(_count_from_zero))
        if isinstance(member, DistributedOptimizer):
            handles.append(member.optimizer.register_load_state_dict_post_hook(_set_steps_aside))
            handles.append(member.optimizer.register_state_dict_pre_hook(_put_steps_back))
    return handles


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every weight its own step count after core loaded a state; Adam refuses to step before that."""
    for adam in torch_adams(optimizer):
        _put_steps_back(adam)
        for group in adam.param_groups:
            group.pop("step", None)  # as in a job that has loaded nothing


def _members_with_adam(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    members = optimizer_members(optimizer)
    return [member for member in members if isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW)]


def _set_steps_aside(adam: torch.optim.Optimizer) -> None:
    """Move the step counts from the weights to their group, which is where core keeps them in checkpoints."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            group["step"] = float(adam.state[parameter].pop("step"))


def _put_steps_back(adam: torch.optim.Optimizer) -> None:
    """Give a step count to every weight that has none."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if "step" not in state:
                state["step"] = step_count(parameter, group).fill_(group["step"])


def _count_from_zero(adam: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Supply the step count of a checkpoint from before the first step: core leaves it out where it is zero."""
    for state in state_dict["state"].values():
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
