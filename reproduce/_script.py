"""What every script here does when it is run: print its table, or write and draw it."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

ROOT = Path(__file__).resolve().parents[1]


def run(script: str) -> NoReturn:
    """Recompute the table or figure of `script`; exits with 2 and one line for wrong usage."""
    # The scripts are modules of a package; Python puts their own folder first instead of the one above it.
    sys.path[0] = str(ROOT)
    from moe_ckpt.megatron_core import skip_megatron_core

    skip_megatron_core()
    from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError

    name = Path(script).stem
    try:
        command(name).main(prog_name=f"reproduce/{name}.py", standalone_mode=False)
    except (click.ClickException, MoECheckpointError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"reproduce/{name}.py: {message}", err=True)
        sys.exit(2)
    sys.exit(0)


def command(name: str) -> click.Command:
    """The command line of one table or figure: `name` is a module here that has `figure() -> Figure`."""
    module = import_module(f"reproduce.{name}")

    @click.command(help=module.__doc__)
    @click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON, plain numbers.")
    @click.option("--out", type=click.Path(path_type=Path), metavar="FILE", multiple=True, help=".md or .json; repeat.")
    @click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
    @click.option("--docs", is_flag=True, help="Write its page in docs/results, with data and picture beside it.")
    def recompute(as_json: bool, out: tuple[Path, ...], plot: Path | None, docs: bool) -> None:
        from moe_ckpt.report import show

        shared = import_module("reproduce.figure")
        if docs:
            page = shared.page(name)
            out, plot = (*out, page, page.with_suffix(".json")), plot or page.with_suffix(".png")
        shared.check_targets(out, plot)
        made_by = f"python reproduce/{name}.py" + (" --docs" if docs else "")
        data = next((path for path in out if path.suffix == ".json"), None)
        figure = module.figure()
        for path in out:
            figure.write(path, made_by, plot, data)
        if plot is not None:
            figure.plot(plot)
        if as_json:
            click.echo(json.dumps(figure.data, indent=2))
        elif not out and plot is None:
            show(figure.report, False)

    return recompute
