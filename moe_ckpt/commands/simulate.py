"""`moe-ckpt simulate`: what training would get of each checkpoint system."""

from __future__ import annotations

import click

from .simulate_run import run

MOVED = (
    *("table3", "table6", "table7", "fig1", "fig10", "fig11", "fig13", "fig16"),
    *("moc-fig10", "moc-fig13", "moetion-fig9"),
)
"""Tables and figures of papers, which were sub commands here."""


class _Simulations(click.Group):
    """Tells who asks for a paper's table where it is now."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in MOVED:
            script = args[0].replace("-", "_")
            raise click.UsageError(f"paper tables moved to reproduce/{script}.py", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Simulations)
def simulate() -> None:
    """Predict overhead, recovery and ETTR of each checkpoint system, before a run: no GPU, no torch, no job needed.

    The papers' tables and figures are recomputed by the scripts in reproduce/.

    \b
    $ moe-ckpt simulate run --model DeepSeek-MoE --pp 12 --ep 8 --mtbf 30m --mtbf 10m
    """


simulate.add_command(run)
