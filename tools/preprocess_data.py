#!/usr/bin/env python3
"""Make an indexed corpus (`.bin`, `.idx`) for training from text or JSONL files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.preprocess import PreprocessRequest, preprocess
from megatron.pretrain.tokenizer import TOKENIZER_TYPES


def parse_arguments(arguments: list[str]) -> tuple[PreprocessRequest, int]:
    """The request the flags make, and the log interval in documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, globs or directories; .jsonl/.json or text"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold the text")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="ByteTokenizer", help="how text is split")
    parser.add_argument("--tokenizer-model", help="tokenizer.json, or the directory that holds it")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="for NullTokenizer: how many ids there are, as for training; the last one ends documents",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two progress lines")
    flags = parser.parse_args(arguments)
    if flags.log_interval < 1:
        raise InvalidInput(f"--log-interval {flags.log_interval}: at least 1 is needed")
    request = PreprocessRequest(
        inputs=tuple(flags.input),
        json_keys=tuple(dict.fromkeys(flags.json_keys)),
        output_prefix=flags.output_prefix,
        tokenizer_type=flags.tokenizer_type,
        tokenizer_model=flags.tokenizer_model,
        vocab_size=flags.vocab_size,
        append_eod=flags.append_eod,
        workers=flags.workers,
    )
    return request, flags.log_interval


def progress_printer(log_interval: int) -> Callable[[int, int], None]:
    """A callback that reports the totals and the speed every `log_interval` documents."""
    started_s = time.monotonic()

    def on_progress(documents: int, tokens: int) -> None:
        if documents % log_interval == 0:
            elapsed_s = max(time.monotonic() - started_s, 1e-9)
            rates = f"{documents / elapsed_s:.1f} documents/s, {tokens / elapsed_s / 1e6:.3f} Mtokens/s"
            print(f"processed {documents} documents ({rates})", file=sys.stderr, flush=True)

    return on_progress


def main(arguments: list[str]) -> int:
    try:
        request, log_interval = parse_arguments(arguments)
        corpora = preprocess(request, progress_printer(log_interval))
    except PretrainError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"preprocess_data: {error}; nothing was replaced", file=sys.stderr)
        return 1
    for corpus in corpora:
        empty = f" ({corpus.empty_documents} empty left out)" if corpus.empty_documents else ""
        print(f"{corpus.prefix}: {corpus.documents} documents{empty}, {corpus.tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
