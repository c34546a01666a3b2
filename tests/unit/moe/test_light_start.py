"""The planner starts without Megatron-Core and torch, which take seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOE = "megatron.core.dist_checkpointing.moe"
ALL_POLICIES = f"""
import importlib, pkgutil, sys
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
policy = importlib.import_module("{MOE}.policy")
names = [module.name for module in pkgutil.iter_modules(policy.__path__)]
for name in names:
    importlib.import_module("{MOE}.policy." + name)
print(len(names))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments",
    [("-c", ALL_POLICIES), ("-m", "moe_ckpt", "plan", "--model", "GPT-125M-8E")],
    ids=["all policies", "the planner"],
)
def test_nothing_of_torch_or_megatron_core_is_imported(arguments: tuple[str, ...]) -> None:
    result = run("-X", "importtime", *arguments)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 0, result.stderr[-500:]
    assert f"{MOE}.types" in imported
    heavy = {"torch", "numpy", "megatron.core.parallel_state", "megatron.core.dist_checkpointing.serialization"}
    assert not heavy & imported


@pytest.mark.ci
def test_commands_that_read_checkpoints_bring_megatron_core_in() -> None:
    code = """
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
from moe_ckpt.megatron_core import load_megatron_core
load_megatron_core()
import megatron.core.dist_checkpointing as shared
import moe_ckpt.dense.safe_load
print(shared.load.__module__, shared.moe.__name__)
"""
    assert run("-c", code).stdout.split() == ["megatron.core.dist_checkpointing.serialization", MOE]


READS = """
import io, sys
from argparse import Namespace
from moe_ckpt.megatron_core import is_skipped, skip_megatron_core
skip_megatron_core()
import torch
import moe_ckpt.checkpoints.comparison, moe_ckpt.checkpoints.inspect_tensors
from moe_ckpt.dense.safe_load import load_torch_bytes

def back(value):
    file = io.BytesIO()
    torch.save(value, file)
    return load_torch_bytes(file.getvalue(), "it")

assert back({"args": Namespace(lr=1.0), "w": torch.ones(2)})["args"].lr == 1.0
print(is_skipped(), "megatron.core.parallel_state" in sys.modules)
from megatron.core.enums import ModelType  # nothing of what a whole import runs
assert back([ModelType.encoder_or_decoder])[0].value == 1
print(is_skipped())
"""


@pytest.mark.ci
def test_reading_a_checkpoint_imports_megatron_core_only_where_it_holds_objects_of_it() -> None:
    result = run("-W", "ignore", "-c", READS)
    assert result.stdout.split() == ["True", "False", "False"], result.stderr[-500:]
