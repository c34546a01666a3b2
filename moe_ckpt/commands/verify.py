"""`moe-ckpt verify`: whether a checkpoint is what was saved, byte by byte, and complete."""

from __future__ import annotations

import click

from moe_ckpt.report import Fact, Report, printable, show, table
from moe_ckpt.report.progress import progress

HELP = """Read all of PLACE and say whether it is what was saved.

PLACE is an iteration (iter_0000012), a --save directory, a --moe-ckpt-persist-dir (a folder or a URL), one snapshot
of it, or a --moe-ckpt-memory-dir, also while its job runs. Nothing is changed and nothing that is stored is run.

\b
    $ moe-ckpt verify checkpoints/                  # all iterations, their chains, the tracker
    $ moe-ckpt verify checkpoints/iter_0000012      # this one, and those that hold experts for it
    $ moe-ckpt verify s3://bucket/run/snapshots       # every record of every snapshot, and whether windows are whole
    $ moe-ckpt verify /dev/shm/moe-ckpt-$(id -un) --json

Every checksum is compared: of each file of a dense checkpoint (moe_ckpt_integrity.json has them), of each record of a
snapshot, of every manifest. Missing files and snapshots, names and numbers that do not fit together, and a place with
nothing in it to restore from are findings too. Each is one line: the path, what was found, what was expected. Without
its tracker a job restores nothing from a --save directory.

A checkpoint of stock Megatron has no checksums. It is then checked for completeness and by reading every tensor, and
the report says that single bytes could not be checked.

\b
Exit codes: 0 all is well; 1 nothing can be restored, or PLACE is nothing that can be read; 2 wrong usage; 3 something
is damaged or missing, and a state can be restored all the same: the newest one is named.
"""

USABLE = 3
"""Exit code where there are findings and something to restore from."""


@click.command(help=HELP)
@click.argument("place")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option(
    "--rows", type=click.IntRange(min=0), metavar="N", default=20, show_default=True,
    help="Rows of a table; 0 for all.",
)  # fmt: skip
@click.pass_context
def verify(context: click.Context, place: str, as_json: bool, rows: int) -> None:
    """See `HELP`; the option above each parameter explains it."""
    # Only when there is something to read: --help stays quick.
    from moe_ckpt.checkpoints.places import locate

    location = locate(place)
    with progress("verifying", location.size_bytes()) as advance:
        result = location.verify(advance)
    found = ((finding.path, finding.item, finding.found, finding.expected) for finding in result.findings)
    findings = table("findings", "path | item | found | expected", found)
    parts = ((part.part, part.how, part.items, part.nbytes) for part in result.checked)
    checked = table("checked", "part | how | items:count | size:bytes", parts)
    usable = bool(result.findings and result.restores)
    verdict = "usable, with findings" if usable else "damaged" if result.findings else "intact"
    facts = [
        Fact("holds", location.kind.value),
        Fact("verdict", verdict),
        Fact("read", sum(part.nbytes for part in result.checked), "bytes"),
    ]
    if result.restores is not None:
        facts.insert(2, Fact("newest state", result.restores or "none"))
    report = Report(place, tuple(facts), (checked, findings) if as_json else (checked,), result.unchecked)
    show(report, as_json, rows or None)
    if not as_json:
        for finding in result.findings:
            click.echo(f"finding: {printable(str(finding))}")
    if result.findings:
        context.exit(USABLE if usable else 1)
