"""Nodes that wait to join a job: what the agent of a node and its workers tell each other of them, in files."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "MOE_CKPT_JOINING"
"""Environment variable with the folder that the agent of a node and its workers share."""


class Joining:
    """What the agent of a node and its workers tell each other of nodes that wait."""

    def __init__(self, folder: Path) -> None:
        self._asked, self._ready = folder / "nodes-wait", folder / "workers-ready"

    @property
    def is_asked(self) -> bool:
        """For workers: whether nodes wait."""
        return self._asked.exists()

    def ready(self) -> None:
        """For workers: training has come to an end, and everything is protected. Raises OSError."""
        self._ready.touch()

    @property
    def is_ready(self) -> bool:
        """For agents: whether workers have said so."""
        return self._ready.exists()

    def ask(self) -> None:
        """For agents: nodes wait. Raises OSError."""
        self._asked.touch()

    def forget(self) -> None:
        """For agents: none wait any more. Raises OSError."""
        for path in (self._asked, self._ready):
            path.unlink(missing_ok=True)


def joining_here() -> Joining | None:
    """For workers: what their agent has told them of, if it has."""
    folder = os.environ.get(FOLDER)
    return Joining(Path(folder)) if folder else None
