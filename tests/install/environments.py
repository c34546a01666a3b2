"""Python environments without this project, to install it into: made in a second, of what the running one has."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = Path(sysconfig.get_path("purelib")) / "megatron" / "core"
ENGINE = "megatron.core.dist_checkpointing.moe"
PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check")


@dataclass(frozen=True)
class Environment:
    """A virtual environment; what runs in it starts outside of all sources."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def run(self, *command: str | Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
        """`path` is PYTHONPATH. A name that is no path is a program of the environment."""
        program = self.folder / "bin" / command[0] if isinstance(command[0], str) else command[0]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
        kept |= {"PATH": f"{self.folder / 'bin'}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        arguments = [str(program), *map(str, command[1:])]
        return subprocess.run(
            arguments, cwd=self.folder, env=kept, capture_output=True, text=True, timeout=200, check=False
        )

    def installs(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs pip for this environment, with nothing but what is given and what is there."""
        command = [
            *PIP[:4],
            "--python",
            str(self.python),
            *PIP[4:],
            "install",
            "--no-index",
            "--no-compile",
            *map(str, arguments),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def empty(folder: Path) -> Environment:
    """Has Python's standard library only."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return Environment(folder)


def with_torch(folder: Path, *, core: bool = True, first: Path | None = None) -> Environment:
    """Has what the running environment has, but for this project; core: its Megatron-Core lies in the same folder.

    Otherwise that lies where pip does not write for this environment, as what an image brings; first: with what is in
    this folder in its place.
    """
    made = empty(folder)
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [*([str(first)] if first is not None else []), *sorted(paths)]
    (made.site / "image.pth").write_text("\n".join(lines) + "\n")
    if core:
        source_tree(made.site)
        found = importlib.metadata.distribution("megatron-core").locate_file("")
        for info in Path(str(found)).glob("megatron_core-*.dist-info"):
            shutil.copytree(info, made.site / info.name)
    return made


def preinstalled(folder: Path, *names: str) -> Environment:
    """Has these packages of the running environment, what they need, and nothing else: not this project either."""
    made, waiting, done = empty(folder), [*names], set[str]()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system, or not asked for here
            continue
        if name not in done:
            done.add(name)
            waiting += [re.split(r"[^\w.-]", one)[0] for one in found.requires or () if "extra ==" not in one]
            tops = {file.parts[0] for file in found.files or () if not file.is_absolute() and file.parts[0] != ".."}
            for top in tops - {"__pycache__"}:
                source, target = Path(str(found.locate_file(top))), made.site / top
                if not target.exists() and source.exists():
                    target.symlink_to(source)
    return made


def source_tree(folder: Path) -> Path:
    """What a Megatron-LM checkout looks like to Python: `megatron.core` and `megatron.training`, nothing of ours."""
    ignored = shutil.ignore_patterns("moe") if (CORE / "dist_checkpointing" / "moe").exists() else None
    shutil.copytree(CORE / "dist_checkpointing", folder / "megatron" / "core" / "dist_checkpointing", ignore=ignored)
    shutil.copytree(CORE, folder / "megatron" / "core", dirs_exist_ok=True, ignore=lambda *_: ["dist_checkpointing"])
    shutil.copytree(CORE.parent / "training", folder / "megatron" / "training")
    return folder


def bare_tree(folder: Path) -> Path:
    """The packages of Megatron-Core that we lie among, empty: imported in no time, and found as the real ones are."""
    for package in ("megatron/core", "megatron/core/dist_checkpointing"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    return folder


def sources(folder: Path) -> Path:
    """The files of this project, as git knows them, where a build may leave its own beside them."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def built_wheel(source: Path, target: Path) -> Path:
    """The wheel of a source folder."""
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (wheel,) = target.glob("*.whl")
    return wheel
