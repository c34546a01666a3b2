"""Contradictions in the settings of checkpointing, each told with the values in it and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .config import MoECheckpointConfig, out_of_range
from .errors import UsageError
from .extensions import load
from .policy.determinism import DeviceSettings, obstacles
from .runtime.faults import check_fault_ranks, parse_fault
from .strategies import STRATEGIES, owners_of
from .strategies.memory_report import AUTO, CopyRate, MemoryLimit


def contradictions(
    given: MoECheckpointConfig,
    *,
    world_size: int,
    num_experts: int,
    use_distributed_optimizer: bool,
    stages: int | None = None,
) -> Iterator[str]:
    """Settings that are out of range, or that contradict each other or the job.

    Args:
        given: The settings.
        world_size: Ranks of the job.
        num_experts: Experts per MoE layer, 0 in a model without.
        use_distributed_optimizer: Whether each rank's optimizer state is sharded over data-parallel ranks already.
        stages: Pipeline stages of the job; None: not known yet.

    Yields:
        A sentence for each.
    """
    yield from out_of_range(given, given.PREFIX)
    try:
        faults = [parse_fault(text) for text in given.inject_fault]
        if given.elastic is None:  # else a rank may be there at another time
            check_fault_ranks(faults, world_size)
    except UsageError as error:
        yield f"--moe-ckpt-inject-fault: {error}"
    if given.strategy not in ("none", *STRATEGIES):
        yield f"--moe-ckpt-strategy {given.strategy} is unknown; choose none, {', '.join(STRATEGIES)}"
        return
    default = MoECheckpointConfig()
    changed = [
        field.name
        for field in dataclasses.fields(given)
        if field.name not in ("strategy", "inject_fault") and getattr(given, field.name) != getattr(default, field.name)
    ]
    idle = [name for name in changed if name != "take_over"]
    if given.strategy == "none" and idle:
        *names, last = STRATEGIES
        yield (f"{_moe_flag(idle[0])} has no effect with --moe-ckpt-strategy none; choose {', '.join(names)} or {last}")
    if given.strategy != "none":
        for name in changed:
            owners = owners_of(name)
            if owners and given.strategy not in owners:
                yield f"{_moe_flag(name)} is for --moe-ckpt-strategy {owners[0]}, not {given.strategy}"
        yield from STRATEGIES[given.strategy].contradictions(given, num_experts)
    if given.replicate != "state" and given.strategy != "none":
        yield from _unfollowable(given)
    if given.shard != "none" and use_distributed_optimizer:
        yield (
            f"--moe-ckpt-shard {given.shard} is for state that data-parallel ranks hold alike, but with "
            "--use-distributed-optimizer each rank's state is sharded already; leave one of them out"
        )
    estimating = given.interval_policy in ("young", "daly")
    if estimating and given.mtbf_s is None:
        yield f"--moe-ckpt-interval-policy {given.interval_policy} needs --moe-ckpt-mtbf-s"
    if given.mtbf_s is not None and not estimating:
        yield "--moe-ckpt-mtbf-s has an effect only with --moe-ckpt-interval-policy young or daly"
    if given.persist_dir is None and {"persist_interval", "persist_keep", "pec_k_persist"} & set(changed):
        yield "--moe-ckpt-persist-interval, -persist-keep and -pec-k-persist need --moe-ckpt-persist-dir"
    if given.persist_dir is None and given.persist_agent_s is not None:
        yield f"--moe-ckpt-persist-agent-s {given.persist_agent_s:g} needs --moe-ckpt-persist-dir"
    if given.interval == "auto" and given.interval_policy != "fixed":
        yield (
            f"--moe-ckpt-interval auto and --moe-ckpt-interval-policy {given.interval_policy} both choose the interval:"
            " leave one of them out"
        )
    if given.persist_dir is not None and given.interval != "auto" and given.persist_interval < given.interval:
        yield (
            f"--moe-ckpt-persist-interval {given.persist_interval} is below --moe-ckpt-interval {given.interval}: only "
            "snapshots become persistent"
        )
    for parse, text in ((MemoryLimit.parse, given.memory_limit), (CopyRate.parse, given.copy_rate)):
        try:
            _ = text is None or parse(text)
        except UsageError as error:
            yield str(error)
    if given.recovery == "local" and stages is not None and stages < 2:
        yield f"--moe-ckpt-recovery local needs pipeline stages that stay, but the job has {stages}: choose auto"
    if given.copy_placement == "bubbles":
        yield from _without_bubbles(given, stages)
    if given.elastic is not None:
        yield from load("elastic.sizes").not_elastic(given)
    if given.replicas is not None and given.replicas >= world_size and given.elastic is None:
        yield (
            f"--moe-ckpt-replicas {given.replicas} needs as many peers, but the job has {world_size} "
            f"ranks: at most {world_size - 1} are possible"
        )


def _unfollowable(given: MoECheckpointConfig) -> Iterator[str]:
    """A sentence for each setting with which peers cannot follow the optimizer's steps."""
    flag = f"--moe-ckpt-replicate {given.replicate}"
    if not STRATEGIES[given.strategy].follows_steps:
        able = " or ".join(name for name, strategy in STRATEGIES.items() if strategy.follows_steps)
        yield (
            f"{flag} is for --moe-ckpt-strategy {able}: snapshots of {given.strategy} have only a part of the"
            " state from which the next one follows"
        )
    if given.interval != 1 or given.interval_policy != "fixed":
        yield (
            f"{flag} needs a snapshot after each step, but has --moe-ckpt-interval {given.interval} and"
            f" --moe-ckpt-interval-policy {given.interval_policy}: choose 1 and fixed"
        )
    if given.shard != "none":
        yield f"{flag} follows whole shards of the optimizer, which --moe-ckpt-shard {given.shard} cuts: leave one out"
    if given.replicas == 0:
        yield f"{flag} has no effect with --moe-ckpt-replicas 0"


def _without_bubbles(given: MoECheckpointConfig, stages: int | None) -> Iterator[str]:
    """A sentence for each reason why copies cannot wait for bubbles."""
    if stages is not None and stages < 2:
        yield (
            f"--moe-ckpt-copy-placement bubbles needs pipeline stages that wait for each other, but the job has"
            f" {stages}: choose spread"
        )
    if given.copy_rate != AUTO:
        yield (
            f"--moe-ckpt-copy-placement bubbles has a pace of its own, which --moe-ckpt-copy-rate"
            f" {given.copy_rate} contradicts: choose auto, or spread"
        )


def must_repeat_itself(given: MoECheckpointConfig) -> bool:
    """Whether a fault is followed by iterations that have to come out to the same bits as when they ran first."""
    return given.strategy != "none" and STRATEGIES[given.strategy].replays and given.replay_tolerance == 0


def not_repeatable(given: MoECheckpointConfig, settings: DeviceSettings) -> Iterator[str]:
    """A line for each setting with which iterations would not come out to the same bits, and what to set.

    Args:
        given: The settings.
        settings: How this process computes.
    """
    if not must_repeat_itself(given):
        return
    for obstacle in obstacles(settings):
        yield f"--moe-ckpt-strategy {given.strategy} has to repeat iterations to the bit, but {obstacle}"
    if given.elastic is not None and settings.device != "cpu":
        yield (
            f"--moe-ckpt-elastic {given.elastic} with --moe-ckpt-strategy {given.strategy} has to repeat iterations of"
            " another layout to the bit, which needs as many devices: choose --moe-ckpt-strategy full"
        )


def _moe_flag(name: str) -> str:
    return f"--moe-ckpt-{name.replace('_', '-')}"
