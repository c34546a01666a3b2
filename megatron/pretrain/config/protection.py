"""Contradictions in the flags of checkpointing, each told with the values in it and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError as FaultUsageError
from megatron.core.dist_checkpointing.moe.runtime.faults import check_fault_ranks, parse_fault
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.derived import Environment

_ONLY_FOR = {"pec": ("pec_", "plt_"), "sparse": ("window", "ordering", "reorder_", "replay_")}
"""What the fields of settings begin with that only one strategy knows."""


def faults(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    try:
        check_fault_ranks([parse_fault(text) for text in config.moe_checkpoint.inject_fault], environment.world_size)
    except FaultUsageError as error:
        yield f"--moe-ckpt-inject-fault: {error}"


def protection(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    given, default, experts = config.moe_checkpoint, type(config.moe_checkpoint)(), config.moe.num_experts
    changed = [
        field.name
        for field in dataclasses.fields(given)
        if field.name not in ("strategy", "inject_fault") and getattr(given, field.name) != getattr(default, field.name)
    ]
    if given.strategy == "none" and changed:
        yield f"{_moe_flag(changed[0])} has no effect with --moe-ckpt-strategy none; choose full, pec or sparse"
    for name in changed:
        only = next((strategy for strategy, names in _ONLY_FOR.items() if name.startswith(names)), given.strategy)
        if given.strategy not in ("none", only):
            yield f"{_moe_flag(name)} is for --moe-ckpt-strategy {only}, not {given.strategy}"
    if given.strategy == "sparse":
        yield from _sparse(given)
    if given.shard != "none" and config.parallel.use_distributed_optimizer:
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
    if given.persist_dir is not None and given.persist_interval < given.interval:
        yield (
            f"--moe-ckpt-persist-interval {given.persist_interval} is below --moe-ckpt-interval {given.interval}: only "
            "snapshots become persistent"
        )
    if given.replicas is not None and given.replicas >= environment.world_size:
        yield (
            f"--moe-ckpt-replicas {given.replicas} needs as many peers, but the job has {environment.world_size} "
            f"ranks: at most {environment.world_size - 1} are possible"
        )
    if given.strategy == "pec" and experts is None:
        yield "--moe-ckpt-strategy pec needs --num-experts; a dense model is protected with full or sparse"
    if given.strategy == "pec" and experts is not None and given.pec_k_snapshot > experts:
        yield f"--moe-ckpt-pec-k-snapshot {given.pec_k_snapshot} is above --num-experts {experts}"
    if (given.pec_k_persist or 0) > given.pec_k_snapshot:
        yield (
            f"--moe-ckpt-pec-k-persist {given.pec_k_persist} is above --moe-ckpt-pec-k-snapshot "
            f"{given.pec_k_snapshot}: only experts that are in a snapshot can become persistent"
        )
    if (given.plt_threshold or 0) > 1:
        yield f"--moe-ckpt-plt-threshold {given.plt_threshold} is a share of all tokens, from 0 to 1; 0.0375 is 3.75 %"


def _sparse(given: MoECheckpointConfig) -> Iterator[str]:
    whole = given.window.isascii() and given.window.isdigit() and int(given.window) >= 1
    if given.window != "auto" and not whole:
        yield f"--moe-ckpt-window {given.window} is neither auto nor a number of iterations from 1 on"
    if not 0 < given.reorder_fraction <= 1:
        yield f"--moe-ckpt-reorder-fraction {given.reorder_fraction} must be above 0, and at most 1"
    if given.interval != 1 or given.interval_policy != "fixed":
        flag = f"interval {given.interval}" if given.interval != 1 else f"interval-policy {given.interval_policy}"
        yield (
            f"--moe-ckpt-{flag} has no meaning with --moe-ckpt-strategy sparse, which snapshots a part of the state"
            " after every iteration; --moe-ckpt-window says in how many of them all of it is snapshotted"
        )
    if given.shard != "none":
        yield (
            f"--moe-ckpt-shard {given.shard} is for snapshots of all operators, but those of --moe-ckpt-strategy sparse"
            " hold a part of them; use --use-distributed-optimizer to share state out"
        )


def _moe_flag(name: str) -> str:
    return f"--moe-ckpt-{name.replace('_', '-')}"
