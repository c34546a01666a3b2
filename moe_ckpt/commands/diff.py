"""`moe-ckpt diff`: where two checkpoints differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.report import Fact, Report, show, table
from moe_ckpt.report.progress import progress

if TYPE_CHECKING:
    from ..checkpoints.comparison import Difference
    from ..checkpoints.values import StateView

HELP = """Compare the training states at A and B bit by bit. Prints nothing when they are equal.

A and B are two dense checkpoints (an iteration, or a --save folder, of which the iteration is taken that its tracker
names), or two of a job's storage (a --moe-ckpt-persist-dir, of which the newest whole state is taken, or one of its
snapshots). A checkpoint that was saved with --save-experts is put together with the older iterations that it needs.

\b
    $ moe-ckpt diff run-a/iter_0000012 run-b/iter_0000012 && echo the same training state
    $ moe-ckpt diff run/checkpoints converted/          # is the conversion what training saved?
    $ moe-ckpt diff run-a/snapshots run-b/snapshots --all

Said are: entries that only one has, tensors of another dtype or shape, and the first tensor with other values: the
index of its first element that differs and both values, how many elements differ, and the largest difference. With
--all every tensor is read and each that differs is listed. One pair of tensors is in memory at a time.

As with `moe-ckpt digest`, the files do not matter, nor do the command line that was saved, the description of the
sharding, and the alignment padding of the distributed optimizer's buckets. Of snapshots the records and the trainer's
state are compared, not which job made them. What is stored under another parallel layout has other names or shapes;
compare a dense checkpoint with storage by converting it first (`moe-ckpt convert`).

Exit codes: 0 equal; 1 different, or one of them cannot be read; 2 wrong usage.
"""

_COLUMNS = "entry | what | first | second | index | differing:count | elements:count | largest difference"


@click.command(help=HELP)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help="List every tensor that differs, not the first one only.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, also when they are equal.")
@click.option(
    "--rows", type=click.IntRange(min=0), metavar="N", default=20, show_default=True, help="Rows to print; 0 for all.",
)  # fmt: skip
@click.pass_context
def diff(context: click.Context, first: str, second: str, everything: bool, as_json: bool, rows: int) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.checkpoints.places import locate

    locations = locate(first), locate(second)
    views = locations[0].state_view(), locations[1].state_view()
    if views[0].is_dense != views[1].is_dense:
        dense, stored = views if views[0].is_dense else views[::-1]
        raise UsageError(
            f"{dense.what} is a dense checkpoint and {stored.what} consists of snapshots of single ranks: convert these"
            " first (moe-ckpt convert --to dense), then compare"
        )
    total_bytes = sum(value.nbytes for view in views for value in view.values)
    with progress("comparing", total_bytes) as advance:
        found = tuple(_found(views, everything, advance))
    if as_json or found:
        show(_report(views, found, everything), as_json, rows or None)
    if found:
        context.exit(1)


def _found(
    views: tuple[StateView, StateView], everything: bool, advance: Callable[[int], None]
) -> Iterator[Difference]:
    from ..checkpoints.comparison import differing_values, structure

    first, second = views[0].values, views[1].values
    yield from structure(first, second)
    for difference in differing_values(first, second, advance):
        yield difference
        if not everything:
            return


def _report(views: tuple[StateView, StateView], found: Sequence[Difference], everything: bool) -> Report:
    facts = (
        Fact("First", views[0].what),
        Fact("Second", views[1].what),
        Fact("Equal", not found),
        Fact("Differences", len(found), "count"),
    )
    others = any(difference.what == "value" for difference in found) and not everything
    note = ("Only the first tensor with other values is listed; --all lists each of them.",) if others else ()
    differing = table("Differing", _COLUMNS, map(_row, found))
    return Report("Comparison of two training states", facts, (differing,), note)


def _row(found: Difference) -> tuple[str | float | list[int] | None, ...]:
    index = None if found.index is None else list(found.index)
    # JSON has no NaN and no infinities.
    largest = found.largest if found.largest is None or isfinite(found.largest) else str(found.largest)
    return found.name, found.what, found.first, found.second, index, found.differing, found.elements, largest
