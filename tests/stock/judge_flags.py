"""A program for one worker: Megatron-LM parses and validates flags, then they are judged as `protected` does it."""

from __future__ import annotations

import sys

from megatron.pretrain.initialize import use_cpu


def main() -> str:
    """Who accepted the flags, or refused them and why."""
    use_cpu(stock_loop=True)

    from importlib.metadata import version

    from megatron.core.dist_checkpointing.moe import stock
    from megatron.core.dist_checkpointing.moe.errors import UsageError
    from megatron.core.dist_checkpointing.moe.stock import flags
    from megatron.training import arguments

    try:
        args = arguments.parse_args(stock.arguments)
        arguments.validate_args(args)
        arguments.core_transformer_config_from_args(args)
    except (AssertionError, ValueError) as error:
        return f"refused by Megatron-LM: {error}"
    try:
        flags.check(flags.read(args), args, version("megatron-core"))
    except UsageError as error:
        return f"refused: {error}"
    return f"accepted by {flags.__file__}"


if __name__ == "__main__":
    sys.stdout.write(f"\nverdict: {main()}\n")
