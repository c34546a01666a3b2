"""What the project may weigh, from `[tool.budgets]` of pyproject.toml: lower a number when it falls, and raise one only
with the reason beside it."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from test_architecture import FILES, MODULES, ROOT, imports_of, module_of, tree_of

BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["budgets"]
SLACK = 0.1
"""By how much a count may lie below its budget before that has to follow."""


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def python_files() -> tuple[Path, ...]:
    names = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    return tuple(ROOT / name for name in names if (ROOT / name).exists())


def in_folder(folder: str) -> Iterator[Path]:
    """Python files of a folder without those of the folders in it that have budgets of their own."""
    inner = [other for other in BUDGETS["lines"] if other.startswith(f"{folder}/")]
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(f"{folder}/") and not any(name.startswith(f"{other}/") for other in inner):
            yield path


@pytest.mark.parametrize("folder", BUDGETS["lines"])
def test_a_folder_has_no_more_lines_than_its_budget_and_the_budget_follows(folder: str) -> None:
    budget, lines = BUDGETS["lines"][folder], sum(map(lines_of, in_folder(folder)))
    assert budget * (1 - SLACK) - 200 <= lines <= budget, f"{folder} has {lines} lines"


def code_of(path: Path) -> int:
    """Lines that are neither blank nor a comment, a docstring or an import: what has to be understood."""
    others = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        1
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if at not in others and line.strip() and line.strip()[0] != "#"
    )


_ADAPTERS = ("stock", "standby", "in_place", "bridge.py", "bridge_survivors.py")


@pytest.mark.parametrize("part", BUDGETS["code"])
def test_the_kernel_what_restarts_it_and_extensions_have_no_more_code_than_their_budgets(part: str) -> None:
    engine = "megatron/core/dist_checkpointing/moe"
    apart = {"extensions": ("extensions",), "restart_and_adapters": _ADAPTERS}
    names = apart.get(part, ())
    lines = 0
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(f"{engine}/"):
            first = name.removeprefix(f"{engine}/").partition("/")[0]
            is_apart = any(first in others for others in apart.values())
            lines += code_of(path) if (first in names if names else not is_apart) else 0
    budget = BUDGETS["code"][part]
    assert budget * (1 - SLACK) <= lines <= budget, f"{part} has {lines} lines of code"


def test_every_python_file_has_a_budget() -> None:
    counted = {path for folder in BUDGETS["lines"] for path in in_folder(folder)}
    assert {path.name for path in python_files() if path not in counted} == {
        "setup.py",
        "pretrain_gpt_moe.py",
        "moe_ckpt_finder.py",
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        module: {name for name in imports_of(path) if name in MODULES} - {module} for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # names the circle


def public_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods whose names, and those of whose classes, are public."""

    def within(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from within(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                yield node

    yield from within(tree_of(path).body)


def explains_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function of two or more parameters has an `Args:` block, or names its port: "As `Store.put`"."""
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs) if arg.arg not in ("self", "cls")]
    decorated = {ast.unparse(one) for one in function.decorator_list}
    if len(names) < 2 or decorated & {"override", "overload"}:
        return True
    said = ast.get_docstring(function) or ""
    return "Args:" in said or said.startswith(("As `", "See `"))


@pytest.mark.parametrize("folder", BUDGETS["without_args"])
def test_public_functions_explain_their_arguments(folder: str) -> None:
    paths = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(f"{folder}/")]
    silent = [
        f"{path.name}: {one.name}" for path in paths for one in public_functions(path) if not explains_arguments(one)
    ]
    assert len(silent) <= BUDGETS["without_args"][folder], f"{len(silent)} without Args:, as {silent[:5]}"


def comment_share(paths: list[Path]) -> float:
    """Comments on 100 lines of code."""
    counts = Counter[str]()
    for path in paths:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            counts["comment"] += token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|fmt:|noqa)", token.string)
            counts["code"] += token.type == tokenize.NEWLINE
    return 100 * counts["comment"] / counts["code"]


@pytest.mark.parametrize("folder", BUDGETS["comments"])
def test_code_at_streams_locks_and_process_groups_is_commented(folder: str) -> None:
    paths = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(f"{folder}/")]
    assert round(comment_share(paths), 1) >= BUDGETS["comments"][folder], f"{comment_share(paths):.1f} on 100 lines"


def words_in(text: str) -> Counter[str]:
    patterns = {name: re.compile(rf"\b{pattern}\b", re.IGNORECASE) for name, pattern in BUDGETS["words"]["not"].items()}
    return Counter({name: len(pattern.findall(text)) for name, pattern in patterns.items()})


def test_private_words_do_not_come_back() -> None:
    """In pages, and in docstrings, strings and names of the product."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if "decisions" not in page.parts and page.name != "glossary.md"]
    product = [path for path in FILES if module_of(path).startswith(("megatron.", "moe_ckpt"))]
    found = sum((words_in(path.read_text(encoding="utf-8")) for path in (*pages, *product)), Counter[str]())
    over = {name: count for name, count in found.items() if count > BUDGETS["words"]["most"].get(name, 0)}
    assert not over


def prose() -> list[Path]:
    """README and the pages of docs that are written by hand."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return [page for page in pages if not re.search(r"^Made by `|\bMade by `python", page.read_text(), re.MULTILINE)]


def test_pages_have_no_more_words_than_their_budget() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in prose())
    budget = BUDGETS["words"]["pages"]
    assert budget * (1 - SLACK) <= words <= budget, f"{words} words"


def test_each_page_says_first_which_question_it_answers() -> None:
    heads = {page.name: page.read_text(encoding="utf-8").splitlines()[:4] for page in prose()}
    assert [name for name, head in heads.items() if name != "README.md" and "*Question: " not in "\n".join(head)] == []


SUBJECT = re.compile(r"[a-z0-9_/., -]+: [a-z0-9`'\"].*")
SINCE = "7c7735f"
"""The newest commit from before this rule."""


def test_subjects_of_commits_name_an_area_and_are_short() -> None:
    command = ["git", "log", "--no-merges", "--format=%s", f"{SINCE}..HEAD"]
    log = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if log.returncode:
        pytest.skip("the history is not here")
    assert [line for line in log.stdout.splitlines() if len(line) > 72 or not SUBJECT.fullmatch(line)] == []
