"""Where each constant of the simulator comes from: published, measured by this project, fitted to a row, or assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from .constants import COMEBACKS, FOUND, THIS_PROJECT, Constants
from .cost import MEGATRON_UTILISATION, MOEVEMENT_UTILISATION, Utilisation

_TABLE3 = "MoEvement Table 3"

CONSTANTS = {
    "replicas": ("published", "MoEvement 4; for this project the default of --moe-ckpt-replicas on several nodes"),
    "network_share": ("fitted", f"with nic_share, one value: windows of {_TABLE3} (3 of GPT-MoE, 6 of DeepSeek-MoE)"),
    "host_share": ("assumed", "without effect where the network is slower"),
    "contention": (
        "fitted",
        f"{_TABLE3}: MoEvement's ETTR, 12 cells, with local_restart_s. For this project, without a value: assumed by"
        " the roofline, as Gemini (SOSP 2023) reports no overhead of a checkpoint per iteration. The end of its band:"
        f" on one H100 iterations of a small model were longer by {FOUND['measured']['contention']:g} times what a copy"
        " takes, docs/results/h100.md",
    ),
    "copies_weights": (
        "given",
        "this project casts compute weights from the masters; MoEvement's dense state has both",
    ),
    "persist_stall_s": ("fitted", f"{_TABLE3}: CheckFreq's intervals, 3 rows"),
    "upload_slowdown": (
        "fitted",
        f"{_TABLE3}: CheckFreq's intervals, the same 3 rows; for this project {FOUND['fitted']['upload_slowdown']:g},"
        " by its ETTR, 12 cells, with a cold launch",
    ),
    "persist_every_s": (
        "published",
        "Gemini's three hours; for this project half an hour, as racks fail: docs/results/failure-traces.md",
    ),
    "persist_slowdown": ("assumed", "0 in the papers' systems; for this project as its upload_slowdown"),
    "detect_s": ("assumed", "heartbeats of a few seconds"),
    "cold_launch_s": ("fitted", f"{_TABLE3}: ETTR of Gemini, 12 cells; with the node's replacement, on Azure"),
    "connect_s": (
        "assumed",
        "linear, near a bound of MegaScale (NSDI 2024) 3.5: under 30 s for more than 10,000 GPUs, under 5 s for 2,048",
    ),
    "store_requests_per_s": ("measured", "one TCPStore, decision 083; 4 requests of each node"),
    "meeting_polls_per_s": ("measured", "that ranks make while they meet: a limit of this project, decision 083"),
    "comeback": ("given", "--restart-mode"),
    "restart_s": ("given", "--restart, or a job's timelines by --from"),
    "local_restart_s": (
        "fitted",
        f"{_TABLE3}: MoEvement's ETTR, with contention; not used with torchrun, which restarts all ranks",
    ),
    "restarts_all": ("given", "torchrun restarts all ranks"),
    "frozen_saves": ("published", "MoEvement 3.5"),
    "pec_floor": ("published", "MoEvement Fig. 10c"),
    "pec_slowdown": ("fitted", f"{_TABLE3}: MoC's overhead at 2 h; for this project, without a value: as contention"),
    "pec_snapshot_bytes_per_s": ("published", "MoC-System 6.2.4"),
    "pec_blocking_s": ("fitted", f"{_TABLE3}: MoC's overhead at 1 h and below"),
    "pec_lost_per_hour": ("fitted", f"{_TABLE3}: that MoC's budget holds at 2 h and fails at 1 h"),
    "planned_s": ("published", "MoEvement 5.2: runs of 12 hours"),
}
"""Of `Constants`."""

UTILISATION = {
    "gemm_share": ("published", "FlashAttention-2: 225 of 312 TFLOPS on A100; a cluster's own gemm_shares come first"),
    "memory_share": (
        "fitted",
        f"A100, DeepSpeed: one iteration time of {_TABLE3}. Megatron: 0.85 of the data sheet, assumed",
    ),
    "hidden_share": ("published", "Megatron-MoE-ModelZoo, Qwen3-235B on 256 H100: 19.7 s, 17.6 s with overlap"),
    "nic_share": ("given", "network_share, one value"),
    "nvlink_share": ("assumed", "what NCCL usually reaches; moves no iteration by more than a few per cent"),
    "latency_s": ("assumed", "as nvlink_share"),
    "optimizer_bytes_per_s": ("assumed", "three quarters of the memory's rate"),
    "imbalance": (
        "published",
        "1 for Megatron's equal stages; 0.35 fitted where DeepSpeed places layers by parameters",
    ),
}
"""Of `Utilisation`."""


@dataclass(frozen=True)
class Sourced:
    """One constant. kind: published, measured, fitted, assumed, or given by whoever asks."""

    name: str
    value: Any
    kind: str
    source: str


def sourced(constants: Constants = THIS_PROJECT, utilisation: Utilisation = MEGATRON_UTILISATION) -> Iterator[Sourced]:
    """All constants with their values and sources. Raises KeyError for one whose source nobody wrote down.

    Args:
        constants: Constants of checkpoints and recoveries.
        utilisation: Shares of the hardware's rates that training reaches.
    """
    for field in fields(Constants):
        if field.name not in ("name", "source"):
            yield Sourced(field.name, getattr(constants, field.name), *CONSTANTS[field.name])
    for mode, share in COMEBACKS.items():
        where = FOUND["measured"]["source"]
        kind = ("measured", f"{where}: medians of restart, import and build, by those of new processes")
        yield Sourced(f"comeback {mode}", share, *kind)
    for utilised in fields(Utilisation):
        if utilised.name == "source":
            continue
        how, source = UTILISATION[utilised.name]
        if utilised.name == "imbalance" and utilisation.imbalance != 1:
            how = "fitted"
        yield Sourced(utilised.name, getattr(utilisation, utilised.name), how, source)
    if utilisation.memory_share != MOEVEMENT_UTILISATION.memory_share:
        yield Sourced("memory_share on A100", MOEVEMENT_UTILISATION.memory_share, *UTILISATION["memory_share"])
