"""From documents to an indexed corpus: read inputs, tokenize, write `.bin` and `.idx` whole or not at all."""

from __future__ import annotations

import functools
import glob
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.tokenizer import Tokenizer, build_tokenizer

_JSON_SUFFIXES = (".jsonl", ".json")
_DOCUMENTS_PER_ROUND = 256


@dataclass(frozen=True)
class PreprocessRequest:
    """What to tokenize and where to write it; the fields are the flags of `tools/preprocess_data.py`."""

    inputs: tuple[str, ...]
    json_keys: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    append_eod: bool
    workers: int


@dataclass(frozen=True)
class Document:
    """One text, the key it belongs to, and where it came from for error messages."""

    key: str
    text: str
    origin: str


class CorpusWriter:
    """Collects documents into the indexed corpus that `corpus_writer` puts in place; counts what it wrote."""

    def __init__(self, prefix: str, data_path: Path, vocab_size: int) -> None:
        # Imported here: it brings torch, and the tokenizing workers, which import this module, never write.
        with warnings.catch_warnings():
            # Preprocessing has no use for the GPU libraries whose absence is announced.
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # type: ignore[import-untyped,unused-ignore]

        self.prefix = prefix
        self._dtype = DType.optimal_dtype(vocab_size)
        self.builder = IndexedDatasetBuilder(str(data_path), dtype=self._dtype)
        self.documents = self.tokens = self.empty_documents = 0

    def add(self, ids: list[int]) -> None:
        """Append one document of token ids; an empty one is counted and left out."""
        if not ids:
            self.empty_documents += 1
            return
        self.builder.add_document(np.asarray(ids, dtype=self._dtype), [len(ids)])
        self.documents += 1
        self.tokens += len(ids)

    def require_documents(self) -> None:
        """Raise `InvalidInput` when no document came: Megatron cannot map an empty corpus."""
        if self.documents == 0:
            raise InvalidInput(f"nothing to write to {self.prefix}: every input document is empty")


@contextmanager
def corpus_writer(prefix: str, vocab_size: int) -> Iterator[CorpusWriter]:
    """A writer for `prefix.bin` and `prefix.idx`, put in place together when the block ends without an error.

    Files are written under temporary names, synced, and renamed, the index last: a reader sees the new corpus,
    or no index. Raises `InvalidInput` when the place cannot be written or no document came.

    Args:
        prefix: The path of both files without their suffixes.
        vocab_size: The number of tokens, which decides their dtype.
    """
    data_path, index_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    temporary_data, temporary_index = (Path(f"{path}.{os.getpid()}.tmp") for path in (data_path, index_path))
    try:
        data_path.parent.mkdir(parents=True, exist_ok=True)
        writer = CorpusWriter(prefix, temporary_data, vocab_size)
    except OSError as error:
        raise InvalidInput(f"--output-prefix {prefix} cannot be written: {error.strerror}") from error
    try:
        yield writer
        writer.require_documents()
        writer.builder.finalize(str(temporary_index))
        _sync(temporary_data)
        _sync(temporary_index)
        # Without an index the old data are no corpus any more; with the new one the new data are.
        index_path.unlink(missing_ok=True)
        temporary_data.replace(data_path)
        temporary_index.replace(index_path)
        _sync(data_path.parent)
    finally:
        writer.builder.data_file.close()
        temporary_data.unlink(missing_ok=True)
        temporary_index.unlink(missing_ok=True)


