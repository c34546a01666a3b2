"""What hardware figures and policies leave open about the checkpoint systems: one set of constants per paper."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole

FOUND: dict[str, Any] = json.loads((files(__package__) / "presets" / "constants.json").read_text(encoding="utf-8"))
"""What was measured or fitted, by `tools/simulator_constants.py` from the files that it names; a test compares."""


@dataclass(frozen=True)
class Constants:
    """How checkpoint systems fare on a real cluster. Seconds, bytes per second, and shares from 0 to 1; `sources` says
    where each of them comes from.

    Copies:
    replicas: r, peers that keep a snapshot in memory. network_share, host_share: of the rate of a rank's NIC, and of
    its link to the host, that copies reach while training leaves these alone. contention: of the seconds for which a
    copy and its replicas keep a GPU's link to the host busy, what they add to training (memory and PCIe are shared);
    None: by the roofline, the share of the memory's rate that the link takes from it. copies_weights: whether copies in
    memory have the compute weights too, which this project casts from the masters (`Precision.full_bytes`).

    Storage:
    persist_stall_s: what a checkpoint to storage stalls training whatever its size (barriers, commit).
    upload_slowdown: share by which iterations get longer while a checkpoint is uploaded. persist_every_s: time between
    the states that systems which checkpoint to memory put into storage for the loss of all replicas. persist_slowdown:
    share by which iterations get longer meanwhile; these states wait for nobody, so nothing stalls.

    Recovery:
    detect_s. cold_launch_s: tear down, replace the node, start all processes, import, build the model. connect_s: until
    a rank has its connections, for each rank of the job. store_requests_per_s: that the one server of the store answers
    while ranks meet. meeting_polls_per_s: of these that ranks make while they wait for the last one. Neither is counted
    where it is 0. comeback: how processes come
    back, see `COMEBACKS`. restart_s: of launch and connections together, where that is known; None: from these.
    local_restart_s: replace the node and connect it, while all others wait. restarts_all: every fault restarts all
    ranks, as torchrun does, also those that continue from where they stood; so a fault in a recovery always begins it
    again. frozen_saves: share of an operator's work that is saved while it is frozen.

    MoC:
    pec_floor: share of the experts in a snapshot at first. pec_slowdown: share by which a snapshot of this size in each
    iteration makes it longer; None: snapshots of any size are copied as those of the other systems, as `pec` has it,
    and the next two do not matter. pec_snapshot_bytes_per_s: GPU to host, of one rank. pec_blocking_s: what it takes to
    collect and commit a snapshot that is larger than the buffers, beside its copies. pec_lost_per_hour: the lost-token
    budget, in iterations' worth of tokens per hour of planned training. planned_s: length of the planned training.
    """

    name: str
    source: str
    replicas: int = 2
    network_share: float = 0.77
    host_share: float = 0.8
    contention: float | None = FOUND["fitted"]["contention"]
    copies_weights: bool = True
    persist_stall_s: float = 1.2
    upload_slowdown: float = 0.195
    persist_every_s: float = 3 * 3600.0
    persist_slowdown: float = 0.0
    detect_s: float = 3.0
    cold_launch_s: float = FOUND["fitted"]["cold_launch_s"]
    connect_s: float = 0.003
    store_requests_per_s: float = 0.0
    meeting_polls_per_s: float = 0.0
    comeback: str = "cold"
    restart_s: float | None = None
    local_restart_s: float = FOUND["fitted"]["local_restart_s"]
    restarts_all: bool = False
    frozen_saves: float = 1 / 3
    pec_floor: float = 1 / 8
    pec_slowdown: float | None = 0.08
    pec_snapshot_bytes_per_s: float = 1e9
    pec_blocking_s: float = 2.6
    pec_lost_per_hour: float = 2.4
    planned_s: float = 12 * 3600.0

    def __post_init__(self) -> None:
        whole("replicas", self.replicas, 0)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ABOVE_0:
                positive(field.name, value)
            elif isinstance(value, float):  # some may be None
                not_negative(field.name, value)
        for name in (*_SHARES, "frozen_saves"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but is a share: from 0 to 1")
        if self.comeback not in COMEBACKS:
            raise UsageError(f"comeback is {self.comeback!r}, not one of {', '.join(COMEBACKS)}")

    def launch_s(self, ranks: int) -> float:
        """Until all processes of a job of `ranks` run again, with their model."""
        if self.restart_s is not None:
            return max(0.0, self.restart_s - self.meet_s(ranks))
        return self.cold_launch_s * COMEBACKS[self.comeback]

    def meet_s(self, ranks: int, ranks_per_node: int = 8) -> float:
        """Until all ranks are connected: what the store answers and what NCCL takes, both linear in them.

        Args:
            ranks: Of the job.
            ranks_per_node: Ranks that one agent speaks for in the store.
        """
        linear_s = self.connect_s * ranks
        if self.store_requests_per_s:
            linear_s += REQUESTS_PER_NODE * -(-ranks // ranks_per_node) / self.store_requests_per_s
        if self.meeting_polls_per_s:
            linear_s += ranks / self.meeting_polls_per_s
        return linear_s if self.restart_s is None else min(linear_s, self.restart_s)

    @property
    def knows_restart(self) -> bool:
        """Whether a restart was measured or given, so that seconds of a recovery are a prediction."""
        return self.restart_s is not None


def predicted_seconds(constants: Constants) -> str:
    """Whether seconds of a recovery are a prediction, in words for every output that has them."""
    if constants.knows_restart:
        return f"predicted, with a restart of {constants.restart_s:.3g} s that was given or measured"
    return (
        f"not predicted: the restart is that of MoEvement's cluster ({constants.cold_launch_s:.0f} s cold); give"
        " --restart or --from"
    )


REQUESTS_PER_NODE = 4
"""Of an agent while numbers of nodes are settled: 1,026 requests of 256 nodes (decision 083)."""

COMEBACKS: dict[str, float] = FOUND["measured"]["comeback"]
"""How processes come back, and what share of a cold launch that takes: all as new processes, all from standbys that
have done their imports, or only those of lost ranks, from standbys, while the others keep process and model."""

_SHARES = ("network_share", "host_share", "pec_floor")
_ABOVE_0 = frozenset((*_SHARES, "persist_every_s", "pec_snapshot_bytes_per_s", "planned_s"))

MOEVEMENT = Constants(name="moevement", source="MoEvement's 96 A100, see `moe-ckpt simulate constants`.")
"""MoEvement's own 96 A100 (5.1 to 5.6)."""

THIS_PROJECT = replace(
    MOEVEMENT,
    name="this-project",
    source="All ranks restart after a fault; sources of all constants: `moe-ckpt simulate constants`.",
    replicas=1,
    restarts_all=True,
    persist_every_s=1800.0,
    contention=None,
    copies_weights=False,
    upload_slowdown=FOUND["fitted"]["upload_slowdown"],
    persist_slowdown=FOUND["fitted"]["upload_slowdown"],
    pec_slowdown=None,
    store_requests_per_s=30_000.0,
    meeting_polls_per_s=20_000.0,
)
"""Predictions of runs with this project. What was fitted to another software and cluster and does not show on this one
(that copies slow training, by `full` as by MoC) is not taken over: decision 091."""
