"""What lines of a job look like."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
from megatron.pretrain.initialize import Launch
from megatron.pretrain.logs import configure_logging
configure_logging(Launch.from_environment())
log = logging.getLogger("megatron.core.dist_checkpointing.moe.runtime")
log.info("protected")
log.warning("slow")
"""


@pytest.mark.ci
def test_lines_begin_with_the_subsystem_and_from_warnings_on_name_their_level() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[moe-ckpt] protected"]
    assert "[moe-ckpt] WARNING: slow" in done.stderr.splitlines()


IN_A_STANDBY = """
import os
from megatron.pretrain import loop
loop.wait_for_rank = lambda: os.environ.update(RANK="3", WORLD_SIZE="4")
loop.in_worker([], lambda launch: print(launch.rank, "of", launch.world_size))
"""


def test_a_script_that_trains_without_main_has_the_place_that_its_standby_was_given() -> None:
    """Else each rank that came from a standby would take itself for the last one, and write all metrics too."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_STANDBY], capture_output=True, text=True)
    assert done.stdout == "3 of 4\n", done.stderr
