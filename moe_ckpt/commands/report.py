"""`moe-ckpt report`: one page about what jobs did, and what protecting them cost."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .values import Duration

HELP = """Make one page of HTML from what jobs wrote: what happened, what protection cost, where the time went.

RUN is a file of --metrics-jsonl, a folder with one (metrics.jsonl, reports or any *.jsonl), or the folder of a drill
(scripts/chaos_cpu.sh). With several runs the page compares them. Files of running jobs, of several attempts, and those
that end in the middle of a line are fine.

\b
    $ moe-ckpt report run/metrics.jsonl                       # writes report.html
    $ moe-ckpt report today/ yesterday/ --out both.html
    $ moe-ckpt report run/metrics.jsonl --watch               # serves it on http://127.0.0.1:8000 while the job runs

The page is one file that needs nothing from elsewhere, and no scripts. It has loss with faults and repeated iterations,
stalls, protection and persistence, each recovery as a bar of its parts with its table, ETTR so far, memory, bytes, lost
tokens, and changes of window and order.

Exit codes: 0 done; 1 a file cannot be read or has no line of a job; 2 wrong usage, such as a port in use.
"""


@click.command(help=HELP)
@click.argument("paths", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, metavar="FILE",
    help="The page; not with --watch.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Serve the page on localhost until Ctrl-C; it renews itself.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, metavar="N", help="With --watch; 0: any.",
)  # fmt: skip
@click.option(
    "--every", "every_s", type=Duration(), default="5s", show_default=True, metavar="TIME",
    help="With --watch: how often it renews itself.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of making a page.")
def report(paths: tuple[Path, ...], out: Path, watch: bool, port: int, every_s: float, as_json: bool) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.runs.page import render
    from moe_ckpt.runs.sources import read_runs

    if watch:
        _serve(paths, port, every_s)
        return
    if as_json:
        from moe_ckpt.report import show
        from moe_ckpt.runs.figures import figures_of

        show(figures_of(read_runs(paths)), as_json=True)
        return
    _check_output(out)
    out = Path(os.path.realpath(out))
    page = render(read_runs(paths), time.time())
    from megatron.core.dist_checkpointing.moe.storage.system import write_atomically

    try:
        write_atomically(out, page.encode())
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    click.echo(f"{out}: {len(page.encode()) / 1e6:.2f} MB")


def _check_output(out: Path) -> None:
    """Before anything is read, which may take a while. Raises UsageError where --out cannot be written."""
    is_other = os.path.lexists(out) and not os.path.isfile(out)  # such as /dev/null, which the page would replace
    if is_other or not os.path.isdir(out.parent) or not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out} cannot be written: give a file in a folder that exists and may be written to")


def _serve(paths: tuple[Path, ...], port: int, every_s: float) -> None:
    from moe_ckpt.runs.sources import read_runs
    from moe_ckpt.runs.watch import LivePage, server

    read_runs([path for path in paths if path.exists()] or paths)  # what is wrong from the start is said here
    with server(LivePage(paths, every_s), port) as serving:
        click.echo(f"http://{serving.server_address[0]!s}:{serving.server_address[1]} until Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            serving.serve_forever()
