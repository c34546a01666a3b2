"""Communicators of one rank: what they cost to make, and whether one can be aborted behind a kernel that spins."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_commands import bounded, ending
from gpu_place import needs_cuda, needs_device

pytestmark = needs_device

Record = Callable[..., None]
SCRIPT = Path(__file__).with_name("groups_alone.py")
WAIT_S = 60.0


@pytest.mark.takes(40)
@pytest.mark.parametrize("how", ["threads", "row", "other"])
def test_communicators_are_aborted_while_a_kernel_spins(how: str, record: Record) -> None:
    done = bounded([sys.executable, str(SCRIPT), how], WAIT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        record(f"communicators of one rank: {how}", **line)
    assert any("abort_s" in line for line in lines), ending(done)
    assert done.returncode == 0, ending(done)


@needs_cuda("memory of contexts was")
@pytest.mark.takes(15)
def test_a_context_costs_memory_for_each_process_and_none_for_a_thread_on_its_device(record: Record) -> None:
    torch.cuda.init()
    torch.ones(1, device="cuda")
    event = torch.cuda.Event()
    event.record()

    def free() -> int:
        return int(torch.cuda.mem_get_info()[0])

    before = free()
    thread = threading.Thread(target=event.query)
    thread.start()
    thread.join()
    of_thread, before = before - free(), free()
    script = (
        "import torch, sys; torch.cuda.Event().query(); torch.ones(1, device='cuda'); print(1, flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "1"
    of_process = before - free()
    other.communicate("\n", timeout=WAIT_S)
    record("context", process_bytes=of_process, thread_bytes=of_thread)
    assert of_thread <= 0 < of_process
