"""`moe-ckpt inspect`: what is in a place, who holds what, and what its tensors look like."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.report import show

HELP = """Say what PLACE holds: iterations, operators and who has them, age, bytes, layout, what is whole or torn.

PLACE is any of these, and is recognized by itself:

\b
    a --save folder, or one iteration in it      saved here or by stock Megatron-Core (torch_dist)
    a --moe-ckpt-persist-dir, or one snapshot    a folder, or a URL that fsspec knows
    a --moe-ckpt-memory-dir                      or the folder of one node, job or slot in it; a job may be running

\b
    $ moe-ckpt inspect run/checkpoints
    $ moe-ckpt inspect s3://bucket/run/snapshots --rows 0
    $ moe-ckpt inspect /dev/shm/moe-ckpt-$(id -un)
    $ moe-ckpt inspect run/checkpoints/iter_0000500 --tensors '*router*'

Without --tensors only names, indices and manifests are read, so it takes seconds whatever the size. With --tensors each
chosen tensor is read whole, one at a time: dtype, shape, smallest and largest value, mean, standard deviation, and how
many elements are infinite or NaN. Of storage and memory that is the newest iteration that is there; a glob pattern
after --tensors chooses by name, so give PLACE first.

"whole" means that names and manifests fit together; moe-ckpt verify reads every byte. The copies of an operator are the
places that have the newest state of all its shards. A job's memory on other nodes cannot be seen from this one.

Exit codes: 0 PLACE was understood; 1 what is there is damaged, half-written, without a tracker, of another framework or
of a newer version, and a line says so; 2 wrong usage, such as a place that does not exist.
"""

UNCHECKED = "Bytes were not checked: moe-ckpt verify {} reads them."


@click.command(help=HELP)
@click.argument("place", type=click.Path())
@click.option(
    "--tensors", is_flag=False, flag_value="*", metavar="[PATTERN]", help="Statistics of the tensors that match a glob."
)
@click.option(
    "--rows", type=click.IntRange(min=0), metavar="N", default=20, show_default=True, help="Of each table; 0 for all.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON, all rows, with plain numbers.")
def inspect(place: str, tensors: str | None, rows: int, as_json: bool) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.checkpoints.places import locate

    location = locate(place)
    if tensors is not None:
        show(location.inspect_tensors(tensors), as_json, rows or None)
        return
    inspection = location.inspect(time.time())
    report = inspection.report
    show(replace(report, notes=(*report.notes, UNCHECKED.format(place))), as_json, rows or None)
    if inspection.problem:
        raise UnreadableCheckpoint(inspection.problem)
