"""`moe-ckpt plan selective`: how many experts the links carry in each iteration, and which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import budget_bytes
from megatron.core.dist_checkpointing.moe.strategies import Throughput
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorSize, SnapshotPlan
from moe_ckpt.report import Fact, Report, Table, table

from ...simulator.driver import ENDLESS, Driver, Taken, plan_bytes
from ...simulator.shards import owned_operators
from . import counts_file
from .drive import job_of
from .options import PlannedJob, duration, number, plan_command, rate

HELP = """Show selective expert checkpointing (MOETION 4): the experts that fit into one iteration beside everything
else, to the host's memory and on to peers, shared among the layers by the tokens at risk.

\b
    $ moe-ckpt plan selective --model DeepSeek-MoE --pp 12 --ep 8 --iteration-time 2.9 \\
          --budget-local-gbps 25 --budget-remote-gbps 5

Driven is the strategy of a job that measures these links: its first snapshot has everything, and the one shown comes
--checkpoints later, when tokens have been counted since then. The table of layers is that of the ranks that save the
fewest experts.
"""


@dataclass(frozen=True)
class _Share:
    """What the ranks of a lane copy of a snapshot, and what they send; in bytes, and the experts."""

    copied: tuple[OperatorId, ...]
    sent: tuple[OperatorId, ...]
    local_bytes: int
    remote_bytes: int


@plan_command(HELP)
@rate("--budget-local-gbps", "From one GPU to its host's memory.")
@rate("--budget-remote-gbps", "From one rank to its peers.")
@duration("--iteration-time", "Of one iteration.")
@number("--replicas", default=1, minimum=0, show_default=True, metavar="R", help="Peers that keep a copy.")
@number("--checkpoints", default=2, maximum=10_000, show_default=True, help="Which one to show, after the first.")
@counts_file.option
def selective(
    job: PlannedJob,
    budget_local_gbps: float,
    budget_remote_gbps: float,
    iteration_time: float,
    replicas: int,
    checkpoints: int,
    counts: Path | None,
) -> Report:
    if not job.shape.moe_layers:
        raise UsageError(f"--model {job.shape.name} has no MoE layers: selective checkpoints need experts")
    local, remote = budget_local_gbps * 1e9, budget_remote_gbps * 1e9
    tokens = counts_file.load_counts(counts, job.shape)
    config = MoECheckpointConfig(strategy="selective", replicas=replicas)
    planned = job_of(job, config)
    driver = Driver(planned, tokens.of, pace=Throughput(iteration_time, local, remote))
    (taken,) = islice(driver.snapshots(ENDLESS), checkpoints, checkpoints + 1)
    lanes = dict(zip(owned_operators(job.shape, job.topology), planned.sizes.values(), strict=True))
    shares = {lane: _share(taken, sizes) for lane, sizes in lanes.items()}
    local_budget, remote_budget = budget_bytes(local, iteration_time), budget_bytes(remote, iteration_time)
    stalls = {lane: max(0, share.local_bytes - local_budget) / local for lane, share in shares.items()}
    lag_s = max(max(0, share.remote_bytes * replicas - remote_budget) / remote for share in shares.values())
    fewest = min(shares, key=lambda lane: (len(shares[lane].copied), lane))
    experts = len(job.shape.moe_layers) * job.shape.num_experts
    return Report(
        f"Selective expert checkpoints of {job.shape.name}",
        (
            Fact("Local budget", local_budget, "bytes"),
            Fact("Remote budget", remote_budget, "bytes"),
            Fact("Experts saved, of all", sum(len(share.copied) for share in shares.values()) / experts, "share"),
            Fact("Experts replicated, of all", sum(len(share.sent) for share in shares.values()) / experts, "share"),
            Fact("Fits", not lag_s and not any(stalls.values())),
            Fact("Stall", max(stalls.values()), "seconds"),
            Fact("Lag of replication", lag_s, "seconds"),
        ),
        (_layers(shares[fewest], lanes[fewest]), _ranks(shares, stalls)),
    )


def _share(taken: Taken, sizes: Mapping[OperatorId, OperatorSize]) -> _Share:
    sent = {operator: part for piece in taken.pieces if piece.replicated for operator, part in piece.plan.parts.items()}
    own = tuple(operator for operator in sizes if operator.is_expert)
    return _Share(
        tuple(operator for operator in own if operator in taken.plan.parts),
        tuple(operator for operator in own if operator in sent),
        plan_bytes(taken.plan, sizes),
        plan_bytes(SnapshotPlan(taken.plan.iteration, sent), sizes),
    )


def _layers(share: _Share, sizes: Mapping[OperatorId, OperatorSize]) -> Table:
    rows = []
    for layer in sorted({operator.layer for operator in sizes if operator.is_expert}):
        copied = [operator.expert for operator in share.copied if operator.layer == layer]
        rows.append((layer, len(copied), copied, sum(operator.layer == layer for operator in share.sent)))
    return table("Layers", "layer:count | saved:count | experts | replicated:count", rows)


def _ranks(shares: Mapping[tuple[int, int], _Share], stalls: Mapping[tuple[int, int], float]) -> Table:
    rows = (
        (*lane, len(share.copied), len(share.sent), share.local_bytes, share.remote_bytes, stalls[lane])
        for lane, share in shares.items()
    )
    columns = (
        "stage:count | ep rank:count | saved:count | replicated:count | local:bytes | remote:bytes | stall:seconds"
    )
    return table("Ranks", columns, rows)
