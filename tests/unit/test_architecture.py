"""The rooms of the project and who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOE = "megatron.core.dist_checkpointing.moe"
VALUES = ("types", "errors", "config", "models")
SIDE_ROOMS = ("capture", "store", "replicate", "recover", "replay")

FILES = sorted(
    path for folder in ("megatron", "moe_ckpt", "reproduce", "tools") for path in (ROOT / folder).rglob("*.py")
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything imported anywhere in the file, inside functions too."""
    module, found = module_of(path), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            origin = f"{base}.{node.module or ''}".rstrip(".") if node.level else str(node.module)
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


def in_room(module: str, room: str) -> bool:
    return module == f"{MOE}.{room}" or module.startswith(f"{MOE}.{room}.")


def is_pure(path: Path) -> bool:
    module = module_of(path)
    return is_value(module) or in_room(module, "policy") or in_room(module, "strategies")


def is_value(module: str) -> bool:
    return any(in_room(module, room) for room in VALUES)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_files_to_judge() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("folder", ["megatron", "megatron/core", "megatron/core/dist_checkpointing"])
def test_the_namespace_that_the_wheel_shares_has_no_init_file(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_training_package_shadows_the_one_of_newer_wheels() -> None:
    assert not (ROOT / "megatron" / "training").exists()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_subsystem_never_imports_the_driver(path: Path) -> None:
    if module_of(path).startswith(MOE):
        assert not [name for name in imports_of(path) if name.startswith("megatron.pretrain")]


@pytest.mark.parametrize("path", [path for path in FILES if is_pure(path)], ids=named)
def test_values_and_policies_import_only_values(path: Path) -> None:
    foreign = {name for name in imports_of(path) if name.split(".")[0] in ("torch", "os", "time", "random", "megatron")}
    rooms = ("policy", "strategies") if in_room(module_of(path), "strategies") else ("policy",)
    allowed = [name for name in foreign if is_value(name) or any(in_room(name, room) for room in rooms)]
    assert foreign == set(allowed)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_side_rooms_do_not_import_each_other(path: Path) -> None:
    module = module_of(path)
    for room in SIDE_ROOMS:
        if in_room(module, room):
            others = [other for other in SIDE_ROOMS if other != room]
            assert not [name for name in imports_of(path) if any(in_room(name, other) for other in others)]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_what_looks_at_stores_from_outside_is_used_by_commands_alone(path: Path) -> None:
    module = module_of(path)
    uses = [name for name in imports_of(path) if in_room(name, "examine")]
    assert not uses or in_room(module, "examine") or in_room(module, "cli") or not module.startswith("megatron")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_reports_and_the_simulator_import_no_commands_and_nothing_imports_the_reproduction(path: Path) -> None:
    module, imports = module_of(path), imports_of(path)
    if module.startswith("moe_ckpt.report"):
        assert not [name for name in imports if name.startswith("megatron")]
    if in_room(module, "simulate"):
        assert not [name for name in imports if in_room(name, "cli") or name.startswith("moe_ckpt")]
    if not module.startswith("reproduce"):
        assert not [name for name in imports if name.split(".")[0] == "reproduce"]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_cpu_device_is_imported_only_where_a_cpu_run_starts(path: Path) -> None:
    inside = module_of(path).startswith("megatron.pretrain.cpu_device")
    uses = [name for name in imports_of(path) if name.startswith("megatron.pretrain.cpu_device")]
    assert not uses or inside or module_of(path) == "megatron.pretrain.initialize"


def test_no_module_imports_the_cpu_device_at_its_top_level() -> None:
    tree = ast.parse((ROOT / "megatron" / "pretrain" / "initialize.py").read_text())
    top_level = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in top_level if "cpu_device" in line]


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT / "megatron")], ids=named)
def test_library_code_neither_prints_nor_exits(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {ast.unparse(call) for call in calls}
    in_main = {"sys.exit"} if '__name__ == "__main__"' in path.read_text() else set()
    assert not (names & {"print", "exit", "quit", "sys.exit", "os._exit"}) - in_main
