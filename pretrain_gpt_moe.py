"""Train a GPT with Mixture-of-Experts layers on Megatron-Core, one process per rank; start it with torchrun."""

import sys
from collections.abc import Sequence
from functools import partial

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe import Timestamps, take_seat
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import PretrainError, TrainingFailure
from megatron.pretrain.initialize import Launch, initialize
from megatron.pretrain.loops import has_stock_loop
from megatron.pretrain.warm_up import warm_up
from megatron.pretrain.worker import run_worker


def pretrain(config: PretrainConfig, launch: Launch, marks: Timestamps) -> None:
    """Build everything, resume if there is something to resume from, and train to the end."""
    initialize(config, launch, marks)

    # Core looks at the device while it is imported, so the device comes first.
    from megatron.pretrain.assemble import build_metrics, build_state
    from megatron.pretrain.batches import build_splits
    from megatron.pretrain.checkpoint.protect import resume
    from megatron.pretrain.loop import Trainer
    from megatron.pretrain.progress import log_progress
    from megatron.pretrain.tokenizer import build_tokenizer

    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    state, transformer = build_state(config, tokenizer)
    manager = resume(state, launch, marks)
    datasets = build_splits(config, tokenizer)

    metrics = build_metrics(state, transformer, launch.place.job_here)
    log_progress(state, f"Started training\tIteration: {state.progress.iteration}", launch)
    trainer = Trainer(state, transformer, datasets, metrics, manager)
    try:
        with driver_errors(), manager.run():
            trainer.run()
    except PretrainError as error:
        if manager.replays_alone:
            # Rank 0, which speaks for all, may be one of those that wait and know nothing of it.
            raise TrainingFailure(str(error)) from error
        raise
    log_progress(state, f"Ended training\tIteration: {state.progress.iteration}", launch)
    metrics.close()


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
