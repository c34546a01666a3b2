"""`moe-ckpt sign`: dense checkpoints that a job with a secret will take."""

from __future__ import annotations

import json

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.storage.manifest import is_keyed
from megatron.core.dist_checkpointing.moe.storage.small_files import SECRET_FILE
from moe_ckpt.report.progress import progress

HELP = """Sign the dense checkpoints at PLACE with the secret of a job.

A job with --moe-ckpt-secret-file takes no checkpoint that was saved without the secret: anybody may have made it. Sign
one that you trust, such as the weights that a job starts from. PLACE is an iteration, or a --save folder, of which all
complete iterations are signed. The file of the secret is named by MOE_CKPT_SECRET_FILE.

\b
    $ export MOE_CKPT_SECRET_FILE=~/.moe-ckpt-secret
    $ moe-ckpt sign pretrained/

Each file is compared with the checksums that the checkpoint came with, if it came with any; then its integrity file is
written again. Nothing else is changed. An iteration that has the signature already is verified.

Exit codes: 0 all are signed; 1 one is damaged, or signed with another secret; 2 wrong usage, such as no secret.
"""


@click.command(help=HELP)
@click.argument("place")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def sign(place: str, as_json: bool) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.checkpoints.files import length_bytes
    from moe_ckpt.checkpoints.places import locate
    from moe_ckpt.dense.signing import sign as sign_folder

    if not is_keyed():
        raise UsageError(f"there is no secret to sign with: give the file of the job's in {SECRET_FILE}")
    folders = locate(place).signable()
    done = {}
    with progress("signing", sum(map(length_bytes, folders))) as advance:
        for folder in folders:
            done[str(folder)] = sign_folder(folder, advance)
    if as_json:
        click.echo(json.dumps({"signed": [name for name, is_new in done.items() if is_new], "iterations": list(done)}))
        return
    for name, is_new in done.items():
        click.echo(f"{name} {'is signed' if is_new else 'was signed before, and is intact'}")
