"""What the documents say can be done: links lead somewhere, commands and flags exist, named tests exist."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import pytest
from megatron_flags import options, parser
from tiers import tier_of

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.standby.run import parse_options
from moe_ckpt.commands.main import commands
from reproduce.__main__ import main as reproduce

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "reproduce", "scripts", "tests", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])

LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`(?: \(`make (\S+)`\))?")
OURS = re.compile(rf"(?:{'|'.join(FOLDERS)})/[^\s<>]*|pretrain_gpt_moe\.py")
CHECKED = re.compile(
    rf"(?:moe-ckpt|make|torchrun|sbatch|bash|python|\.venv/bin/\S+|(?:{'|'.join(FOLDERS)})/\S*)(?: |$)"
)
OVERLAY = ROOT / "megatron" / "core" / "dist_checkpointing" / "moe"
PACKAGES = "|".join(["megatron", "moe_ckpt", *(made.parent.name for made in OVERLAY.glob("*/__init__.py"))])
MODULE = re.compile(rf"`((?:{PACKAGES})/[\w/]+?)/?(?:\.py)?`")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|\[.*\]|\.\.\.")
FLAG = re.compile(r"--[a-z][\w-]*")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=named)


def parts(page: Path) -> tuple[list[str], list[str]]:
    """Lines of prose, and lines of code blocks, fenced or indented, with continued ones joined."""
    prose, code, fenced = [], [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line.strip())
        else:
            prose.append(line)
    return prose, re.sub(r"\\\n\s*", " ", "\n".join(code)).splitlines()


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    titles = [line.lstrip("#").strip().lower() for line in parts(page)[0] if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall("\n".join(INLINE.sub("", line) for line in parts(page)[0])):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield target


def spoken(line: str) -> Iterator[list[str]]:
    """The commands in a line as it is typed in a shell, without assignments before and redirections behind them."""
    line = line.removeprefix("$ ")
    if not CHECKED.match(re.sub(r"^(?:[A-Z_]+=\S* )+", "", line)):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";|&()"):
            words.append(word)
            continue
        words = words[: next((at for at, one in enumerate(words) if set(one) <= set("<>")), None)]
        while words and ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def misuse(words: list[str], *, typed: bool) -> str:
    """What is wrong with a command line, nothing if all is well. typed: its values are real ones, and it is whole."""
    typed = typed and "..." not in words
    if words[0].removeprefix(".venv/bin/") == "moe-ckpt":
        return misuse_of_moe_ckpt(words[1:], typed=typed)
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in make_targets()]
        return f"no such target: {unknown}" if unknown else ""
    if words[1:3] == ["-m", "reproduce"]:
        return (
            ""
            if PLACEHOLDER.fullmatch("".join(words[3:4]) or "NAME")
            else misuse_of_click(reproduce, words[3:], typed=True)
        )
    at = next((at for at, word in enumerate(words) if OURS.fullmatch(word)), None)
    if at is None:
        return ""
    name, flags = words[at].partition("::")[0], words[at + 1 :]
    if "NNN" not in name and not any(ROOT.glob(name.rstrip("/"))):
        return f"no such file: {name}"
    if name.startswith("tools/checkpoint/"):
        return misuse_of_moe_ckpt([Path(name).stem, *flags], typed=typed)
    if name in ("pretrain_gpt_moe.py", "scripts/train_cpu.sh") and typed:
        return misuse_of_driver(flags)
    known = flags_of(name)
    unknown = [word for word in flags if word.startswith("--") and word != "--" and word.split("=")[0] not in known]
    return f"no such flags: {unknown}" if unknown else ""


def misuse_of_moe_ckpt(words: list[str], *, typed: bool) -> str:
    command: click.Command = commands
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        if PLACEHOLDER.fullmatch(name):
            return ""
        if name not in command.commands:
            return f"no such command: {name}"
        command = command.commands[name]
    return misuse_of_click(command, words, typed=typed)


def misuse_of_click(command: click.Command, words: list[str], *, typed: bool) -> str:
    if "--help" in words:
        return ""
    context = click.Context(command, **command.context_settings)
    try:
        given, rest, _ = command.make_parser(context).parse_args([word for word in words if word != "..."])
        for parameter in command.params if typed else ():
            value = given.get(str(parameter.name))
            if not isinstance(value, str | bool | list | tuple) or value in ((), []):
                if parameter.required:
                    return f"{parameter.name} is missing"
            elif not isinstance(parameter.type, click.Path | click.File):
                parameter.type_cast_value(context, value)
    except click.ClickException as error:
        return error.format_message()
    unknown = [word for word in rest if word.startswith("--") and word not in driver_flags()]
    return f"No such option: {unknown}" if unknown else ""


def misuse_of_driver(flags: list[str]) -> str:
    try:
        parser().parse_args(flags)
    except InvalidInput as error:
        return str(error)
    return ""


@cache
def driver_flags() -> frozenset[str]:
    return frozenset(options())


@cache
def launcher_flags() -> frozenset[str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        parse_options(["--help"])
    return frozenset(FLAG.findall(said.getvalue()))


@cache
def flags_of(name: str) -> frozenset[str]:
    """Flags that a script may be given: its own, those of modules that it runs, the driver's if it hands them on."""
    path = ROOT / name
    if not path.is_file():
        return frozenset()
    text = path.read_text()
    if path.parent.name == "benchmarks":
        text += (path.parent / "harness.py").read_text()
    for module in re.findall(r"-m ((?:megatron|moe_ckpt)[\w.]+)", text):
        source = ROOT / module.replace(".", "/")
        text += "".join(one.read_text() for one in (source.with_suffix(".py"), source / "__main__.py") if one.is_file())
    reads_all = path.name == "pretrain_gpt_moe.py" or "from_argv(sys.argv" in text
    hands_on = path.suffix in (".sh", ".sbatch") or reads_all
    return frozenset(FLAG.findall(text)) | (driver_flags() if hands_on else frozenset())


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).is_file() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@every_page
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    assert not [*broken_links(page)]


