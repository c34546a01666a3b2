"""Train a GPT with Mixture-of-Experts layers on Megatron-Core, one process per rank; start it with torchrun."""

import sys
from collections.abc import Sequence

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.validate import resolve
from megatron.pretrain.ending import exit_code_of
from megatron.pretrain.errors import PretrainError, TrainingFailure
from megatron.pretrain.initialize import (
    Launch,
    Timestamps,
    initialize,
    marks_of_this_process,
    probe_environment,
    shut_down,
)
from megatron.pretrain.logs import configure_logging


def pretrain(config: PretrainConfig, launch: Launch, marks: Timestamps) -> None:
    """Build everything, resume if there is something to resume from, and train to the end."""
    initialize(config, launch, marks)

    # Core looks at the device while it is imported, so the device comes first.
    from megatron.pretrain.assemble import build_faults, build_metrics, build_state
    from megatron.pretrain.batches import build_splits
    from megatron.pretrain.checkpoint.protect import driver_errors, leave, resume
    from megatron.pretrain.loop import Trainer
    from megatron.pretrain.progress import log_progress
    from megatron.pretrain.stopping import Termination
    from megatron.pretrain.tokenizer import build_tokenizer

    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    state, transformer = build_state(config, tokenizer)
    session = resume(state, launch, marks)
    ending = Termination()
    if session is not None and session.communicator is not None:
        ending.install()  # there is state to put aside first
    datasets = build_splits(config, tokenizer)

    metrics = build_metrics(config)
    log_progress(state, f"Started training\tIteration: {state.progress.iteration}", launch)
    trainer = Trainer(state, transformer, datasets, metrics, build_faults(config, launch), session, ending)
    try:
        with driver_errors():
            trainer.run()
    except BaseException as error:
        if session is not None:
            leave(session, error)
            if session.replays_alone and isinstance(error, PretrainError):
                # Rank 0, which speaks for all, may be one of those that wait and know nothing of it.
                raise TrainingFailure(str(error)) from error
        raise
    finally:
        ending.uninstall()
    log_progress(state, f"Ended training\tIteration: {state.progress.iteration}", launch)
    metrics.close()


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 trained or left as asked, 1 training failed, 2 flags or inputs that cannot work."""
    marks, launch = marks_of_this_process(), Launch.from_environment()
    configure_logging(launch)
    try:
        config = resolve(parse_config(argv), probe_environment(launch.world_size))
        pretrain(config, launch, marks)
    except Exception as error:
        return exit_code_of(error, launch)
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
