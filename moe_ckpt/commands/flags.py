"""`moe-ckpt flags`: the flags of checkpoints, with the most needed first."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, add_flags
from megatron.core.dist_checkpointing.moe.extensions.partial_saves.flags import ExpertSaveFlags
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, owners_of
from megatron.pretrain.allocation_units import add_unit_flags
from megatron.pretrain.standby.health_options import add_launcher_flags
from moe_ckpt.report import Report, show, table

START = ("strategy", "interval", "interval_policy", "replicas", "persist_dir", "persist_interval", "memory_limit")
"""With --moe-ckpt-standbys what nine of ten jobs set, or look at."""
LIMITS = ("copy_rate", "mtbf_s", "persist_keep", "persist_agent_s", "timeout_s", "strict")
SHARED = {
    "replicate": ("full", "selective"),
    "recovery": ("sparse",),
    "log_expert_tokens": ("pec", "selective"),
}
"""Settings of several strategies, or of one that others ignore."""
STANDBYS = "--moe-ckpt-standbys"

HELP = """List the flags of checkpoints: for Megatron-LM's parser with them, and for moe-ckpt-run.

Those to start with come first, then those of each strategy, or of STRATEGY alone, limits, and the rest. Flags of
Megatron-LM itself are listed by --help of the training script.

\b
    $ moe-ckpt flags full
    $ moe-ckpt flags sparse --json

Exit codes: 0 printed, 2 wrong usage.
"""


@dataclasses.dataclass(frozen=True)
class KnownFlag:
    """name: the flag as it is typed, with what stands for its value."""

    name: str
    help: str


def sections(strategy: str | None = None) -> dict[str, list[KnownFlag]]:
    """Flags by section, in the order in which a person needs them.

    Args:
        strategy: The strategy whose flags are asked for; None: each has a section.
    """
    config, launcher = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    expert_saves = argparse.ArgumentParser(add_help=False)
    choices = {"strategy": ("none", *STRATEGIES)}
    add_flags(config, MoECheckpointConfig, "", MoECheckpointConfig.PREFIX, choices)
    add_flags(expert_saves, ExpertSaveFlags, "")
    add_launcher_flags(launcher)
    add_unit_flags(launcher)
    settings = dict(zip(_settings(), _shown(config), strict=True))
    of_launcher = _shown(launcher)
    standbys = [one for one in of_launcher if one.name.startswith(STANDBYS)]
    found = {"Start here": [settings.pop(name) for name in START] + standbys}
    owners = {name: SHARED.get(name) or owners_of(name) for name in settings}
    for one in STRATEGIES:
        if strategy in (None, one):
            found[f"Strategy {one}"] = [settings[name] for name in settings if one in owners[name]]
    found["Limits"] = [settings[name] for name in LIMITS]
    found["Launcher moe-ckpt-run"] = [one for one in of_launcher if one not in standbys]
    found["Advanced"] = [settings[name] for name in settings if not owners[name] and name not in LIMITS]
    found["Checkpoints with some of the experts"] = _shown(expert_saves)
    return {title: flags for title, flags in found.items() if flags}


def _settings() -> list[str]:
    return [field.name for field in dataclasses.fields(MoECheckpointConfig) if "flag" in field.metadata]


def _shown(parser: argparse.ArgumentParser) -> list[KnownFlag]:
    formatter = parser._get_formatter()
    return [
        KnownFlag(
            " ".join((*action.option_strings, formatter._format_args(action, "")))
            if action.nargs != 0
            else action.option_strings[0],
            formatter._expand_help(action),
        )
        for action in parser._actions
    ]


@click.command(help=HELP)
@click.argument("strategy", required=False, type=click.Choice([*STRATEGIES]))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def flags(strategy: str | None, as_json: bool) -> None:
    """See `HELP`; the option above each parameter explains it."""
    found = sections(strategy)
    if as_json:
        rows = {title: [(one.name, one.help) for one in section] for title, section in found.items()}
        tables = [table(title, "flag | meaning", of_section) for title, of_section in rows.items()]
        show(Report("Flags of checkpoints", (), tuple(tables)), as_json)
        return
    indent = " " * 6
    for title, section in found.items():
        click.echo(f"{title}:")
        for one in section:
            text = textwrap.fill(one.help, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            click.echo(f"  {one.name}\n{text}")
        click.echo()
