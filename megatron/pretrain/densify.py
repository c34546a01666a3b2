"""Recovers from snapshots in storage, replays what they need, saves a dense checkpoint, ends: `moe-ckpt convert`."""

import sys
from dataclasses import replace

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe import Timestamps
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.initialize import Launch, initialize
from megatron.pretrain.worker import run_worker


def densify(config: PretrainConfig, launch: Launch, _marks: Timestamps) -> None:
    """Write the newest state in `--moe-ckpt-persist-dir` into `--save`."""
    initialize(config, launch)

    # Core looks at the device while it is imported, so the device comes first.
    from megatron.pretrain.assemble import build_metrics, build_state
    from megatron.pretrain.batches import build_splits
    from megatron.pretrain.checkpoint.protect import resume
    from megatron.pretrain.checkpoint.save import Saver
    from megatron.pretrain.loop import Trainer
    from megatron.pretrain.tokenizer import build_tokenizer

    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    # No iteration but those of a replay is run here, so random states of a GPU go on unchanged: nothing is inexact.
    config = replace(config, moe_checkpoint=replace(config.moe_checkpoint, reshard="inexact"))
    state, transformer = build_state(config, tokenizer)
    manager = resume(state, launch)
    if config.moe_checkpoint.strategy == "none" or not (manager.is_replaying or manager.iteration):
        raise InvalidInput(
            f"no state can be recovered from {config.moe_checkpoint.persist_dir}; the lines above say why"
        )
    with driver_errors():
        if manager.is_replaying:
            datasets = build_splits(config, tokenizer)
            Trainer(state, transformer, datasets, build_metrics(config), manager).replay()
            return
        manager.begin()
        Saver(replace(state, random_states=manager.random_states_of_another_device)).save()
        manager.finish()


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], densify))
