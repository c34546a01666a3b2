"""Commands that end with the budget; nothing here needs Megatron-Core, which takes a compiled Transformer Engine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from gpu_check import end


def left_s() -> float:
    """Of the budget of this run; with none, a day."""
    until = os.environ.get("MOE_CKPT_GPU_UNTIL_S")
    return float(until) - time.monotonic() if until else 86400.0


def bounded(
    command: Sequence[str], most_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, no longer than the budget lasts; what was printed is kept if it is killed for that.

    Args:
        command: With its arguments.
        most_s: Longest time without a budget.
        environment: Of this process if not given.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, errors="replace"
    ) as process:
        try:
            out, err = process.communicate(timeout=max(1.0, min(most_s, left_s())))
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            err += f"killed: it took longer than {most_s:g} s, or than the budget"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ending(done: subprocess.CompletedProcess[str]) -> str:
    """The last of what a command printed, for failure messages."""
    lines = [line for text in (done.stdout, done.stderr) for line in text.splitlines()[-40:]]
    return f"exit code {done.returncode}\n" + "\n".join(lines)
