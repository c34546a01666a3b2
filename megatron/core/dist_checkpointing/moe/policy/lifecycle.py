"""Lifecycles as tables that run: a window in memory, its copy in storage, how safe the job is.

`snapshot.tracker` changes the state of a window, of a persistent copy and of the job's protection through these tables
and in no other way; what a table does not hold raises. The value of each state and event is its meaning, and each
transition has a reason: docs/internals/lifecycle.md is made of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MoECheckpointError


class UnexpectedEvent(MoECheckpointError):
    """An event that cannot happen in a state: the caller has lost track, and must not continue as if all were well."""

    def __init__(self, state: enum.Enum, event: enum.Enum, allowed: tuple[enum.Enum, ...]) -> None:
        names = ", ".join(known.name for known in allowed)
        super().__init__(
            f"{type(state).__name__} {state.name} has no transition for {type(event).__name__} {event.name};"
            f" {f'it allows {names}' if allowed else 'it is final'}"
        )
        self.state, self.event, self.allowed = state, event, allowed


@dataclass(frozen=True)
class TransitionTable[S: enum.Enum, E: enum.Enum]:
    """What may happen to one kind of thing.

    Args:
        title: what the thing is called in the documentation.
        starts: the states in which it may come into being.
        rows: by state and event the state that follows, and why.
    """

    title: str
    starts: tuple[S, ...]
    rows: Mapping[tuple[S, E], tuple[S, str]]

    def after(self, state: S, event: E) -> S:
        """The state that an event leads to.

        Args:
            state: The state before the event.
            event: The event.

        Raises:
            UnexpectedEvent: The table has no such row.
        """
        if (state, event) not in self.rows:
            raise UnexpectedEvent(state, event, tuple(known for before, known in self.rows if before is state))
        return self.rows[state, event][0]


class WindowState(enum.Enum):
    """One window in memory: the snapshots that restore a state together (MoEvement 3.2), by themselves or in number.

    A snapshot of `full` or `pec` is a window of one iteration. All events are agreed on by all ranks in the message of
    an iteration, so the windows of a job are in the same states on all of them.
    """

    COPYING = "Its snapshots are copied, sealed and sent to peers one by one; not all ranks have sealed the last one."
    REPLICATING = "All ranks have sealed all of it; peers still receive the last snapshot."
    PROTECTED = "All peers that were asked for have verified all of it: it survives the loss of nodes."
    UNDER_REPLICATED = "It is whole on all ranks, but some replica is missing, and is not tried again."
    GIVEN_UP = "Some rank has no snapshot of it: it restores nothing, and goes once nothing of it is under way."
    RESTORED = "A recovery found it whole on all ranks; whether its replicas are there is still counted again."
    SPARE = "A recovery found these pieces on some ranks only; they stay until a newer window is protected."
    FREED = "Its memory belongs to other windows."


class WindowEvent(enum.Enum):
    """What happens to a window."""

    BEGUN = "The next one of its snapshots is planned, and is copied from here on."
    SEALED = "All ranks have sealed a snapshot other than the last one."
    ALL_SEALED = "All ranks have sealed its last snapshot, and with it the window."
    ENDED = "Nothing more happens to the replicas of one snapshot, and the window continues."
    ALL_ACKNOWLEDGED = "The last replica of any of its snapshots was verified."
    REPLICAS_MISSING = "Nothing more happens to its replicas, and some are missing."
    FAILED = "Some rank could not copy or seal a snapshot."
    DRAINED = "Nothing of it is under way any more."
    SUPERSEDED = "Newer windows cover all that it holds, as safe as it is."


_S, _E = WindowState, WindowEvent  # so that a row of the table is a line

WINDOW: TransitionTable[WindowState, WindowEvent] = TransitionTable(
    "Window",
    (_S.COPYING, _S.RESTORED, _S.SPARE),
    {
        (_S.COPYING, _E.BEGUN): (_S.COPYING, "A window has one snapshot per iteration."),
        (_S.COPYING, _E.SEALED): (_S.COPYING, "It restores nothing before its last snapshot."),
        (_S.COPYING, _E.ENDED): (_S.COPYING, "Replicas are made as the window goes, and are judged when it is whole."),
        (_S.COPYING, _E.ALL_SEALED): (_S.REPLICATING, "From here on it restores a state where no node is lost."),
        (_S.COPYING, _E.FAILED): (
            _S.GIVEN_UP,
            "A window that lacks a snapshot restores nothing; the next iteration begins another one.",
        ),
        (_S.REPLICATING, _E.ALL_ACKNOWLEDGED): (_S.PROTECTED, "Any of the asked-for number of nodes may go."),
        (_S.REPLICATING, _E.REPLICAS_MISSING): (
            _S.UNDER_REPLICATED,
            "The next window brings its own replicas: these are not tried again.",
        ),
        (_S.RESTORED, _E.ALL_ACKNOWLEDGED): (
            _S.PROTECTED,
            "Peers that lacked a replica, as on a new node, have it again.",
        ),
        (_S.RESTORED, _E.REPLICAS_MISSING): (
            _S.UNDER_REPLICATED,
            "Some replica that went with a node could not be made again.",
        ),
        (_S.GIVEN_UP, _E.ENDED): (_S.GIVEN_UP, "What comes of a window after its failure is freed as it comes."),
        (_S.GIVEN_UP, _E.FAILED): (_S.GIVEN_UP, "What comes of a window after its failure is freed as it comes."),
        (_S.GIVEN_UP, _E.DRAINED): (_S.FREED, "Until then copies and replicas of it still take memory."),
        (_S.PROTECTED, _E.SUPERSEDED): (
            _S.FREED,
            "The newest protected copy of everything is elsewhere (`policy.tracking`).",
        ),
        (_S.UNDER_REPLICATED, _E.SUPERSEDED): (
            _S.FREED,
            "The newest copy of everything is elsewhere, and no less safe (`policy.tracking`).",
        ),
        (_S.SPARE, _E.SUPERSEDED): (_S.FREED, "No rank needs them for another recovery: a newer state is protected."),
    },
)


class PersistState(enum.Enum):
    """The copy of one window in persistent storage; written from memory, so the window stays there until it ends."""

    WRITING = "It is written by all ranks, each what it owns; one window at a time."
    PERSISTENT = "All ranks have written it: it survives the loss of all nodes."
    FAILED = "Some rank could not write it; what others wrote of it is left, and restores nothing."
    REMOVED = "It is not needed any more and is removed from storage."


class PersistEvent(enum.Enum):
    """What happens to a persistent copy."""

    WRITTEN = "The last rank has written its part."
    REFUSED = "Storage refused it on some rank for as long as it was tried."
    SUPERSEDED = "It is not among the last ones that are kept, and none of these needs it."


PERSISTENT_COPY: TransitionTable[PersistState, PersistEvent] = TransitionTable(
    "Persistent copy",
    (PersistState.WRITING, PersistState.PERSISTENT),
    {
        (PersistState.WRITING, PersistEvent.WRITTEN): (PersistState.PERSISTENT, "It counts only once it is whole."),
        (PersistState.WRITING, PersistEvent.REFUSED): (
            PersistState.FAILED,
            "The next window that is due is tried instead.",
        ),
        (PersistState.PERSISTENT, PersistEvent.SUPERSEDED): (
            PersistState.REMOVED,
            "Storage keeps the last `--moe-ckpt-persist-keep` states, and what these need.",
        ),
    },
)


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
    ATTEMPT_FAILED = "A snapshot, a replication or a write failed, or could not begin in time."
    CONTACT_LOST = "The ranks do not hear from each other any more: nothing newer is agreed on."


_WITHOUT_COPIES = "There is no copy that would be too old."
_TOO_OLD = "The copies that there are fall behind."

PROTECTION: TransitionTable[ProtectionState, ProtectionEvent] = TransitionTable(
    "Protection",
    (ProtectionState.UNPROTECTED, ProtectionState.DEGRADED),  # degraded: after a recovery, until replicas are counted
    {
        **{
            (state, ProtectionEvent.COMMITTED): (ProtectionState.PROTECTED, "The newest state is safe.")
            for state in ProtectionState
        },
        **{
            (state, event): (ProtectionState.DEGRADED, _TOO_OLD)
            for state in (ProtectionState.PROTECTED, ProtectionState.DEGRADED)
            for event in (ProtectionEvent.ATTEMPT_FAILED, ProtectionEvent.CONTACT_LOST)
        },
        **{
            (ProtectionState.UNPROTECTED, event): (ProtectionState.UNPROTECTED, _WITHOUT_COPIES)
            for event in (ProtectionEvent.ATTEMPT_FAILED, ProtectionEvent.CONTACT_LOST)
        },
    },
)


@dataclass(frozen=True)
class Protection:
    """The protection of one tier, and the iteration at which it came to be so."""

    state: ProtectionState = ProtectionState.UNPROTECTED
    since_iteration: int = 0

    def after(self, event: ProtectionEvent, iteration: int) -> Protection:
        """The protection after `event` at `iteration`; the same since when the state does not change.

        Args:
            event: What happened to the protection.
            iteration: The iteration at which it happened.
        """
        state = PROTECTION.after(self.state, event)
        return self if state is self.state else Protection(state, iteration)


TABLES: tuple[TransitionTable[Any, Any], ...] = (WINDOW, PERSISTENT_COPY, PROTECTION)
