"""Flags that all plans share: the model, its precision, the layout, and how the result is shown."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, ModelShape, Precision, Topology
from moe_ckpt.report import Report, show

from ..model_file import load_model
from ..values import Duration, Rate

# More ranks than any cluster has; what is planned for is listed rank by rank.
LARGEST = 1_000_000

# Megatron's names, and the short ones that people say.
LAYOUT = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}

SHARED = {
    "Batch and cluster": (
        *("global_batch_size", "micro_batch_size", "seq_length", "overlaps", "once_per_node", "nodes_per_token"),
        *("cluster_name", "profile", "job_file", "iteration_time_s", "comeback", "restart_s"),
    ),
    "Model and layout": ("model", "precision", *LAYOUT, "vpp", "world_size", "ranks_per_node"),
    "Output": ("rows", "as_json"),
}
"""Parameters that commands share, by the heading under which `--help` has them."""


@dataclass(frozen=True)
class PlannedJob:
    """What is planned for."""

    shape: ModelShape
    precision: Precision
    topology: Topology


def plan_command(help: str) -> Callable[[Callable[..., Report]], click.Command]:
    """Make a command of a function that takes a PlannedJob and its own options and returns a Report."""

    def decorate(function: Callable[..., Report]) -> click.Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            as_json, rows = given.pop("as_json"), given.pop("rows")
            report = function(_job(given), **given)
            show(report, as_json, rows or None)

        # Shared flags are added last, so that a command's own ones come after them in the help text.
        for option in reversed(_shared()):
            command = option(command)
        return click.command(cls=PlanningCommand, help=help)(command)

    return decorate


class PlanningCommand(click.Command):
    """Tells its own options first, then those that many commands share."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As `click.Command.format_options`, in groups."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SHARED)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                titles = (title for title, names in SHARED.items() if parameter.name in names)
                sections[next(titles, "Options")].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number in a range."""

    name = "integer"

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        number = int(text) if text.isascii() and text.lstrip("-").isdigit() and len(text) < 20 else None
        if number is None or not self.minimum <= number <= self.maximum:
            self.fail(f"{text} must be a whole number from {self.minimum} to {self.maximum}", param, ctx)
        return number


def duration(name: str, what: str, default: str | None = None) -> Callable[..., Any]:
    """A flag for a time, in seconds, which has to be given where there is no default."""
    return click.option(name, type=Duration(), metavar="TIME", help=what, **_default(default))


def rate(name: str, what: str, default: float | None = None) -> Callable[..., Any]:
    """A flag for a bandwidth, in GB/s (1e9 bytes), which has to be given where there is no default."""
    return click.option(name, type=Rate(), metavar="GB/S", help=what, **_default(default))


def _default(value: str | float | None) -> dict[str, Any]:
    return {"required": True} if value is None else {"default": value, "show_default": True}


def number(
    *names: str,
    default: int | None,
    help: str,
    minimum: int = 1,
    maximum: int = LARGEST,
    metavar: str = "N",
    show_default: bool = False,
) -> Callable[..., Any]:
    """A flag for a whole number."""
    kind = _Whole(minimum, maximum)
    return click.option(*names, type=kind, default=default, metavar=metavar, show_default=show_default, help=help)


shown_checkpoints = number(
    "--checkpoints", default=None, maximum=10_000, help="How many to show [default: the first, then all experts once]."
)
"""For plans of checkpoints that have some of the experts."""


def _shared() -> list[Callable[..., Any]]:
    preset = dict.fromkeys(LAYOUT, (1, "Default 1.")) | {"etp": (None, "By default the tensor-parallel size.")}
    degrees = [
        number(f"--{long}", f"--{short}", short, default=preset[short][0], help=preset[short][1])
        for short, long in LAYOUT.items()
    ]
    return [
        click.option("--model", required=True, metavar="NAME|FILE", help="A preset, or a JSON file with its shape."),
        click.option("--precision", type=click.Choice(list(PRECISIONS)), default="fp16-fp32", show_default=True),
        *degrees,
        number("--virtual-stages", "--vpp", "vpp", default=1, help="Virtual stages per pipeline rank. Default 1."),
        number("--world-size", default=None, help="Ranks; by default the fewest that the degrees need."),
        number("--ranks-per-node", default=8, help="Ranks of one failure domain.", show_default=True),
        number("--rows", default=40, minimum=0, help="Rows of a table to print; 0 prints all.", show_default=True),
        click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON, all rows, plain numbers."),
    ]


def _job(given: dict[str, Any]) -> PlannedJob:
    """Take the shared flags out of `given`."""
    shape, precision = load_model(given.pop("model")), PRECISIONS[given.pop("precision")].exact()
    degrees = {name: given.pop(name) for name in (*LAYOUT, "vpp")}
    world = given.pop("world_size")
    if world is None:
        tp, pp, cp, ep = (max(1, degrees[name]) for name in ("tp", "pp", "cp", "ep"))
        world = pp * math.lcm(tp * cp, max(1, degrees["etp"] or tp) * ep)
    return PlannedJob(shape, precision, Topology(world, **degrees, ranks_per_node=given.pop("ranks_per_node")))
