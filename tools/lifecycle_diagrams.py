#!/usr/bin/env python3
"""Write docs/internals/lifecycle.md from the tables in policy/lifecycle.py and policy/parking.py."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from made_page import write_or_check

from megatron.core.dist_checkpointing.moe.policy import parking
from megatron.core.dist_checkpointing.moe.policy.lifecycle import TABLES, TransitionTable
from megatron.core.dist_checkpointing.moe.policy.parking import PARKING, Cause, ParkContents, StepPhase

PAGE = Path(__file__).resolve().parents[1] / "docs" / "internals" / "lifecycle.md"
HEADING = """# Lifecycles

Made by `python tools/lifecycle_diagrams.py` from the tables in `lifecycle.py` and `parking.py` of
`megatron/core/dist_checkpointing/moe/policy/`; change them there. They are what runs: `snapshot/tracker.py` and
`step_guard.py` ask them for every change, and an event that no arrow from a state names is an error in that state.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEADING, *map(section, TABLES), *parking_section()])


def section(table: TransitionTable[Any, Any]) -> str:
    """Heading, what the table stands for, diagram, and a line for each state, event and transition."""
    states, (_, event) = type(table.starts[0]), next(iter(table.rows))
    return "\n".join(
        [
            f"## {table.title}",
            "",
            inspect.cleandoc(states.__doc__ or ""),
            "",
            "```mermaid",
            *diagram(table),
            "```",
            "",
            *meanings("State", states),
            "",
            *meanings("Event", type(event)),
            "",
            "| In | At | Follows | Because |",
            "|---|---|---|---|",
            *(
                f"| `{before.name}` | `{event.name}` | `{after.name}` | {why} |"
                for (before, event), (after, why) in table.rows.items()
            ),
            "",
        ]
    )


def diagram(table: TransitionTable[Any, Any]) -> Iterator[str]:
    """Mermaid's lines; events with the same way from state to state share an arrow."""
    arrows: dict[tuple[enum.Enum, enum.Enum], list[str]] = {}
    for (state, event), (after, _) in table.rows.items():
        arrows.setdefault((state, after), []).append(event.name)
    order = list(type(table.starts[0]))
    yield "stateDiagram-v2"
    for start in table.starts:
        yield f"    [*] --> {start.name}"
    for state, after in sorted(arrows, key=lambda arrow: (order.index(arrow[0]), order.index(arrow[1]))):
        yield f"    {state.name} --> {after.name}: {', '.join(arrows[state, after])}"
    with_exits = {state for state, _ in table.rows}
    for state in order:
        if state not in with_exits:
            yield f"    {state.name} --> [*]"


def meanings(title: str, members: Iterable[enum.Enum]) -> Iterator[str]:
    """A table with the sentence of each state or event."""
    yield f"| {title} | Meaning |"
    yield "|---|---|"
    for member in members:
        yield f"| `{member.name}` | {member.value} |"


def parking_section() -> Iterator[str]:
    """What is kept in which phase of a step, and why, by cause."""
    yield from ("## Parking", "", inspect.cleandoc(parking.__doc__ or ""), "")
    yield from meanings("Phase", StepPhase)
    for title, members in (("Cause", Cause), ("Kept", ParkContents)):
        yield ""
        yield from meanings(title, members)
    yield from ("", f"| Phase | {' | '.join(f'`{cause.name}`' for cause in Cause)} |", "|---" * (1 + len(Cause)) + "|")
    for phase in StepPhase:
        yield f"| `{phase.name}` | {' | '.join(f'`{PARKING[phase, cause].keep.name}`' for cause in Cause)} |"
    yield ""
    for why in dict.fromkeys(rule.why for rule in PARKING.values()):
        cells = [f"`{phase.name}`/`{cause.name}`" for (phase, cause), rule in PARKING.items() if rule.why == why]
        yield f"- {', '.join(cells)}: {why}"
    yield ""


def main(arguments: list[str]) -> int:
    """As `write_or_check`."""
    return write_or_check(arguments, __doc__, PAGE, render, "the tables say", __file__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
