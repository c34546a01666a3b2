"""`moe-ckpt plan`: any decision of the subsystem as a table, before a GPU hour is spent."""

from __future__ import annotations

import click

from .pec import pec
from .placement import placement
from .recovery import recovery
from .saves import saves
from .selective import selective
from .sharding import sharding
from .window import window

COMMANDS = (window, pec, saves, selective, sharding, placement, recovery)


@click.group()
def plan() -> None:
    """Show what a strategy would do with a model and a cluster: no GPU, no torch, no job needed.

    \b
    $ moe-ckpt plan window --model DeepSeek-MoE --pp 12 --ep 8 --budget-local-gbps 25 --iteration-time 2.9
    $ moe-ckpt plan recovery --model DeepSeek-MoE --pp 12 --ep 8 --window 6 --lost-nodes 3
    """


for command in COMMANDS:
    plan.add_command(command)
