"""The `moe-ckpt` command as a person meets it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, add_flags
from moe_ckpt.commands.flags import sections
from moe_ckpt.commands.main import GROUPS, commands, main
from moe_ckpt.dense.digest import digest_components
from moe_ckpt.dense.integrity import seal

if TYPE_CHECKING:
    from conftest import Content, Save

    from moe_ckpt.dense.dense import DenseCheckpoint


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["moe-ckpt", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = run(monkeypatch, *arguments)
        return code, *capsys.readouterr()

    return call


def test_each_component_has_a_line_with_its_digest_and_size(
    output, content: Content, save: Save, tmp_path: Path
) -> None:
    directory = save(content, tmp_path / "iter_0000012")
    code, out, err = output("digest", directory)
    rows = [line.rsplit(maxsplit=3) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [rows[0][0], rows[1][0], rows[-1][0]] == ["model weights", "master weights", "total"]
    assert all(len(digest) == 32 and int(digest, 16) >= 0 and unit == "bytes" for _, digest, _, unit in rows)


def test_two_saves_of_one_state_print_the_same_text(output, content: Content, save: Save, tmp_path: Path) -> None:
    texts = {output("digest", save(content, tmp_path / name, pieces=n))[1] for name, n in (("a", 1), ("b", 2))}
    assert len(texts) == 1
    assert str(tmp_path) not in texts.pop()


def test_json_says_the_same_as_the_lines(output, content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "iter_0000012")
    lines = output("digest", directory)[1].splitlines()
    facts = json.loads(output("digest", directory, "--json")[1])
    listed = [*facts["components"], facts["total"]]
    assert [(fact["component"], fact["digest"]) for fact in listed] == [
        tuple(line.rsplit(maxsplit=3)[:2]) for line in lines
    ]


def test_a_checkpoint_with_a_changed_byte_has_no_digest(output, content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "iter_0000012")
    seal(directory)
    assert output("digest", directory)[0] == 0
    shard = next(directory.glob("*.distcp"))
    flip(shard)
    code, out, err = output("digest", directory)
    assert (code, out) == (1, "")
    assert f"{shard} is damaged: its checksum is" in err


def test_a_checkpoint_that_is_saved_again_meanwhile_has_no_digest(
    output, content: Content, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(content, tmp_path / "iter_0000012")

    def late(checkpoint: DenseCheckpoint) -> Any:
        found = digest_components(checkpoint)
        shutil.copytree(directory, tmp_path / "other")
        shutil.rmtree(directory)
        (tmp_path / "other").rename(directory)
        return found

    monkeypatch.setattr("moe_ckpt.dense.digest.digest_components", late)
    code, out, err = output("digest", directory)
    assert (code, out) == (1, "")
    assert f"{directory} was saved again while it was read" in err


def test_an_unreadable_checkpoint_is_one_line_and_exit_code_1(output, tmp_path: Path) -> None:
    code, out, err = output("digest", tmp_path)
    assert (code, out) == (1, "")
    assert err == f"moe-ckpt: {tmp_path} is empty; give an iter_XXXXXXX or a --save directory\n"


@pytest.mark.parametrize("command", [("digest",), ("convert", "--to", "hf"), ("inspect",), ("verify",)])
def test_a_place_that_does_not_exist_is_wrong_usage(output, command: tuple[str, ...], tmp_path: Path) -> None:
    out = ("out",) if command[0] == "convert" else ()
    code, _, err = output(*command, tmp_path / "nowhere", *out)
    assert (code, err) == (2, f"moe-ckpt: {tmp_path / 'nowhere'} does not exist; check the path\n")


@pytest.mark.parametrize("arguments", [("digest",), ("digets", "."), ("digest", ".", "--jsn")])
def test_wrong_usage_is_exit_code_2(output, arguments: tuple[str, ...]) -> None:
    code, out, err = output(*arguments)
    assert (code, out) == (2, "")
    assert "moe-ckpt: " in err


def test_help_says_what_is_left_out(output) -> None:
    code, out, _ = output("digest", "--help")
    assert code == 0
    assert "Left out are" in out
    assert "diff a.txt b.txt" in out


def test_version_names_the_distribution(output) -> None:
    code, out, _ = output("--version")
    assert code == 0
    assert out.startswith("moe-ckpt, version ")


def test_the_command_prints_no_warnings_of_the_packages_below(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import moe_ckpt; moe_ckpt.main()", "digest", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == f"moe-ckpt: {tmp_path} is empty; give an iter_XXXXXXX or a --save directory\n"
    assert result.returncode == 1


def test_help_lists_every_command_once_under_what_it_is_for(output) -> None:
    code, out, _ = output("--help")
    assert code == 0
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(commands.commands)
    titles = [out.index(f"{title}:") for title in GROUPS]
    assert titles == sorted(titles)
    assert all(f"\n  {name} " in out for name in listed)
    assert "...\n" not in out.partition("\n")[2]


def test_inspect_says_that_bytes_were_not_checked(output, content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "iter_0000012")
    _, out, _ = output("inspect", directory)
    assert f"Bytes were not checked: moe-ckpt verify {directory} reads them." in " ".join(out.split())


def flags_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "moe_ckpt", "flags", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_flags_are_listed_without_torch() -> None:
    listed = flags_run("full")
    assert listed.returncode == 0, listed.stderr[-500:]
    assert not {line.rpartition("|")[2].strip() for line in listed.stderr.splitlines()} & {
        "torch",
        "numpy",
        "moe_ckpt.commands.advise",
        "moe_ckpt.simulator",
    }
    assert listed.stdout.startswith("Start here:\n  --moe-ckpt-strategy ")
    assert "Strategy full:" in listed.stdout and "Strategy sparse:" not in listed.stdout


def test_each_flag_of_checkpoints_is_listed_once_for_each_strategy_that_it_is_for() -> None:
    found = sections()
    assert len(found["Start here"]) == 8
    names = Counter(one.name.split()[0] for rows in found.values() for one in rows)
    parser = argparse.ArgumentParser(add_help=False, usage="")
    add_flags(parser, MoECheckpointConfig, "", MoECheckpointConfig.PREFIX)
    assert set(re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE)) <= set(names)
    for one in (one for rows in found.values() for one in rows):
        begin = re.match(r"(?:full|sparse|pec|selective)(?: and (?:full|sparse|pec|selective))*(?=:| with)", one.help)
        if begin and one.name.split()[0] != "--moe-ckpt-strategy":
            for strategy in begin[0].split(" and "):
                assert one in found[f"Strategy {strategy}"], one.name


def test_flags_are_listed_as_json(output) -> None:
    code, out, _ = output("flags", "pec", "--json")
    listed = json.loads(out)
    assert code == 0
    assert "--moe-ckpt-pec-k-snapshot INT" in [row["flag"] for row in listed["strategy_pec"]]
