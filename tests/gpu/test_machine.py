"""What the machine is: recorded first, as all else is read by it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable

import psutil
import torch
from gpu_place import REHEARSED, needs_device

pytestmark = needs_device

Record = Callable[..., None]


def loaded_nccl() -> str:
    """The release of NCCL in this process, which a preloaded one takes the place of; empty where there is none."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def test_what_this_machine_is(record: Record) -> None:
    shm, (locked, _) = shutil.disk_usage("/dev/shm"), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    record(
        "machine",
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=loaded_nccl(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        shm_bytes=shm.total,
        shm_free_bytes=shm.free,
        locked_limit_bytes=locked,
    )
    if not REHEARSED:
        query = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm"
        said = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True)
        record("nvidia-smi", csv=said.stdout.splitlines())
        assert said.returncode == 0, said.stderr
