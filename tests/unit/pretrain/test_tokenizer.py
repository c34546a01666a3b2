"""Tokenizers: which ids a text has, and what cannot work is said."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.tokenizer import ByteTokenizer, build_tokenizer

WORDS = {"<unk>": 0, "hello": 1, "world": 2, "<|endoftext|>": 3}


def write_word_tokenizer(path: Path, vocabulary: dict[str, int]) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(path))
    return path


@given(st.binary())
def test_any_bytes_survive_the_byte_tokenizer(content: bytes) -> None:
    ids = ByteTokenizer().tokenize(content.decode("utf-8", errors="surrogateescape"))
    assert bytes(ids) == content


def test_the_byte_tokenizer_has_257_ids_and_ends_documents_with_the_last() -> None:
    tokenizer = build_tokenizer("ByteTokenizer", None, None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lone surrogate at character 1"):
        ByteTokenizer().tokenize("a\ud800")


def test_a_null_tokenizer_reads_ids_and_keeps_the_last_one_for_the_end_of_a_document() -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 101)
    assert tokenizer.tokenize("0 99 7") == [0, 99, 7]
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)


@pytest.mark.parametrize("text", ["99", "-1", "seven"])
def test_a_null_tokenizer_refuses_what_is_not_an_id(text: str) -> None:
    with pytest.raises(InvalidInput):
        build_tokenizer("NullTokenizer", None, 100).tokenize(text)


def test_a_hugging_face_file_tokenizes_and_gives_its_end_of_document(tmp_path: Path) -> None:
    file = write_word_tokenizer(tmp_path / "tokenizer.json", WORDS)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    assert tokenizer.tokenize("hello world") == [1, 2]
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 3)


def test_a_hugging_face_directory_is_as_good_as_its_file(tmp_path: Path) -> None:
    file = write_word_tokenizer(tmp_path / "tokenizer.json", WORDS)
    found = [build_tokenizer("HuggingFaceTokenizer", str(place), None) for place in (file, tmp_path)]
    assert [tokenizer.tokenize("hello world") for tokenizer in found] == [[1, 2]] * 2


def test_gaps_between_hugging_face_ids_do_not_put_an_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    file = write_word_tokenizer(tmp_path / "tokenizer.json", {"<unk>": 0, "far": 90, "</s>": 4})
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    assert tokenizer.tokenize("far") == [90]
    assert tokenizer.vocab_size == 91


def test_a_hugging_face_file_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    file = write_word_tokenizer(tmp_path / "tokenizer.json", {"<unk>": 0, "hello": 1})
    with pytest.raises(InvalidInput, match="no end-of-document token"):
        build_tokenizer("HuggingFaceTokenizer", str(file), None)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff not json")
    with pytest.raises(InvalidInput, match="not a Hugging Face"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path), None)


def test_text_that_is_not_utf8_is_refused_by_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", str(write_word_tokenizer(tmp_path / "tokenizer.json", WORDS)), None
    )
    with pytest.raises(InvalidInput, match="not valid UTF-8"):
        tokenizer.tokenize(b"\xff".decode("utf-8", errors="surrogateescape"))


@pytest.mark.parametrize(
    ("tokenizer_type", "model", "vocab_size", "message"),
    [
        ("GPT2BPETokenizer", None, None, "choose one of"),
        ("HuggingFaceTokenizer", None, None, "needs --tokenizer-model"),
        ("HuggingFaceTokenizer", "/does/not/exist", None, "no tokenizer.json there"),
        ("NullTokenizer", None, None, "needs --vocab-size"),
        ("NullTokenizer", None, 1, "at least 2"),
        ("ByteTokenizer", "tokenizer.json", None, "reads no file"),
        ("ByteTokenizer", None, 300, "contradicts ByteTokenizer, which has 257"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    tokenizer_type: str, model: str | None, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_tokenizer(tokenizer_type, model, vocab_size)


def test_a_tokenizer_is_built_without_a_deprecation_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_tokenizer("ByteTokenizer", None, None)
    assert caplog.records == []
