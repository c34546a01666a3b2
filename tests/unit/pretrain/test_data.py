"""Datasets and batches: the corpus comes back as it was, in an order that survives a restart."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from notices import without_notices

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.pretrain.data import DatasetRequest, build_data_iterator, build_datasets
from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.preprocess import corpus_writer
from megatron.pretrain.tokenizer import ByteTokenizer, NullTokenizer

LENGTH = 16
DOCUMENTS = [f"document number {i}, " * (1 + i % 3) for i in range(40)]


def write_corpus(prefix: Path, documents: list[str]) -> str:
    tokenizer = ByteTokenizer()
    with corpus_writer(str(prefix), tokenizer.vocab_size) as writer:
        for document in documents:
            writer.add([*tokenizer.tokenize(document), tokenizer.eod])
    return str(prefix)


def request_for(*data_path: str, **changes: Any) -> DatasetRequest:
    request = DatasetRequest(
        data_path=data_path,
        split="80,10,10",
        sequence_length=LENGTH,
        seed=1234,
        num_samples=(50, 4, 2),
        cache_path=None,
        mock=False,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mmap_bin_files=True,
    )
    return replace(request, **changes)


def build(request: DatasetRequest) -> tuple[Any, Any, Any]:
    return build_datasets(request, ByteTokenizer(), lambda: True)


def read_all(dataset: Any) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", DOCUMENTS)


def test_samples_put_back_in_order_are_the_text_of_the_corpus(tmp_path: Path) -> None:
    text = "".join(chr(32 + i % 95) for i in range(1000)) + "grüße\n"
    prefix = write_corpus(tmp_path / "one", [text])
    samples = len(text.encode()) // LENGTH
    train, _, _ = build(request_for(prefix, split="1", num_samples=(samples, 0, 0)))
    in_order = [train[i]["tokens"] for i in np.argsort(train.shuffle_index)]
    read = ByteTokenizer().detokenize(torch.cat(in_order).tolist())
    assert len(train) == samples
    assert read.encode("utf-8", errors="surrogateescape") == text.encode()[: samples * LENGTH]


def test_labels_are_the_tokens_moved_by_one(corpus: str) -> None:
    train, _, _ = build(request_for(corpus))
    sample = train[0]
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    assert sample["loss_mask"].tolist() == [1.0] * LENGTH
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}


def test_document_ends_are_masked_and_positions_start_anew_when_asked(corpus: str) -> None:
    train, _, _ = build(
        request_for(
            corpus, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True, create_attention_mask=True
        )
    )
    sample = next(s for s in map(train.__getitem__, range(len(train))) if 256 in s["tokens"][1:-1])
    end = 1 + sample["tokens"][1:-1].tolist().index(256)
    assert sample["loss_mask"][end] == 0.0
    assert sample["position_ids"][end + 1] == 0
    assert sample["attention_mask"].shape == (1, LENGTH, LENGTH)
    assert bool(sample["attention_mask"][0, end + 1, end])


def test_every_split_has_at_least_the_samples_asked_even_beyond_one_epoch(corpus: str) -> None:
    train, valid, test = build(request_for(corpus, num_samples=(500, 40, 30)))
    assert (len(train) >= 500, len(valid) >= 40, len(test) >= 30) == (True, True, True)


def test_the_same_request_gives_the_same_samples_from_its_cache(corpus: str) -> None:
    first = [read_all(dataset) for dataset in build(request_for(corpus))]
    assert [read_all(dataset) for dataset in build(request_for(corpus))] == first


def test_another_seed_gives_another_order(corpus: str) -> None:
    first, _, _ = build(request_for(corpus))
    second, _, _ = build(request_for(corpus, seed=1))
    assert read_all(first) != read_all(second)


def test_reading_without_mapping_gives_the_same_samples(corpus: str) -> None:
    mapped, _, _ = build(request_for(corpus))
    read, _, _ = build(request_for(corpus, mmap_bin_files=False))
    assert read_all(mapped) == read_all(read)


def test_a_split_of_which_no_samples_are_asked_is_none(corpus: str) -> None:
    train, valid, test = build(request_for(corpus, num_samples=(50, 0, 2)))
    assert (train is None, valid is None, test is None) == (False, True, False)
    assert build(request_for(corpus, num_samples=(0, 0, 0))) == (None, None, None)


def test_a_validation_split_without_a_share_is_none(corpus: str) -> None:
    _, valid, test = build(request_for(corpus, split="1"))
    assert (valid, test) == (None, None)


def test_each_split_can_have_its_own_corpora(tmp_path: Path, corpus: str) -> None:
    other = write_corpus(tmp_path / "other", ["z" * 400])
    train, valid, test = build(request_for(train_data_path=(corpus,), valid_data_path=(other,)))
    assert all(set(tokens) <= {ord("z"), 256} for tokens in read_all(valid))
    assert not any(ord("z") in tokens for tokens in read_all(train))
    assert test is None


def test_only_validation_can_be_asked_of_separate_corpora(corpus: str) -> None:
    request = request_for(train_data_path=(corpus,), valid_data_path=(corpus,), num_samples=(0, 4, 0))
    train, valid, test = build(request)
    assert (train, test) == (None, None)
    assert len(valid) >= 4


@pytest.mark.parametrize("cached", [False, True])
def test_a_weighted_blend_takes_from_each_corpus_by_its_weight(tmp_path: Path, cached: bool) -> None:
    prefixes = [write_corpus(tmp_path / letter, [letter * 300] * 20) for letter in "ab"]
    cache_path = str(tmp_path / "indices") if cached else None
    request = request_for("3", prefixes[0], "1", prefixes[1], num_samples=(100, 0, 0), cache_path=cache_path)
    train, _, _ = build(request)
    of_first = sum(ord("a") in tokens for tokens in read_all(train))
    assert 70 <= of_first <= 80


def test_a_blend_without_weights_reads_every_corpus_once(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / letter, [letter * 15] * count) for letter, count in (("a", 31), ("b", 11))]
    train, _, _ = build(request_for(*prefixes, split="1", num_samples=(40, 0, 0)))
    of_first = sum(ord("a") in tokens for tokens in read_all(train))
    assert (len(train), of_first) == (40, 30)


def test_mock_data_needs_no_files_and_stays_inside_the_vocabulary(tmp_path: Path) -> None:
    train, valid, _ = build_datasets(
        request_for(mock=True, num_samples=(10, 2, 0), cache_path=str(tmp_path)), NullTokenizer(50), lambda: True
    )
    assert max(max(tokens) for tokens in (train[i]["tokens"].tolist() for i in range(10))) <= 50
    assert len(valid) >= 2


def test_a_corpus_made_anew_under_an_old_name_is_not_read_with_old_indices(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", ["a" * 900])
    build(request_for(prefix, split="1"))
    write_corpus(tmp_path / "corpus", ["b" * 90] * 5)
    train, _, _ = build(request_for(prefix, split="1"))
    assert all(set(tokens) <= {ord("b"), 256} for tokens in read_all(train))
    assert len(read_all(train)[0]) == LENGTH


def test_cached_indices_cut_short_by_a_kill_are_made_again(corpus: str) -> None:
    train, _, _ = build(request_for(corpus))
    expected = read_all(train)
    del train
    torn = sorted(Path(corpus, "cache").rglob("*.npy"))
    for keep_bytes, path in zip([0, 60, 130] * len(torn), torn, strict=False):
        path.write_bytes(path.read_bytes()[:keep_bytes])
    assert read_all(build(request_for(corpus))[0]) == expected


def test_indices_go_where_the_cache_path_says(tmp_path: Path, corpus: str) -> None:
    build(request_for(corpus, cache_path=str(tmp_path / "elsewhere")))
    assert list((tmp_path / "elsewhere").rglob("*shuffle_index.npy"))
    assert not Path(corpus).exists()


def test_building_says_nothing_about_a_legacy_tokenizer(corpus: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(request_for(corpus))
    assert caplog.records == []


def cut(path: str, keep_bytes: int) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:keep_bytes])


@pytest.mark.parametrize(
    ("suffix", "keep_bytes", "message"),
    [
        (".bin", 100, "truncated or belongs to another index"),
        (".idx", 200, "is truncated"),
        (".idx", 20, "is truncated"),
        (".idx", 0, "is empty"),
    ],
)
def test_a_file_cut_short_is_refused(corpus: str, suffix: str, keep_bytes: int, message: str) -> None:
    cut(corpus + suffix, keep_bytes)
    with pytest.raises(InvalidInput, match=message):
        build(request_for(corpus))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(corpus: str, suffix: str) -> None:
    Path(corpus + suffix).unlink()
    with pytest.raises(InvalidInput, match=rf"corpus\{suffix} does not exist"):
        build(request_for(corpus))


def test_a_foreign_index_is_refused(corpus: str) -> None:
    Path(corpus + ".idx").write_text("this is a text file that has nothing to do with an index")
    with pytest.raises(InvalidInput, match="not a Megatron index"):
        build(request_for(corpus))


def test_an_index_of_numbers_that_are_no_tokens_is_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "floats.bin"), dtype=np.float32)
    builder.add_document(np.ones(100, dtype=np.float32), [100])
    builder.finalize(str(tmp_path / "floats.idx"))
    with pytest.raises(InvalidInput, match="token type 7"):
        build(request_for(str(tmp_path / "floats")))


def test_a_corpus_without_tokens_is_refused(tmp_path: Path) -> None:
    IndexedDatasetBuilder(str(tmp_path / "empty.bin"), dtype=np.uint16).finalize(str(tmp_path / "empty.idx"))
    with pytest.raises(InvalidInput, match="holds no tokens"):
        build(request_for(str(tmp_path / "empty")))


def test_tokens_beyond_the_vocabulary_are_refused(corpus: str) -> None:
    with pytest.raises(InvalidInput, match="holds token id 256, the tokenizer has 101 ids"):
        build_datasets(request_for(corpus), NullTokenizer(100), lambda: True)


def test_a_corpus_one_token_short_of_a_sample_is_refused_and_one_more_is_enough(tmp_path: Path) -> None:
    short = write_corpus(tmp_path / "short", ["x" * (LENGTH - 1)])
    with pytest.raises(
        InvalidInput, match=f"the training split .* has {LENGTH} tokens and a sample takes {LENGTH + 1}"
    ):
        build(request_for(short, split="1"))
    enough = write_corpus(tmp_path / "enough", ["x" * LENGTH])
    train, _, _ = build(request_for(enough, split="1"))
    assert len(train) >= 50


def test_a_validation_split_too_small_for_one_sample_is_refused(corpus: str) -> None:
    with pytest.raises(InvalidInput, match=r"the validation split .* has 0 tokens"):
        build(request_for(corpus, split="998,1,1"))


def test_a_blend_without_weights_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / letter, [letter * 15] * 20) for letter in "ab"]
    with pytest.raises(InvalidInput, match="put a weight before each prefix"):
        build(request_for(*prefixes, split="1", num_samples=(50, 0, 0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "a,b"}, "is not numbers"),
        ({"split": "0,0,0"}, "sums to 0"),
        ({"split": "1,1,1,1"}, "one to three shares"),
        ({"split": "2,-1"}, "none negative"),
        ({"split": "nan,1"}, "none negative"),
        ({"split": "0,1,1"}, "training has no data"),
        ({"data_path": ("1", "a", "x", "b")}, "`x` stands where a positive weight"),
        ({"data_path": ("1", "a", "0", "b")}, "`0` stands where a positive weight"),
        ({"data_path": ()}, "no data: give"),
        ({"mock": True}, "exclude each other"),
        ({"train_data_path": ("a",)}, "exclude each other"),
        ({"data_path": (), "valid_data_path": ("a",)}, "training has no data"),
        ({"sequence_length": 0}, "--seq-length 0"),
        ({"num_samples": (-1, 0, 0)}, "must not be negative"),
    ],
)
def test_flags_that_cannot_work_are_refused(corpus: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(request_for(corpus, **changes))


def test_a_cache_place_taken_by_a_file_is_refused(corpus: str) -> None:
    Path(corpus).write_text("the text the corpus was made from")
    with pytest.raises(InvalidInput, match="--data-cache-path"):
        build(request_for(corpus))


def batches_of(dataset: Any, consumed: int = 0, rank: int = 0, ranks: int = 1, workers: int = 0) -> Any:
    return build_data_iterator(
        dataset,
        consumed_samples=consumed,
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        num_workers=workers,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_stack_the_samples_in_order(corpus: str, workers: int) -> None:
    train, _, _ = build(request_for(corpus))
    batches = batches_of(train, workers=workers)
    for k in range(5):
        batch = next(batches)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(batch[name], torch.stack([train[2 * k][name], train[2 * k + 1][name]]))


def test_a_resumed_iterator_continues_with_another_data_parallel_size(corpus: str) -> None:
    train, _, _ = build(request_for(corpus))
    whole = batches_of(train)
    for _ in range(4):
        next(whole)
    halves = [batches_of(train, consumed=8, rank=rank, ranks=2) for rank in range(2)]
    for _ in range(3):
        for half in halves:
            assert torch.equal(next(half)["tokens"], next(whole)["tokens"])


def test_what_was_consumed_is_not_read_again(corpus: str) -> None:
    train, _, _ = build(request_for(corpus))
    touched: list[int] = []

    class Watched(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(train)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            touched.append(index)
            sample: dict[str, torch.Tensor] = train[index]
            return sample

    next(batches_of(Watched(), consumed=20))
    assert touched == [20, 21]


def test_a_batch_of_a_blend_holds_nothing_but_model_input(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / letter, [letter * 300] * 20) for letter in "ab"]
    train, _, _ = build(request_for("1", prefixes[0], "1", prefixes[1], num_samples=(20, 0, 0)))
    assert set(next(batches_of(train))) == {"tokens", "labels", "loss_mask", "position_ids"}


@pytest.mark.parametrize("workers", [0, 1])
def test_running_out_says_how_much_there_was_only_after_the_last_batch(corpus: str, workers: int) -> None:
    train, _, _ = build(request_for(corpus))
    batches = batches_of(train, consumed=len(train) - 5, workers=workers)
    assert [len(next(batches)["tokens"]) for _ in range(2)] == [2, 2]
    for _ in range(2):
        with pytest.raises(
            PretrainError, match=f"the dataset has {len(train)} samples, {len(train) - 5} were consumed"
        ):
            next(batches)


def test_loading_draws_nothing_from_the_global_random_state(corpus: str) -> None:
    train, _, _ = build(request_for(corpus))
    before = torch.get_rng_state()
    next(batches_of(train))
    next(batches_of(train, workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_negative_number_of_workers_is_refused(corpus: str) -> None:
    with pytest.raises(InvalidInput, match="--num-workers -1"):
        batches_of(build(request_for(corpus))[0], workers=-1)


def run_with_workers(stuck_from: int, end: str, begin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a trainer that only takes note of SIGTERM, does `begin`, reads a batch with two workers, and does `end`.

    Its workers do not come back from samples from `stuck_from` on.
    """
    script = f"""
import os, signal, torch
from megatron.pretrain.data import build_data_iterator

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        while index >= {stuck_from}:
            signal.pause()
        return {{"tokens": torch.tensor([index])}}

signal.signal(signal.SIGTERM, lambda number, frame: None)
{begin}
batches = build_data_iterator(Counting(), consumed_samples=0, micro_batch_size=2, data_parallel_rank=0,
                              data_parallel_size=1, num_workers=2)
print(next(batches)["tokens"].flatten().tolist(), flush=True)
{end}
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    # To read the output to its end is to wait for every process that inherited it.
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, start_new_session=True)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9)], ids=["at exit", "when killed"]
)
def test_stuck_workers_neither_keep_a_trainer_from_ending_nor_outlive_it(end: str, code: int) -> None:
    done = run_with_workers(4, end)
    assert (done.returncode, done.stdout, without_notices(done.stderr)) == (code, "[0, 1]\n", "")


def test_a_signal_to_the_whole_process_group_does_not_take_the_workers_from_a_trainer_that_goes_on() -> None:
    done = run_with_workers(1000, "os.killpg(0, signal.SIGTERM)\nprint([next(batches) for _ in range(50)][-1])")
    assert (done.returncode, without_notices(done.stderr)) == (0, "")
    assert "[100]" in done.stdout


def test_a_worker_that_gets_a_signal_before_it_is_set_up_goes_on() -> None:
    early = """
