"""Training, validation and test data: Megatron's GPT datasets behind checks, and batches from them."""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.pretrain.data_request import SPLIT_NAMES, Blend, DatasetRequest, parse_blend, parse_split
from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.indexed_corpus import (
    IndexedCorpus,
    check_token_ids,
    discard_torn_indices,
    fingerprint,
    open_corpus,
)
from megatron.pretrain.processes import live_and_die_with_parent, starting_helpers
from megatron.pretrain.sampler import PretrainingSampler
from megatron.pretrain.tokenizer import Tokenizer

__all__ = ["DataIterator", "DatasetRequest", "build_data_iterator", "build_datasets"]

Sample = dict[str, torch.Tensor]
Prepared = tuple[GPTDatasetConfig, list[bool]]
Datasets = tuple[Dataset[Sample] | None, Dataset[Sample] | None, Dataset[Sample] | None]

_SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")


def build_datasets(
    request: DatasetRequest,
    tokenizer: Tokenizer,
    is_built_on_rank: Callable[[], bool],
    agree: Callable[[Callable[[], Prepared]], Prepared] = lambda action: action(),
) -> Datasets:
    """The training, validation and test datasets, each at least as long as the samples asked of it.

    A split is `None` when no samples are asked of it, when validation or test have no share of the data, or on a rank
    where `is_built_on_rank()` is false. Call it on every rank; rank 0 must build, as it writes the cached indices the
    others read. Items are dicts of `tokens`, `labels`, `position_ids` (int64, [sequence_length]), `loss_mask` (float32,
    [sequence_length]) and, if asked for, `attention_mask` (bool, [1, sequence_length, sequence_length], true = masked).

    Raises `InvalidInput` for missing, foreign or truncated files, tokens beyond the vocabulary, a bad split or blend,
    and too few tokens, before anything is built; `agree` makes what one rank raises there the error of all ranks.
    """
    config, wanted = agree(lambda: _prepare(request, tokenizer))
    if not any(wanted):
        return None, None, None
    _leave_out_unwanted(config, wanted)
    dataset_class = MockGPTDataset if request.mock else GPTDataset
    train, valid, test = _Builder(dataset_class, list(request.num_samples), is_built_on_rank, config).build()
    return train, valid, test


def _prepare(request: DatasetRequest, tokenizer: Tokenizer) -> Prepared:
    """The configuration of core's builder, and which splits are wanted, after every check."""
    request.check()
    blends = _blends_per_split(request)
    config = _dataset_config(request, blends, tokenizer)
    spans = [(0.0, 1.0)] * 3 if config.split_matrix is None else config.split_matrix
    wanted = [
        samples > 0 and span is not None and (request.mock or blend is not None)
        for samples, span, blend in zip(request.num_samples, spans, blends, strict=True)
    ]
    if request.num_samples[0] > 0 and not wanted[0]:
        raise InvalidInput("training has no data: give --train-data-path, or --split a first share above 0")
    if any(wanted) and not request.mock:
        corpora = {prefix: open_corpus(prefix) for blend in blends if blend for prefix in blend.prefixes}
        for corpus in corpora.values():
            check_token_ids(corpus, tokenizer.vocab_size)
        for i, blend in enumerate(blends):
            if wanted[i] and blend is not None:
                _check_size(i, request, [corpora[prefix] for prefix in blend.prefixes], blend, spans[i])
        config.path_to_cache = str(_prepare_cache(request, tuple(corpora.values())))
    return config, wanted


