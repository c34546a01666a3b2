"""Which stored snapshots a recovery plan needs, and where each is taken from."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recover.fetch import needs
from megatron.core.dist_checkpointing.moe.recover.inventory import Catalogue, Found
from megatron.core.dist_checkpointing.moe.types import (
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    Scope,
    Segment,
    SnapshotPlan,
    Source,
    Tier,
)

HEAD = OperatorId(2, OperatorKind.HEAD)
SNAPSHOT, PLAN = SnapshotId(4, 0), SnapshotPlan(4, {HEAD: Part.FULL})
ONE_NODE = (0, 0, 0)


@pytest.mark.parametrize("damaged", [0, 2])
def test_beside_a_damaged_copy_an_intact_one_on_the_same_node_is_taken(damaged: int) -> None:
    found = tuple(Found(finder, SNAPSHOT, Tier.OWN_MEMORY, PLAN) for finder in (0, 2))
    known = Catalogue(found, {0: frozenset([HEAD])}, ONE_NODE)
    gone = {(damaged, SNAPSHOT, Tier.OWN_MEMORY)}
    source = Source(0, 4, Tier.OWN_MEMORY, 0, Part.FULL, frozenset([HEAD]))
    plan = RecoveryPlan(4, Scope.GLOBAL, (Segment((0,), 4, 4),), (source,), ())
    (need,) = needs(plan, known.inventory(gone), known.without(gone))
    assert need.found.finder == 2 - damaged
    assert need.parts == ((Part.FULL, frozenset([HEAD])),)
