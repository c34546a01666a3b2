"""Flags that differ from those of what a job goes on from: the flag holds, or a line says which value does.

Megatron-LM (0.17 to 0.19) loads the settings of the optimizer's groups with its state: --adam-beta2 or --adam-eps of a
resumed job has no effect, and with another --lr it finds no group that fits. Memory and storage have no such settings:
there the flags hold, and here they do in checkpoints as well. Of the learning rate's schedule Megatron-LM's own flags
decide: --override-opt_param-scheduler, --use-checkpoint-opt_param-scheduler, or neither, where both have to agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..megatron_state.trainer_state import load_scheduler
from ..replay.patches import replaced
from .shaping import changed_flags

TOLD = (
    "global_batch_size lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_warmup_init weight_decay"
    " start_weight_decay end_weight_decay weight_decay_incr_style adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad"
    " seq_length seed split"
).split()
"""What a user may have meant to change, and what changes the course of training unsaid."""
_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Of a group, what the scheduler reads: by core 0.18 and later a part of what tells groups apart."""
_TELLS_APART = ("wd_mult", "lr_mult", "optimizer", "is_expert_parallel", "is_decoupled_lr")
_STATE = ("params", "lr", "weight_decay", "step", *_SCHEDULED, *_TELLS_APART)
"""Of a group, what is no setting of the optimizer itself."""


@contextlib.contextmanager
def flags_hold(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """A block in which Megatron-LM loads a checkpoint into these. Raises UsageError where schedules do not agree."""
    members = () if optimizer is None else getattr(optimizer, "chained_optimizers", (optimizer,))
    before = [[_settings(group) for group in member.param_groups] for member in members]
    with contextlib.ExitStack() as stack:
        for member in members:
            loading = partial(_load, member, member.load_state_dict)
            stack.enter_context(replaced(member, load_state_dict=loading))
        if scheduler is not None:
            loading = partial(load_scheduler, scheduler, source="checkpoint")
            stack.enter_context(replaced(scheduler, load_state_dict=loading))
        yield
    for member, groups in zip(members, before, strict=True):
        for group, settings in zip(member.param_groups, groups, strict=True):
            group.update(settings)


def told(recorded: Mapping[str, Any], given: Mapping[str, Any], *, keeps_schedule: bool) -> str:
    """What differs, for a log line; empty where nothing does.

    Args:
        recorded, given: As `shaping_flags`, of the start that made the state, and of this one.
        keeps_schedule: Whether --use-checkpoint-opt_param-scheduler was given.
    """
    lines = []
    for flag, was, now in changed_flags(recorded, given, TOLD):
        if keeps_schedule and flag in ("--lr", "--min-lr"):
            lines.append(f"{flag} stays {was} and is not {now}, for --use-checkpoint-opt_param-scheduler was given")
        else:
            lines.append(f"{flag} was {was} and is {now}")
    return "; ".join(lines)


def _load(member: Any, load: Callable[[Any], Any], state_dict: Any) -> Any:
    """Into one optimizer, from groups that are told apart by what its own are."""
    saved = _groups_of(state_dict)
    for group in member.param_groups:
        same = [other for other in saved if _key(other) == _key(group)]
        alike = [other for other in member.param_groups if _key(other) == _key(group)]
        if len(same) == len(alike) == 1:
            for name in _SCHEDULED:
                same[0].pop(name, None)
            same[0].update({name: group[name] for name in _SCHEDULED if name in group})
    return load(state_dict)


def _groups_of(state_dict: Any) -> Sequence[dict[str, Any]]:
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    groups: Sequence[dict[str, Any]] = state_dict.get("param_groups", ())
    return groups


def _key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """NeMo calls the factors `pre_lr_mult` and `pre_wd_mult`."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _TELLS_APART)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name.removeprefix("pre_") not in _STATE}
