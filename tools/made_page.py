"""The command line of what makes a page of the docs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(
    arguments: list[str], doc: str | None, page: Path, render: Callable[[], str], source: str, script: str
) -> int:
    """Write the page; with --check only say by the exit code whether it is up to date.

    Args:
        arguments: Of the command line.
        doc: What the script is for.
        page: Where it goes.
        render: Gives its text.
        source: What it is made from, as in "is not what the flags are".
        script: The file that was started.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    is_check = parser.parse_args(arguments).check
    text = render()
    if not is_check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is not what {source}: run python tools/{Path(script).name}", file=sys.stderr)
    return 1
