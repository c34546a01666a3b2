"""Reports on snapshots: in storage, and in the memory of nodes, where a job may be busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.ledger import LossRecord
from megatron.core.dist_checkpointing.moe.extensions.lossy.recovery import mlt, plt_moc, plt_pec
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.storage.lease import writer_of
from megatron.core.dist_checkpointing.moe.storage.manifest import FORMAT_VERSION
from megatron.core.dist_checkpointing.moe.types import STANDBY
from megatron.core.dist_checkpointing.moe.types.recovery import spans
from moe_ckpt.checkpoints.survey import (
    MemorySurvey,
    SealedCopy,
    operator_rows,
    survey_slot,
    survey_snapshot,
    survey_storage,
)
from moe_ckpt.checkpoints.windows import StoredSnapshot, StoredState
from moe_ckpt.report import Fact, Report, Table, table

from .location import age_of
from .persist_dir import PersistDir
from .slots import Slot, slots

_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_WINDOWS = "iterations | kind | snapshots:count | of:count | state | copies:count | size:bytes | age:seconds | job"
_OPERATORS = "operator | part | size:bytes | iteration:count | ranks | held by | copies:count"
_LOSSES = "fault after:count | continued from:count | lost tokens:count | PLT MoC:share | PLT PEC:share | MLT:share"
_SLOTS = "node | job | local rank:count | area | owner | size:bytes | sealed:count | torn:count | being written:count"


def snapshot_report(place: str, persist_dir: PersistDir, snapshot: SnapshotId, now_s: float) -> Report:
    """One snapshot by itself. Raises UnreadableCheckpoint.

    Args:
        place: The snapshot's place as the user gave it, for the title.
        persist_dir: The storage that has the snapshot.
        snapshot: Iteration, rank and kind of the snapshot.
        now_s: Current time, in seconds since 1970, for ages.
    """
    survey = survey_snapshot(persist_dir, snapshot)
    notes = ("Only this snapshot was looked at: what belongs to it lies beside it.",)
    tables = (*_tables(survey, now_s), _flags(survey))
    return Report(f"The {snapshot} in {place}", _facts(survey, now_s), tables, notes)


def storage_report(persist_dir: PersistDir, now_s: float) -> Report:
    """All snapshots of a --moe-ckpt-persist-dir. Raises UnreadableCheckpoint if none is sealed.

    Args:
        persist_dir: The storage.
        now_s: Current time, in seconds since 1970, for ages.
    """
    survey, place = survey_storage(persist_dir), persist_dir.place
    if not survey.holdings:
        why = f": {survey.torn[0].why}" if survey.torn else ""
        raise UnreadableCheckpoint(f"{place} has no sealed snapshot, there is nothing to restore from{why}")
    tables = (*_tables(survey, now_s), _flags(survey))
    lost = "No state is whole here: a recovery takes another place, and moe-ckpt verify says what is missing."
    facts = (*_facts(survey, now_s), *_whole_facts(survey))
    notes = filter(None, (writer_of(place), "" if survey.newest_whole else lost))
    return Report(f"Snapshots in {place}", facts, tables, tuple(notes))


def memory_report(folder: Path, now_s: float) -> Report:
    """A memory dir, or what is below one folder in it; a job that uses it is not disturbed.

    Args:
        folder: A `--moe-ckpt-memory-dir`, or a folder of a job or slot in it.
        now_s: Current time, in seconds since 1970, for ages.
    """
    found = slots(folder)
    surveys = [survey_slot(slot) for slot in found]
    survey = MemorySurvey(
        tuple(holding for of_slot in surveys for holding in of_slot.holdings),
        tuple(torn for of_slot in surveys for torn in of_slot.torn),
    )
    facts = (
        Fact("Number of slots", len(found), "count"),
        Fact("Living owners", sum(slot.alive for slot in found), "count"),
        Fact("Memory taken", sum(slot.nbytes for slot in found), "bytes"),
        *((*_facts(survey, now_s), *_whole_facts(survey)) if survey.holdings else ()),
    )
    tables = (_slots(found, surveys), *_tables(survey, now_s), _standby(survey), _flags(survey))
    notes = ("Memory of other nodes is not seen from here: what is missing may be there.",)
    return Report(f"Memory tier in {folder}", facts, tables, notes)


def _facts(survey: MemorySurvey, now_s: float) -> tuple[Fact, ...]:
    states = _of_states(survey)
    newest = _newest(states).stored
    losses = _losses(survey)
    return (
        Fact("Newest iteration", max(holding.snapshot.iteration for holding in states), "count"),
        Fact("Age", _age_s(states, now_s), "seconds"),
        Fact("Bytes", sum(holding.nbytes for holding in survey.holdings), "bytes"),
        Fact("Snapshots", len(survey.holdings), "count"),
        Fact("Torn", len(survey.torn), "count"),
        Fact("World size", newest.world_size or None, "count"),
        Fact("Layout", _layout(newest)),
        Fact("Strategy", newest.said.made_by),
        Fact("Job", newest.facts.job),
        Fact("Timeline", _timeline(newest)),
        Fact("Format", f"snapshot {FORMAT_VERSION}"),
        *(losses.facts() if losses else ()),
    )


def _newest(states: Iterable[SealedCopy]) -> SealedCopy:
    return max(states, key=lambda held: (held.stored.timeline[-1:], held.snapshot.iteration))


def _losses(survey: MemorySurvey) -> Losses | None:
    """Of the timeline that a recovery would continue with."""
    states = _of_states(survey)
    if not states:
        return None
    timeline = _newest(states).stored.timeline
    return Losses.newest(held for held in states if held.stored.timeline == timeline)


def _whole_facts(survey: MemorySurvey) -> tuple[Fact, ...]:
    whole, found = survey.newest_whole, survey.states
    return (
        Fact("Newest whole state", whole.span[-1] if whole else None, "count"),
        Fact("Whole windows", f"{sum(not state.lacking for state, _ in found)} of {len(found)}"),
        Fact("Protection", _protection(whole, survey)),
    )


def _of_states(survey: MemorySurvey) -> tuple[SealedCopy, ...]:
    """Without logs and what was parked, if there is anything else."""
    return tuple(held for held in survey.holdings if held.snapshot.kind not in STANDBY) or survey.holdings


def _tables(survey: MemorySurvey, now_s: float) -> tuple[Table, ...]:
    by_snapshot = {holding.snapshot: holding for holding in survey.holdings}
    windows = []
    for state, is_left in survey.states:
        members = [by_snapshot[member.snapshot] for member in state.members]
        counts = len(members), len(members) + state.lacking, _state(state, is_left), _copies(state, survey)
        size, age_s = sum(member.nbytes for member in members), _age_s(members, now_s)
        span, kind = spans(set(state.span)), state.leading.snapshot.kind
        windows.append((span, kind, *counts, size, age_s, state.leading.facts.job))
    torn = ((str(torn.snapshot), torn.why) for torn in survey.torn)
    losses = _losses(survey)
    return (
        table("Windows", _WINDOWS, windows),
        *((losses.table(),) if losses and losses.records else ()),
        table("Operators", _OPERATORS, operator_rows(survey.holdings)),
        table("Torn snapshots", "snapshot | why", torn),
    )


def _state(state: StoredState, is_left: bool) -> str:
    if state.lacking:
        return f"lacks {state.missing}"
    return "whole, left behind" if is_left else "whole"


def _copies(state: StoredState, survey: MemorySurvey) -> int:
    return min(len(survey.places[member.snapshot]) for member in state.members)


def _protection(whole: StoredState | None, survey: MemorySurvey) -> str:
    if whole is None:
        return "none: no state is whole here"
    copies = _copies(whole, survey)
    return f"iteration {whole.span[-1]}, {copies} {'copies' if copies > 1 else 'copy'} of each snapshot"


def _timeline(newest: StoredSnapshot) -> str | None:
    led = newest.timeline
    return f"attempt {len(led)}, {led[-1][0]}, which continued after iteration {led[-1][1]}" if led else None


def _age_s(holdings: Iterable[SealedCopy], now_s: float) -> float | None:
    written = [holding.written_s for holding in holdings if holding.written_s is not None]
    return age_of(max(written, default=None), now_s)


def _layout(newest: StoredSnapshot) -> str | None:
    topology = newest.facts.topology
    degrees = [f"{name.upper()} {topology[name]}" for name in _DEGREES if topology.get(name)]
    return ", ".join(degrees) or None


def _flags(survey: MemorySurvey) -> Table:
    """The driver's flags with which the job was started, from the newest snapshot that has them."""
    words: list[str] = []
    for holding in sorted(survey.holdings, key=lambda held: (-held.snapshot.iteration, held.snapshot.rank)):
        command = holding.stored.command
        words = list(command.flags) if command else []
        if words:
            break
    rows: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not rows:
            rows.append([word, ""])
        else:
            rows[-1][1] = f"{rows[-1][1]} {word}".strip()
    return table("Flags", "flag | value", map(tuple, rows))


