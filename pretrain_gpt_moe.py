"""Train a GPT with Mixture-of-Experts layers on Megatron-Core, one process per rank; start it with torchrun."""

import sys
from collections.abc import Sequence
from functools import partial

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe import Timestamps, take_seat
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.initialize import Launch, initialize
from megatron.pretrain.loops import has_stock_loop
from megatron.pretrain.warm_up import warm_up
from megatron.pretrain.worker import run_worker


def pretrain(config: PretrainConfig, launch: Launch, marks: Timestamps) -> None:
    """Build everything, resume if there is something to resume from, and train to the end."""
    launch, marks = initialize(config, launch, marks)

    # Core looks at the device while it is imported, so the device comes first.
    from megatron.pretrain.pretraining import Pretraining

    Pretraining(config).train(launch, marks)


def main(argv: Sequence[str]) -> int:
    """Exit code, see `run_worker`."""
    take_seat(partial(warm_up, argv))
    if has_stock_loop():
        from megatron.pretrain.stock_loop import run_stock

        return run_stock(argv)
    return run_worker(argv, pretrain)


def command() -> None:
    """`moe-ckpt-pretrain`, which torchrun starts with `--no-python`."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command()
