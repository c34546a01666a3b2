"""What the wheel has, what it does where it is installed, and what it leaves alone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from environments import ENGINE, ROOT, Environment, built_wheel, empty, sources, with_torch

pytestmark = pytest.mark.ci

NGC = {
    "torch": "2.10.0a0+b4e4ee81d3.nv25.12",
    "megatron-core": "0.18.0",
    "transformer-engine": "2.16.0",
    "numpy": "1.26.4",
    "typing_extensions": "4.15.0",
    **dict.fromkeys(("psutil", "click", "fsspec", "msgspec", "rich", "tensorboard", "tokenizers", "xxhash"), "9999"),
}
"""What an image brings, as pip sees it."""


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def image(folder: Path, **other: str) -> Environment:
    """An environment in which pip finds these distributions, of which nothing but the names is there."""
    made = empty(folder)
    for name, version in (NGC | other).items():
        info = made.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("the image\n")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Beside the core of an image, where most people have it."""
    made = with_torch(tmp_path_factory.mktemp("installed"), core=False)
    result = made.installs("--no-deps", "--ignore-installed", wheel)
    assert result.returncode == 0, result.stderr
    return made


def test_it_has_every_module_and_script_of_the_sources(wheel: Path) -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    modules = {name for name in tracked if name.startswith(("megatron/", "moe_ckpt/")) and name.endswith(".py")}
    shared = {name for name in tracked if name.startswith(("scripts/", "examples/")) and not name.endswith(".json")}
    expected = modules | {f"moe_ckpt/share/{name}" for name in shared} | {"pretrain_gpt_moe.py", "moe_ckpt_finder.py"}
    expected |= {f"{package}/py.typed" for package in ("moe_ckpt", "megatron/pretrain", ENGINE.replace(".", "/"))}
    assert len(modules) > 200
    assert "scripts/train_cpu.sh" in shared
    assert sorted(expected - names_in(wheel)) == []


def test_it_has_the_licence_and_says_which(wheel: Path) -> None:
    about = metadata_of(wheel)
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = sources(tmp_path / "source")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=source, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names_in(built_wheel(unpacked, tmp_path / "second")) == names_in(wheel)
    assert (unpacked / "tests" / "conftest.py").exists()


def test_it_has_no_file_of_megatron_core(wheel: Path) -> None:
    files = {str(file) for file in importlib.metadata.files("megatron-core") or ()}
    assert "megatron/core/__init__.py" in files
    assert names_in(wheel) & files == set()


def test_it_merges_with_megatron_core_and_goes_again_without_a_trace(wheel: Path, tmp_path: Path) -> None:
    site = with_torch(tmp_path / "venv")
    before = {path for path in site.site.rglob("*") if path.suffix != ".pyc"}
    assert site.installs("--no-deps", "--ignore-installed", wheel).returncode == 0
    assert (site.site / "megatron" / "core" / "dist_checkpointing" / "moe" / "__init__.py").exists()
    command = [sys.executable, "-m", "pip", "--isolated", "--python", str(site.python), "uninstall", "-y"]
    subprocess.run([*command, "megatron-moe-ckpt"], check=True, capture_output=True, timeout=100)
    assert {path for path in site.site.rglob("*") if path.suffix != ".pyc"} == before


def test_its_tools_run_outside_of_the_sources_behind_a_source_tree(installed: Environment, megatron_tree: Path) -> None:
    result = installed.run("moe-ckpt", "--help", path=(megatron_tree,))
    assert result.returncode == 0, result.stderr
    assert result.stdout.lower().startswith("usage:")


@pytest.mark.parametrize(
    ("driver", "behind_a_tree"),
    [
        pytest.param(("-m", "pretrain_gpt_moe"), False, id="module", marks=pytest.mark.full),
        pytest.param(("--no-python", "moe-ckpt-pretrain"), True, id="command"),
    ],
)
def test_its_driver_is_what_torchrun_starts(
    installed: Environment, megatron_tree: Path, driver: tuple[str, str], behind_a_tree: bool
) -> None:
    path = (megatron_tree,) if behind_a_tree else ()
    result = installed.run("python", "-m", "torch.distributed.run", *driver, "--help", path=path)
    assert result.returncode == 0, result.stderr
    assert "--moe-ckpt-strategy" in result.stdout


