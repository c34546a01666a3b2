"""Recovers from snapshots in storage, replays what they need, saves a dense checkpoint, ends: `moe-ckpt convert`."""

import sys

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe.recovery.timestamps import Timestamps
from megatron.core.dist_checkpointing.moe.runtime.unprotected import Unprotected
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.initialize import Launch, initialize
from megatron.pretrain.worker import run_worker


def densify(config: PretrainConfig, launch: Launch, _marks: Timestamps) -> None:
    """Write the newest state in `--moe-ckpt-persist-dir` into `--save`."""
    initialize(config, launch)

    # Core looks at the device while it is imported, so the device comes first.
    from megatron.pretrain.assemble import build_faults, build_metrics, build_state
    from megatron.pretrain.batches import build_splits
    from megatron.pretrain.checkpoint.protect import driver_errors, resume
    from megatron.pretrain.checkpoint.save import Saver
    from megatron.pretrain.loop import Trainer
    from megatron.pretrain.tokenizer import build_tokenizer

    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    state, transformer = build_state(config, tokenizer)
    session = resume(state, launch)
    if isinstance(session, Unprotected) or not (session.is_replaying or state.progress.iteration):
        raise InvalidInput(
            f"no state can be recovered from {config.moe_checkpoint.persist_dir}; the lines above say why"
        )
    with driver_errors():
        if session.is_replaying:
            datasets = build_splits(config, tokenizer)
            Trainer(state, transformer, datasets, build_metrics(config), build_faults(config, launch), session).replay()
            return
        session.begin(state.progress.iteration)
        Saver(state).save()
        session.shutdown(keep_memory=False)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], densify))
