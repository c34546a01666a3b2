"""What hardware figures and policies leave open about the checkpoint systems: one set of constants per paper."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole


@dataclass(frozen=True)
class Constants:
    """How checkpoint systems fare on a real cluster. Seconds, bytes per second, and shares from 0 to 1.

    Copies:
    replicas: r, peers that keep a snapshot in memory. network_share, host_share: of the rate of a rank's NIC, and of
    its link to the host, that copies reach while training leaves these alone. network_busy_s: of an iteration, in which
    training needs the NIC itself; None: as counted in the iteration's cost. copy_slowdown: by how much an iteration
    gets longer while copies run beside it (memory and PCIe are shared).

    Storage:
    persist_stall_s: what a checkpoint to storage stalls training whatever its size (barriers, commit).
    upload_slowdown: as copy_slowdown, while a checkpoint is uploaded. persist_every_s: time between the states that
    systems which checkpoint to memory put into storage for the loss of all replicas.

    Recovery:
    detect_s. global_restart_s: tear down, replace the node, start and connect all ranks. local_restart_s: replace the
    node and connect it, while all others wait. restarts_all: every fault restarts all ranks, as torchrun does, also
    those that go on from where they stood; so a fault in a recovery always begins it anew. frozen_saves: share of an
    operator's work that is saved while it is frozen.

    MoC:
    pec_floor: share of the experts in a snapshot at first. pec_slowdown: as copy_slowdown, for a snapshot of this size
    in each iteration. pec_snapshot_bytes_per_s: GPU to host, of one rank. pec_blocking_s: what it takes to collect and
    commit a snapshot that is larger than the buffers, beside its copies. pec_lost_per_hour: the lost-token budget, in
    iterations' worth of tokens per hour of planned training. planned_s: length of the planned training.
    """

    name: str
    source: str
    replicas: int = 2
    network_share: float = 0.8
    network_busy_s: float | None = None
    host_share: float = 0.8
    copy_slowdown: float = 0.018
    persist_stall_s: float = 1.2
    upload_slowdown: float = 0.195
    persist_every_s: float = 3 * 3600.0
    detect_s: float = 3.0
    global_restart_s: float = 154.0
    local_restart_s: float = 4.0
    restarts_all: bool = False
    frozen_saves: float = 1 / 3
    pec_floor: float = 1 / 8
    pec_slowdown: float = 0.08
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
            elif isinstance(value, float):  # network_busy_s may be None
                not_negative(field.name, value)
        for name in (*_SHARES, "frozen_saves"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but is a share: from 0 to 1")

    @property
    def stage_restart_s(self) -> float:
        """Until what replaces the ranks of some stages is connected with all others."""
        return self.global_restart_s if self.restarts_all else self.local_restart_s


_SHARES = ("network_share", "host_share", "pec_floor")
_ABOVE_0 = frozenset((*_SHARES, "persist_every_s", "pec_snapshot_bytes_per_s", "planned_s"))

MOEVEMENT = Constants(
    name="moevement",
    source=(
        "Fitted to MoEvement Table 3, one value each for all models and failure rates. network_share, network_busy_s:"
        " windows and Gemini's intervals; traffic counted from the layouts gives 1.19 to 1.25 s for three of the four"
        " models, and less for MoE-LLaVa, whose tokens are not published. copy_slowdown: what MoEvement's ETTR lacks at"
        " 2 h. persist_stall_s, upload_slowdown: CheckFreq's intervals. detect_s, global_restart_s: ETTR of CheckFreq"
        " and Gemini; local_restart_s: of MoEvement. pec_slowdown, pec_blocking_s, pec_lost_per_hour: MoC's overheads"
        " and ETTR; the budget has to hold at 2 h, to fail at 1 h and to end with all experts in Fig. 10. From the"
        " text: replicas 2 (4), CheckFreq's cap of 3 % and runs of 12 h (5.2), frozen_saves a third (3.5), pec_floor"
        " 12.5 % (Fig. 10c), pec_snapshot_bytes_per_s 1 GB/s (MoC 6.2.4). Assumed, and without effect on"
        " Table 3: host_share; persist_every_s, three hours as Gemini has it."
    ),
    network_busy_s=1.2,
)
"""MoEvement's own 96 A100 (5.1 to 5.6)."""

THIS_PROJECT = replace(
    MOEVEMENT,
    name="this-project",
    source=(
        "As MoEvement's, where nothing was measured, and with torchrun, which restarts the"
        " processes of all ranks after each fault."
    ),
    network_busy_s=None,
    restarts_all=True,
)
"""Predictions of runs with this project."""
