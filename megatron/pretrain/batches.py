"""Datasets and batches of this rank, and the forward step that consumes them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.core_versions.training import batch_on_this_cp_rank
from megatron.pretrain.agreement import on_rank_zero, raise_invalid_input_on_all_ranks
from megatron.pretrain.checkpoint.state import Progress
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.derived import virtual_pipeline_size
from megatron.pretrain.data import DatasetRequest, build_data_iterator, build_datasets
from megatron.pretrain.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
LossParts = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The splits on this rank, None where this rank needs no data; `present` names those that the job has."""

    train: Any
    valid: Any
    test: Any
    present: frozenset[str]


def build_splits(config: PretrainConfig, tokenizer: Tokenizer) -> Datasets:
    """Build the datasets that this rank reads; a collective over all ranks. Raises InvalidInput for a bad corpus."""
    train, valid, test = build_datasets(
        _request(config), tokenizer, lambda: _needs_data(config), agree=raise_invalid_input_on_all_ranks
    )
    # Rank 0 is on the first pipeline stage, which reads every split that exists.
    splits = {"train": train, "valid": valid, "test": test}
    present = frozenset(on_rank_zero(lambda: [name for name, split in splits.items() if split is not None]))
    if config.training.eval_iters and not {"valid", "test"} & present:
        log.warning("--eval-iters %d: no data for validation or test, see --split", config.training.eval_iters)
    return Datasets(train, valid, test, present)


def training_iterators(config: PretrainConfig, datasets: Datasets, progress: Progress) -> Any:
    """What the pipeline schedules read from: one iterator, or one per model chunk; None on ranks without data."""
    return _per_chunk(config, lambda: _iterator(config, datasets.train, progress.consumed_train_samples))


def evaluation_iterators(config: PretrainConfig, dataset: Any, consumed_samples: int) -> Any:
    """As `training_iterators`, over a validation or test split."""
    return _per_chunk(config, lambda: _iterator(config, dataset, consumed_samples))


def forward_step(batches: Iterator[Batch] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one microbatch through one model chunk; returns its output and the function that makes the loss of it."""
    batch = _next_batch(batches)
    output = model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> LossParts:
    """Sum of the token losses (nats), number of unmasked tokens, and both for the report."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.float().reshape(-1) * mask)
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens.detach()])
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(report, group=parallel_state.get_context_parallel_group())
    return total, tokens.to(torch.int), {"lm loss": report}


def _next_batch(batches: Iterator[Batch] | None) -> Batch:
    if batches is None:
        return {}
    device = torch.cuda.current_device()
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
    return batch_on_this_cp_rank(batch)


def _needs_data(config: PretrainConfig) -> bool:
    """Inner pipeline stages get activations; they only need a batch for its attention mask."""
    at_an_end = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return at_an_end or config.data.reset_attention_mask


def _iterator(config: PretrainConfig, dataset: Any, consumed_samples: int) -> Iterator[Batch] | None:
    if dataset is None:
        return None
    return build_data_iterator(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=config.training.micro_batch_size or 0,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        num_workers=config.data.num_workers,
        pin_memory=config.parallel.device == "cuda",
    )


def _per_chunk(config: PretrainConfig, build: Callable[[], Iterator[Batch] | None]) -> Any:
    chunks = virtual_pipeline_size(config)
    return build() if chunks is None else [build() for _ in range(chunks)]


def _request(config: PretrainConfig) -> DatasetRequest:
    data, training = config.data, config.training
    iterations, samples = training.train_iters or 0, training.global_batch_size or 0
    evaluations = iterations // training.eval_interval + 1
    return DatasetRequest(
        data_path=data.data_path,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        split=data.split,
        sequence_length=training.seq_length or 0,
        seed=training.seed,
        num_samples=(
            iterations * samples,
            evaluations * training.eval_iters * samples,
            training.eval_iters * samples,
        ),
        cache_path=data.data_cache_path,
        mock=data.mock_data,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.reset_attention_mask,
        mmap_bin_files=data.mmap_bin_files,
    )
