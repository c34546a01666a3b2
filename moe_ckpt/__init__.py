"""The `moe-ckpt` command and what it is made of: everything that people run beside training jobs."""

from __future__ import annotations

from .megatron_core import refuse_unsupported_versions


def main() -> None:
    """Runs `moe-ckpt`."""
    refuse_unsupported_versions()
    from .commands.main import main as run

    run()
