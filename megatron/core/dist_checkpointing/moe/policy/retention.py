"""What may be freed: windows in memory, boundary logs, directories on disk; and why the rest is kept."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..errors import UsageError
from ..types import OperatorId, Part, SnapshotPlan
from .lifecycle import WindowState

Item = TypeVar("Item")

COMPONENTS = (Part.MASTER, Part.MOMENTS, Part.WEIGHTS)


@dataclass(frozen=True)
class StoredWindow:
    """One rank's share of a window, or of a single snapshot, in one memory tier.

    `name` tells windows apart and must be unique. `plans` are its snapshots, whatever its state. `acknowledged` counts
    the peers that verified all of its bytes. `in_use`: somebody reads it (a replicator, a persister, a recovery).
    Raises UsageError when a plan's iteration lies outside.
    """

    name: str
    rank: int
    first_iteration: int
    last_iteration: int
    state: WindowState
    plans: tuple[SnapshotPlan, ...] = field(repr=False)
    acknowledged: int = 0
    in_use: bool = False

    def __post_init__(self) -> None:
        _check_order(f"window {self.name}", self.first_iteration, self.last_iteration)
        if self.acknowledged < 0:
            raise UsageError(f"window {self.name}: acknowledged is {self.acknowledged}, but must be at least 0")
        for plan in self.plans:
            if not self.first_iteration <= plan.iteration <= self.last_iteration:
                raise UsageError(
                    f"window {self.name}: it has a plan of iteration {plan.iteration}, but its iterations are"
                    f" {self.first_iteration} to {self.last_iteration}"
                )


@dataclass(frozen=True)
class Agreement:
    """The last iterations of the newest windows that every rank of the job still holds, protected or at least sealed.

    None: there is no such window, or the ranks have not told each other. Raises UsageError when a window would be
    protected but not sealed.
    """

    protected_iteration: int | None = None
    sealed_iteration: int | None = None

    def __post_init__(self) -> None:
        protected, sealed = self.protected_iteration, self.sealed_iteration
        if protected is not None and (sealed is None or sealed < protected):
            raise UsageError(f"sealed_iteration is {sealed}, but must be at least protected_iteration {protected}")


@dataclass(frozen=True)
class LogRange:
    """Boundary logs of a range of iterations, ends included, which are freed together."""

    first_iteration: int
    last_iteration: int
    in_use: bool = False

    def __post_init__(self) -> None:
        _check_order("log", self.first_iteration, self.last_iteration)


class DirectoryKind(enum.Enum):
    """What a directory in persistent storage holds. No kind needs directories of another one to be loaded."""

    DENSE = "dense"  # a checkpoint of everything, in Megatron's own format
    WINDOW = "window"  # a sparse window
    PARTIAL = "partial"  # a snapshot of `pec` or `selective`; what it lacks is in older ones


@dataclass(frozen=True)
class StoredDirectory:
    """One directory in persistent storage, of all ranks together.

    `iteration` is the last one it holds. `plans` name its content; a dense one needs none. `complete`: its manifest is
    there. `in_use`: it is being written or read. Raises UsageError when a plan is newer than the directory.
    """

    name: str
    iteration: int
    kind: DirectoryKind
    complete: bool
    plans: tuple[SnapshotPlan, ...] = field(default=(), repr=False)
    in_use: bool = False

    def __post_init__(self) -> None:
        for plan in self.plans:
            if plan.iteration > self.iteration:
                raise UsageError(
                    f"directory {self.name}: it has a plan of iteration {plan.iteration}, but its last iteration is"
                    f" {self.iteration}"
                )


class Reason(enum.Enum):
    """Why something is kept or freed."""

    NEWEST_PROTECTED = "it has the newest protected copy of some operators"
    NEWEST_COPY = "no other copy of some operators is both newer and as well replicated"
    COMMON = "it is of the newest state that all ranks have"
    NOT_AGREED = "it is newer than what all ranks have"
    UNDER_WAY = "it is still being copied or replicated"
    IN_USE = "it is not needed, but somebody reads it"
    REPLAY = "a replay from a kept window may need it"
    UNKNOWN_BASE = "no window tells which replays are possible"
    AMONG_LAST = "it is among the last that are to be kept"
    COMPLETES = "a kept snapshot lacks operators of which it has the newest copy"
    TORN = "it was never completed or is damaged"
    SUPERSEDED = "it was superseded"
    COVERED = "newer copies, as well replicated, cover all that it holds"
    BEFORE_REPLAY = "no replay begins so early"
    OLDER = "enough newer ones are kept, and none of them lacks what it holds"


_FREEING = (Reason.TORN, Reason.SUPERSEDED, Reason.COVERED, Reason.BEFORE_REPLAY, Reason.OLDER)


@dataclass(frozen=True)
class Retention(Generic[Item]):
    """What to free and what to keep, each with the reason; oldest first."""

    freed: tuple[tuple[Item, Reason], ...]
    kept: tuple[tuple[Item, Reason], ...]


def retain_windows(windows: Iterable[StoredWindow], agreed: Agreement) -> Retention[StoredWindow]:
    """Which windows of a memory tier may be freed (MoEvement 3.2, "Persisting Snapshots"; MoC 5.1).

    Of each rank, operator and component (master weights, moments, compute weights) the newest copy is kept among the
    protected windows, among those that at least n peers acknowledged, for each n, and among all sealed ones. For a
    sparse window, which has every operator, that leaves the paper's one protected window and one in flight; under lossy
    strategies an old snapshot stays while it has the newest copy of one component of one operator. Master weights count
    as compute weights too, which are their cast. Windows that are being copied are kept, and so are those being
    replicated, so long as protected copies do not cover them. Torn and superseded ones are freed unless in use.

    The paper leaves out that ranks get there at different times, and can only recover to a state that all of them have.
    So the newest copies up to what the ranks have `agreed` on are kept too, and so are all windows newer than that,
    with the reason NOT_AGREED: one of them is what the ranks agree on next. Where a straggler makes them many, start
    no further window, or give up the middle ones.

    Raises UsageError when two windows have the same name.
    """
    stored = sorted(_unique(windows), key=_age)
    needed: dict[str, Reason] = {}
    for held in _by_rank(stored):
        needed |= _needed_of_rank(held, agreed)

    def reason(window: StoredWindow) -> Reason:
        if window.name in needed:
            return needed[window.name]
        if window.state in _COMMITTED:
            return Reason.COVERED if _is_agreed(window, agreed) else Reason.NOT_AGREED
        return Reason.TORN if window.state is WindowState.TORN else Reason.SUPERSEDED

    return _decided((window, reason(window), window.in_use) for window in stored)


def replay_base(retained: Retention[StoredWindow]) -> int | None:
    """The iteration with whose snapshot the earliest possible replay begins: the oldest one of the windows that stay.

    None if no window stays. A sender's logs serve replays of the neighbouring stages: take the least value over the
    ranks of all stages that its logs feed.
    """
    return min((window.first_iteration for window, _ in retained.kept), default=None)


def retain_logs(logs: Iterable[LogRange], base: int | None) -> Retention[LogRange]:
    """Which boundary logs may be freed (MoEvement 3.4, "Stale Log Cleanup").

    `base` is the `replay_base` of all windows that these logs serve: the first replayed iteration is `base + 1`. Kept
    is every range that ends later, up to the newest iteration. With None, nothing is known and nothing is freed.
    """

    def reason(log: LogRange) -> Reason:
        if base is None:
            return Reason.UNKNOWN_BASE
        return Reason.REPLAY if log.last_iteration > base else Reason.BEFORE_REPLAY

    ordered = sorted(logs, key=lambda log: (log.first_iteration, log.last_iteration, log.in_use))
    return _decided((log, reason(log), log.in_use) for log in ordered)


def retain_directories(directories: Iterable[StoredDirectory], keep_last: int) -> Retention[StoredDirectory]:
    """Which directories in persistent storage may be removed.

    Of each kind the newest `keep_last` complete ones are kept, and with each partial one the older ones that have the
    newest copy, as of its iteration, of a component that it lacks (MoC 5.1), so that each of them can be loaded.
    Incomplete ones are removed unless they are in use, and never count.

    Raises UsageError for a `keep_last` below 1 and for two directories with the same name.
    """
    if keep_last < 1:
        raise UsageError(f"keep_last is {keep_last}, but must be at least 1")
    stored = sorted(_unique(directories), key=lambda directory: (directory.iteration, directory.name))
    last: set[str] = set()
    completing: set[str] = set()
    for kind in DirectoryKind:
        complete = [directory for directory in stored if directory.complete and directory.kind is kind]
        for end in range(len(complete), max(0, len(complete) - keep_last), -1):
            last.add(complete[end - 1].name)
            completing |= _newest_holders(complete[:end])

    def reason(directory: StoredDirectory) -> Reason:
        if not directory.complete:
            return Reason.TORN
        if directory.name in last:
            return Reason.AMONG_LAST
        return Reason.COMPLETES if directory.name in completing else Reason.OLDER

    return _decided((directory, reason(directory), directory.in_use) for directory in stored)


_COMMITTED = (WindowState.SEALED, WindowState.REPLICATING, WindowState.PROTECTED)
_IN_FLIGHT = (WindowState.PLANNED, WindowState.COPYING)
_PROTECTED = 2**63  # above every number of acknowledgements

Stored = TypeVar("Stored", StoredWindow, StoredDirectory)


def _level(window: StoredWindow) -> int:
    """How well a committed window is replicated; comparable between windows."""
    return _PROTECTED if window.state is WindowState.PROTECTED else window.acknowledged


def _is_agreed(window: StoredWindow, agreed: Agreement) -> bool:
    """Whether the ranks agreed on something at least as new that is as good: protected if this window is."""
    protected = window.state is WindowState.PROTECTED
    reached = agreed.protected_iteration if protected else agreed.sealed_iteration
    return reached is not None and window.last_iteration <= reached


def _needed_of_rank(held: Sequence[StoredWindow], agreed: Agreement) -> dict[str, Reason]:
    """Why windows of one rank, sorted by age, are needed; those that are not are left out."""
    needed = {window.name: Reason.UNDER_WAY for window in held if window.state in _IN_FLIGHT}
    committed = [window for window in held if window.state in _COMMITTED]
    sealed = -1 if agreed.sealed_iteration is None else agreed.sealed_iteration
    needed |= dict.fromkeys(_newest_holders([one for one in committed if one.last_iteration <= sealed]), Reason.COMMON)
    for level in sorted({_level(window) for window in committed}):
        high = [window for window in committed if _level(window) >= level]
        needed |= dict.fromkeys(_newest_holders(high), Reason.NEWEST_COPY)
    protected = [window for window in committed if window.state is WindowState.PROTECTED]
    common = [window for window in protected if _is_agreed(window, agreed)]
    needed |= dict.fromkeys(_newest_holders(common), Reason.COMMON)
    needed |= dict.fromkeys(_newest_holders(protected), Reason.NEWEST_PROTECTED)
    for window in committed:
        if window.state is WindowState.REPLICATING and window.name in _newest_holders([*protected, window]):
            needed[window.name] = Reason.UNDER_WAY
    return needed


def _newest_holders(stored: Sequence[Stored]) -> set[str]:
    """Names of those that hold the newest copy of any component; of equally new ones the last in the sequence."""
    snapshots = [(plan.iteration, at, plan) for at, one in enumerate(stored) for plan in one.plans]
    snapshots.sort(key=lambda snapshot: snapshot[:2], reverse=True)
    found: set[str] = set()
    for component in COMPONENTS:
        seen: set[OperatorId] = set()
        for _, at, plan in snapshots:
            if not plan.giving(component) <= seen:
                found.add(stored[at].name)
                seen |= plan.giving(component)
    return found


def _unique(stored: Iterable[Stored]) -> list[Stored]:
    by_name: dict[str, Stored] = {}
    for one in stored:
        if one.name in by_name:
            raise UsageError(f"two stored windows or directories are named {one.name!r}; names must be unique")
        by_name[one.name] = one
    return list(by_name.values())


def _by_rank(windows: Iterable[StoredWindow]) -> Iterable[list[StoredWindow]]:
    found: dict[int, list[StoredWindow]] = {}
    for window in windows:
        found.setdefault(window.rank, []).append(window)
    return found.values()


def _age(window: StoredWindow) -> tuple[int, int, int, str]:
    return window.last_iteration, window.first_iteration, window.rank, window.name


def _decided(judged: Iterable[tuple[Item, Reason, bool]]) -> Retention[Item]:
    freed: list[tuple[Item, Reason]] = []
    kept: list[tuple[Item, Reason]] = []
    for item, reason, in_use in judged:
        if reason in _FREEING and in_use:
            reason = Reason.IN_USE
        (freed if reason in _FREEING else kept).append((item, reason))
    return Retention(tuple(freed), tuple(kept))


def _check_order(what: str, first_iteration: int, last_iteration: int) -> None:
    if not 0 <= first_iteration <= last_iteration:
        raise UsageError(
            f"{what}: its iterations are {first_iteration} to {last_iteration}, but the first must be from 0 to the"
            " last"
        )
