#!/usr/bin/env python3
"""Write an ordinary complete checkpoint from one that was saved with --save-experts and those that it needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.core.dist_checkpointing.moe.cli.megatron_core import load_megatron_core
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError


def main(arguments: list[str]) -> int:
    """Exit code 0: written; 2: the input cannot be merged or the output not be written, one line says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="an iteration (iter_0000012), or a --save directory for its newest")
    parser.add_argument("target", type=Path, help="where the iteration and its tracker are written")
    flags = parser.parse_args(arguments)
    load_megatron_core()
    from megatron.core.dist_checkpointing.moe.store.export import export_merged

    try:
        print(export_merged(flags.source, flags.target))
    except (MoECheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