from megatron.pretrain import data
def set_up(worker, protect=data.live_and_die_with_parent):
    os.kill(os.getpid(), signal.SIGTERM)
    protect(worker)
data.live_and_die_with_parent = set_up
"""
    done = run_with_workers(1000, "print([next(batches) for _ in range(50)][-1])", early)
    assert (done.returncode, without_notices(done.stderr)) == (0, "")
    assert "[100]" in done.stdout


def build_on_a_rank(rank: int, directory: str, prefixes: tuple[str, str]) -> None:
    """Build a blend as one of three ranks, of which the last loads no data, and write down what it can read."""
    store = torch.distributed.FileStore(f"{directory}/rendezvous", 3)
    timeout = timedelta(seconds=60)  # so that one rank's failure ends the others
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    request = request_for("1", prefixes[0], "2", prefixes[1], num_samples=(30, 0, 0))
    train, valid, test = build_datasets(request, ByteTokenizer(), lambda: rank != 2)
    read = None if train is None else read_all(train)
    Path(directory, f"{rank}.json").write_text(json.dumps([read, valid is None, test is None]))
    torch.distributed.destroy_process_group()


def test_ranks_read_the_same_samples_and_one_that_loads_no_data_gets_none(tmp_path: Path) -> None:
    prefixes = tuple(write_corpus(tmp_path / letter, [letter * 300] * 20) for letter in "ab")
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=build_on_a_rank, args=(rank, str(tmp_path), prefixes)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    first, second, third = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    assert first == second
    assert len(first[0]) >= 30
    assert third == [None, True, True]
