"""State or gradients: what a peer that keeps a replica of an operator is sent."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ...errors import UsageError
from ...policy.checks import whole
from ...types import OperatorId


class TransferChoice(enum.Enum):
    """What is sent of one operator (MOETION Alg. 3)."""

    STATE = "state"  # "Optimizer+Model": the replica is replaced
    GRADIENTS = "gradients"  # the peer repeats the optimizer step on its replica of the iteration before


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Bytes of either transfer of one operator. Raises UsageError for fewer than 0 bytes.

    Gradients go as the optimizer reads them, after their reduction, unscaling and clipping: 4 bytes beside the 12 of
    fp32 master weights and moments; where bf16 and a factor have all bits, 2 are sent in the end. The factor of 5 in
    MOETION 5.2 is that of 2-byte gradients and 10 bytes of state.
    """

    state_bytes: int
    gradient_bytes: int

    def __post_init__(self) -> None:
        whole("state_bytes", self.state_bytes, 0)
        whole("gradient_bytes", self.gradient_bytes, 0)


def transfer(
    previous: AbstractSet[OperatorId],
    current: AbstractSet[OperatorId],
    interval: int,
    acknowledged: AbstractSet[OperatorId],
    costs: Mapping[OperatorId, TransferCost],
) -> dict[OperatorId, TransferChoice]:
    """MOETION Alg. 3: what is sent of each operator for the state after iteration t.

    Gradients go only to a peer that verifiably holds the state after iteration t - 1: snapshots are taken in every
    iteration, the operator was in the snapshot before, and the peer has confirmed that very state, received or stepped
    to, by its checksum. The paper asks for the first two alone, so that one lost or damaged message would make all
    later replicas wrong. Gradients must also be smaller than the state, else state is sent.

    The peer arrives at the same bits only if it repeats the step with what the trainer used: learning rate, weight
    decay, clip factor, loss scale, step count, and whether the step was skipped. These are journaled per iteration and
    travel along.

    Args:
        previous: Operators of the snapshot before.
        current: Operators of this snapshot.
        interval: Iterations between the two; 1: every iteration has a snapshot.
        acknowledged: Operators that the peer has confirmed; with several replicas those that all of them have.
        costs: Bytes of the state and of the gradients of each operator.

    Returns:
        The choice for each operator in `current`, ascending.

    Raises:
        UsageError: An interval below 1, and an operator without cost.
    """
    whole("interval", interval, 1)
    stepwise = previous & acknowledged if interval == 1 else frozenset()
    decisions: dict[OperatorId, TransferChoice] = {}
    for operator in sorted(current, key=_order):
        cost = _cost(operator, costs)
        smaller = cost.gradient_bytes < cost.state_bytes
        decisions[operator] = TransferChoice.GRADIENTS if smaller and operator in stepwise else TransferChoice.STATE
    return decisions


def _cost(operator: OperatorId, costs: Mapping[OperatorId, TransferCost]) -> TransferCost:
    if operator not in costs:
        raise UsageError(f"costs has no entry for {operator}: each operator in the snapshot needs its bytes")
    return costs[operator]


def _order(operator: OperatorId) -> tuple[int, int, int]:
    return operator.layer, operator.kind.value, operator.expert
