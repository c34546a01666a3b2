"""The words of the subsystem: operators, plans, topologies, models, inventories. No torch, nothing that acts."""

from .journal import StepJournal
from .model_shape import ModelShape, iterate_operators, moe_layers_of
from .operators import (
    FP16_FP32,
    FP32,
    LOW_PRECISIONS,
    PRECISIONS,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Part,
    Precision,
    expert,
)
from .recovery import (
    BoundaryLog,
    Copy,
    CopySource,
    Direction,
    Inventory,
    Lost,
    RecoveryPlan,
    Refusal,
    RefusalReason,
    ReplaySegment,
    Scope,
    Tier,
)
from .snapshots import Level, Piece, SnapshotPlan, Window, full_plan
from .standby import GRADIENTS, LOG, PARKED, STANDBY, boundary_key
from .topology import Coordinates, Topology

__all__ = [
    "FP16_FP32",
    "FP32",
    "GRADIENTS",
    "LOG",
    "LOW_PRECISIONS",
    "PARKED",
    "PRECISIONS",
    "STANDBY",
    "BoundaryLog",
    "Coordinates",
    "Copy",
    "CopySource",
    "Direction",
    "Inventory",
    "Level",
    "Lost",
    "ModelShape",
    "OperatorId",
    "OperatorKind",
    "OperatorSize",
    "Part",
    "Piece",
    "Precision",
    "RecoveryPlan",
    "Refusal",
    "RefusalReason",
    "ReplaySegment",
    "Scope",
    "SnapshotPlan",
    "StepJournal",
    "Tier",
    "Topology",
    "Window",
    "boundary_key",
    "expert",
    "full_plan",
    "iterate_operators",
    "moe_layers_of",
]
