"""What one rank finds in its stores, one row per snapshot: named fields that ranks exchange as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ..errors import UnreadableCheckpoint
from ..policy.lineage import Lineage
from ..ports import Facts, Json, SnapshotId, Store, Torn
from ..types import OperatorId, Tier


class OperatorPart(NamedTuple):
    """An operator and the part of its state that a snapshot holds, as the scalar `operators` of manifests has it."""

    layer: int
    kind: int
    expert: int
    part: int


class InventoryRow(msgspec.Struct, frozen=True, array_like=True):
    """One stored snapshot, whether it can be used or not.

    Attributes:
        why: The reason why it cannot be used, empty if it can.
        torn: Whether it was never sealed.
        digest: Of the plan that all ranks followed.
        operators: The operators of its owner of which it holds a part.
        timeline: The attempts that led to it.
        job: The job that made it.
        window: First and last iteration of those whose snapshots restore a state together with this one.
        has_journal: Whether it has what a replay of its iteration needs of its owner besides operators: the global
            outcome of the step, and the trainer state.
        has_strategy: Whether it has the state of the strategy.
    """

    snapshot: SnapshotId
    tier: Tier
    why: str = ""
    torn: bool = False
    digest: str = ""
    operators: tuple[OperatorPart, ...] = ()
    timeline: Lineage = ()
    job: str = ""
    window: tuple[int, int] | None = None
    has_journal: bool = False
    has_strategy: bool = False


class RankInventory(msgspec.Struct):
    """All that one rank tells the others: the name of its node, which operators it owns, and what it found."""

    node: str
    operators: tuple[tuple[int, int, int], ...]
    rows: tuple[InventoryRow, ...]


class _Scalars(msgspec.Struct):
    """What a recovery needs of the scalars of a manifest; others may stand beside it."""

    operators: tuple[OperatorPart, ...]
    timeline: Lineage
    window: tuple[int, int] | None = None
    journal: Any = None
    trainer: Any = msgspec.UNSET
    strategy: Any = None


def listing(
    store: Store,
    tier: Tier,
    accepts: Mapping[str, Json],
    strategy: str = "",
    *,
    job: str = "",
    owner: int | None = None,
) -> list[InventoryRow]:
    """The rows of one store.

    Args:
        accepts: The parallel layout that snapshots must have been made in.
        strategy: The strategy that must have made them.
        job: The job that must have made them; empty for any.
        owner: The rank whose snapshots to list; None: all.

    Raises:
        StoreFailure: The store cannot be listed.
    """
    listed, rows = store.snapshots(), []
    for torn in listed.torn:
        if owner in (None, torn.snapshot.rank):
            rows.append(InventoryRow(torn.snapshot, tier, torn.why, torn=_interrupted(torn)))
    for snapshot in listed.sealed:
        if owner in (None, snapshot.rank):
            try:
                with store.open(snapshot) as reader:
                    facts = reader.manifest.facts
            except UnreadableCheckpoint as error:
                rows.append(InventoryRow(snapshot, tier, str(error)))
            else:
                rows.append(_row(snapshot, tier, facts, _mismatch(facts, accepts, job, strategy)))
    return rows


def rank_inventory(node: str, operators: Iterable[OperatorId], rows: Iterable[InventoryRow]) -> Json:
    """A `RankInventory` as JSON values."""
    ids = tuple((operator.layer, operator.kind.value, operator.expert) for operator in sorted(operators))
    values: Json = msgspec.to_builtins(RankInventory(node, ids, tuple(rows)))
    return values


def _mismatch(facts: Facts, accepts: Mapping[str, Json], job: str, strategy: str) -> str:
    """Why this job cannot go on from such a snapshot; empty if it can."""
    if dict(facts.topology) != dict(accepts):
        return f"it was made in the parallel layout {dict(facts.topology)}, this job has {dict(accepts)}"
    if job and facts.job != job:
        return f"it belongs to job {facts.job}"
    made_by = facts.scalars.get("made_by", strategy)
    return "" if made_by == strategy else f"it was made with --moe-ckpt-strategy {made_by}, this job has {strategy}"


def _row(snapshot: SnapshotId, tier: Tier, facts: Facts, why: str) -> InventoryRow:
    try:
        scalars = msgspec.convert(facts.scalars, _Scalars)
    except msgspec.ValidationError as error:
        return InventoryRow(snapshot, tier, why or f"its manifest does not fit: {error}; something else made it")
    return InventoryRow(
        snapshot,
        tier,
        why,
        digest=facts.plan_digest,
        operators=scalars.operators,
        timeline=scalars.timeline,
        job=facts.job,
        window=scalars.window,
        has_journal=scalars.journal is not None and scalars.trainer is not msgspec.UNSET,
        has_strategy=scalars.strategy is not None,
    )


def _interrupted(torn: Torn) -> bool:
    """Whether it was left while it was written; else it was sealed once, and is damaged or of another version."""
    return torn.path.rpartition("/")[2].startswith(".writing.") or torn.path.endswith(".writing")
