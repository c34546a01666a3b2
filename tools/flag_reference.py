#!/usr/bin/env python3
"""Write docs/flags.md from what `moe-ckpt flags` lists."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_ckpt.commands.flags import sections

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
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
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page; with --check only say by the exit code whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render():
        return 0
    print(f"{PAGE} is not what the flags are: run python tools/flag_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