@every_page
def test_command_lines_name_commands_scripts_targets_and_flags_that_exist(page: Path) -> None:
    told = [(shlex.join(words), misuse(words, typed=True)) for line in parts(page)[1] for words in spoken(line)]
    assert not [(command, wrong) for command, wrong in told if wrong]


@every_page
def test_commands_and_files_that_sentences_name_exist(page: Path) -> None:
    said = [code for line in parts(page)[0] for code in INLINE.findall(line) if CHECKED.match(code) and "<" not in code]
    told = [(code, misuse(words, typed=False)) for code in said for words in spoken(code)]
    assert not [(code, wrong) for code, wrong in told if wrong]


@every_page
def test_flags_of_the_subsystem_that_are_named_exist(page: Path) -> None:
    found = set(re.findall(r"--moe-ckpt-[a-z][a-z-]*[a-z](?![\w*-])", page.read_text(encoding="utf-8")))
    assert found <= driver_flags() | launcher_flags()


@every_page
def test_modules_that_are_named_exist(page: Path) -> None:
    named = sorted(set(MODULE.findall(page.read_text(encoding="utf-8"))))
    places = {name: [there / f"{name}{end}" for there in (ROOT, OVERLAY) for end in ("", ".py")] for name in named}
    assert [name for name in named if not any(path.exists() for path in places[name])] == []


@every_page
def test_tests_that_are_named_exist(page: Path) -> None:
    named_tests = TEST.findall(page.read_text(encoding="utf-8"))
    assert not [(path, name) for path, name, _ in named_tests if name not in functions_in(path)]


def test_guarantees_say_which_tier_runs_each_test_where_that_is_not_make_test() -> None:
    named_tests = TEST.findall((ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))
    tiers = [(name, told or "test", tier_of(ROOT / path, name)) for path, name, told in named_tests]
    assert [(name, f"runs in make {tier}, not in make {told}") for name, told, tier in tiers if told != tier] == []


