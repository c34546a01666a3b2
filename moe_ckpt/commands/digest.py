"""`moe-ckpt digest`: one line per component of a checkpoint, to be compared by diff."""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

from .values import require_place

HELP = """Print one digest per component of the torch_dist checkpoint in DIRECTORY.

DIRECTORY is an iteration (iter_0000012), or a --save directory, of which the iteration is taken that
latest_checkpointed_iteration.txt names. The digests (xxh3, 128 bit) depend on the values only, not on how many
files or ranks wrote them, so two runs that reached the same state print the same lines:

\b
    $ moe-ckpt digest run-a/iter_0000012 > a.txt
    $ moe-ckpt digest run-b/iter_0000012 > b.txt
    $ diff a.txt b.txt && echo the same training state

Each line has the component, its digest, and the number of bytes hashed. Components: model weights, master weights
(the optimizer's fp32 parameters), one line per moment (exp_avg, exp_avg_sq, ...), router buffers (expert bias),
optimizer (param groups, step), loss scaler, rng, scheduler, data position (iteration, consumed samples), and other
for everything else. The state is compared as it was saved: a different parallel layout, or another sharding of the
optimizer, gives other digests for what it stores differently.

Left out are: the saved command line (args), except the data position; the description of the sharding (content
metadata); and, in distributed-optimizer buckets, the alignment padding between parameters, which Megatron-Core never
initialises.

Exit codes: 0 printed; 1 DIRECTORY is damaged or not whole; 2 wrong usage. Every file of which there is a checksum is
compared with it first.
"""


@click.command(help=HELP)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same facts, and the number of entries, as JSON.")
def digest(directory: Path, as_json: bool) -> None:
    """See `HELP`; the option above each parameter explains it."""
    require_place(directory)
    # torch is imported only when there is something to read: --help stays quick.
    from ..dense.digest import digest_components, total_digest
    from ..dense.integrity import damaged, identities, refuse_saved_again, sums_of
    from ..dense.merged import open_alone

    folder = open_alone(directory).directory
    before = identities([folder])
    # Once more, now that its files are known: a job that goes back saves an iteration again, and swaps the folder.
    checkpoint = open_alone(folder)
    if damage := damaged(sums_of([checkpoint])):
        raise UnreadableCheckpoint(f"{damage[0]}; restore the file or take another iteration")
    components = digest_components(checkpoint)
    refuse_saved_again(before)
    lines = (*components, total_digest(components))
    if as_json:
        facts = [
            {"component": line.component, "digest": line.digest, "entries": line.entries, "bytes": line.value_bytes}
            for line in lines
        ]
        click.echo(json.dumps({"components": facts[:-1], "total": facts[-1]}, indent=2))
        return
    width = max(len(line.component) for line in lines)
    for line in lines:
        click.echo(f"{line.component:<{width}}  {line.digest}  {line.value_bytes} bytes")
