"""Builds the pieces of a training job from its configuration."""

from __future__ import annotations

import os
import time

import torch

from megatron.core.dist_checkpointing.moe import ProcessInfo
from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.agreement import raise_invalid_input_on_all_ranks
from megatron.pretrain.checkpoint.state import Progress, TrainingState
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.early_memory import check_memory
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.flops import flops_per_token, shape_of
from megatron.pretrain.metrics import Metrics, RunFacts
from megatron.pretrain.metrics.settings import from_flags
from megatron.pretrain.model import build_model, build_transformer_config
from megatron.pretrain.optimization import build_optimizer, build_scheduler
from megatron.pretrain.tokenizer import Tokenizer, padded_vocab_size


def build_state(config: PretrainConfig, tokenizer: Tokenizer) -> tuple[TrainingState, TransformerConfig]:
    """The freshly initialized training state of this rank, and the configuration that its modules share."""
    transformer = build_transformer_config(config)
    vocab_size = padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    config.flat.padded_vocab_size = vocab_size
    _check_memory(config, transformer, vocab_size)
    chunks = build_model(config, transformer, vocab_size)
    optimizer = build_optimizer(config, chunks)
    return TrainingState(config, chunks, optimizer, build_scheduler(config, optimizer), Progress()), transformer


def _check_memory(config: PretrainConfig, transformer: TransformerConfig, vocab_size: int) -> None:
    """Say early where a node has too little memory for its checkpoints."""
    place, local_ranks = ProcessInfo.from_environment(), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if place.local_rank:
        return
    shape = shape_of(transformer, vocab_size, tied=not config.model.untie_embeddings_and_output_weights)
    is_half = config.optimizer.bf16 or config.optimizer.fp16
    check_memory(config.moe_checkpoint, shape, read_topology(local_ranks), is_half=is_half, node=place.node)


def build_metrics(config: PretrainConfig) -> Metrics:
    """The writer of this rank's numbers; a collective.

    Raises InvalidInput on all ranks if a file cannot be opened, or a package is missing.
    """
    training = config.training

    def opened() -> Metrics:
        try:
            return Metrics(
                is_last_rank=torch.distributed.get_rank() == torch.distributed.get_world_size() - 1,
                train_iters=training.train_iters or 0,
                settings=from_flags(training),
            )
        except OSError as error:
            raise InvalidInput(
                f"--metrics-jsonl, --metrics-textfile or --tensorboard-dir cannot be written: {error}"
            ) from error

    return raise_invalid_input_on_all_ranks(opened)


def run_facts(state: TrainingState, transformer: TransformerConfig, job: str) -> RunFacts:
    """What the numbers of one start of training belong to."""
    config, training = state.config, state.config.training
    assert training.global_batch_size and training.seq_length
    tokens = training.global_batch_size * training.seq_length
    vocab_size = int(config.flat.padded_vocab_size)
    per_token = flops_per_token(transformer, vocab_size=vocab_size, seq_length=training.seq_length)
    return RunFacts(
        job=job,
        strategy=config.moe_checkpoint.strategy,
        world_size=torch.distributed.get_world_size(),
        train_iters=training.train_iters or 0,
        iteration=state.progress.iteration,
        tokens_per_iteration=tokens,
        flops_per_iteration=tokens * per_token,
        at_s=time.time(),
    )