def test_the_tier_of_a_test_is_that_of_its_cheapest_case(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(
        "import pytest\nci, full = pytest.mark.ci, pytest.mark.full\n"
        "@pytest.fixture(params=[pytest.param(1, marks=ci), pytest.param(2, marks=full)])\ndef made(request): ...\n"
        "def plain(): ...\n@full\ndef marked(): ...\ndef of_fixture(made): ...\n"
        "@pytest.mark.parametrize('one', [pytest.param(1, marks=full), 2])\ndef sampled(one): ...\n"
        "@pytest.mark.parametrize('one', [pytest.param(1, marks=[full])])\ndef left_out(one, made): ...\n"
    )
    names = ("plain", "sampled", "of_fixture", "marked", "left_out")
    found = [tier_of(tmp_path / "cases.py", name) for name in names]
    assert found == ["test", "test", "test-ci", "test-full", "test-full"]


def test_each_guarantee_says_when_it_ends_and_which_test_shows_it() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]
    promises = [section for section in sections if not section.startswith("Not promised")]
    assert len(promises) > 10
    assert not [one.splitlines()[0] for one in promises if not TEST.search(one) or "**Ends when**" not in one]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("moe-ckpt digets ckpt", "no such command"),
        ("moe-ckpt digest --jsno ckpt > a; make setup", "No such option"),
        ("moe-ckpt convert --to sparse a b", "not one of 'dense', 'hf'"),
        ("moe-ckpt digest", "directory is missing"),
        ("NPROC=2 scripts/train_cpu.sh --train-iterations 3", "--train-iterations"),
        ("scripts/train_cpu.sh --train-iters many", "invalid int value"),
        ("torchrun --nproc-per-node 8 pretrain_gpt_moe.py --layers 3", "--layers"),
        (".venv/bin/python tools/preprocess_data.py --inputs a", "--inputs"),
        ("scripts/chaos_cpu.sh --hours 3", "--hours"),
        ("python -m reproduce fig2", "'fig2' is not one of"),
        ("scripts/train_gpu.sh", "no such file"),
        ("make setup tests", "no such target"),
    ],
)
def test_a_command_line_that_would_not_work_is_found(line: str, wrong: str) -> None:
    (found,) = filter(None, (misuse(words, typed=True) for words in spoken(line)))
    assert wrong in found


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return tool("command_reference")


def test_the_picture_of_the_architecture_is_what_its_source_draws() -> None:
    picture = tool("architecture_picture")
    assert picture.TARGET.read_text(encoding="utf-8") == picture.architecture(), "run tools/architecture_picture.py"


def test_the_way_of_a_tensor_names_files_that_are_there_and_counts_them() -> None:
    page = (ROOT / "docs/internals/design.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## The way of one expert's tensor\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)`", section)
    engine = ROOT / "megatron/core/dist_checkpointing/moe"
    assert [file for file in files if not ((engine / file).is_file() or (ROOT / file).is_file())] == []
    told = re.search(r"\*\*(\d+) files\*\*, of which (\d+) \(in bold\)", section)
    assert told and [int(count) for count in told.groups()] == [
        len(set(files)),
        len(re.findall(r"\*\*`[\w/]+\.py`\*\*", section)),
    ]


def test_the_page_of_compatibility_is_what_was_measured_with_each_release() -> None:
    compatibility = tool("compatibility")
    measured = compatibility.results()
    assert {release.rpartition(".")[0] for release in measured} == {"0.17", "0.18", "0.19"}
    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.render(), "run python tools/compatibility.py"


def test_who_installs_is_told_what_each_release_of_core_allows() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Install\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert "](docs/compatibility.md)" in section


def test_pages_have_no_traces_of_merges() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    marked = re.compile(r"^(<{7}|\|{7}|={7}|>{7})( |$)", re.MULTILINE)
    assert [page.name for page in pages if marked.search(page.read_text(encoding="utf-8"))] == []


def test_the_environment_has_the_bridge_that_its_page_is_about() -> None:
    makefile, page = (ROOT / "Makefile").read_text(), (ROOT / "docs/bridge.md").read_text(encoding="utf-8")
    (version,) = re.findall(r"^BRIDGE \?= ([\d.]+)$", makefile, re.MULTILINE)
    assert f"Bridge {version}" in page
    assert "--no-deps megatron-bridge==$(BRIDGE)" in makefile


def test_the_page_of_commands_is_what_the_commands_say_of_themselves(reference: ModuleType) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert page == reference.render(), "run python tools/command_reference.py"


def test_the_page_of_flags_is_what_the_command_lists() -> None:
    flags = tool("flag_reference")
    assert flags.PAGE.read_text(encoding="utf-8") == flags.render(), "run python tools/flag_reference.py"


OF_OTHERS = re.compile(r"(SLURM|TORCH|CUDA|GLIBC|SBATCH|PYTHON)[A-Z_]*|BASH_SOURCE|HOME|USER|PATH|SECONDS|RANDOM")
OF_ARGUMENTS = "NPROC TP PP EP VPP NNODES MAX_RESTARTS STANDBYS DATA SAVE HEAD JOB NODES TOKENIZER".split()
"""Of scripts/train_cpu.sh, and of the examples that begin a job with what each user has elsewhere."""


