"""Lifecycles as tables: the training process through faults, a window, a persist buffer, the job's protection.

What a table does not hold raises. The value of each state and event is its meaning; docs/lifecycle.md is made of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import MoECheckpointError

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class UnexpectedEvent(MoECheckpointError):
    """An event that cannot happen in a state: the caller has lost track, and must not go on as if all were well."""

    def __init__(self, state: enum.Enum, event: enum.Enum, allowed: tuple[enum.Enum, ...]) -> None:
        names = ", ".join(one.name for one in allowed)
        super().__init__(
            f"{type(state).__name__} {state.name} has no transition for {type(event).__name__} {event.name};"
            f" {f'it allows {names}' if allowed else 'it is final'}"
        )
        self.state, self.event, self.allowed = state, event, allowed


def next_state(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state that `event` leads to. Raises UnexpectedEvent when the table has no such transition."""
    try:
        return table[state, event]
    except KeyError:
        allowed = tuple(known for before, known in table if before is state)
        raise UnexpectedEvent(state, event, allowed) from None


@dataclass(frozen=True)
class Machine(Generic[S, E]):
    """A table, where it starts, and where it may come to rest: final states, or one that it returns to."""

    title: str
    transitions: Mapping[tuple[S, E], S]
    start: S
    ends: frozenset[S]


class ProcessState(enum.Enum):
    """One training process (rank) through faults: MoEvement 3.4 and App. A on an elastic launcher.

    A fault ends every process and the launcher starts all of them again; state survives in the memory tier. Any fault
    while recovering begins the recovery anew from the sealed copies, never from a half-done replay, so that no
    iteration is replayed twice on top of itself. App. A lets a recovery that the new failure does not touch go on
    undisturbed; here all processes restart, and such a segment is planned again with the same result.
    """

    STARTING = "The process was started for the first time and waits for the others."
    TRAINING = "Iterations run and are snapshotted."
    PARKING = "A peer is gone: the process copies its complete, consistent state to the memory tier."
    PARKED = "The parked state is sealed; the process has ended and waits for the launcher to restart it."
    RESTARTING = "The process is started again; what is sealed in the memory tier has survived, all else is forgotten."
    INVENTORY = "The ranks tell each other which sealed copies, logs and parked states they found."
    PLANNING = "Every rank computes the same recovery plan from the common inventory."
    FETCHING = "The process restores its state from the sources that the plan names, verifying each record."
    REPLAYING = "The process repeats the iterations from its base to the target, from boundary logs or with all others."
    ROLLING_FORWARD = "The process applies its kept gradients once, to reach the target from the iteration before."
    REJOINING = "The process stands at the target and waits until all do; its parked copy is still kept."
    STOPPED = "Training has ended, or cannot go on and has said why."


class ProcessEvent(enum.Enum):
    """What happens to a training process."""

    WORLD_FORMED = "All ranks have met."
    NOTHING_FOUND = "The ranks agree that there is no earlier state: training begins at the first iteration."
    INVENTORY_AGREED = "Every rank has the same inventory."
    PLAN_AGREED = "Every rank has the same plan."
    IMPOSSIBLE = "No sufficient set of intact copies exists; the facts are in the error."
    RESTORED_BEHIND = "The process has the state of its base and must replay."
    RESTORED_WITH_GRADIENTS = "The process has the state before the target and the target's reduced gradients."
    RESTORED_AT_TARGET = "The process has the state of the target."
    COPY_REFUSED = "Some rank found a copy or log damaged that the plan relies on; all plan again without it."
    REPLAY_DONE = "The last iteration of the replay was applied."
    ROLLED_FORWARD = "The kept gradients were applied."
    ALL_REJOINED = "Every rank stands at the target."
    PEER_LOST = "Another process ended without warning, or stopped answering."
    PARKED_STATE_SEALED = "The parked state's manifest was renamed."
    PARK_INTERRUPTED = "The process was killed, or the memory tier failed, before the parked state was sealed."
    RESTARTED = "The launcher started the processes again."
    RESTARTS_EXHAUSTED = "The launcher gives up: too many restarts, or too few nodes."
    END = "The last iteration is done, or a stop was asked for."


_RECOVERING = (ProcessState.INVENTORY, ProcessState.PLANNING, ProcessState.FETCHING, ProcessState.REPLAYING)
_FOLLOWING_A_PLAN = (
    ProcessState.FETCHING,
    ProcessState.REPLAYING,
    ProcessState.ROLLING_FORWARD,
    ProcessState.REJOINING,
)