def _slots(found: Sequence[Slot], surveys: Sequence[MemorySurvey]) -> Table:
    rows = []
    for slot, survey in zip(found, surveys, strict=True):
        owner = slot.problem or f"{slot.owner or 'a process'}, {'alive' if slot.alive else 'gone'}"
        counts = len(survey.holdings), len(survey.torn), len(survey.writing)
        rows.append((slot.node, slot.job, slot.local_rank, slot.area, owner, slot.nbytes, *counts))
    return table("Slots", _SLOTS, rows)


def _standby(survey: MemorySurvey) -> Table:
    """Boundary logs, parked states and gradients, for recoveries of single stages."""
    groups: dict[tuple[str, int, str], list[SealedCopy]] = {}
    for holding in survey.holdings:
        if holding.snapshot.kind in STANDBY:
            groups.setdefault((holding.snapshot.kind, holding.snapshot.rank, holding.place), []).append(holding)
    rows = (
        (kind, rank, spans({held.snapshot.iteration for held in group}), sum(held.nbytes for held in group), place)
        for (kind, rank, place), group in sorted(groups.items())
    )
    return table("Logs and parked states", "kind | rank:count | iterations | size:bytes | held by", rows)


_SHARES = {"PLT MoC": plt_moc, "PLT PEC": plt_pec, "MLT": mlt}
"""MoC eq. 7, PEC eq. 4, MOETION eq. 6."""


