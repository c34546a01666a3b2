"""`moe-ckpt inspect`: what is in a place, who holds what, and what its tensors look like."""

from __future__ import annotations

import time

import click

from moe_ckpt.report import Report, show

from ..errors import UnreadableCheckpoint
from ..examine.recognition import Content, Recognized, recognized
from ..ports import SnapshotId, Store

HELP = """Say what PLACE holds: iterations, operators and who has them, age, bytes, layout, what is whole or torn.

PLACE is any of these, and is recognized by itself:

\b
    a --save folder, or one iteration in it      saved here or by stock Megatron-Core (torch_dist)
    a --moe-ckpt-persist-dir, or one snapshot    a folder, or a URL that fsspec knows
    a --moe-ckpt-memory-dir                      or the folder of one node, job or slot in it; a job may be running

\b
    $ moe-ckpt inspect run/checkpoints
    $ moe-ckpt inspect s3://bucket/run/windows --rows 0
    $ moe-ckpt inspect /dev/shm/moe-ckpt-$USER
    $ moe-ckpt inspect run/checkpoints/iter_0000500 --tensors '*router*'

Without --tensors only names, indices and manifests are read, so it takes seconds whatever the size. With --tensors each
chosen tensor is read whole, one at a time: dtype, shape, smallest and largest value, mean, standard deviation, and how
many elements are infinite or NaN. Of storage and memory that is the newest iteration that is there; a glob pattern
after --tensors chooses by name, so give PLACE first.

"whole" means that names and manifests fit together; moe-ckpt verify reads every byte. The copies of an operator are the
places that have the newest state of all its shards. A job's memory on other nodes cannot be seen from this one.

Exit codes: 0 PLACE was understood; 1 what is there is damaged, half-written, of another framework or of a newer
version, and a line says so; 2 wrong usage, such as a place that does not exist.
"""


@click.command(help=HELP)
@click.argument("place", type=click.Path())
@click.option(
    "--tensors", is_flag=False, flag_value="*", metavar="[PATTERN]", help="Statistics of the tensors that match a glob."
)
@click.option("--rows", type=click.IntRange(min=0), default=20, show_default=True, help="Of each table; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON, all rows, with plain numbers.")
def inspect(place: str, tensors: str | None, rows: int, as_json: bool) -> None:
    found = recognized(place)
    report, why = _tensors(found, tensors) if tensors is not None else _overview(found, time.time())
    show(report, as_json, rows or None)
    if why:
        raise UnreadableCheckpoint(why)


def _overview(found: Recognized, now_s: float) -> tuple[Report, str]:
    """The report, and what is wrong with it, if anything is."""
    if found.content is Content.SAVES:
        from .inspection.dense import saves_report

        return saves_report(found.path, now_s)
    if found.content is Content.ITERATION:
        from .inspection.dense import iteration_report

        return iteration_report(found.path, now_s)
    from .inspection.snapshots import memory_report, storage_report

    if found.content is Content.MEMORY:
        return memory_report(found.path, now_s), ""
    store, only = _opened(found)
    return storage_report(found.place, store, only, now_s), ""


def _tensors(found: Recognized, pattern: str) -> tuple[Report, str]:
    from .megatron_core import load_megatron_core

    load_megatron_core()
    from .inspection.tensors import dense_tensors, newest_in_memory, newest_in_storage, snapshot_tensors

    if found.content in (Content.SAVES, Content.ITERATION):
        return dense_tensors(found.path, pattern), ""
    if found.content is Content.MEMORY:
        return snapshot_tensors(found.place, newest_in_memory(found.path), pattern), ""
    store, only = _opened(found)
    chosen = {only: store.open} if only else newest_in_storage(store)
    return snapshot_tensors(found.place, chosen, pattern), ""


def _opened(found: Recognized) -> tuple[Store, SnapshotId | None]:
    """The storage of a place, and the one snapshot in it that is meant, if it is one."""
    from ..examine.storage import open_storage, snapshot_at

    if found.content is Content.STORAGE:
        return open_storage(found.place), None
    folder, snapshot = snapshot_at(found.place)
    return open_storage(folder), snapshot