def find_inputs(patterns: Iterable[str]) -> tuple[Path, ...]:
    """The files that paths, globs and directories name, each once, in a fixed order.

    Directories are read recursively, without hidden files. Raises `InvalidInput` for a pattern that names nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [file for match in matches for file in _files_of(Path(match))]
        if not files:
            raise InvalidInput(f"--input {pattern}: no such file, or a directory or glob without files")
        found.update(dict.fromkeys(files))
    return tuple(found)


def read_documents(path: Path, json_keys: tuple[str, ...]) -> Iterator[Document]:
    """The documents of one file: each line and key of a `.jsonl` or `.json` file, any other file whole as key `text`.

    Raises `InvalidInput`, naming file and line, for what is not JSON, or has no text under a key.

    Args:
        path: The file.
        json_keys: The keys whose texts are documents.
    """
    if path.suffix in _JSON_SUFFIXES:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield from _parse_line(line, json_keys, f"{path}:{number}")
        return
    if "text" not in json_keys:
        raise InvalidInput(
            f"{path} is plain text, whose only key is `text`; --json-keys asks for {' '.join(json_keys)}"
        )
    try:
        yield Document("text", path.read_bytes().decode("utf-8", errors="surrogateescape"), str(path))
    except OSError as error:
        raise InvalidInput(f"--input {path} cannot be read: {error.strerror}") from error


def preprocess(request: PreprocessRequest, on_progress: Callable[[int, int], None]) -> tuple[CorpusWriter, ...]:
    """Tokenize the inputs and write one corpus per JSON key at `{output_prefix}_{key}_document`.

    Raises `InvalidInput` for bad input; then nothing is written.

    Args:
        request: The inputs, the tokenizer, and where the corpora go.
        on_progress: Called after every document with the documents and tokens so far.

    Raises:
        InvalidInput: The input is bad; then nothing is written.
    """
    if request.workers < 1:
        raise InvalidInput(f"--workers {request.workers}: at least 1 is needed")
    files = find_inputs(request.inputs)
    tokenizer = build_tokenizer(request.tokenizer_type, request.tokenizer_model, request.vocab_size)
    documents = (document for path in files for document in read_documents(path, request.json_keys))
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(corpus_writer(f"{request.output_prefix}_{key}_document", tokenizer.vocab_size))
            for key in request.json_keys
        }
        done = tokens = 0
        for key, ids in _encode_all(documents, tokenizer, request):
            writers[key].add(ids)
            done, tokens = done + 1, tokens + len(ids)
            on_progress(done, tokens)
        for writer in writers.values():  # all of them before any is put in place
            writer.require_documents()
    return tuple(writers.values())


def _encode_all(
    documents: Iterator[Document], tokenizer: Tokenizer, request: PreprocessRequest
) -> Iterator[tuple[str, list[int]]]:
    if request.workers == 1:
        for document in documents:
            yield document.key, encode_document(tokenizer, document, request.append_eod)
        return
    # Spawned, not forked: the parent has torch's threads by now. In rounds, so that memory stays bounded.
    with multiprocessing.get_context("spawn").Pool(request.workers) as pool:
        while round_ := list(islice(documents, _DOCUMENTS_PER_ROUND * request.workers)):
            encoded = pool.map(functools.partial(_encode_in_worker, request), round_, chunksize=16)
            yield from zip((document.key for document in round_), encoded, strict=True)


_tokenizer_of_worker = functools.cache(build_tokenizer)


def _encode_in_worker(request: PreprocessRequest, document: Document) -> list[int]:
    tokenizer = _tokenizer_of_worker(request.tokenizer_type, request.tokenizer_model, request.vocab_size)
    return encode_document(tokenizer, document, request.append_eod)


def encode_document(tokenizer: Tokenizer, document: Document, append_eod: bool) -> list[int]:
    """Token ids of a document.

    Args:
        tokenizer: The tokenizer.
        document: The document.
        append_eod: Whether the end-of-document id is put behind a document that is not empty.
    """
    try:
        ids = tokenizer.tokenize(document.text)
    except InvalidInput as error:
        raise InvalidInput(f"{document.origin}: {error}") from error
    return [*ids, tokenizer.eod] if ids and append_eod else ids


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _parse_line(line: bytes, json_keys: tuple[str, ...], origin: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{origin}: not a line of JSON: {error}") from error
    for key in json_keys:
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InvalidInput(f"{origin}: no text under key `{key}`; name the keys that hold text with --json-keys")
        yield Document(key, text, origin)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
