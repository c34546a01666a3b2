"""`moe-ckpt convert` of a chain: what is damaged, or in the way, is refused, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verify_places

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.commands.main import main
from moe_ckpt.dense import export
from moe_ckpt.dense.chain import MANIFEST
from moe_ckpt.dense.integrity import NAME, check
from moe_ckpt.dense.names import TRACKER
from moe_ckpt.dense.staging import staging

Convert = Callable[[Path, Path], tuple[int, str]]

pytestmark = pytest.mark.usefixtures("single_process_group")


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Convert:
    def call(source: Path, out: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["moe-ckpt", "convert", "--to", "dense", str(source), str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("iteration", [12, 24, 36])
def test_a_changed_byte_of_any_iteration_of_the_chain_is_not_converted(
    iteration: int, convert: Convert, tmp_path: Path
) -> None:
    root, out = verify_places.chained(tmp_path / "run", 1), tmp_path / "out"
    shard = sorted((root / f"iter_{iteration:07d}").glob("*.distcp"))[-1]
    flip(shard)
    code, err = convert(root, out)
    assert code == 1
    assert f"{shard} is damaged: its checksum is" in err
    assert not out.exists()


def test_a_chain_that_lost_its_checksums_is_not_converted(convert: Convert, tmp_path: Path) -> None:
    root, out = verify_places.chained(tmp_path / "run", 2), tmp_path / "out"
    (root / "iter_0000012" / NAME).unlink()
    code, err = convert(root, out)
    assert (code, out.exists()) == (1, False)
    assert "its bytes cannot be checked" in err


def test_a_manifest_that_was_damaged_is_no_reason_for_newer_software(convert: Convert, tmp_path: Path) -> None:
    root = verify_places.chained(tmp_path / "run", 2)
    path = root / "iter_0000036" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    code, err = convert(root, tmp_path / "out")
    assert code == 1
    assert "does not match its checksum" in err


@pytest.mark.parametrize("tracked", ["48", "release", "soon"])
def test_a_folder_that_names_another_checkpoint_is_left_as_it_is(
    tracked: str, convert: Convert, tmp_path: Path
) -> None:
    root, out = verify_places.chained(tmp_path / "run", 3), tmp_path / "out"
    out.mkdir()
    (out / TRACKER).write_text(tracked)
    code, err = convert(root, out)
    assert code == 2
    assert "has checkpoints of its own" in err
    assert [path.read_text() for path in out.iterdir()] == [tracked]


def saved_again(folder: Path, other: Path) -> None:
    """As a job that went back does it."""
    aside = folder.with_name(f".{folder.name}.replaced")
    folder.rename(aside)
    other.rename(folder)
    shutil.rmtree(aside)


@pytest.mark.parametrize("iteration", [12, 36])
@pytest.mark.parametrize("before", ["sums_of", "damaged", "_write"])
def test_an_iteration_that_is_saved_again_meanwhile_is_not_converted_into_a_mixture(
    before: str, iteration: int, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else bytes that nobody has compared with a checksum get one that they match."""
    root, out = verify_places.chained(tmp_path / "run", 4), tmp_path / "out"
    folder = root / f"iter_{iteration:07d}"
    other = shutil.copytree(folder, tmp_path / "other")
    step = getattr(export, before)

    def late(*arguments: Any) -> Any:
        if other.exists():
            saved_again(folder, other)
        return step(*arguments)

    monkeypatch.setattr(export, before, late)
    code, err = convert(root, out)
    assert code == 1
    assert f"{folder} was saved again while it was read" in err
    assert not list(out.iterdir())


def test_a_chain_is_converted_into_an_intact_checkpoint(convert: Convert, tmp_path: Path) -> None:
    root, out = verify_places.chained(tmp_path / "run", 4), tmp_path / "out"
    assert convert(root, out) == (0, "")
    assert check(out / "iter_0000036") == ()
    assert (out / TRACKER).read_text() == "36"


def test_of_two_conversions_to_one_target_one_is_published_and_the_other_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def late() -> None:
        with staging(target, "merging") as folder:
            (folder / "a").touch()
            with staging(target, "merging") as first:
                (first / "b").touch()
            (folder / "c").touch()

    with pytest.raises(UsageError, match="out exists already; give another target or remove it"):
        late()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "b"]


def test_a_killed_conversion_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    target = tmp_path / "out"
    program = f"""
import os, pathlib
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
from moe_ckpt.dense.staging import staging
with staging(pathlib.Path({str(target)!r}), "merging") as folder:
    (folder / "a").touch()
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert [path.name for path in tmp_path.rglob("a")] == ["a"]
    with staging(target, "merging") as folder:
        (folder / "b").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "b"]
