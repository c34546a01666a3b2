"""Where Transformer Engine's Python lies: a folder of its own, so that nothing finds it that did not ask."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "MOE_CKPT_TE_PYTHON"
"""Environment variable with another folder that holds the unpacked wheel."""


class MissingWheel(Exception):
    """The wheel is not where it should be; the text says how to get it there."""


def place() -> Path:
    """The folder of the unpacked wheel, whether it is there or not: below that of this Python."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else Path(sys.prefix) / "transformer-engine-python"


def find() -> Path:
    """The folder of the unpacked wheel.

    Raises:
        MissingWheel: It is not there.
    """
    folder = place()
    if not (folder / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        raise MissingWheel(
            f"Transformer Engine's Python is not in {folder}: run `python scripts/install_te_python.py`, as"
            f" `make setup` does, or set {FOLDER} to a folder with the unpacked wheel transformer-engine"
        )
    return folder
