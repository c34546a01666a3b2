"""The engine and the driver are found however they were installed, also behind another Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import ENGINE, Environment, sources, with_torch

FIND_PACKAGES = f"""
import megatron.core, {ENGINE} as engine, megatron.pretrain as driver
for module in (megatron.core, engine, driver):
    print(module.__file__)
"""
FIND = f"from {ENGINE}.runtime.session import Session\n{FIND_PACKAGES}"
"""Also runs the imports of nearly all of the engine, and of Megatron-Core."""
PLACES = ("editable", "wheel", "wheel beside the core of an image")


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Environment, Path]:
    """An environment with this project, and the folder that its packages lie in."""
    folder = tmp_path_factory.mktemp("place")
    made = with_torch(folder / "venv", core=request.param == "wheel")
    source = sources(folder / "source") if request.param == "editable" else None
    what = ("--no-build-isolation", "--editable", source) if source is not None else (wheel,)
    result = made.installs("--no-deps", "--ignore-installed", *what)
    assert result.returncode == 0, result.stderr
    return made, source or made.site


def found(made: Environment, code: str = FIND, path: tuple[Path, ...] = ()) -> list[Path]:
    result = made.run("python", "-c", code, path=path)
    assert result.returncode == 0, result.stderr
    return [Path(line) for line in result.stdout.splitlines()]


def test_it_is_found_beside_megatron_core(place: tuple[Environment, Path]) -> None:
    made, folder = place
    core, engine, driver = found(made)
    assert not core.is_relative_to(folder / "megatron" / "core" / "dist_checkpointing")
    assert engine == folder / "megatron" / "core" / "dist_checkpointing" / "moe" / "__init__.py"
    assert driver == folder / "megatron" / "pretrain" / "__init__.py"


def test_it_is_found_behind_a_source_tree_whose_core_is_used(
    place: tuple[Environment, Path], megatron_tree: Path
) -> None:
    made, folder = place
    core, engine, driver = found(made, path=(megatron_tree,))
    assert core == megatron_tree / "megatron" / "core" / "__init__.py"
    assert engine.is_relative_to(folder)
    assert driver.is_relative_to(folder)


def test_it_is_found_behind_a_source_tree_in_which_megatron_is_no_namespace(
    place: tuple[Environment, Path], tmp_path: Path
) -> None:
    for package in ("megatron", "megatron/core", "megatron/core/dist_checkpointing"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    made, folder = place
    core, engine, driver = found(made, FIND_PACKAGES, path=(tmp_path,))
    assert core.is_relative_to(tmp_path)
    assert engine.is_relative_to(folder)
    assert driver.is_relative_to(folder)


def test_a_clone_on_the_path_is_found_once_its_top_level_package_is_imported(
    megatron_tree: Path, tmp_path: Path
) -> None:
    made, source = with_torch(tmp_path / "venv", core=False), sources(tmp_path / "source")
    _, engine, driver = found(made, f"import moe_ckpt\n{FIND_PACKAGES}", path=(megatron_tree, source))
    assert engine.is_relative_to(source)
    assert driver.is_relative_to(source)


def test_an_installation_that_lost_its_files_says_what_to_do(
    place: tuple[Environment, Path], megatron_tree: Path
) -> None:
    made, folder = place
    init = folder / "megatron" / "pretrain" / "__init__.py"
    hidden = init.rename(init.with_suffix(".away"))
    try:
        code = "import moe_ckpt_finder as finder; finder.HiddenPackages.find_spec('megatron.pretrain')"
        result = made.run("python", "-c", code, path=(megatron_tree,))
    finally:
        hidden.rename(init)
    assert result.stderr.splitlines()[-1].endswith("install megatron-moe-ckpt again")
