#!/usr/bin/env python3
"""Draw docs/sizing.md: what checkpoints of real models take of a node, of its links and of an iteration.

    python tools/sizing.py      renews the page from what the planner and the simulator say

Bytes are those of the planner, the policies that a job follows; seconds are bytes over the rates of a cluster preset.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sizing.md"
sys.path.insert(0, str(ROOT))

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig  # noqa: E402
from megatron.core.dist_checkpointing.moe.strategies.memory_report import memory_report  # noqa: E402
from megatron.core.dist_checkpointing.moe.types import PRECISIONS, ModelShape, Topology  # noqa: E402
from moe_ckpt.simulator.clusters import cluster  # noqa: E402
from moe_ckpt.simulator.constants import THIS_PROJECT  # noqa: E402
from moe_ckpt.simulator.driver import Driver, strategy_job  # noqa: E402
from moe_ckpt.simulator.models import preset  # noqa: E402

CLUSTER = "h100-dgx"
PRECISION = PRECISIONS["fp16-fp32"]
REPLICAS = 1


class SizedJob(NamedTuple):
    """A model on some nodes of 8 GPUs."""

    model: str
    nodes: int
    tp: int
    pp: int
    ep: int

    @property
    def topology(self) -> Topology:
        return Topology(8 * self.nodes, tp=self.tp, pp=self.pp, ep=self.ep, etp=1)

    @property
    def shape(self) -> ModelShape:
        return preset(self.model)

    @property
    def command(self) -> str:
        """What shows the same, and more, for another rate or time."""
        degrees = {"tp": self.tp, "etp": 1 if self.tp > 1 else 0, "pp": self.pp, "ep": self.ep}
        layout = " ".join(f"--{name} {size}" for name, size in degrees.items() if size > (name != "etp"))
        return f"moe-ckpt plan --model {self.model} {layout} --world-size {8 * self.nodes} --cluster {CLUSTER}"


ROWS = (
    SizedJob("Qwen3-30B-A3B", 2, 1, 1, 8),
    SizedJob("Qwen3-30B-A3B", 8, 1, 1, 8),
    SizedJob("Qwen3-30B-A3B", 16, 1, 1, 8),
    SizedJob("Mixtral-8x7B", 8, 1, 4, 8),
    SizedJob("Mixtral-8x22B", 16, 2, 8, 8),
    SizedJob("Mixtral-8x22B", 64, 2, 8, 8),
    SizedJob("DeepSeek-V3-671B", 64, 1, 8, 64),
    SizedJob("DeepSeek-V3-671B", 128, 1, 16, 64),
    SizedJob("DeepSeek-V3-671B", 256, 1, 16, 64),
)


def node_bytes(row: SizedJob) -> tuple[int, int]:
    """Bytes of the largest rank's state, and what snapshots and replicas of `full` take of a node."""
    config = MoECheckpointConfig(strategy="full", interval=1, replicas=REPLICAS)
    job = strategy_job(row.shape, row.topology, PRECISION, config, iterations=1)
    specs = Driver(job).strategy.buffer_specs()
    reports = [memory_report(specs, own, REPLICAS) for own in job.sizes.values()]
    largest = max(sum(size.full_bytes for size in own.values()) for own in job.sizes.values())
    return largest, 8 * max(report.own_bytes + report.replica_bytes for report in reports)


def gigabytes(count: float) -> str:
    """Three significant digits."""
    return f"{count / 1e9:,.3g}" if count < 1e12 else f"{count / 1e9:,.0f}"


def line(row: SizedJob) -> str:
    machines = cluster(CLUSTER)
    owned, full = node_bytes(row)
    copy, send = owned / machines.host_link_bytes_per_s, REPLICAS * owned / machines.inter_node_bytes_per_s
    layout = f"TP {row.tp}, PP {row.pp}, EP {row.ep}"
    cells = (
        row.model,
        row.nodes,
        layout,
        f"{gigabytes(12 * row.shape.total_parameters)}",
        gigabytes(owned),
        gigabytes(full),
        f"{100 * full / machines.host_memory_bytes:.0f} %",
        f"{(copy / THIS_PROJECT.host_share):.2f}",
        f"{(send / THIS_PROJECT.network_share):.2f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEADING = """# Sizing

*Question: how much host memory does a node need?* With `--moe-ckpt-strategy full --moe-ckpt-replicas 1`, bf16 training
with fp32 masters and moments, and the distributed optimizer. Made by `python tools/sizing.py` from what the planner
says; the rates are those of the preset `{cluster}`: {source}.

| model | nodes of 8 | layout | state, GB | owned by a rank, GB | memory of a node, GB | of 2 TB | copy, s | send, s |
|---|---|---|---|---|---|---|---|---|
"""
LEGEND = """
- **State**: master weights and moments, 12 bytes per parameter. **Owned by a rank**: the largest share of it.
- **Memory of a node**: what is reserved on the tmpfs when the job starts: three segments for each rank's own
  snapshots, two for each rank whose replicas it keeps. Give `/dev/shm` at least that; its
  usual size is half of the node's memory.
- **Copy** and **send**: time of a snapshot to host memory and to its peer at {host:.0%} and {network:.0%} of what
  the links carry, in the background. Both have to fit into the interval; `--moe-ckpt-interval auto` measures this, and
  what copies cost training. Rates are data-sheet rates of one GPU, which TCP on one
  interface, the default, does not reach: give `--peer-gbps`; `--from` takes those of a job.
- With twice the nodes and the same layout a rank owns half, and a node needs half.

A row, with what checkpoints add to an iteration and what a fault leads to; for other rates and strategies give
`--host-gbps`, `--peer-gbps`, `--iteration-time` and the `--moe-ckpt-*` flags of the job:

    {command} --global-batch-size 256

Which strategy to use, what it costs and what ETTR to expect: `moe-ckpt advise`,
[operations](operations.md#choose-a-strategy).
"""


def render() -> str:
    """The whole page."""
    head = HEADING.format(cluster=CLUSTER, source=cluster(CLUSTER).source)
    shares = {"host": THIS_PROJECT.host_share, "network": THIS_PROJECT.network_share}
    legend = LEGEND.format(**shares, command=ROWS[2].command)
    return head + "\n".join(map(line, ROWS)) + "\n" + legend


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} renewed")