@dataclass(frozen=True)
class Losses:
    """The faults of one timeline, oldest first. tokens: of the planned training; topk: of each token; 0: unknown."""

    records: tuple[LossRecord, ...]
    tokens: int | tuple[int, ...]
    topk: int | tuple[int, ...]

    @classmethod
    def newest(cls, holdings: Iterable[SealedCopy]) -> Losses | None:
        """Of the newest snapshot that has them; None where no strategy counted tokens."""
        for held in sorted(holdings, key=lambda one: (-one.snapshot.iteration, one.snapshot.rank)):
            remembered = held.stored.said.strategy
            if remembered and remembered.ledger:
                return cls(tuple(LossRecord(*row) for row in remembered.ledger.losses), *remembered.planned)
        return None

    def facts(self) -> tuple[Fact, ...]:
        """What all faults have cost, by the definitions of the papers."""
        lost = self._sums(len(self.records))
        return (
            Fact("Lost tokens of all faults", sum(lost), "count"),
            *(Fact(name, share, "share") for name, share in zip(_SHARES, self._shares(lost), strict=True)),
        )

    def table(self) -> Table:
        """A row for each fault; shares are those of all faults up to it."""
        rows = (
            (one.fault_iteration, one.restored_iteration, sum(one.lost_tokens), *self._shares(self._sums(at + 1)))
            for at, one in enumerate(self.records)
        )
        return table("Lost tokens", _LOSSES, rows)

    def _sums(self, faults: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(one.lost_tokens for one in self.records[:faults]), strict=True)))

    def _shares(self, lost: tuple[int, ...]) -> tuple[float | None, ...]:
        try:
            return tuple(float(share(lost or (0,), self.tokens, self.topk)) for share in _SHARES.values())
        except UsageError:
            return (None,) * len(_SHARES)