PROCESS_TRANSITIONS: Mapping[tuple[ProcessState, ProcessEvent], ProcessState] = {
    (ProcessState.STARTING, ProcessEvent.WORLD_FORMED): ProcessState.INVENTORY,
    (ProcessState.STARTING, ProcessEvent.PEER_LOST): ProcessState.RESTARTING,
    (ProcessState.STARTING, ProcessEvent.RESTARTS_EXHAUSTED): ProcessState.STOPPED,
    (ProcessState.TRAINING, ProcessEvent.PEER_LOST): ProcessState.PARKING,
    (ProcessState.TRAINING, ProcessEvent.END): ProcessState.STOPPED,
    (ProcessState.PARKING, ProcessEvent.PEER_LOST): ProcessState.PARKING,
    (ProcessState.PARKING, ProcessEvent.PARKED_STATE_SEALED): ProcessState.PARKED,
    (ProcessState.PARKING, ProcessEvent.PARK_INTERRUPTED): ProcessState.RESTARTING,
    (ProcessState.PARKED, ProcessEvent.PEER_LOST): ProcessState.PARKED,
    (ProcessState.PARKED, ProcessEvent.RESTARTED): ProcessState.RESTARTING,
    (ProcessState.PARKED, ProcessEvent.RESTARTS_EXHAUSTED): ProcessState.STOPPED,
    (ProcessState.RESTARTING, ProcessEvent.WORLD_FORMED): ProcessState.INVENTORY,
    (ProcessState.RESTARTING, ProcessEvent.PEER_LOST): ProcessState.RESTARTING,
    (ProcessState.RESTARTING, ProcessEvent.RESTARTS_EXHAUSTED): ProcessState.STOPPED,
    (ProcessState.INVENTORY, ProcessEvent.NOTHING_FOUND): ProcessState.TRAINING,
    (ProcessState.INVENTORY, ProcessEvent.INVENTORY_AGREED): ProcessState.PLANNING,
    (ProcessState.PLANNING, ProcessEvent.PLAN_AGREED): ProcessState.FETCHING,
    (ProcessState.PLANNING, ProcessEvent.IMPOSSIBLE): ProcessState.STOPPED,
    (ProcessState.FETCHING, ProcessEvent.RESTORED_BEHIND): ProcessState.REPLAYING,
    (ProcessState.FETCHING, ProcessEvent.RESTORED_WITH_GRADIENTS): ProcessState.ROLLING_FORWARD,
    (ProcessState.FETCHING, ProcessEvent.RESTORED_AT_TARGET): ProcessState.REJOINING,
    (ProcessState.REPLAYING, ProcessEvent.REPLAY_DONE): ProcessState.REJOINING,
    (ProcessState.ROLLING_FORWARD, ProcessEvent.ROLLED_FORWARD): ProcessState.REJOINING,
    (ProcessState.REJOINING, ProcessEvent.ALL_REJOINED): ProcessState.TRAINING,
    # The state at the target is complete: worth parking, so that the next recovery need not replay here.
    (ProcessState.REJOINING, ProcessEvent.PEER_LOST): ProcessState.PARKING,
    (ProcessState.ROLLING_FORWARD, ProcessEvent.PEER_LOST): ProcessState.RESTARTING,
    **{(state, ProcessEvent.PEER_LOST): ProcessState.RESTARTING for state in _RECOVERING},
    **{(state, ProcessEvent.COPY_REFUSED): ProcessState.PLANNING for state in _FOLLOWING_A_PLAN},
}


class WindowState(enum.Enum):
    """One window (or a single snapshot, a window of one iteration) in the memory tier: MoEvement 3.2.

    Retention decides when a window is superseded: not before other protected windows hold a newer copy of all that it
    holds. Persisting does not change the state; a window that is being persisted is in use and is freed after that.
    """

    PLANNED = "The window's plan is known, nothing is copied yet."
    COPYING = "Snapshots of its iterations are being copied to the host; those that are done already go to peers."
    SEALED = "Its manifest was renamed: whole and immutable in the memory of this node."
    REPLICATING = "Peers that lack its bytes receive and verify them."
    PROTECTED = "The required number of peers acknowledged verified bytes: it survives the loss of this node."
    SUPERSEDED = "Not needed any more; nobody new may read it, and it goes when its last reader has ended."
    TORN = "It was never sealed or is damaged: no reader takes it, and its memory is wanted back."
    FREED = "Its memory belongs to another window."


class WindowEvent(enum.Enum):
    """What happens to a window."""

    COPY_STARTED = "The first snapshot's copy began."
    COPIED = "The last snapshot was copied and the manifest renamed."
    COPY_FAILED = "Memory ran out, or the process ended, before the window was complete."
    SEND_STARTED = "Replication began, or was tried again."
    SEND_FAILED = "A peer did not answer or refused the bytes; the job is less protected until a retry succeeds."
    ACKNOWLEDGED = "The last required peer acknowledged verified bytes; at once where no replicas are asked for."
    REPLICA_LOST = "A node that held a replica is gone."
    DAMAGED = "A checksum did not match."
    NEWER_PROTECTED = "Newer protected copies cover all that it holds."
    ROLLED_BACK = "A recovery went to an iteration before its last one."
    RELEASED = "No reader refers to it."


