"""How a recovery writes into live state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.recovery.restoring import Attempt
from megatron.core.dist_checkpointing.moe.types import RecoveryPlan, ReplaySegment, Scope, Topology


def test_state_that_no_copy_gives_is_nan_after_a_recovery_and_never_what_it_was() -> None:
    live = torch.ones(8)
    restorer = LiveRestorer((), lambda recast: None, derived=[live])
    ports: Any = SimpleNamespace(transport=SimpleNamespace(rank=0), restorer=restorer)
    plan = RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), ())
    Attempt(ports, plan, (), Topology(1)).restore()
    assert bool(live.isnan().all())
