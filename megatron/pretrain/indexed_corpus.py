"""Checks of an indexed corpus (`PREFIX.bin`, `PREFIX.idx`) before Megatron maps it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.pretrain.errors import InvalidInput

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_TOOL = "tools/preprocess_data.py"


@dataclass(frozen=True)
class IndexedCorpus:
    """An indexed corpus whose files were found whole.

    `sequence_lengths` holds the tokens of each sequence, int32, shape [sequences]; `token_dtype` is a token's type in
    `.bin`.
    """

    prefix: str
    sequence_lengths: npt.NDArray[np.int32]
    token_dtype: np.dtype[np.generic]

    @property
    def tokens(self) -> int:
        return self.tokens_between(0.0, 1.0)

    def tokens_between(self, begin: float, end: float) -> int:
        """Tokens of the sequences between two fractions of the corpus, rounded as Megatron's split is.

        Args:
            begin: Where they begin, as a fraction of the corpus.
            end: Where they end, as a fraction of the corpus.
        """
        count = len(self.sequence_lengths)
        return int(self.sequence_lengths[round(begin * count) : round(end * count)].sum(dtype=np.int64))


def open_corpus(prefix: str) -> IndexedCorpus:
    """The corpus at `prefix`; raises `InvalidInput` when a file is missing, foreign, truncated or empty."""
    index_path, data_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index_path, data_path):
        if not path.is_file():
            raise InvalidInput(f"data prefix {prefix}: {path} does not exist; make it with {_TOOL}")
    try:
        index, data_bytes = np.memmap(index_path, mode="r", dtype=np.uint8), data_path.stat().st_size
    except ValueError as error:  # an empty file cannot be mapped
        raise InvalidInput(f"{index_path} is empty; make it again with {_TOOL}") from error
    except OSError as error:
        raise InvalidInput(f"{index_path} cannot be read: {error.strerror}") from error
    dtype, sequences, documents = _parse_header(index[: _HEADER.size].tobytes(), index_path)
    lengths_end = _HEADER.size + 4 * sequences
    pointers_end = lengths_end + 8 * sequences
    index_bytes = pointers_end + 8 * documents
    if index.size < index_bytes:
        raise InvalidInput(
            f"{index_path} is truncated ({index.size} of {index_bytes} bytes); make it again with {_TOOL}"
        )
    lengths: np.ndarray[Any, Any] = index[_HEADER.size : lengths_end].view(np.int32)
    pointers: np.ndarray[Any, Any] = index[lengths_end:pointers_end].view(np.int64)
    if sequences == 0 or not lengths.any():
        raise InvalidInput(f"data prefix {prefix} holds no tokens; give {_TOOL} some text")
    needed_bytes = int((pointers + lengths.astype(np.int64) * dtype.itemsize).max())
    if data_bytes < needed_bytes:
        raise InvalidInput(
            f"{data_path} is truncated or belongs to another index ({data_bytes} of {needed_bytes} bytes); "
            f"make both again with {_TOOL}"
        )
    return IndexedCorpus(prefix=prefix, sequence_lengths=lengths, token_dtype=dtype)


def _parse_header(header: bytes, path: Path) -> tuple[np.dtype[np.generic], int, int]:
    """Type of the tokens, and the numbers of sequences and documents."""
    if not header.startswith(_MAGIC[: len(header)]):
        raise InvalidInput(f"{path} is not a Megatron index; give the prefix of files made by {_TOOL}")
    if len(header) < _HEADER.size:
        raise InvalidInput(f"{path} is truncated ({len(header)} bytes); make it again with {_TOOL}")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _TOKEN_DTYPES:
        raise InvalidInput(
            f"{path} has index version {version} and token type {code}; only version 1 with integer tokens is read"
        )
    return np.dtype(_TOKEN_DTYPES[code]), sequences, documents
