"""The page of formats says what is written, and suffices to read it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from workload import content, new_store, write

from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.storage import manifest
from moe_ckpt.dense import chain, integrity

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", [manifest, chain, integrity], ids=lambda one: one.__name__.rpartition(".")[2])
def test_the_page_of_formats_has_the_versions_that_are_written(module: ModuleType) -> None:
    assert f"`{module.__name__.rpartition('.')[2]}` | {module.FORMAT_VERSION} |" in PAGE


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """The functions that the page of formats shows, which know nothing of the library."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    functions: dict[str, Any] = {}
    exec(code, functions)
    return functions


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
def test_a_reader_made_from_the_page_of_formats_alone_reads_what_stores_write(
    kind: str, described: dict[str, Any], tmp_path: Path
) -> None:
    store, snapshot = new_store(kind, tmp_path), SnapshotId(12, 3)
    write(store, snapshot)
    store.close()
    (sealed,) = (path for path in tmp_path.rglob("*.json") if snapshot.name in str(path))
    segment = sealed.parent / described["body"](sealed, "manifest")["segment"]
    assert dict(described["records"](sealed, segment)) == content(snapshot)


def test_files_beside_dense_checkpoints_are_read_as_the_page_of_formats_says(
    described: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / chain.MANIFEST).write_bytes(chain.encode(chain.Chain(7, {0: (7, 7)}, {7: "0f" * 8}, 2, None, "all")))
    integrity.seal(tmp_path)
    assert described["body"](tmp_path / chain.MANIFEST, "chain")["holders"] == {"0": [7, 7]}
    length, _ = described["body"](tmp_path / integrity.NAME, "integrity")["files"][chain.MANIFEST]
    assert length == (tmp_path / chain.MANIFEST).stat().st_size
