"""Replicas that follow the optimizer: peers get its step in place of the state (`--moe-ckpt-replicate gradients`;
MOETION 5.2, Alg. 3)."""

from __future__ import annotations

import logging

from ...replication.agreement import raise_on_all_ranks
from ...types.operators import scaled
from .. import Additions, Extension
from .adam_steps import AdamSteps, check_repeatable
from .step_offers import StepOffers

log = logging.getLogger(__name__)


class GradientReplicas(Extension):
    """Of one rank."""

    def chosen(self) -> None:
        session = self.session
        if session.job.replicas:
            raise_on_all_ranks(session.control, lambda: check_repeatable(session.training.optimizer))
        elif session.control.rank == 0:
            log.warning("--moe-ckpt-replicate gradients has no effect: no replicas are kept")

    def protects(self, additions: Additions) -> None:
        session = self.session
        if not session.job.replicas:
            return
        steps = AdamSteps(session.training.optimizer, session.state.live.stepped)
        session.held.callback(steps.close)
        additions.steps, additions.sender = steps, StepOffers(session.control.rank)
        if session.control.rank == 0:
            log.info("gradient replication: at most %s of host memory per rank", scaled(steps.most_bytes))


EXTENSION = GradientReplicas
