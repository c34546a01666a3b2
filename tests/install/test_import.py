"""The engine and the driver are found however they were installed, also behind another Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import ENGINE, Environment, bare_tree, sources, with_torch

pytestmark = pytest.mark.ci

FIND_PACKAGES = f"""
import megatron.core, {ENGINE} as engine, megatron.pretrain as driver
for module in (megatron.core, engine, driver):
    print(module.__file__)
"""
FIND = f"from {ENGINE}.runtime.protected_session import ProtectedSession\n{FIND_PACKAGES}"
"""Also runs the imports of nearly all of the engine, and of Megatron-Core."""
PLACES = ("editable", "wheel", "wheel beside the core of an image")


@dataclass(frozen=True)
class Place:
    """An environment with this project, and the folder that its packages lie in.

    has_core: a Megatron-Core that can be imported, and not only its bare packages: for one place, since that takes 5 s.
    The others meet it in the rest of the tests, all of which run in an editable install, and in those of the wheel.
    """

    made: Environment
    folder: Path
    has_core: bool

    def found(self, path: tuple[Path, ...] = ()) -> list[Path]:
        """The files of core, engine and driver."""
        return found(self.made, FIND if self.has_core else FIND_PACKAGES, path)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name == "wheel" else ()) for name in PLACES]
)
def place(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder, has_core = tmp_path_factory.mktemp("place"), request.param == "wheel"
    first = None if has_core else bare_tree(folder / "image")
    made = with_torch(folder / "venv", core=has_core, first=first)
    source = sources(folder / "source") if request.param == "editable" else None
    what = ("--no-build-isolation", "--editable", source) if source is not None else (wheel,)
    result = made.installs("--no-deps", "--ignore-installed", *what)
    assert result.returncode == 0, result.stderr
    if request.param == "wheel beside the core of an image":
        # Two folders with a `megatron.core`: only a hook at Python's start finds what the second one adds.
        assert made.run("python", "-m", "moe_ckpt_finder", "enable").returncode == 0
    return Place(made, source or made.site, has_core)


def found(made: Environment, code: str, path: tuple[Path, ...] = ()) -> list[Path]:
    result = made.run("python", "-c", code, path=path)
    assert result.returncode == 0, result.stderr
    return [Path(line) for line in result.stdout.splitlines()]


def test_it_is_found_beside_megatron_core(place: Place) -> None:
    core, engine, driver = place.found()
    assert not core.is_relative_to(place.folder / "megatron" / "core" / "dist_checkpointing")
    assert engine == place.folder / "megatron" / "core" / "dist_checkpointing" / "moe" / "__init__.py"
    assert driver == place.folder / "megatron" / "pretrain" / "__init__.py"


def test_it_is_found_behind_a_source_tree_whose_core_is_used(place: Place, megatron_tree: Path, tmp_path: Path) -> None:
    tree = megatron_tree if place.has_core else bare_tree(tmp_path)
    core, engine, driver = place.found(path=(tree,))
    assert core == tree / "megatron" / "core" / "__init__.py"
    assert engine.is_relative_to(place.folder)
    assert driver.is_relative_to(place.folder)


def test_it_is_found_behind_a_source_tree_in_which_megatron_is_no_namespace(place: Place, tmp_path: Path) -> None:
    (bare_tree(tmp_path) / "megatron" / "__init__.py").touch()
    core, engine, driver = found(place.made, FIND_PACKAGES, path=(tmp_path,))
    assert core.is_relative_to(tmp_path)
    assert engine.is_relative_to(place.folder)
    assert driver.is_relative_to(place.folder)


def test_a_clone_on_the_path_is_found_once_its_top_level_package_is_imported(tmp_path: Path) -> None:
    made, source = with_torch(tmp_path / "venv", core=False), sources(tmp_path / "source")
    tree = bare_tree(tmp_path / "tree")
    _, engine, driver = found(made, f"import moe_ckpt\n{FIND_PACKAGES}", path=(tree, source))
    assert engine.is_relative_to(source)
    assert driver.is_relative_to(source)


def test_an_installation_that_lost_its_files_says_what_to_do(place: Place, megatron_tree: Path) -> None:
    init = place.folder / "megatron" / "pretrain" / "__init__.py"
    hidden = init.rename(init.with_suffix(".away"))
    try:
        code = "import moe_ckpt_finder as finder; finder.HiddenPackages.find_spec('megatron.pretrain')"
        result = place.made.run("python", "-c", code, path=(megatron_tree,))
    finally:
        hidden.rename(init)
    assert result.stderr.splitlines()[-1].endswith("install megatron-moe-ckpt again")
