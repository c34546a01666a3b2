"""`moe-ckpt convert`: an ordinary dense checkpoint from what `--moe-ckpt-persist-dir` holds."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import MoECheckpointError, UsageError

HELP = """Turn the newest snapshots in STORAGE into an ordinary torch_dist checkpoint in OUT.

STORAGE is what a job was given as --moe-ckpt-persist-dir. No single snapshot of a sparse window is a whole state, so
the job is started once more, on the CPU and with as many processes as it had ranks. They recover the state, replay the
iterations of the window with the recorded flags and the same data, save OUT/iter_NNNNNNN, and end:

\b
    $ moe-ckpt convert --to dense run/windows run/dense
    $ scripts/train_cpu.sh --load run/dense ...          # goes on from there

Flags after -- win over the recorded ones, as when the data was moved:

\b
    $ moe-ckpt convert --to dense run/windows run/dense -- --data-path /new/place/corpus

The parallel layout stays that of the job; the checkpoint can then be loaded under another one as any other. Random
states travel only within one kind of device, so a job on GPUs cannot be replayed on the CPU to the last bit: such
snapshots are refused.
"""


@click.command(help=HELP)
@click.option("--to", type=click.Choice(["dense"]), required=True, help="What to make of it.")
@click.argument("storage")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def convert(context: click.Context, to: str, storage: str, out: Path, flags: tuple[str, ...]) -> None:
    from .conversion import densified, newest, opened  # brings numpy, which other commands start without

    source = newest(opened(storage), storage)
    target = out / f"iter_{source.last:07d}"
    if target.exists():
        raise UsageError(f"{target} exists already; remove it or choose another folder")
    code = densified(source, storage, out, flags)
    if code:
        context.exit(code)
    if not target.exists():
        raise MoECheckpointError(f"{target} was not written; the lines above say why")
    click.echo(f"{target} holds the whole state after iteration {source.last}")
