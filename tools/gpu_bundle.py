"""Pack what a machine with a GPU, torch and no network lacks to check this project: `scripts/gpu_there.sh` unpacks it.

Packages come from the package index. Compiled code keeps the kernels of one GPU architecture. Each pack is small enough
to travel together with these sources in 64 MiB. The packs of a run:

    base  Megatron-Core and msgspec; every part of the check needs it
    nccl  the release of NCCL that takes several ranks on one GPU: part `ranks`
    te    Transformer Engine, whose extension of torch is compiled on the machine: part `te`
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import platform
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu-bundle"
LIMIT_BYTES = 64 << 20
"""Of what travels at once: the sources and the packs of a part."""

PACKS: dict[str, tuple[str, ...]] = {
    "base": ("megatron-core==0.19.2", "msgspec==0.22.0"),
    "nccl": ("nvidia-nccl-cu13==2.30.7",),
    "te": (
        "transformer-engine==2.20.2",
        "transformer-engine-cu13==2.20.2",
        "transformer-engine-torch==2.20.2",
        "nvidia-cudnn-frontend==1.32.0",
        "nvdlfw-inspect==0.2.2",
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "annotated-types==0.8.0",
        "typing-inspection==0.4.5",
        "importlib-metadata==10.2.0",
        "pybind11==3.1.0",
    ),
}
"""What each brings. What torch itself needs, pytest and xxhash for example, is expected there: see docs/gpu.md."""
FROM_SOURCE = ("transformer-engine-torch",)
"""Has no wheel; its source is packed."""
LEFT_OUT = ("transformer_engine/jax/", "transformer_engine/common/include/nccl_ep/", "cudnn/")
"""Never needed: bindings of JAX, and the Python of cuDNN's frontend, of which a compiler takes the headers."""
LEFT_OUT_FILES = ("libnccl_ep.so",)
GLIBC = (17, 18, 24, 27, 28)
"""Minor versions of glibc 2 whose wheels run there; pip matches each by name."""

FATBIN = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
MAGIC = 0xBA55ED50
PTX, ELF = 1, 2


@dataclasses.dataclass(frozen=True)
class Target:
    """The machine that a bundle is for: its GPU (90 is Hopper), its Python, its processor."""

    sm: int = 90
    python: str = "3.12"
    machine: str = "x86_64"


def main() -> int:
    """Exit code: 0 made, 1 something does not fit or cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sm", type=int, default=90, help="architecture of the GPU there (default: 90, H100 and H200)")
    parser.add_argument("--python", default="3.12", help="Python there (default: 3.12)")
    parser.add_argument("--pack", choices=PACKS, action="append", help="only this one; may be repeated")
    given = parser.parse_args()
    target = Target(given.sm, given.python, platform.machine())
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        for name in given.pack or PACKS:
            pack(name, target, FOLDER)
    except (subprocess.CalledProcessError, ValueError) as error:
        sys.stderr.write(f"gpu-bundle: {error}\n")
        return 1
    return report(FOLDER)


def pack(name: str, target: Target, folder: Path) -> Path:
    """Download the packages of a pack and write its archive into the folder."""
    archive, files = folder / f"{name}.tar.xz", dict[str, bytes]()
    for package in PACKS[name]:
        found = dict(contents(download(package, target, folder / "downloads")))
        for path in [path for path in found if path.endswith((".so", ".so.2"))]:
            found[path] = pruned(found[path], target.sm, path)
        files |= found
    files[f"{name}.json"] = json.dumps(dataclasses.asdict(target) | {"packages": PACKS[name]}).encode()
    write(archive, files)
    return archive


def download(package: str, target: Target, folder: Path) -> Path:
    """The wheel of a package, or its source; from the folder where it is there."""
    name, version = package.split("==")
    if found := [*folder.glob(f"{name.replace('-', '_')}-{version}[-.]*")]:
        return found[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if name in FROM_SOURCE:
        kind = ["--no-binary=:all:", "--no-build-isolation"]
    else:
        tags = [f"manylinux_2_{minor}_{target.machine}" for minor in GLIBC] + [f"manylinux2014_{target.machine}"]
        kind = ["--only-binary=:all:", "--implementation", "cp", "--python-version", target.python]
        kind += [part for tag in tags for part in ("--platform", tag)]
    subprocess.run([*pip, *kind, package], check=True)
    return next(folder.glob(f"{name.replace('-', '_')}-{version}[-.]*"))


def contents(package: Path) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each file of a wheel or a source archive that is needed there."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            for name in wheel.namelist():
                if not (name.endswith("/") or name.startswith(LEFT_OUT) or name.endswith(LEFT_OUT_FILES)):
                    yield name, wheel.read(name)
        return
    with tarfile.open(package) as source:
        for member in source:
            if member.isfile() and (file := source.extractfile(member)) is not None:
                yield f"sources/{member.name}", file.read()


def pruned(library: bytes, sm: int, name: str) -> bytes:
    """A library with zeros in place of kernels for other architectures, which compress to nothing.

    Everything stays where it was. CUDA chooses among the entries of a fat binary by their headers, which stay too.

    Raises:
        ValueError: It has kernels, but none for this architecture.
    """
    data, at, kernels, kept = bytearray(library), 0, 0, 0
    while (at := data.find(MAGIC.to_bytes(4, "little"), at)) >= 0:
        _, version, header, nbytes = FATBIN.unpack_from(data, at)
        if version != 1 or header != FATBIN.size or at + header + nbytes > len(data):
            at += 4  # these four bytes mean something else
            continue
        entry, at = at + header, at + header + nbytes
        while entry < at:
            kind, _, head, size, *_, arch = ENTRY.unpack_from(data, entry)
            if head < ENTRY.size or kind not in (PTX, ELF):
                break
            kernels += 1
            if kind == ELF and arch == sm:
                kept += 1
            else:
                data[entry + head : entry + head + size] = bytes(size)
            entry += head + size
    if kernels and not kept:
        raise ValueError(f"{name} has no kernels for sm_{sm} (expected an architecture that its wheel was built for)")
    return bytes(data)


def write(archive: Path, files: dict[str, bytes]) -> None:
    """The archive; the same bytes for the same files."""
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if ".so" in name else 0o644
            packed.addfile(member, io.BytesIO(data))


def sources_bytes() -> int:
    """What git tracks here, which travels along."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT).decode().split("\0")
    return sum(path.stat().st_size for name in names if name and (path := ROOT / name).is_file())


def report(folder: Path) -> int:
    """Print what is there and what travels together; exit code 1 where that is too much."""
    sources, code = sources_bytes(), 0
    packs = {path.name.split(".")[0]: path for path in sorted(folder.glob("*.tar.xz"))}
    base = packs["base"].stat().st_size if "base" in packs else 0
    print(f"{'sources':<9} {sources / 1e6:6.1f} MB")
    for name, path in packs.items():
        nbytes = path.stat().st_size
        total = sources + base + (nbytes if name != "base" else 0)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        print(f"{name:<9} {nbytes / 1e6:6.1f} MB  {path.relative_to(ROOT)}  sha256 {digest}")
        fits = total <= LIMIT_BYTES
        print(
            f"{'':<9} {total / 1e6:6.1f} MB travel for it, {'within' if fits else 'MORE THAN'} {LIMIT_BYTES >> 20} MiB"
        )
        code |= not fits
    return code


if __name__ == "__main__":
    sys.exit(main())
