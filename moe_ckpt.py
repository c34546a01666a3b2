"""Entry of the `moe-ckpt` command: quiets what Megatron-Core says when it is imported, then hands over."""

from __future__ import annotations

import warnings


def main() -> None:
    """Runs `moe-ckpt`."""
    # Importing anything below megatron.core imports all of it, and that warns of optional packages that no subcommand
    # needs. The filter has to stand before that import, hence outside of that package.
    warnings.filterwarnings("ignore", r"(?:Transformer Engine|Apex).* not installed", UserWarning)
    from megatron.core.dist_checkpointing.moe.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
