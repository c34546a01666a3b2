"""`moe-ckpt convert`: an ordinary dense checkpoint from a job's storage or from a chain of partial ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from moe_ckpt.checkpoints.location import LocationKind
from moe_ckpt.checkpoints.recognition import recognize
from moe_ckpt.megatron_core import load_megatron_core
from moe_ckpt.report.progress import progress

from ..dense.names import new_iteration_folder

HELP = """Turn SOURCE into an ordinary torch_dist checkpoint in OUT, which any Megatron loads.

SOURCE is the storage of a job (its --moe-ckpt-persist-dir), of which the newest state is taken, or a checkpoint that
was saved with --save-experts: an iteration, or the --save folder for its newest one.

A checkpoint with some of the experts is put together with the older iterations beside it that hold the others. That
takes memory for one piece of a tensor, and no job:

\b
    $ moe-ckpt convert --to dense run/checkpoints run/dense
    $ scripts/train_cpu.sh --load run/dense ...          # goes on from there

No single snapshot of a sparse window in storage is a whole state, so the job is started once more, on the CPU and with
as many processes as it had ranks. They recover the state, replay the iterations of the window with the recorded flags
and the same data, save OUT/iter_NNNNNNN, and end; what they say goes to standard error. Flags after -- win over the
recorded ones, as when the data was moved:

\b
    $ moe-ckpt convert --to dense run/windows run/dense
    $ moe-ckpt convert --to dense run/windows run/dense -- --data-path /new/place/corpus

The parallel layout stays that of the job; the checkpoint can then be loaded under another one as any other. Random
states travel only within one kind of device, so a job on GPUs cannot be replayed on the CPU to the last bit: such
snapshots are refused.

Exit codes: 0 written; 1 SOURCE is damaged or not whole, or the job failed; 2 wrong usage, such as an OUT that has that
iteration, or another checkpoint, already; every byte of a chain is compared with its checksum before it is taken.
"""


@click.command(help=HELP)
@click.option("--to", type=click.Choice(["dense"]), required=True, help="What to make of it.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def convert(context: click.Context, to: str, as_json: bool, source: str, out: Path, flags: tuple[str, ...]) -> None:
    kind = recognize(source)
    if kind is LocationKind.STORAGE:
        target, iteration = _from_storage(context, source, out, flags)
    else:
        target, iteration = _from_chain(source, kind, out, flags)
    if as_json:
        click.echo(json.dumps({"checkpoint": str(target), "iteration": iteration}))
    else:
        click.echo(f"{target} holds the whole state after iteration {iteration}")


def _from_storage(context: click.Context, source: str, out: Path, flags: tuple[str, ...]) -> tuple[Path, int]:
    from moe_ckpt.checkpoints.persist_dir import open_persist_dir  # brings numpy, which other commands start without

    from .conversion import densified, newest

    storage = open_persist_dir(source)
    window = newest(storage)
    target = new_iteration_folder(out, window.last)
    code = densified(window, storage, out, flags)
    if code:
        context.exit(code)
    if not target.exists():
        raise MoECheckpointError(f"{target} was not written; the lines above say why")
    return target, window.last


def _from_chain(source: str, kind: LocationKind, out: Path, flags: tuple[str, ...]) -> tuple[Path, int]:
    if kind not in (LocationKind.SAVES, LocationKind.ITERATION):
        raise UsageError(
            f"{source} is {kind.value}: give the --moe-ckpt-persist-dir of the job, or a checkpoint that"
            " was saved with --save-experts"
        )
    if flags:
        raise UsageError(f"{source} is converted without a job: leave out the flags after --, {' '.join(flags)}")
    load_megatron_core()
    from ..dense.export import export_merged

    try:
        target = export_merged(Path(source), out, partial(progress, "converting"))
    except OSError as error:
        raise MoECheckpointError(f"{error.filename or out} cannot be written: {error.strerror or error}") from error
    return target, int(target.name.rpartition("_")[2])
