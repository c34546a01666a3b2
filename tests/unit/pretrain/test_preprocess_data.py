"""Preprocessing: from text and JSONL to corpora Megatron reads, whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from notices import without_notices

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.preprocess import PreprocessRequest, find_inputs, preprocess

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def request_for(inputs: list[Path | str], prefix: Path) -> PreprocessRequest:
    return PreprocessRequest(
        inputs=tuple(str(path) for path in inputs),
        json_keys=("text",),
        output_prefix=str(prefix),
        tokenizer_type="ByteTokenizer",
        tokenizer_model=None,
        vocab_size=None,
        append_eod=True,
        workers=1,
    )


def ignore_progress(documents: int, tokens: int) -> None:
    pass


def ids_at(prefix: str | Path) -> list[list[int]]:
    """The ids of each document, copied: Megatron's arrays must not outlive the dataset they are mapped by."""
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def documents_at(prefix: str | Path) -> list[bytes]:
    """The documents of a byte corpus made with an end-of-document id, that id checked and taken off."""
    found = ids_at(prefix)
    assert all(ids[-1] == 256 for ids in found)
    return [bytes(ids[:-1]) for ids in found]


def run_tool(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOLS / name), *flags], capture_output=True, text=True, check=False)


def test_each_text_file_becomes_one_document_byte_for_byte(tmp_path: Path) -> None:
    contents = [b"first\r\nfile\n", b"latin-1: \xe9", "grüße".encode()]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.txt").write_bytes(content)
    preprocess(request_for([tmp_path / "*.txt"], tmp_path / "out"), ignore_progress)
    assert documents_at(tmp_path / "out_text_document") == contents


def test_each_json_line_becomes_one_document_per_key(tmp_path: Path) -> None:
    lines = [{"title": "a", "body": "one\ntwo", "year": 3}, {"title": "b", "body": "three", "year": 4}]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    request = replace(request_for([tmp_path / "in.jsonl"], tmp_path / "out"), json_keys=("title", "body"))
    preprocess(request, ignore_progress)
    assert documents_at(tmp_path / "out_title_document") == [b"a", b"b"]
    assert documents_at(tmp_path / "out_body_document") == [b"one\ntwo", b"three"]


def test_without_append_eod_only_the_text_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    preprocess(replace(request_for([tmp_path / "a.txt"], tmp_path / "out"), append_eod=False), ignore_progress)
    assert ids_at(tmp_path / "out_text_document") == [list(b"abc")]


def test_workers_write_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} " * (i % 7)}) for i in range(700)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    one = request_for([tmp_path / "in.jsonl"], tmp_path / "one")
    preprocess(one, ignore_progress)
    preprocess(replace(one, output_prefix=str(tmp_path / "two"), workers=2), ignore_progress)
    for suffix in ("bin", "idx"):
        alone, together = (tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "two"))
        assert alone.read_bytes() == together.read_bytes()


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    (summary,) = preprocess(request_for([tmp_path / "in.jsonl"], tmp_path / "out"), ignore_progress)
    assert (summary.documents, summary.tokens, summary.empty_documents) == (1, 2, 1)


