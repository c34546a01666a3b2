"""What torch says of the machine, whatever is run on it."""

from __future__ import annotations


def without_notices(text: str) -> str:
    """What a process wrote, without the line that a torch built for CUDA writes where there is a CUDA and no GPU."""
    return "".join(line for line in text.splitlines(keepends=True) if "No CUDA runtime is found" not in line)
