"""The `moe-ckpt` command and what it is made of: everything that people run beside training jobs."""

from __future__ import annotations

from .megatron_core import skip_megatron_core


def main() -> None:
    """Runs `moe-ckpt`."""
    skip_megatron_core()
    from .commands.main import main as run

    run()
