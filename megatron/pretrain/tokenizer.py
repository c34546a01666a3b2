"""Tokenizers of the preprocessor: text to token ids.

Those of `megatron.core.tokenizers` do not do: the Hugging Face one needs `transformers` and may ask the network, the
byte one has other ids, the null one checks nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from megatron.pretrain.errors import InvalidInput

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")

_END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  (DeepSeek writes full-width bars)
    "<eod>",
    "<|eod|>",
)


class Tokenizer(ABC):
    """What the preprocessor needs of one.

    Args:
        vocab_size: number of token ids, the end-of-document id included; every id is below it.
        eod: the id that ends a document.
    """

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`, without an end-of-document id. Raises `InvalidInput` for text it cannot encode."""


class ByteTokenizer(Tokenizer):
    """One id per byte of the UTF-8 text (0 to 255) and 256 as end of document.

    Bytes that are not UTF-8 travel as surrogate escapes, so any file makes the round trip unchanged.
    """

    def __init__(self) -> None:
        super().__init__(257, 256)

    def tokenize(self, text: str) -> list[int]:
        try:
            return list(text.encode("utf-8", errors="surrogateescape"))
        except UnicodeEncodeError as error:
            raise InvalidInput(f"text holds a lone surrogate at character {error.start}; it is not Unicode") from error


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` read from disk with the `tokenizers` library; never asks the network.

    `path` is the file or a directory that holds it. Raises `InvalidInput` when the file is missing or unreadable,
    or when none of the usual end-of-document names is in its vocabulary.
    """

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise InvalidInput("HuggingFaceTokenizer needs the `tokenizers` package: pip install tokenizers") from error
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InvalidInput(f"--tokenizer-model {path}: no tokenizer.json there; give the file or its directory")
        content = file.read_bytes()
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise InvalidInput(f"--tokenizer-model {file} is not a Hugging Face tokenizer.json: {error}") from error
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        eod = next((vocabulary[name] for name in _END_OF_DOCUMENT_NAMES if name in vocabulary), None)
        if eod is None:
            known = ", ".join(_END_OF_DOCUMENT_NAMES[:4])
            raise InvalidInput(
                f"--tokenizer-model {file} has no end-of-document token ({known}, ...); add one to its vocabulary"
            )
        # Ids may have gaps, so the count of entries is not a bound on them.
        vocab_size = max(vocabulary.values()) + 1
        super().__init__(vocab_size, eod)

    def tokenize(self, text: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidInput(
                "text is not valid UTF-8, which a Hugging Face tokenizer needs; convert it first"
            ) from error


class NullTokenizer(Tokenizer):
    """Text that is token ids separated by spaces; the last of the `vocab_size` ids is in no text and ends a document,
    as with Megatron-LM's."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise InvalidInput(f"--vocab-size {vocab_size}: NullTokenizer needs at least 2, one of them for the end")
        super().__init__(vocab_size, vocab_size - 1)

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise InvalidInput(f"NullTokenizer reads token ids separated by spaces, not words: {error}") from error
        for i in ids:
            if not 0 <= i < self.eod:
                raise InvalidInput(f"token id {i} is outside 0..{self.eod - 1}; raise --vocab-size or fix the text")
        return ids


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--tokenizer-model` and `--vocab-size` ask for.

    Raises `InvalidInput` for an unknown type, a flag the type needs and lacks, or one that contradicts it.

    Args:
        tokenizer_type: A name in TOKENIZER_TYPES.
        tokenizer_model: The file of the tokenizer, or None.
        vocab_size: The number of tokens, or None.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise InvalidInput(f"--tokenizer-type {tokenizer_type} is unknown; choose one of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise InvalidInput("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model (a tokenizer.json)")
        return _refuse_other_size(HuggingFaceTokenizer(tokenizer_model), vocab_size)
    if tokenizer_model is not None:
        raise InvalidInput(f"--tokenizer-model {tokenizer_model}: {tokenizer_type} reads no file; drop the flag")
    if tokenizer_type == "ByteTokenizer":
        return _refuse_other_size(ByteTokenizer(), vocab_size)
    if vocab_size is None:
        raise InvalidInput("--tokenizer-type NullTokenizer needs --vocab-size")
    return NullTokenizer(vocab_size)


def _refuse_other_size(tokenizer: Tokenizer, vocab_size: int | None) -> Tokenizer:
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise InvalidInput(
            f"--vocab-size {vocab_size} contradicts {type(tokenizer).__name__}, "
            f"which has {tokenizer.vocab_size} ids; drop the flag"
        )
    return tokenizer
