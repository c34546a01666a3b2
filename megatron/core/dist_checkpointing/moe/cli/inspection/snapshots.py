"""Reports on snapshots: in storage, and in the memory of nodes, where a job may be busy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from moe_ckpt.report import Columns, Fact, Report, Table

from ...errors import UnreadableCheckpoint
from ...examine.areas import Slot, slots
from ...examine.survey import Holding, Survey, operator_copies, survey_slot, survey_storage
from ...examine.windows import State, Stored
from ...ports import SnapshotId, Store
from ...recover.table import spans
from ...store.manifest import FORMAT_VERSION
from ...types import STANDBY

_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_WINDOWS: Columns = (
    *(("iterations", "text"), ("kind", "text"), ("snapshots", "count"), ("of", "count"), ("state", "text")),
    *(("copies", "count"), ("size", "bytes"), ("age", "seconds"), ("job", "text")),
)
_OPERATORS: Columns = (
    *(("operator", "text"), ("part", "text"), ("size", "bytes"), ("iteration", "count"), ("ranks", "text")),
    *(("held by", "text"), ("copies", "count")),
)
_SLOTS: Columns = (
    *(("node", "text"), ("job", "text"), ("local rank", "count"), ("area", "text"), ("owner", "text")),
    *(("size", "bytes"), ("sealed", "count"), ("torn", "count"), ("being written", "count")),
)
_STANDBY: Columns = (
    *(("kind", "text"), ("rank", "count"), ("iterations", "text"), ("size", "bytes"), ("held by", "text")),
)


def storage_report(place: str, store: Store, only: SnapshotId | None, now_s: float) -> Report:
    """All snapshots of a --moe-ckpt-persist-dir, or `only` one. Raises UnreadableCheckpoint if none is sealed."""
    survey = survey_storage(store, only)
    if not survey.holdings:
        why = f": {survey.torn[0].why}" if survey.torn else ""
        raise UnreadableCheckpoint(f"{place} has no sealed snapshot, there is nothing to restore from{why}")
    tables = (*_tables(survey, now_s), _flags(survey))
    if only is not None:
        notes = ("Only this snapshot was looked at: what belongs to it lies beside it.",)
        return Report(f"The {only} in {place}", _facts(survey, now_s), tables, notes)
    lost = "No state is whole here: a recovery takes another place, and moe-ckpt verify says what is missing."
    facts = (*_facts(survey, now_s), *_whole_facts(survey))
    return Report(f"Snapshots in {place}", facts, tables, () if survey.newest_whole else (lost,))


def memory_report(folder: Path, now_s: float) -> Report:
    """A memory dir, or what is below one folder in it; a job that uses it is not disturbed."""
    found = slots(folder)
    surveys = [survey_slot(slot) for slot in found]
    survey = Survey(
        tuple(holding for one in surveys for holding in one.holdings),
        tuple(torn for one in surveys for torn in one.torn),
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


def _facts(survey: Survey, now_s: float) -> tuple[Fact, ...]:
    states = _of_states(survey)
    newest = max(states, key=lambda one: (one.stored.timeline[-1:], one.snapshot.iteration)).stored
    return (
        Fact("Newest iteration", max(holding.snapshot.iteration for holding in states), "count"),
        Fact("Age", _age_s(states, now_s), "seconds"),
        Fact("Bytes", sum(holding.nbytes for holding in survey.holdings), "bytes"),
        Fact("Snapshots", len(survey.holdings), "count"),
        Fact("Torn", len(survey.torn), "count"),
        Fact("World size", newest.world_size or None, "count"),
        Fact("Layout", _layout(newest)),
        Fact("Strategy", newest.facts.scalars.get("made_by")),
        Fact("Job", newest.facts.job),
        Fact("Timeline", _timeline(newest)),
        Fact("Format", f"snapshot {FORMAT_VERSION}"),
    )


def _whole_facts(survey: Survey) -> tuple[Fact, ...]:
    whole, found = survey.newest_whole, survey.states
    return (
        Fact("Newest whole state", whole.span[-1] if whole else None, "count"),
        Fact("Whole windows", f"{sum(not state.lacking for state, _ in found)} of {len(found)}"),
        Fact("Protection", _protection(whole, survey)),
    )


def _of_states(survey: Survey) -> tuple[Holding, ...]:
    """Without logs and what was parked, if there is anything else."""
    return tuple(one for one in survey.holdings if one.snapshot.kind not in STANDBY) or survey.holdings


def _tables(survey: Survey, now_s: float) -> tuple[Table, ...]:
    by_snapshot = {holding.snapshot: holding for holding in survey.holdings}
    windows = []
    for state, is_left in survey.states:
        members = [by_snapshot[one.snapshot] for one in state.members]
        counts = len(members), len(members) + len(state.lacking), _state(state, is_left), _copies(state, survey)
        size, age_s = sum(member.nbytes for member in members), _age_s(members, now_s)
        span, kind = spans(set(state.span)), state.leading.snapshot.kind
        windows.append((span, kind, *counts, size, age_s, state.leading.facts.job))
    operators = tuple(
        (str(one.operator), one.part, one.nbytes, one.iteration, spans(set(one.ranks)), list(one.places), one.copies)
        for one in operator_copies(survey.holdings)
    )
    torn = tuple((str(one.snapshot), one.why) for one in survey.torn)
    return (
        Table("Windows", _WINDOWS, tuple(windows)),
        Table("Operators", _OPERATORS, operators),
        Table("Torn snapshots", (("snapshot", "text"), ("why", "text")), torn),
    )


def _state(state: State, is_left: bool) -> str:
    if state.lacking:
        iteration, rank = state.lacking[0]
        more = f" and {len(state.lacking) - 1} more" if len(state.lacking) > 1 else ""
        return f"lacks rank {rank} after iteration {iteration}{more}"
    return "whole, left behind" if is_left else "whole"


def _copies(state: State, survey: Survey) -> int:
    return min(len(survey.places[one.snapshot]) for one in state.members)


def _protection(whole: State | None, survey: Survey) -> str:
    if whole is None:
        return "none: no state is whole here"
    copies = _copies(whole, survey)
    return f"iteration {whole.span[-1]}, {copies} {'copies' if copies > 1 else 'copy'} of each snapshot"


def _timeline(newest: Stored) -> str | None:
    led = newest.timeline
    return f"attempt {len(led)}, {led[-1][0]}, which went on after iteration {led[-1][1]}" if led else None


def _age_s(holdings: Iterable[Holding], now_s: float) -> float | None:
    written = [holding.written_s for holding in holdings if holding.written_s is not None]
    return max(0.0, now_s - max(written)) if written else None


def _layout(newest: Stored) -> str | None:
    topology = newest.facts.topology
    degrees = [f"{name.upper()} {topology[name]}" for name in _DEGREES if topology.get(name)]
    return ", ".join(degrees) or None


def _flags(survey: Survey) -> Table:
    """Those of the driver with which the job was started, as the newest snapshot that says them has it."""
    told: list[str] = []
    for holding in sorted(survey.holdings, key=lambda one: (-one.snapshot.iteration, one.snapshot.rank)):
        trainer = cast("Mapping[str, Any]", holding.stored.facts.scalars.get("trainer") or {})
        told = list((trainer.get("command") or {}).get("flags", ()))
        if told:
            break
    rows: list[list[str]] = []
    for word in told:
        if word.startswith("--") or not rows:
            rows.append([word, ""])
        else:
            rows[-1][1] = f"{rows[-1][1]} {word}".strip()
    return Table("Flags", (("flag", "text"), ("value", "text")), tuple(map(tuple, rows)))


def _slots(found: Sequence[Slot], surveys: Sequence[Survey]) -> Table:
    rows = []
    for slot, survey in zip(found, surveys, strict=True):
        owner = f"{slot.owner or 'a process'}, {'alive' if slot.alive else 'gone'}"
        counts = len(survey.holdings), len(survey.torn), len(survey.writing)
        rows.append((slot.node, slot.job, slot.local_rank, slot.area, owner, slot.nbytes, *counts))
    return Table("Slots", _SLOTS, tuple(rows))


def _standby(survey: Survey) -> Table:
    """Boundary logs, parked states and gradients, for recoveries of single stages."""
    groups: dict[tuple[str, int, str], list[Holding]] = {}
    for holding in survey.holdings:
        if holding.snapshot.kind in STANDBY:
            groups.setdefault((holding.snapshot.kind, holding.snapshot.rank, holding.place), []).append(holding)
    rows = tuple(
        (kind, rank, spans({one.snapshot.iteration for one in held}), sum(one.nbytes for one in held), place)
        for (kind, rank, place), held in sorted(groups.items())
    )
    return Table("Logs and parked states", _STANDBY, rows)
