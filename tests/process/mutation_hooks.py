"""Breaks one ingredient of an exact replay at a time, inside the workers of one attempt of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest import mock

import torch

Restored = Callable[[Any], None]
"""What is done to an optimizer after trainer state was put back."""


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """In place of `owner.name` what `make` makes of it."""
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def frozen_otherwise(change: Callable[[Any, frozenset[Any], Any], tuple[Any, Any]]) -> Any:
    """The next iteration is run with what `change` makes of the frozen operators and the journal."""
    from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution

    def make(freeze: Any) -> Any:
        def changed(self: Any, frozen: Any, step: Any, *, alone: bool = False) -> None:
            freeze(self, *change(self, frozenset(frozen), step), alone=alone)

        return changed

    return patched(LiveExecution, "freeze", make)


def the_norm_of_active_gradients_alone() -> Any:
    from megatron.core.dist_checkpointing.moe.replay import patches

    def make(replaced: Any) -> Any:
        return lambda owner, **values: replaced(owner, **{k: v for k, v in values.items() if k != "get_grad_norm"})

    return patched(patches, "replaced", make)


def the_norm_of_another_iteration() -> Any:
    before: list[Any] = [None]

    def change(_: Any, frozen: Any, step: Any) -> tuple[Any, Any]:
        other, before[0] = before[0], step.grad_norm or before[0]
        return frozen, step if step.grad_norm is None else replace(step, grad_norm=other or 2 * step.grad_norm)

    return frozen_otherwise(change)


def an_active_operator_frozen() -> Any:
    def change(self: Any, frozen: Any, step: Any) -> tuple[Any, Any]:
        told: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, sorted(set(self._operator_of.values()) - frozen))
        return frozen | {min(operator for active in told for operator in active)}, step

    return frozen_otherwise(change)


def frozen_operators_stepped_too() -> Any:
    from megatron.core.dist_checkpointing.moe.replay import patches

    return patched(patches, "_only_active", lambda _: lambda member, frozen: contextlib.nullcontext())


def a_frozen_operator_active() -> Any:
    return frozen_otherwise(lambda _, frozen, step: (frozen - {max(frozen)} if frozen else frozen, step))


@contextlib.contextmanager
def gradients_that_are_not_finite_ignored() -> Iterator[None]:
    """The step is made though the journal says that it was skipped."""
    from megatron.core.dist_checkpointing.moe.replay import patches

    def make(_: Any) -> Any:
        def judging(member: Any, skipped: bool) -> Any:
            unscale = member._unscale_main_grads_and_check_for_nan

            def judged() -> bool:
                unscale()
                return False

            return judged

        return judging

    def with_a_norm(_: Any, frozen: Any, step: Any) -> tuple[Any, Any]:
        return frozen, replace(step, grad_norm=step.grad_norm or 1.0, skipped=False)

    with patched(patches, "_with_journaled_verdict", make), frozen_otherwise(with_a_norm):
        yield


def loaded_otherwise(change: Callable[[Any], Any]) -> Any:
    """After a replayed iteration is loaded what `change` makes of what its snapshot gives."""
    from megatron.core.dist_checkpointing.moe.replay.densify import Replay

    def make(take: Any) -> Any:
        def changed(self: Any, step: Any, *rest: Any) -> None:
            take(self, replace(step, loads=tuple(map(change, step.loads))), *rest)

        return changed

    return patched(Replay, "_load", make)


def weights_of_frozen_operators_left_as_they_were() -> Any:
    from megatron.core.dist_checkpointing.moe.types import Part

    def change(load: Any) -> Any:
        return replace(load, parts={part: which for part, which in load.parts.items() if part is not Part.COMPUTE})

    return loaded_otherwise(change)


def compute_weights_not_derived_from_loaded_masters() -> Any:
    """Between iterations: at the end of the replay they are."""
    from megatron.core.dist_checkpointing.moe.replay.densify import Replay

    def make(stepped: Any) -> Any:
        @wraps(stepped)
        def changed(self: Any, outcome: Any) -> None:
            with mock.patch.object(self._ports.restorer, "refresh", return_value=None):
                stepped(self, outcome)

        return changed

    return patched(Replay, "stepped", make)


def at_first(change: Callable[[Any], None]) -> Any:
    """Before the first replayed iteration, `change` is done to the live execution."""
    done: list[bool] = []

    def once(self: Any, frozen: Any, step: Any) -> tuple[Any, Any]:
        if not done:
            done.append(True)
            change(self)
        return frozen, step

    return frozen_otherwise(once)


def expert_bias_lost() -> Any:
    def change(execution: Any) -> None:
        for chunk in execution._chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.zero_()

    return at_first(change)


def step_counts_of_adam_one_too_high() -> Any:
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import torch_adams

    def change(execution: Any) -> None:
        for inner in torch_adams(execution._optimizer):
            for state in inner.state.values():
                state["step"] += 1

    return at_first(change)


def restored_otherwise(change: Restored) -> Any:
    """Each time that trainer state was put back, `change` is done to the optimizer."""
    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState

    def make(restore: Any) -> Any:
        def changed(self: Any, *saved: Any) -> None:
            restore(self, *saved)
            change(self._optimizer)

        return changed

    return patched(LiveTrainerState, "restore", make)


def _times(name: str, factor: float) -> Any:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group[name] *= factor

    return restored_otherwise(change)


def another_learning_rate() -> Any:
    return _times("lr", 1.001)


def another_weight_decay() -> Any:
    return _times("weight_decay", 1.1)


def _scalers(optimizer: Any) -> list[Any]:
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member.grad_scaler for member in members]


def another_loss_scale() -> Any:
    def change(optimizer: Any) -> None:
        for scaler in _scalers(optimizer):
            scaler._scale *= 4

    return restored_otherwise(change)


def another_count_of_steps_since_the_last_overflow() -> Any:
    def change(optimizer: Any) -> None:
        for scaler in _scalers(optimizer):
            scaler._growth_tracker += 1

    return restored_otherwise(change)


def random_states_left_as_they_are() -> Any:
    from megatron.core.dist_checkpointing.moe.megatron_state import trainer_state

    return patched(trainer_state, "restore_random", lambda _: lambda tensors: None)


def data_one_iteration_ahead() -> Any:
    from megatron.training import get_args, training

    def make(build: Any) -> Any:
        def ahead(dataset: Any, consumed: int) -> Any:
            return build(dataset, consumed and consumed + get_args().global_batch_size)

        return ahead

    return patched(training, "build_pretraining_data_loader", make)


def nothing_broken() -> Any:
    return contextlib.nullcontext()
