"""Each flag of the driver's own loop is one of Megatron-LM's, one of the driver's in that loop, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from world import ROOT

from megatron.pretrain.old_flags import OLD_FLAGS

FLAGS = """
import argparse, dataclasses, json
from megatron.pretrain.initialize import use_cpu
use_cpu(stock_loop=True)
from megatron.core.dist_checkpointing.moe import stock
from megatron.core.dist_checkpointing.moe.config import flag_name
from megatron.pretrain import stock_loop
from megatron.pretrain.config import _GROUPS
from megatron.training import arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
arguments.add_megatron_arguments(parser)
stock_loop.add_flags(parser)
own = [
    flag_name(field, getattr(kind, "PREFIX", "")) for kind, _ in _GROUPS.values()
    for field in dataclasses.fields(kind) if "flag" in field.metadata
]
print(json.dumps([own, list(parser._option_string_actions)]))
"""


def test_no_flag_of_the_own_loop_is_merely_unknown() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOOP": "stock"}
    said = subprocess.run(
        [sys.executable, "-c", FLAGS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    own, known = json.loads(said.stdout.splitlines()[-1])
    assert len(own) > 200
    assert sorted(set(own) - set(known)) == sorted(OLD_FLAGS)
