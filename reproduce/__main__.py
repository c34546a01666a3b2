"""`python -m reproduce NAME`: print a table or figure, or write and draw it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from moe_ckpt.megatron_core import skip_megatron_core

skip_megatron_core()

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError  # noqa: E402
from moe_ckpt.report import show  # noqa: E402
from reproduce.figure import Figure, check_targets  # noqa: E402
from reproduce.figures import FIGURES  # noqa: E402

_ROWS = "\n".join(f"{row.name:17} {row.paper + ': ' * bool(row.paper)}{row.what}" for row in FIGURES.values())


@click.command(epilog=f"\b\n{_ROWS}")
@click.argument("name", type=click.Choice(list(FIGURES)), metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON, plain numbers.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", multiple=True, help=".md or .json; repeat.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
@click.option("--docs", is_flag=True, help="Write its page in docs/results, with data and picture beside it.")
def main(name: str, as_json: bool, out: tuple[Path, ...], plot: Path | None, docs: bool) -> None:
    """Recompute a table or figure of the papers."""
    entry = FIGURES[name]
    if docs:
        out, plot = (*out, entry.page, entry.page.with_suffix(".json")), plot or entry.page.with_suffix(".png")
    check_targets(out, plot)
    data = next((path for path in out if path.suffix == ".json"), None)
    figure = Figure.of(name)
    for path in out:
        figure.write(path, f"python -m reproduce {name}" + (" --docs" if docs else ""), plot, data)
    if plot is not None:
        figure.plot(plot)
    if as_json:
        click.echo(json.dumps(figure.data, indent=2))
    elif not out and plot is None:
        show(figure.report, False)


if __name__ == "__main__":
    try:
        main.main(prog_name="python -m reproduce", standalone_mode=False)
    except (click.ClickException, MoECheckpointError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"python -m reproduce: {message}", err=True)
        sys.exit(2)
