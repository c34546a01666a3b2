#!/usr/bin/env python3
"""Write docs/flags.md from what `moe-ckpt flags` lists."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from made_page import write_or_check

from moe_ckpt.commands.flags import sections

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
OF_JOBS = {
    "MOE_CKPT_SECRET_FILE": "as --moe-ckpt-secret-file, for commands as well",
    "MOE_CKPT_PATIENCE_S": "seconds that the launcher gives ranks to end: those of --shutdown-timeout",
    "MOE_CKPT_NODE": "name of the node, where the host's name changes with a restart, as in Kubernetes",
    "MOE_CKPT_UNIT": "allocation unit of the node, as --moe-ckpt-unit: replicas are placed in other ones",
    "MOE_CKPT_FLAGS": "flags of checkpoints for a job of Megatron-Bridge",
}
SCRIPTS = {
    "scripts/slurm/job.sh": "Slurm",
    "scripts/train_cpu.sh": "train_cpu.sh",
    "scripts/gpu_there.sh": "gpu_there.sh",
}
HEADING = """# Flags

Made by `python tools/flag_reference.py` from what `moe-ckpt flags` lists; change it there. `moe-ckpt-run` takes its
flags and `--moe-ckpt-standbys` before the training script, which takes all others.
"""


def render() -> str:
    """The whole page: a table for each section."""
    lines = [HEADING]
    for title, flags in sections().items():
        lines += [f"## {title}", "", "| flag | meaning |", "|---|---|"]
        lines += [f"| `{cell(one.name)}` | {cell(one.help)} |" for one in flags]
        lines.append("")
    lines += ["## Environment variables", "", "| variable | of | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | every job | {cell(meaning)} |" for name, meaning in OF_JOBS.items()]
    for file, of in SCRIPTS.items():
        lines += [
            f"| `{cell(name)}` | [{of}](../{file}) | {cell(meaning)} |" for name, meaning in variables(ROOT / file)
        ]
    lines.append("")
    return "\n".join(lines)


def variables(script: Path) -> Iterator[tuple[str, str]]:
    """What the head of a script says of its environment: names with defaults, and what they are for."""
    name, said = "", ""
    for line in (*script.read_text(encoding="utf-8").splitlines(), ""):
        found = re.match(r"#   (MOE_CKPT_[^ ]+(?:(?:,| \(|\)) ?[^ ]+)*)(?:  +(.*))?$", line)
        if name and (found or not line.startswith("#    ")):
            yield name, said.strip()
            name, said = "", ""
        if found:
            name, said = found[1], found[2] or ""
        elif name:
            said += f" {line[1:].strip()}"


def cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """As `write_or_check`."""
    return write_or_check(arguments, __doc__, PAGE, render, "the flags are", __file__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
