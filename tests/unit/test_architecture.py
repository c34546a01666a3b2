"""Who may import what: one row for each package, and nothing that is not in its row.

Rows stand from low to high and name only rows above them, so imports never run upward and there are no circles. A
package may also import itself and the standard library; pure ones only the part of it that is named.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE, DRIVER, TOOLS = "megatron.core.dist_checkpointing.moe", "megatron.pretrain", "moe_ckpt"

PURE = frozenset(
    "__future__ abc bisect collections copy dataclasses enum fractions functools hashlib heapq itertools math operator "
    "re statistics string typing".split()
)
"""The standard library of packages that decide: no I/O, clock, environment, randomness or threads."""

VALUES = "errors types"
PARTS = f"{VALUES} ports policy strategies"
WORKERS = f"{PARTS} storage megatron_state snapshot recovery"


@dataclass(frozen=True)
class Row:
    """What a package may import beside itself.

    engine, tools: packages of the engine and of `moe_ckpt`. also: other rows, in full. others: distributions.
    standard: of the standard library; None for all of it.
    """

    engine: str = ""
    others: str = ""
    tools: str = ""
    also: str = ""
    standard: frozenset[str] | None = None


ROWS = {
    # Imported whenever Python starts, where that is asked for.
    "moe_ckpt_finder": Row(standard=frozenset({"importlib", "os", "sys"})),
    # The engine: what a training job can reach.
    f"{ENGINE}.errors": Row(standard=PURE | {"errno"}),
    f"{ENGINE}.device": Row("", "torch"),
    f"{ENGINE}.boot_clock": Row(standard=PURE | {"os", "pathlib", "time"}),
    f"{ENGINE}.types": Row("errors", standard=PURE),
    f"{ENGINE}.versions": Row("errors", standard=PURE | {"importlib", "pathlib", "platform"}),
    f"{ENGINE}.config": Row(standard=PURE | {"argparse", "types"}),
    f"{ENGINE}.features": Row("config", standard=PURE),
    f"{ENGINE}.ports": Row(VALUES),
    f"{ENGINE}.policy": Row(VALUES, standard=PURE),
    f"{ENGINE}.strategies": Row(f"{VALUES} config policy", standard=PURE | {"importlib"}),
    f"{ENGINE}.extensions.lossy": Row(f"{VALUES} config policy strategies", standard=PURE),
    # The table of extensions, and where they take part; each is imported by jobs that ask for it.
    f"{ENGINE}.extensions": Row("config ports types"),
    f"{ENGINE}.storage": Row(f"{VALUES} boot_clock", "fsspec msgspec numpy psutil xxhash"),
    f"{ENGINE}.replication": Row("errors boot_clock device ports storage", "msgspec numpy torch xxhash"),
    f"{ENGINE}.standby": Row("errors boot_clock"),
    f"{ENGINE}.core_versions": Row("errors standby", "megatron.core torch"),
    f"{ENGINE}.megatron_state": Row(f"{VALUES} device ports policy core_versions", "megatron.core numpy torch"),
    f"{ENGINE}.replay": Row(f"{VALUES} ports replication megatron_state core_versions", "megatron.core torch"),
    f"{ENGINE}.snapshot": Row(f"{PARTS} device extensions storage replication megatron_state", "msgspec numpy torch"),
    f"{ENGINE}.recovery": Row(f"{PARTS} boot_clock storage replication replay", "msgspec"),
    f"{ENGINE}.resharding": Row(f"{VALUES} ports policy storage replication", "msgspec numpy"),
    f"{ENGINE}.local_recovery": Row(f"{WORKERS} core_versions device", "megatron.core numpy torch"),
    f"{ENGINE}.runtime": Row(
        f"{WORKERS} replay boot_clock device extensions versions config core_versions replication local_recovery"
        " resharding standby",
        "megatron.core msgspec torch",
    ),
    f"{ENGINE}.extensions.bubbles": Row(
        f"{VALUES} extensions policy ports replication snapshot local_recovery strategies", "megatron.core torch"
    ),
    f"{ENGINE}.extensions.capacity_boost": Row(
        "core_versions errors extensions extensions.lossy types megatron_state", "megatron.core torch"
    ),
    f"{ENGINE}.extensions.elastic": Row("config errors runtime standby", "torch"),
    f"{ENGINE}.extensions.gradient_replicas": Row(
        f"{VALUES} device extensions policy ports replication strategies megatron_state", "megatron.core torch"
    ),
    f"{ENGINE}.extensions.persist_agent": Row("errors extensions snapshot storage"),
    f"{ENGINE}.extensions.shard": Row(
        f"{VALUES} extensions strategies megatron_state", "megatron.core torch"
    ),
    f"{ENGINE}.in_place": Row(
        "config errors core_versions device megatron_state ports recovery replication runtime standby storage types",
        "megatron.core torch",
    ),
    f"{ENGINE}.contradictions": Row("config errors extensions policy runtime strategies"),
    f"{ENGINE}.manager": Row(
        "config contradictions core_versions errors extensions features in_place local_recovery megatron_state recovery"
        " runtime standby strategies types",
        "megatron.core torch",
    ),
    f"{ENGINE}.bridge_survivors": Row("core_versions in_place", "megatron.core torch"),
    ENGINE: Row("versions config manager megatron_state recovery resharding runtime standby snapshot types"),
    # Offline: what people run beside jobs.
    f"{TOOLS}.megatron_core": Row("versions", also="moe_ckpt_finder"),
    f"{TOOLS}.scripts": Row(),
    f"{TOOLS}.report": Row("", "click rich"),
    f"{TOOLS}.dense": Row(f"{VALUES} policy storage", "megatron.core msgspec numpy torch xxhash", "megatron_core"),
    # Dense checkpoints of jobs, which jobs and tools read and write in one format.
    f"{ENGINE}.dense_saves": Row("errors core_versions storage", "megatron.core torch", "dense"),
    f"{ENGINE}.bridge": Row(
        "bridge_survivors config core_versions dense_saves errors features in_place manager megatron_state ports"
        " runtime standby",
        "megatron.core",
    ),
    f"{ENGINE}.extensions.partial_saves": Row(
        "config dense_saves errors megatron_state policy storage", "megatron.core torch", "dense"
    ),
    f"{ENGINE}.stock": Row(
        "errors device ports megatron_state recovery standby in_place snapshot strategies config contradictions"
        " features manager runtime dense_saves extensions extensions.partial_saves core_versions resharding storage"
        " versions",
        "megatron.core psutil torch", "dense",
    ),
    f"{TOOLS}.hugging_face": Row("errors storage", "safetensors torch", "dense"),
    f"{TOOLS}.checkpoints": Row(f"{PARTS} config extensions.lossy storage", "fsspec msgspec torch", "dense report"),
    f"{TOOLS}.runs": Row("errors storage", "msgspec torch", "checkpoints report"),
    f"{TOOLS}.simulator": Row(f"{VALUES} config extensions.lossy policy strategies"),
    # The driver, and drills that start it.
    DRIVER: Row(
        "errors boot_clock replication core_versions megatron_state runtime standby",
        "megatron.core megatron.training numpy prometheus_client psutil tokenizers torch transformer_engine",
        "megatron_core",
        also=f"{ENGINE} {ENGINE}.stock",
    ),
    # The entry script, and jobs with its model that do not train.
    "pretrain_gpt_moe": Row("", "megatron.core megatron.training torch", also=f"{DRIVER} {ENGINE}"),
    f"{DRIVER}.densify": Row(also="pretrain_gpt_moe"),
    f"{TOOLS}.drills": Row("standby", "psutil", "dense scripts", also=DRIVER),
    f"{TOOLS}.commands": Row(
        f"{PARTS} config contradictions extensions.partial_saves storage strategies", "click torch",
        "megatron_core report dense hugging_face checkpoints runs simulator", DRIVER,
    ),
    # Entry points and what stands outside of packages.
    f"{TOOLS}.core": Row("errors stock", also=f"moe_ckpt_finder {ENGINE}"),
    TOOLS: Row(tools="commands megatron_core"),
    f"{TOOLS}.__main__": Row(tools="__init__"),
    "reproduce": Row(
        f"{VALUES} extensions.lossy extensions.shard policy", "click matplotlib", "report simulator megatron_core"
    ),
    "tools": Row(
        "config errors features policy types strategies core_versions in_place megatron_state replay stock",
        "click torch yaml",
        "commands simulator __init__", f"pretrain_gpt_moe {DRIVER} {ENGINE}",
    ),
    "scripts": Row("extensions.persist_agent standby", "matplotlib pip torch", "megatron_core", also=DRIVER),
    "examples": Row(
        "", "matplotlib megatron.core megatron.training torch", "simulator",
        also=f"pretrain_gpt_moe reproduce {DRIVER} {ENGINE}",
    ),
    "benchmarks": Row(
        "types ports policy storage replication megatron_state replay recovery snapshot runtime strategies config"
        " boot_clock errors",
        "dlrover lm_resiliency megatron.core msgspec numpy nvidia_resiliency_ext stock_trainer torch torchft",
        "hugging_face simulator",
        also=f"pretrain_gpt_moe reproduce {DRIVER} {ENGINE}",
    ),
    "setup": Row("", "setuptools"),
}  # fmt: skip

SIBLINGS = ("benchmarks", "examples", "reproduce", "scripts", "tools")
"""Folders of scripts, which import the files beside them by their bare names."""

FILES = sorted(
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    if not name.startswith("tests/")
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of all modules imported anywhere in the file, inside functions too."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            origin = f"{base}.{node.module or ''}".rstrip(".") if node.level else str(node.module)
            for alias in node.names:
                yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in MODULES else origin


def row_of(module: str) -> str:
    """The key of the row that speaks for this module: the longest that it lies in."""
    fitting = [key for key in ROWS if module == key or (module.startswith(f"{key}.") and key != ENGINE)]
    return max(fitting, key=len, default="")


def allowed(key: str) -> set[str]:
    """The keys of the rows that may be imported, itself among them."""
    row = ROWS[key]
    found = {f"{ENGINE}.{name}" for name in row.engine.split()} | {key}
    found |= {TOOLS if name == "__init__" else f"{TOOLS}.{name}" for name in row.tools.split()}
    return found | set(row.also.split())


def offence(path: Path, name: str) -> bool:
    """Whether a file must not import this module."""
    key = row_of(module_of(path))
    row, top = ROWS[key], name.split(".")[0]
    if row_of(name):
        return row_of(name) not in allowed(key)
    if top in sys.stdlib_module_names:
        return row.standard is not None and top not in row.standard
    if key in SIBLINGS and any(file.stem == top for file in FILES):
        return False
    return not any(name == other or name.startswith(f"{other}.") for other in row.others.split())


def test_every_file_lies_in_a_row() -> None:
    outside = [module for module in MODULES if not row_of(module)]
    assert len(FILES) > 200
    assert not outside


def test_no_import_is_outside_of_its_row() -> None:
    judged = [path for path in FILES if row_of(module_of(path))]
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in judged
        for name in imports_of(path)
        if offence(path, name)
    }
    assert not sorted(found)


def test_rows_name_only_rows_above_them() -> None:
    order = list(ROWS)
    late = [(key, name) for key in order for name in allowed(key) - {key} if order.index(name) > order.index(key)]
    assert late == []


def test_no_row_allows_what_is_not_imported() -> None:
    used: dict[str, set[str]] = {}
    for path in FILES:
        if key := row_of(module_of(path)):
            used.setdefault(key, set()).update(row_of(name) for name in imports_of(path))
    unused = {key: allowed(key) - {key} - used.get(key, set()) for key in ROWS}
    assert {key: names for key, names in unused.items() if names} == {}


@pytest.mark.parametrize("folder", ["megatron", "megatron/core", "megatron/core/dist_checkpointing"])
def test_the_namespace_that_the_wheel_shares_has_no_init_file(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_training_package_shadows_the_one_of_newer_wheels() -> None:
    assert not (ROOT / "megatron" / "training").exists()


def test_what_a_cpu_run_needs_is_imported_only_where_one_starts_and_not_when_that_is_imported() -> None:
    testing, driver = f"{DRIVER}.testing", ROOT / "megatron" / "pretrain"
    users = {path for path in FILES if any(name.startswith(testing) for name in imports_of(path))}
    starts = {driver / f"{name}.py" for name in ("core_import", "initialize", "launch")}
    install = ROOT / "scripts" / "install_te_python.py"
    assert {path for path in users if not module_of(path).startswith(testing)} == starts | {install}
    for start in starts:
        top = [ast.unparse(node) for node in tree_of(start).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in top if testing in line], start


def test_library_code_neither_prints_nor_exits() -> None:
    for path in FILES:
        if module_of(path).startswith((ENGINE, DRIVER, f"{TOOLS}.")):
            calls = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
            in_main = (
                {"sys.exit", "os._exit"} if '__name__ == "__main__"' in path.read_text(encoding="utf-8") else set()
            )
            # A forked process must not run on, and destructors of torch would abort a launcher.
            in_forks = {"os._exit"} if "os.fork" in calls or path.stem == "exit_noise" else set()
            assert not (calls & {"print", "exit", "quit", "sys.exit", "os._exit"}) - in_main - in_forks, path


def test_no_class_name_has_two_meanings() -> None:
    names = Counter(node.name for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_training_loop_never_asks_whether_there_is_a_session() -> None:
    engine = "megatron/core/dist_checkpointing/moe"
    for name in ("pretrain_gpt_moe.py", "megatron/pretrain/loop.py", f"{engine}/stock/hooks.py", f"{engine}/bridge.py"):
        tests = [ast.unparse(node) for node in ast.walk(tree_of(ROOT / name)) if isinstance(node, ast.Compare)]
        assert not [test for test in tests if "session is" in test], name


PRIVATE_ACCESSES = 111
"""Of tests, mostly hooks that change a running job from within; lower it when one goes. Two came with the probes of a
rank that is slow to accept, and one with the state of a rendezvous that is cut off: neither shows anywhere else.
Two are of the job with standbys, whose ranks say where their weights lie; two of a GPU that spins as torch aborts. Ten
take a wait out of the code, or ask the device as a survivor does: on the asynchronous device they must show. Five give
a recovery drawn inventories, and ask what it takes of them. Nine are of waits of a start that time out, and of buffers
of DeepEP and graphs, which their packages keep to themselves. Six play captures of CUDA graphs, and records of what
stages sent. One opens a part of a session: for how long it serves other nodes shows after minutes elsewhere."""


def test_tests_reach_into_privates_nowhere_new() -> None:
    found = [
        ast.unparse(node)
        for path in (ROOT / "tests").rglob("*.py")
        if "simulated_world" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert len(found) <= PRIVATE_ACCESSES


READ_OTHERWISE = {
    "moe.versions": "files of installed packages, before numpy is there",
    "moe.storage.system": "the kernel's own, of a control group and of devices",
    "moe.storage.small_files": "bounded and regular too, and asked whose it is",
    "moe.boot_clock": "the kernel's own, of this boot and its processes",
    "moe.standby.heartbeat": "a byte in a folder that only the launcher gives",
    "moe.standby.verdict": "a number in a folder that only the launcher makes",
    "dense.safe_load": "bytes that were read, not a file",
    "runs.run_log": "what a user names, which may be a pipe; line by line",
}
"""Modules that read files otherwise than through `storage.small_files`, and why."""


def test_files_that_somebody_else_may_have_put_there_are_read_in_one_place() -> None:
    judged = (ENGINE, *(f"{TOOLS}.{name}" for name in ("checkpoints", "dense", "runs")))
    found = {
        module for module, path in MODULES.items() if module.startswith(judged) and any(map(reads, calls_in(path)))
    }
    assert {module.removeprefix(f"{TOOLS}.").removeprefix(ENGINE[:-3]) for module in found} == READ_OTHERWISE.keys()


def calls_in(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def reads(call: ast.Call) -> bool:
    """Whether a call reads a file by its name."""
    called = ast.unparse(call.func)
    if called.rpartition(".")[2] in ("read_bytes", "read_text") or called == "torch.load":
        return True
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return called.rpartition(".")[2] == "open" and bool(modes) and modes[-1].startswith("r")
