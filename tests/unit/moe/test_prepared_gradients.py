"""Gradients of a step that a fault cut short: each optimizer of a chain prepares its own once, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import Prepared

SCALE = 8.0


class Scaled:
    """An optimizer with a loss scale, whose gradients come from the model's buffers."""

    is_stub_optimizer = False

    def __init__(self, gradient: float) -> None:
        self.model, self.main = torch.tensor([gradient * SCALE]), torch.zeros(1)
        self.found_inf = torch.zeros(1)
        self.grad_scaler = SimpleNamespace(inv_scale=torch.tensor([1 / SCALE]))

    def _copy_model_grads_to_main_grads(self) -> None:
        self.main.copy_(self.model)

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [self.main]

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        self.main.mul_(self.grad_scaler.inv_scale)
        return False

    def prepare_grads(self) -> bool:
        self._copy_model_grads_to_main_grads()
        return self._unscale_main_grads_and_check_for_nan()


class OwnCopy(Scaled):
    """One that has no copy of its own beside the model's buffers: what is prepared twice is divided twice."""

    def _copy_model_grads_to_main_grads(self) -> None:
        self.main = self.model


@pytest.mark.parametrize("kind", [Scaled, OwnCopy])
@pytest.mark.parametrize("already", [0, 1, 2], ids=["none", "one", "both"])
def test_what_the_step_prepared_is_not_divided_by_the_loss_scale_again(kind: type[Scaled], already: int) -> None:
    members, prepared = [kind(0.5), kind(3.0)], Prepared()
    chain: Any = SimpleNamespace(chained_optimizers=members)
    for member in members[:already]:
        with prepared.following(member):  # type: ignore[arg-type]
            member.prepare_grads()
    prepared.finish(chain)
    assert [float(member.main) for member in members] == [0.5, 3.0]
    prepared.finish(chain)
    assert [float(member.main) for member in members] == [0.5, 3.0]
