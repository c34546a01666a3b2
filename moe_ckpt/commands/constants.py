"""`moe-ckpt simulate constants`: every constant of the simulator, with where it comes from."""

from __future__ import annotations

import click

from moe_ckpt.report import Fact, Report, show, table

from ..simulator.sources import sourced


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, plain numbers.")
def constants(as_json: bool) -> None:
    """Print each constant of the simulator, and whether it is published, measured, fitted or assumed.

    \b
    $ moe-ckpt simulate constants
    """
    found = tuple(sourced())
    kinds = {kind: sum(one.kind == kind for one in found) for kind in ("published", "measured", "fitted", "assumed")}
    rows = ((one.name, "-" if one.value is None else f"{one.value}", one.kind, one.source) for one in found)
    report = Report(
        "Constants of the simulator",
        tuple(Fact(kind.capitalize(), count, "count") for kind, count in kinds.items()),
        (table("Constants", "name | value | kind | source", rows),),
        ("Of clusters and models: `source` and `note` of moe_ckpt/simulator/presets/*.json.",),
    )
    show(report, as_json)