class DataIterator(Iterator[Sample]):
    """Batches from a loader; the loader, and its worker processes, start with the first batch.

    Running out raises `PretrainError` instead of ending a loop quietly in the middle of a schedule.
    """

    def __init__(self, loader: DataLoader[Sample], sampler: PretrainingSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._batches: Iterator[Sample] | None = None

    def __next__(self) -> Sample:
        if self._batches is None:
            self._batches = _start(self._loader)
        try:
            return next(self._batches)
        except StopIteration:
            sampler = self._sampler
            raise PretrainError(
                f"out of data: the dataset has {sampler.total_samples} samples, {sampler.consumed_samples} were "
                f"consumed at the start and {len(sampler)} micro-batches of {sampler.micro_batch_size} read on each of "
                f"{sampler.data_parallel_size} data-parallel ranks since; build it with more samples"
            ) from None


def build_data_iterator(
    dataset: Dataset[Sample],
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    pin_memory: bool = False,
) -> DataIterator:
    """Micro-batches of `dataset` for one data-parallel rank, behind the `consumed_samples` of the whole job.

    Each is a dict of a sample's tensors stacked along a first axis of `micro_batch_size`. `num_workers` processes load
    ahead, 0 loads in this one. No global random state is drawn. Raises `InvalidInput` for sizes that make no sense.
    Take the first batch on the main thread: workers end with the thread that started them.
    """
    if num_workers < 0:
        raise InvalidInput(f"--num-workers {num_workers}: must not be negative")
    sampler = PretrainingSampler(
        len(dataset),
        consumed_samples,
        micro_batch_size,
        data_parallel_rank,
        data_parallel_size,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        collate_fn=_collate,
        worker_init_fn=live_and_die_with_parent,
        # Without its own generator a loader draws its seed from the global one, and a resumed run would drift.
        generator=torch.Generator(),
    )
    return DataIterator(loader, sampler)


class _Builder(BlendedMegatronDatasetBuilder):
    """Megatron's builder, also usable for blends in a single process."""

    @staticmethod
    def build_generic_dataset(
        dataset_class: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        if dataset_class is BlendedDataset and not torch.distributed.is_initialized():
            # A blend with a cache asks torch.distributed for its rank even where there is none.
            *others, config = args
            uncached = copy.copy(config)
            uncached.path_to_cache = None
            args = (*others, uncached)
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            dataset_class, is_built_on_rank, synchronize_ranks, *args
        )


def _blends_per_split(request: DatasetRequest) -> list[Blend | None]:
    if request.data_path:
        return [parse_blend(request.data_path, "--data-path")] * 3
    return [parse_blend(paths, flag) for paths, flag in zip(request.per_split_paths, _SPLIT_FLAGS, strict=True)]


def _dataset_config(request: DatasetRequest, blends: list[Blend | None], tokenizer: Tokenizer) -> GPTDatasetConfig:
    shared = blends[0] if request.data_path else None
    per_split = None if request.data_path or request.mock else [blend and blend.for_megatron() for blend in blends]
    return GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.sequence_length,
        blend=shared.for_megatron() if shared else None,
        blend_per_split=per_split,
        split=parse_split(request.split) if shared else None,
        path_to_cache=request.cache_path,
        mmap_bin_files=request.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=request.reset_position_ids,
        reset_attention_mask=request.reset_attention_mask,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=request.create_attention_mask,
    )


def _check_size(
    split: int, request: DatasetRequest, corpora: list[IndexedCorpus], blend: Blend, span: tuple[float, float]
) -> None:
    """Refuse what Megatron would count epochs of for ever, or what would end before the run does."""
    needed_tokens = request.sequence_length + 1
    source = f"the {SPLIT_NAMES[split]} split" + (
        f" (--split {request.split}, in whole documents)" if request.data_path else ""
    )
    available_samples = 0
    for corpus in corpora:
        tokens = corpus.tokens_between(*span)
        if tokens < needed_tokens:
            raise InvalidInput(
                f"data prefix {corpus.prefix} is too small: {source} has {tokens} tokens and a sample takes "
                f"{needed_tokens}; add text, shorten --seq-length or change the split"
            )
        available_samples += (tokens - 1) // request.sequence_length
    asked_samples = request.num_samples[split]
    if len(corpora) > 1 and blend.weights is None and available_samples < asked_samples:
        raise InvalidInput(
            f"a blend without weights is read once: {source} has {available_samples} samples and {asked_samples} are "
            "needed; put a weight before each prefix, or ask for fewer iterations"
        )


def _prepare_cache(request: DatasetRequest, corpora: tuple[IndexedCorpus, ...]) -> Path:
    """The directory for these corpora's sample indices, made and rid of torn files by rank 0.

    Megatron names cached indices after the prefix alone: without the fingerprint, a corpus made anew under an old name
    would be read with the old one's indices.
    """
    root = Path(request.cache_path) if request.cache_path else Path(corpora[0].prefix) / "cache"
    directory = root / fingerprint(corpora)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            discard_torn_indices(directory)
        except OSError as error:
            raise InvalidInput(
                f"sample indices cannot be kept in {root}: {error.strerror}; name another place with --data-cache-path"
            ) from error
    return directory


def _leave_out_unwanted(config: GPTDatasetConfig, wanted: list[bool]) -> None:
    for parts in (config.split_matrix, config.blend_per_split):
        if parts is not None:
            parts[:] = [part if keep else None for part, keep in zip(parts, wanted, strict=True)]


def _collate(samples: list[dict[str, Any]]) -> Sample:
    """Stack samples; a blend also tells which corpus a sample is from, which is no part of a batch."""
    batch: Sample = default_collate([{key: value for key, value in s.items() if key != "dataset_id"} for s in samples])
    return batch


def _start(loader: DataLoader[Sample]) -> Iterator[Sample]:
    before = set(multiprocessing.active_children())
    with starting_helpers():
        batches: Iterator[Sample] = iter(loader)
    workers = [process for process in multiprocessing.active_children() if process not in before]
    if workers:
        # Registered behind torch's own clean-up, and so run before it, which would wait for a worker that is stuck.
        atexit.register(_kill, workers)
    return batches


def _kill(workers: list[multiprocessing.process.BaseProcess]) -> None:
    """End loading processes at exit; they only read, so there is nothing they could leave half done."""
    alive = [worker for worker in workers if worker.is_alive()]
    if alive:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report each as a failure
    for worker in alive:
        worker.kill()
