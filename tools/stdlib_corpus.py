#!/usr/bin/env python3
"""Make a byte-level indexed corpus of the Python standard library's own source found on this machine."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.indexed_corpus import IndexedCorpus, open_corpus
from megatron.pretrain.preprocess import corpus_writer, encode_document, read_documents
from megatron.pretrain.tokenizer import ByteTokenizer

# Tests and installed packages are not the library; character tables and help topics are generated, not written.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def stdlib_sources(root: Path, max_bytes: int) -> Iterator[Path]:
    """The library's `.py` files in sorted order, up to the first that would take their sum over `max_bytes`."""
    total_bytes = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts):
            continue
        total_bytes += path.stat().st_size
        if total_bytes > max_bytes:
            return
        yield path


def build(output_prefix: str, max_bytes: int) -> str:
    """Write the corpus unless a whole one is at `output_prefix` already; returns a sentence on what is there."""
    kept = _whole_corpus(output_prefix)
    if kept is not None:
        documents = len(kept.sequence_lengths)
        return f"kept {output_prefix}: {documents} documents, {kept.tokens} tokens (delete it to rebuild)"
    root = Path(sysconfig.get_path("stdlib"))
    tokenizer = ByteTokenizer()
    paths = tuple(stdlib_sources(root, max_bytes))
    if not paths:
        raise InvalidInput(f"no standard library source below {max_bytes} bytes under {root}; raise --max-mb")
    with corpus_writer(output_prefix, tokenizer.vocab_size) as writer:
        for path in paths:
            for document in read_documents(path, ("text",)):
                writer.add(encode_document(tokenizer, document, append_eod=True))
    return f"wrote {output_prefix}: {writer.documents} documents, {writer.tokens} tokens"


def _whole_corpus(prefix: str) -> IndexedCorpus | None:
    try:
        return open_corpus(prefix)
    except InvalidInput:  # missing or torn
        return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--max-mb", type=float, default=4.0, help="source text to take at most, in MB (1e6 bytes)")
    flags = parser.parse_args(arguments)
    try:
        print(build(flags.output_prefix, int(flags.max_mb * 1e6)))
    except PretrainError as error:
        print(f"stdlib_corpus: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"stdlib_corpus: {error}; nothing was replaced", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