def test_a_directory_is_read_in_a_fixed_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", ".git/config", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert find_inputs([str(tmp_path)]) == tuple(tmp_path / name for name in ("a/1.txt", "b/2.txt", "c.txt"))


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert find_inputs([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")]) == (tmp_path / "a.txt",)


def test_ids_too_large_for_two_bytes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("70000 1 99998")
    request = replace(
        request_for([tmp_path / "ids.txt"], tmp_path / "out"), tokenizer_type="NullTokenizer", vocab_size=100_000
    )
    preprocess(request, ignore_progress)
    assert ids_at(tmp_path / "out_text_document") == [[70000, 1, 99998, 99_999]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_an_older_corpus_stays_as_it_was(tmp_path: Path, workers: int) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "old"}\n')
    request = replace(request_for([tmp_path / "in.jsonl"], tmp_path / "out"), workers=workers)
    preprocess(request, ignore_progress)
    (tmp_path / "in.jsonl").write_text('{"text": "new"}\n{"text": oops}\n')
    with pytest.raises(InvalidInput, match=r"in\.jsonl:2: not a line of JSON"):
        preprocess(request, ignore_progress)
    assert documents_at(tmp_path / "out_text_document") == [b"old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_a_document_a_worker_cannot_tokenize_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n{"text": "1 x"}\n')
    request = replace(
        request_for([tmp_path / "in.jsonl"], tmp_path / "out"), tokenizer_type="NullTokenizer", vocab_size=9, workers=2
    )
    with pytest.raises(InvalidInput, match=r"in\.jsonl:2: NullTokenizer"):
        preprocess(request, ignore_progress)


def test_one_key_without_text_keeps_every_key_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "full", "b": ""}\n')
    for keys in (("a", "b"), ("b", "a")):
        request = replace(request_for([tmp_path / "in.jsonl"], tmp_path / "out"), json_keys=keys)
        with pytest.raises(InvalidInput, match="every input document is empty"):
            preprocess(request, ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"body": "x"}', "no text under key `text`"), ('{"text": 3}', "no text under"), ('["x"]', "no text under")],
)
def test_a_line_without_the_key_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        preprocess(request_for([tmp_path / "in.jsonl"], tmp_path / "out"), ignore_progress)


def test_plain_text_has_no_other_key_than_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    with pytest.raises(InvalidInput, match="whose only key is `text`"):
        preprocess(replace(request_for([tmp_path / "in.txt"], tmp_path / "o"), json_keys=("body",)), ignore_progress)


def test_an_input_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        find_inputs([str(tmp_path / "*.txt")])


def test_an_output_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    with pytest.raises(InvalidInput, match="cannot be written"):
        preprocess(request_for([tmp_path / "in.txt"], tmp_path / "in.txt" / "out"), ignore_progress)


@pytest.mark.ci
def test_the_tool_makes_a_corpus_and_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some text")
    flags = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    done = run_tool("preprocess_data.py", *flags)
    assert (done.returncode, without_notices(done.stderr)) == (0, "")
    assert done.stdout == f"{tmp_path}/out_text_document: 1 documents, 10 tokens\n"


def test_the_tool_ends_with_one_line_and_code_2_for_bad_input(tmp_path: Path) -> None:
    done = run_tool("preprocess_data.py", "--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("preprocess_data: --input")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def stdlib_corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stdlib_corpus", TOOLS / "stdlib_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stdlib_corpus_is_made_once_and_a_torn_one_is_made_again(tmp_path: Path, stdlib_corpus: ModuleType) -> None:
    prefix, data_path = str(tmp_path / "stdlib"), tmp_path / "stdlib.bin"
    assert stdlib_corpus.build(prefix, 200_000).startswith("wrote")
    content, made_at_ns = data_path.read_bytes(), data_path.stat().st_mtime_ns
    assert stdlib_corpus.build(prefix, 200_000).startswith("kept")
    assert data_path.stat().st_mtime_ns == made_at_ns
    data_path.write_bytes(content[:1000])
    assert stdlib_corpus.build(prefix, 200_000).startswith("wrote")
    assert data_path.read_bytes() == content


def test_the_stdlib_corpus_is_source_text_below_the_asked_size(tmp_path: Path, stdlib_corpus: ModuleType) -> None:
    stdlib_corpus.build(str(tmp_path / "stdlib"), 200_000)
    documents = documents_at(tmp_path / "stdlib")
    assert 50_000 < sum(map(len, documents)) <= 200_000
    for document in documents:
        compile(document, "a document", "exec")


def test_tests_and_generated_tables_are_not_in_the_stdlib_corpus(tmp_path: Path, stdlib_corpus: ModuleType) -> None:
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "encodings/cp1.py", "a/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1234")
    assert list(stdlib_corpus.stdlib_sources(tmp_path, 100)) == [tmp_path / "a/x.py", tmp_path / "b.py"]
    assert list(stdlib_corpus.stdlib_sources(tmp_path, 7)) == [tmp_path / "a/x.py"]


def test_a_stdlib_corpus_of_no_bytes_is_refused_with_code_2(
    tmp_path: Path, stdlib_corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stdlib_corpus.main(["--output-prefix", str(tmp_path / "stdlib"), "--max-mb", "0"]) == 2
    assert "raise --max-mb" in capsys.readouterr().err