def test_scripts_take_no_setting_from_a_name_that_a_shell_may_have_for_something_else() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch")]
    scripts += (ROOT / "examples").rglob("*.sh")
    for script in scripts:
        taken = re.findall(r"\$\{([A-Z][A-Z0-9_]*):[-=?+]", script.read_text(encoding="utf-8"))
        bare = [name for name in taken if not OF_OTHERS.fullmatch(name) and name not in OF_ARGUMENTS]
        assert [name for name in bare if not name.startswith("MOE_CKPT_")] == [], script
        if script.parent.name == "scripts":
            assert [name for name in bare if name not in page] == [], script


def test_the_page_of_the_python_interface_is_made_from_docstrings_inherited_ones_too() -> None:
    interface = tool("api_reference")
    assert interface.PAGE.read_text(encoding="utf-8") == interface.render(), "run python tools/api_reference.py"
    assert "### `forward_backward()" in interface.render()


def test_every_command_says_what_it_is_for_and_shows_how(reference: ModuleType) -> None:
    every = {name: command.help or "" for name, command in reference.every("moe-ckpt", commands)}
    assert not [name for name, said in every.items() if not said]
    assert not [name for name, said in every.items() if "$ moe-ckpt" not in said]


def test_every_command_that_finds_something_out_can_say_it_as_json(reference: ModuleType) -> None:
    commands_alone = {name: one for name, one in reference.every("moe-ckpt", commands) if not hasattr(one, "commands")}
    without = [name for name, one in commands_alone.items() if not any("--json" in of.opts for of in one.params)]
    assert without == ["moe-ckpt completion"]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words: `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#two-words-code) [b](#here) [c](gone.md)\n[d](other.md#here) ![e](https://e.e)\n"
    )
    assert [*broken_links(page)] == ["gone.md", "other.md#here"]


def test_the_page_of_sizes_is_what_the_planner_says() -> None:
    sizing = tool("sizing")
    assert sizing.PAGE.read_text(encoding="utf-8") == sizing.render(), "run python tools/sizing.py"


def test_the_page_of_features_by_loop_is_the_table_that_flags_are_judged_by() -> None:
    features = tool("features_by_loop")
    assert features.PAGE.read_text(encoding="utf-8") == features.render(), "run python tools/features_by_loop.py"


def test_the_page_of_recipes_is_what_the_refusals_say() -> None:
    coverage = tool("recipe_coverage")
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.render(), "run python tools/recipe_coverage.py"


@cache
def sentences_of_the_code() -> str:
    """All texts in the packages; those of an f-string and its neighbours as one, with what it puts in as `\\0`."""
    roots = ("megatron/core/dist_checkpointing/moe", "megatron/pretrain", "moe_ckpt")
    found = []
    for file in (file for root in roots for file in sorted((ROOT / root).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def quoted_lines(page: str) -> list[str]:
    """What the first column of its tables quotes."""
    return [code for line in page.splitlines() for code in INLINE.findall(line.partition(" | ")[0]) if " " in code]


VARIABLE = re.compile(r"\.\.\.|\b(?:[A-Z]|[A-Z]+_?[A-Z]+)\b(?!-)|node-\d|rack-\d|-?\d[\d.]*")


NOT_OURS = ("load_sharded", "nvidia-smi", "--async-save", "-- --moe-ckpt")
"""In what a page quotes of stock Megatron-LM or of a command line."""


@pytest.mark.parametrize("page", ["troubleshooting", "operations"])
def test_lines_that_a_page_quotes_are_those_of_the_code(page: str) -> None:
    quoted = quoted_lines((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    lines = [line for line in quoted if not any(other in line for other in NOT_OURS)]
    assert len(lines) > 10
    parts = [(line, part.strip(" ,.:;()")) for line in lines for part in VARIABLE.split(line)]
    assert [(line, part) for line, part in parts if len(part) > 3 and part not in sentences_of_the_code()] == []


def test_a_line_that_no_code_says_is_found() -> None:
    (line,) = quoted_lines("| `the moon is ... full` | because | do |")
    assert "the moon is" in line and "the moon is" not in sentences_of_the_code()
