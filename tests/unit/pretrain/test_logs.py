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
