"""State that data-parallel ranks hold alike is stored by one of them each (`--moe-ckpt-shard`; MoC, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from ...megatron_state.operators import StateTensor
from ...strategies import STRATEGIES
from .. import Extension, Shared
from .sharing import Sharing, joining_restorer


class StoredShares(Extension):
    """Of one rank."""

    def share(self, tensors: Sequence[StateTensor]) -> Shared:
        session = self.session
        config, training = session.config, session.training
        selects = STRATEGIES[config.strategy].selects
        of_job = config.shard, training.chunks, tensors, session.topology, session.control.rank
        sharing = Sharing(*of_job, selects=selects)
        restorer = joining_restorer(training.chunks, training.optimizer, sharing.portions)
        stored = tuple(part for portion in sharing.portions for part in portion.stored)
        return Shared(stored, restorer, sharing.left_out, sharing.varying)


EXTENSION = StoredShares