_STANDING = (WindowState.SEALED, WindowState.REPLICATING, WindowState.PROTECTED)

WINDOW_TRANSITIONS: Mapping[tuple[WindowState, WindowEvent], WindowState] = {
    (WindowState.PLANNED, WindowEvent.COPY_STARTED): WindowState.COPYING,
    (WindowState.PLANNED, WindowEvent.COPY_FAILED): WindowState.TORN,
    (WindowState.PLANNED, WindowEvent.ROLLED_BACK): WindowState.TORN,
    (WindowState.COPYING, WindowEvent.COPIED): WindowState.SEALED,
    (WindowState.COPYING, WindowEvent.COPY_FAILED): WindowState.TORN,
    (WindowState.COPYING, WindowEvent.ROLLED_BACK): WindowState.TORN,
    (WindowState.COPYING, WindowEvent.REPLICA_LOST): WindowState.COPYING,
    (WindowState.SEALED, WindowEvent.SEND_STARTED): WindowState.REPLICATING,
    (WindowState.SEALED, WindowEvent.ACKNOWLEDGED): WindowState.PROTECTED,
    (WindowState.REPLICATING, WindowEvent.ACKNOWLEDGED): WindowState.PROTECTED,
    (WindowState.REPLICATING, WindowEvent.SEND_FAILED): WindowState.SEALED,
    **{(state, WindowEvent.REPLICA_LOST): WindowState.SEALED for state in _STANDING},
    **{(state, WindowEvent.DAMAGED): WindowState.TORN for state in _STANDING},
    **{(state, WindowEvent.NEWER_PROTECTED): WindowState.SUPERSEDED for state in _STANDING},
    **{(state, WindowEvent.ROLLED_BACK): WindowState.SUPERSEDED for state in _STANDING},
    (WindowState.SUPERSEDED, WindowEvent.REPLICA_LOST): WindowState.SUPERSEDED,
    (WindowState.SUPERSEDED, WindowEvent.ROLLED_BACK): WindowState.SUPERSEDED,
    (WindowState.SUPERSEDED, WindowEvent.DAMAGED): WindowState.TORN,
    (WindowState.SUPERSEDED, WindowEvent.RELEASED): WindowState.FREED,
    (WindowState.TORN, WindowEvent.REPLICA_LOST): WindowState.TORN,
    (WindowState.TORN, WindowEvent.ROLLED_BACK): WindowState.TORN,
    (WindowState.TORN, WindowEvent.DAMAGED): WindowState.TORN,
    (WindowState.TORN, WindowEvent.RELEASED): WindowState.FREED,
}


class BufferState(enum.Enum):
    """One of the buffers between snapshot and persistent storage: MoC 5.2, Fig. 9.

    The paper's three states are SNAPSHOT, PERSIST and RECOVERY. Added are FREE and SEALED, which the paper draws as
    parts of the snapshot state, and DRAINING: a buffer that is not needed any more returns only when nobody refers to
    it.
    """

    FREE = "Nothing refers to it: the next snapshot may overwrite it."
    SNAPSHOT = "State is being copied into it."
    SEALED = "It holds a whole snapshot, which waits until no other buffer is being persisted."
    PERSIST = "Its snapshot is being written to persistent storage."
    RECOVERY = "Its snapshot is the newest one that is persistent: recovery reads it from here."
    DRAINING = "Its content is not needed any more, but somebody may still be reading it."


class BufferEvent(enum.Enum):
    """What happens to a buffer."""

    COPY_STARTED = "A snapshot takes the buffer."
    COPIED = "The snapshot is whole and sealed."
    COPY_FAILED = "The snapshot was given up."
    PERSIST_STARTED = "Its turn has come."
    PERSISTED = "The persistent copy is committed."
    PERSIST_FAILED = "Storage refused; the snapshot waits for another try."
    SUPERSEDED = "A newer snapshot takes its place."
    UNREFERENCED = "Its last reader has ended."


