"""The packs of `make gpu-bundle` on a machine that has torch and nothing of ours: rehearsed without GPU and network."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import environments
import gpu_bundle
import pytest

IMAGE = "torch pytest pytest-timeout hypothesis numpy xxhash click fsspec rich tokenizers tensorboard psutil triton"
"""What is installed on the machine, as far as it matters here."""
THERE = environments.ROOT / "scripts" / "gpu_there.sh"
RUN_S = 900
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheel_of(package: str, target: gpu_bundle.Target, folder: Path) -> Path:
    """In place of a download: an installed package, packed again."""
    name, version = package.split("==")
    found = importlib.metadata.distribution(name)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}.whl", "w") as wheel:
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(str(file.locate()), str(file))
    return folder / f"{name}-{version}.whl"


def settings_of(bundle: Path, site: Path) -> dict[str, str]:
    return {
        "MOE_CKPT_PYTHON": sys.executable,
        "MOE_CKPT_GPU_BUNDLE": str(bundle),
        "MOE_CKPT_GPU_SITE": str(site),
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack that every part needs."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_bundle, "download", wheel_of)
        gpu_bundle.pack("base", gpu_bundle.Target(python=HERE), folder)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> environments.Environment:
    """The Python of the machine."""
    return environments.preinstalled(tmp_path_factory.mktemp("image"), *IMAGE.split())


def variables(image: environments.Environment, bundle: Path, site: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept |= settings_of(bundle, site) | {"MOE_CKPT_PYTHON": str(image.python), "OMP_NUM_THREADS": "1"}
    return kept | {"MOE_CKPT_GPU_REHEARSAL": "cpu", "PYTHONWARNINGS": "ignore"} | more


def there(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(THERE), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize(
    ("part", "figure"),
    [
        pytest.param("facts", "machine", marks=pytest.mark.ci),
        pytest.param("abort", "communicators of one rank: threads", marks=pytest.mark.full),
        pytest.param("rates", "restore", marks=pytest.mark.full),
        pytest.param("te", None, marks=pytest.mark.full),
        pytest.param("ranks", "a rank dies in p2p", marks=pytest.mark.full),
        pytest.param("model", "model: every iteration, auto", marks=pytest.mark.full),
        pytest.param("jobs", None, marks=pytest.mark.full),
    ],
)
def test_each_part_runs_beside_a_torch_that_was_there_and_says_what_it_skipped(
    part: str, figure: str | None, image: environments.Environment, bundle: Path, tmp_path: Path
) -> None:
    done = there(variables(image, bundle, tmp_path / "site"), "--part", part, "--out", tmp_path)
    found = lines(tmp_path)
    outcomes = [line for line in found if "outcome" in line]
    assert {line["outcome"] for line in outcomes} <= {"passed", "skipped"}, done.stdout + done.stderr
    assert figure is None or figure in {line.get("figure") for line in found}
    assert all(line["why"] for line in outcomes if line["outcome"] == "skipped")
    assert done.returncode == (0 if any(line["outcome"] == "passed" for line in outcomes) else 1)


@pytest.mark.ci
def test_a_run_that_is_killed_has_left_each_figure_that_it_measured(
    image: environments.Environment, bundle: Path, tmp_path: Path
) -> None:
    environment = variables(image, bundle, tmp_path / "site")
    command = [str(THERE), "--part", "facts,abort", "--out", str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        until_s = time.monotonic() + 120
        while not any(line.get("part") == "abort" for line in lines(tmp_path)) and time.monotonic() < until_s:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    figures = [line["figure"] for line in lines(tmp_path) if "figure" in line]
    assert figures[0] == "machine"
    assert "communicators of one rank: threads" in figures


def packed(folder: Path, **about: Any) -> Path:
    """A bundle of one pack, made for another machine."""
    made_for = {"sm": 90, "python": HERE, "machine": os.uname().machine} | about
    folder.mkdir()
    gpu_bundle.write(folder / "base.tar.xz", {"base.json": json.dumps(made_for).encode(), "a": os.urandom(1 << 16)})
    return folder


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"machine": "vax"}, "pack base is for machine vax, but this is "),
        ({"python": "3.1"}, "pack base is for python 3.1, but this is "),
        (None, "no pack in "),
    ],
)
def test_a_pack_for_another_machine_is_refused_in_one_line(
    about: dict[str, str] | None, said: str, tmp_path: Path
) -> None:
    folder = packed(tmp_path / "bundle", **about) if about is not None else tmp_path
    done = there(
        os.environ
        | {
            "MOE_CKPT_PYTHON": sys.executable,
            "MOE_CKPT_GPU_BUNDLE": str(folder),
            "MOE_CKPT_GPU_SITE": str(tmp_path / "site"),
        },
        "--part",
        "facts",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpu-there: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_a_pack_that_was_cut_short_is_refused_and_unpacked_again_once_it_is_whole(tmp_path: Path) -> None:
    folder = packed(tmp_path / "bundle")
    whole = (folder / "base.tar.xz").read_bytes()
    environment = os.environ | {
        "MOE_CKPT_PYTHON": sys.executable,
        "MOE_CKPT_GPU_BUNDLE": str(folder),
        "MOE_CKPT_GPU_SITE": str(tmp_path / "site"),
    }
    for damaged in (whole[: len(whole) // 2], b"no archive"):
        (folder / "base.tar.xz").write_bytes(damaged)
        (line,) = there(environment).stderr.splitlines()
        assert line.startswith("gpu-there: damaged ")
    (folder / "base.tar.xz").write_bytes(whole)
    for said in ("unpacked", "was there"):
        done = there(environment, "--part", "nothing")
        assert done.stdout == f"gpu-there: base.tar.xz {said}\n"
        assert done.stderr.startswith("gpu-check: no part 'nothing' (expected facts, ")


def test_kernels_of_other_architectures_become_zeros_and_nothing_moves() -> None:
    def entry(kind: int, arch: int, body: bytes) -> bytes:
        return gpu_bundle.ENTRY.pack(kind, 1, gpu_bundle.ENTRY.size, len(body), 0, 0, 0, 0, arch) + body

    entries = entry(2, 80, b"eighty") + entry(2, 90, b"ninety") + entry(1, 90, b"source")
    fat = gpu_bundle.FATBIN.pack(gpu_bundle.MAGIC, 1, gpu_bundle.FATBIN.size, len(entries)) + entries
    library = b"host code, not a header: " + gpu_bundle.MAGIC.to_bytes(4, "little") + b"more" * 9 + fat + b"data"
    found = gpu_bundle.pruned(library, 90, "libx.so")
    assert found == library.replace(b"eighty", bytes(6)).replace(b"source", bytes(6))
    with pytest.raises(ValueError, match=r"libx\.so has no kernels for sm_100"):
        gpu_bundle.pruned(library, 100, "libx.so")
    assert gpu_bundle.pruned(b"no kernels at all", 90, "libx.so") == b"no kernels at all"


def test_versions_are_those_that_are_tested_elsewhere() -> None:
    packages = [package for names in gpu_bundle.PACKS.values() for package in names]
    project = (environments.ROOT / "pyproject.toml").read_text()
    assert next(name for name in packages if name.startswith("megatron-core")) in project
    installer = (environments.ROOT / "scripts" / "install_te_python.py").read_text()
    versions = {name.split("==")[1] for name in packages if name.startswith("transformer-engine")}
    assert [f'VERSION = "{version}"' in installer for version in versions] == [True]


def test_a_pack_holds_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one", "other"):
        gpu_bundle.write(tmp_path / name, {"b.so": b"2", "a": b"1"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with tarfile.open(tmp_path / "one") as archive:
        assert archive.getnames() == ["a", "b.so"]