@pytest.mark.full
def test_its_scripts_work_where_they_are_copied_to(
    installed: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", "1")
    folder = Path(installed.run("python", "-m", "moe_ckpt.scripts").stdout.strip())
    assert folder.is_relative_to(installed.site)
    copy = shutil.copytree(folder, tmp_path / "copy")
    script = copy / "scripts" / "train_cpu.sh"
    assert os.access(script, os.X_OK)
    result = installed.run(script, "--train-iters", "1", "--lr", "no number")
    assert "invalid float value: 'no number'" in result.stderr
    assert (copy / ".data" / "stdlib.idx").exists()


def imported_at_start(made: Environment) -> set[str]:
    said = made.run("python", "-X", "importtime", "-c", "").stderr
    return {line.rpartition("|")[2].strip() for line in said.splitlines()}


def test_python_starts_with_nothing_of_ours_and_with_the_finder_where_that_is_asked_for(
    installed: Environment, tmp_path: Path
) -> None:
    bare = imported_at_start(with_torch(tmp_path / "bare", core=False))
    assert imported_at_start(installed) == bare
    assert installed.run("python", "-m", "moe_ckpt_finder", "enable").returncode == 0
    try:
        assert imported_at_start(installed) - bare == {"moe_ckpt_finder"}
    finally:
        assert installed.run("python", "-m", "moe_ckpt_finder", "disable").returncode == 0
    assert imported_at_start(installed) == bare
    assert installed.run("python", "-m", "moe_ckpt_finder").returncode == 2


def test_the_alias_is_found_behind_a_source_tree_without_a_hook(installed: Environment, megatron_tree: Path) -> None:
    program = (
        f"import sys, moe_ckpt.core.config, {ENGINE}.config; from moe_ckpt.core import MoECheckpointConfig, errors;"
    )
    program += f"assert sys.modules['moe_ckpt.core.config'] is sys.modules['{ENGINE}.config'];"
    program += f"assert errors.__name__ == '{ENGINE}.errors' and errors.__spec__.name == '{ENGINE}.errors';"
    program += f"print(sys.modules['{ENGINE}.config'].__spec__.name, MoECheckpointConfig.__module__)"
    result = installed.run("python", "-c", program, path=(megatron_tree,))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [f"{ENGINE}.config", f"{ENGINE}.config"]


def test_a_dry_run_for_slurm_works_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    folder = Path(installed.run("python", "-m", "moe_ckpt.scripts").stdout.strip())
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "job.sbatch").write_text('#!/bin/bash\n#SBATCH --nodes=2\nsrun --nodes=2 bash -c "echo ran on $1"\n')
    command = [copy / "scripts" / "slurm" / "dry_run.sh", "--folder", tmp_path / "run", "--", "sbatch"]
    result = installed.run(*command, "--partition=h100", "job.sbatch", "flags")
    assert result.returncode == 0, result.stderr
    assert "not played: --partition=h100" in result.stderr
    assert "job 1 has ended with exit code 0" in result.stdout + result.stderr


RANK = """import json, os, sys
names = "WORLD_SIZE", "MOE_CKPT_NODE", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_IB_HCA", "MOE_CKPT_PATIENCE_S"
open(f"{os.environ['SEEN']}/{os.environ['RANK']}", "w").write(json.dumps([sys.argv[1:], *map(os.environ.get, names)]))
"""


@pytest.mark.full
def test_the_job_file_of_16_nodes_is_rehearsed_from_the_wheel(
    installed: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(installed.run("python", "-m", "moe_ckpt.scripts").stdout.strip())
    copy, seen = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "pretrain_gpt.py").write_text(RANK)
    settings = {"NPROC": "1", "STANDBYS": "0", "SCRIPT": str(tmp_path / "pretrain_gpt.py")}
    for name, value in settings.items():
        monkeypatch.setenv(f"MOE_CKPT_{name}", value)
    monkeypatch.setenv("SEEN", str(seen))
    command = [copy / "scripts" / "slurm" / "dry_run.sh", "--folder", tmp_path / "run", "--", "sbatch"]
    result = installed.run(*command, "examples/megatron_lm/train.sbatch", "--train-iters", "7")
    said, nodes = result.stdout + result.stderr, [f"node-{number}" for number in range(17)]
    assert result.returncode == 0, said
    assert f"run 1 on 16 of {','.join(nodes)}, 1 spare" in said and "training has ended" in said
    ranks = [json.loads(path.read_text()) for path in seen.iterdir()]
    assert len(ranks) == 16
    assert all(flags[-4:-1] == ["--train-iters", "7", "--metrics-jsonl"] for flags, *_ in ranks)
    assert {(world, *of_site) for _, world, _, *of_site in ranks} == {("16", "1", "mlx5", "150")}
    assert len({node for _, _, node, *_ in ranks}) == 16 and {node for _, _, node, *_ in ranks} < {*nodes}


@pytest.mark.parametrize("core", ["0.17.1", "0.18.0", "0.19.2"])
def test_an_image_with_torch_and_megatron_core_gets_nothing_but_us(wheel: Path, tmp_path: Path, core: str) -> None:
    made = image(tmp_path / "image", **{"megatron-core": core})
    result = made.installs("--dry-run", "--quiet", "--report", "-", wheel)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)["install"]
    assert [item["metadata"]["name"] for item in report] == ["megatron-moe-ckpt"]


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.5.1"), ("megatron-core", "0.16.1"), ("megatron-core", "0.20.0")]
)
def test_pip_refuses_an_image_with_what_cannot_work(wheel: Path, tmp_path: Path, name: str, version: str) -> None:
    result = image(tmp_path / "image", **{name: version}).installs("--dry-run", wheel)
    assert result.returncode == 1
    # The second where a constraint of the machine's pip limits the same package.
    said = f"No matching distribution found for {name}", "these package versions have conflicting dependencies"
    assert any(each in result.stderr for each in said), result.stderr