BUFFER_TRANSITIONS: Mapping[tuple[BufferState, BufferEvent], BufferState] = {
    (BufferState.FREE, BufferEvent.COPY_STARTED): BufferState.SNAPSHOT,
    (BufferState.SNAPSHOT, BufferEvent.COPIED): BufferState.SEALED,
    (BufferState.SNAPSHOT, BufferEvent.COPY_FAILED): BufferState.DRAINING,
    (BufferState.SEALED, BufferEvent.PERSIST_STARTED): BufferState.PERSIST,
    (BufferState.SEALED, BufferEvent.SUPERSEDED): BufferState.DRAINING,
    (BufferState.PERSIST, BufferEvent.PERSISTED): BufferState.RECOVERY,
    (BufferState.PERSIST, BufferEvent.PERSIST_FAILED): BufferState.SEALED,
    (BufferState.RECOVERY, BufferEvent.SUPERSEDED): BufferState.DRAINING,
    (BufferState.DRAINING, BufferEvent.UNREFERENCED): BufferState.FREE,
}


def advance_buffers(buffers: tuple[BufferState, ...], index: int, event: BufferEvent) -> tuple[BufferState, ...]:
    """All buffers of a rank after `event` at buffer `index` (MoC Fig. 9).

    At most one buffer is persisted at a time, and at most one serves recovery: when the next one is persistent, the
    one before it drains. Raises UnexpectedEvent for an event that the table or the first rule does not allow.
    """
    if event is BufferEvent.PERSIST_STARTED and BufferState.PERSIST in buffers:
        allowed = [known for before, known in BUFFER_TRANSITIONS if before is buffers[index] and known is not event]
        raise UnexpectedEvent(buffers[index], event, tuple(allowed))
    after = list(buffers)
    if event is BufferEvent.PERSISTED and BufferState.RECOVERY in after:
        before = after.index(BufferState.RECOVERY)
        after[before] = next_state(BUFFER_TRANSITIONS, BufferState.RECOVERY, BufferEvent.SUPERSEDED)
    after[index] = next_state(BUFFER_TRANSITIONS, buffers[index], event)
    return tuple(after)


class ProtectionState(enum.Enum):
    """How safe the job is, per tier: once for replicas in memory, once for persistent storage.

    The tiers are told apart so that success in one does not hide failure in the other. Every event is possible in every
    state; logs and metrics show the state and the iteration since which it holds.
    """

    UNPROTECTED = "The tier has no copy of any committed state: what it guards against would lose progress."
    PROTECTED = "The newest committed state has as many copies as were asked for."
    DEGRADED = "Copies exist, but too few of them or not of the newest state; it is tried again."


class ProtectionEvent(enum.Enum):
    """What changes the protection."""

    COMMITTED = "A newer state has all the copies that were asked for."
    ATTEMPT_FAILED = "A snapshot, a replication or a write failed."
    COPIES_SHORT = "A copy of the newest committed state is gone, others are left."
    COPIES_GONE = "The last copy of any committed state is gone."


_WITH_COPIES = (ProtectionState.PROTECTED, ProtectionState.DEGRADED)

PROTECTION_TRANSITIONS: Mapping[tuple[ProtectionState, ProtectionEvent], ProtectionState] = {
    **{(state, ProtectionEvent.COMMITTED): ProtectionState.PROTECTED for state in ProtectionState},
    **{(state, ProtectionEvent.ATTEMPT_FAILED): ProtectionState.DEGRADED for state in _WITH_COPIES},
    **{(state, ProtectionEvent.COPIES_SHORT): ProtectionState.DEGRADED for state in _WITH_COPIES},
    **{(state, ProtectionEvent.COPIES_GONE): ProtectionState.UNPROTECTED for state in ProtectionState},
    (ProtectionState.UNPROTECTED, ProtectionEvent.ATTEMPT_FAILED): ProtectionState.UNPROTECTED,
    (ProtectionState.UNPROTECTED, ProtectionEvent.COPIES_SHORT): ProtectionState.UNPROTECTED,
}


@dataclass(frozen=True)
class Protection:
    """The protection of one tier, and the iteration at which it came to be so."""

    state: ProtectionState = ProtectionState.UNPROTECTED
    since_iteration: int = 0

    def after(self, event: ProtectionEvent, iteration: int) -> Protection:
        """The protection after `event` at `iteration`; the same since when the state does not change."""
        state = next_state(PROTECTION_TRANSITIONS, self.state, event)
        return self if state is self.state else Protection(state, iteration)


PROCESS = Machine("Training process", PROCESS_TRANSITIONS, ProcessState.STARTING, frozenset({ProcessState.STOPPED}))
WINDOW = Machine("Window", WINDOW_TRANSITIONS, WindowState.PLANNED, frozenset({WindowState.FREED}))
BUFFER = Machine("Persist buffer", BUFFER_TRANSITIONS, BufferState.FREE, frozenset({BufferState.FREE}))
PROTECTION = Machine(
    "Protection", PROTECTION_TRANSITIONS, ProtectionState.UNPROTECTED, frozenset({ProtectionState.PROTECTED})
)
MACHINES: tuple[Machine[Any, Any], ...] = (PROCESS, WINDOW, BUFFER, PROTECTION)
