"""Which operators, and how many bytes of each, one rank owns with the distributed optimizer."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorSize, Precision, Topology


def owned_operators(shape: ModelShape, topology: Topology) -> dict[tuple[int, int], tuple[OperatorId, ...]]:
    """Operators of which the ranks at (pipeline stage, expert-parallel rank) own shards, ascending.

    Raises UsageError when layers cannot fill the stages, or ep does not divide the experts.

    Args:
        shape: The model.
        topology: The rank layout.
    """
    owned: dict[tuple[int, int], tuple[OperatorId, ...]] = {}
    for stage, operators in enumerate(shape.operators_of_stages(topology)):
        by_rank: list[list[OperatorId]] = [[] for _ in range(topology.ep)]
        for operator in operators:
            if operator.is_expert:
                by_rank[shape.expert_rank(operator.expert, topology)].append(operator)
            else:
                for lane in by_rank:
                    lane.append(operator)
        owned.update({(stage, ep): tuple(lane) for ep, lane in enumerate(by_rank)})
    return owned


def shard_sizes(
    shape: ModelShape, topology: Topology, precision: Precision, *, frozen_experts: bool = False
) -> dict[OperatorId, OperatorSize]:
    """Bytes of the shard that each rank holding the operator owns, rounded up.

    Experts are split over their expert-tensor and expert-data-parallel ranks, all else over tensor, context and
    data-parallel ranks, as the distributed optimizer does; what tensor parallelism replicates (norms) counts as split.
    Frozen experts are weights and nothing else, which no optimizer shares out.

    Args:
        shape: The model.
        topology: The rank layout.
        precision: Bytes per parameter of each part of the state.
        frozen_experts: Whether routed experts are not trained.
    """
    sizes = {
        operator: OperatorSize(
            -(-size.full_bytes // sharing_ranks(operator, topology)),
            -(-size.weights_bytes // sharing_ranks(operator, topology)),
        )
        for operator, size in shape.sizes(precision).items()
    }
    if frozen_experts:
        for operator, count in shape.parameters.items():
            if operator.is_expert:
                weights = -(-count * precision.compute_bytes // topology.expert_tp)
                sizes[operator] = OperatorSize(weights, weights)
    return sizes


def sharing_ranks(operator: OperatorId, topology: Topology) -> int:
    """How many ranks share the state of one operator with the distributed optimizer.

    Args:
        operator: The operator; the group of an expert differs from that of all other operators.
        topology: The rank layout.
    """
    if operator.is_expert:
        return topology.expert_tp * topology.edp
    return topology.tp * topology.cp * topology.dp
