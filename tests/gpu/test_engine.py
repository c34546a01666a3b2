"""Transformer Engine as the bundle brings it: an extension compiled here, a core with the kernels of one GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_commands import bounded, ending, left_s  # Megatron-Core takes an engine that is compiled

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: kernels of Transformer Engine were not tested"
)

Record = Callable[..., None]
COMPILE_S, MOSTLY_S = 500, 240


def extension() -> str:
    """The name by which it is kept for the next time: it fits this torch and this Python."""
    return f"transformer_engine_torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}.so"


def compiled(site: Path, folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Compile the extension that the bundle has the source of, without any network.

    Args:
        site: Where pack te was unpacked.
        folder: Is made; its build removes files of the source.
    """
    (packed,) = (site / "sources").iterdir()
    source = shutil.copytree(packed, folder)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    headers = [site / "include", *sorted(packages.glob("*/include"))]
    environment = os.environ | {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # it would look for a wheel on the network
        "NVTE_WITH_NCCL_EP": "0",
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
        # Behind those of the toolkit, which need not have cuBLAS's, cuDNN's and the like.
        "CPLUS_INCLUDE_PATH": os.pathsep.join(map(str, headers)),
    }
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    done = bounded([*pip, "--target", str(site), str(source)], COMPILE_S, environment)
    # Its wheel puts it next to the core.
    (library,) = [*site.rglob("transformer_engine_torch.*.so")] or [site / "missing"]
    return library, done


@pytest.mark.takes(10)
def test_the_extension_is_compiled_for_the_torch_that_is_here(record: Record, tmp_path: Path) -> None:
    site, out = Path(os.environ.get("MOE_CKPT_GPU_TE", "/missing")), Path(os.environ["MOE_CKPT_GPU_OUT"])
    if not site.is_dir():
        pytest.skip("pack te is not here: Transformer Engine was not compiled")
    bundle = Path(os.environ.get("MOE_CKPT_GPU_BUNDLE", "build/gpu-bundle"))
    kept = [folder / extension() for folder in (out, bundle) if (folder / extension()).is_file()]
    if kept:
        shutil.copy2(kept[0], site / f"transformer_engine_torch.{sysconfig.get_config_var('SOABI')}.so")
        return
    if left_s() < MOSTLY_S:
        pytest.skip(f"the budget: compiling the extension takes {MOSTLY_S} s, {left_s():.0f} s are left")
    begun_s = time.monotonic()
    library, done = compiled(site, tmp_path / "source")
    record("compiled the extension", seconds=time.monotonic() - begun_s, exit_code=done.returncode)
    assert done.returncode == 0, ending(done)
    record("the extension", bytes=library.stat().st_size, file=extension())
    shutil.copy2(library, out / extension())


@pytest.mark.takes(30)
def test_kernels_of_the_pruned_core_run(record: Record) -> None:
    """One of eight bits, one of grouped experts, one of the optimizer."""
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed: not tested")

    square = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    linear = te.Linear(512, 512, params_dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(square, linear.weight, linear.bias)
    with te.autocast(enabled=True):
        found = linear(square)
    error = float((found - expected).norm() / expected.norm())
    grouped = te.GroupedLinear(4, 512, 512, params_dtype=torch.bfloat16)
    outcome = grouped(square, [128] * 4)
    outcome.sum().backward()
    te.optimizers.FusedAdam([*grouped.parameters()]).step()
    record("kernels of the pruned core", fp8_error=error, finite=bool(torch.isfinite(outcome).all()))
    assert error < 0.1
    assert torch.isfinite(outcome).all()
