"""`make gpu-check` fails where it tested nothing, and says why in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import pytest
import torch
from _pytest.mark.expression import Expression
from gpu_driver import DETERMINISTIC, ENGINE, LOCAL, SMALL, Job, corpus, unfit_nccl
from megatron_flags import judged
from test_cuda_session import GRAPHS, STRATEGIES, WARM
from test_nccl_ranks import FLEX, LAYOUT, PROTECTED, RANKS

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.pretrain.indexed_corpus import open_corpus

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails_with_one_line() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_check.py")], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "warn" not in line.lower()]
    assert line.startswith(f"gpu-check: nothing was tested: torch {torch.__version__}")


MACHINE = {
    "missing": [], "torch": "2.11.0+cu130", "cuda": "13.0", "device": "H100", "sm": 90, "used_bytes": 0,
    "bytes": 80 << 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"torch": "2.4.1"}, "torch 2.4.1 is not supported (expected 2.8 and newer)"),
        ({"cuda": None}, "torch 2.11.0+cu130 is built for CPUs: "),
        ({"error": "Found no NVIDIA driver"}, "torch 2.11.0+cu130 for CUDA 13.0: Found no NVIDIA driver"),
        ({"missing": ["xxhash"]}, "missing packages: xxhash; "),
        ({"used_bytes": 60 << 30}, "GPU in use: 64.4 of 85.9 GB are taken; "),
    ],
)
def test_a_machine_that_is_not_fit_is_refused_with_one_line(found: dict[str, Any], said: str) -> None:
    gpu_check.check(MACHINE, rehearsed=False)
    with pytest.raises(gpu_check.UnusableMachine) as refused:
        gpu_check.check(MACHINE | found, rehearsed=False)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("release", "named"), [("2.28.9", "2.28.9"), ("", "unknown"), ("3", ""), ("2.30.7", "")])
def test_an_nccl_that_takes_one_rank_for_each_gpu_is_named_with_what_to_bring(release: str, named: str) -> None:
    line = f"NCCL {named} takes one rank for each GPU (expected 2.30 and newer): bring pack nccl"
    assert unfit_nccl(release) == (line if named else "")


@pytest.mark.parametrize(
    ("part", "sm", "free_bytes", "said"),
    [
        ("te", 80, 64 << 30, "pack te is for sm_80, but this GPU is sm_90: run `make gpu-bundle SM=90`"),
        ("ranks", None, 64 << 30, "pack nccl is not here: bring nccl.tar.xz of `make gpu-bundle` along"),
        ("model", None, 8 << 30, "/dev/shm has 8.6 GB free, 45G are needed: mount -o remount,size=45G /dev/shm"),
    ],
)
def test_a_part_that_cannot_run_says_why_in_one_line(
    part: str, sm: int | None, free_bytes: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_CKPT_GPU_SITE", str(tmp_path))
    monkeypatch.setattr(gpu_check.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    if sm is not None:
        (tmp_path / part).mkdir()
        (tmp_path / part / f"{part}.json").write_text(json.dumps({"sm": sm}))
    with pytest.raises(gpu_check.UnusableMachine) as refused:
        gpu_check.prepared(part, MACHINE, rehearsed=False)
    assert str(refused.value) == said


def test_a_folder_of_results_that_is_none_is_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert gpu_check.main(["--out", str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: nothing was tested: ")
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "facts,brakes"], "gpu-check: no part 'brakes' (expected facts, "),
        (["--budget", "0"], "gpu-check: invalid --budget: 0 (expected seconds above 0)"),
        (["--budget", "soon"], "gpu-check: argument --budget: invalid float value: 'soon'"),
    ],
)
def test_arguments_that_are_wrong_end_it_with_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(said)


FIGURE = """
import pytest
def test_first(record):
    record("first", value=1)
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs parts, each of one file with this content; returns the results."""
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "asked", lambda: MACHINE)
    monkeypatch.setattr(gpu_check, "KILL_AFTER_S", 0.0)
    monkeypatch.delenv("MOE_CKPT_GPU_SITE", raising=False)
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    paths = f"{ROOT / 'scripts'} {ROOT}"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {paths}\nmarkers = takes\n")
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)

    def run(budget_s: float = 60.0, **contents: str) -> list[dict[str, Any]]:
        parts = {name: gpu_check.CheckPart((f"test_{name}.py",)) for name in contents}
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        for name, content in contents.items():
            (folder / f"test_{name}.py").write_text(content)
        given = ["--part", ",".join(parts), "--budget", str(budget_s), "--out", str(tmp_path / "out")]
        code = gpu_check.main(given)
        text = (tmp_path / "out" / "results.jsonl").read_text()
        return [{"code": code}, *map(json.loads, text.splitlines())]

    return run


Check = Callable[..., list[dict[str, Any]]]


def outcomes(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["part"], line["outcome"]) for line in lines if "outcome" in line]


def test_a_run_in_which_all_was_skipped_is_a_failure(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    lines = check(one="import pytest\n@pytest.mark.skip(reason='no TE')\ndef test_one():\n    pass\n")
    assert lines[0] == {"code": 1}
    assert capsys.readouterr().err.splitlines() == [
        "gpu-check: NOT tested: no TE", "gpu-check: nothing was tested: no test ran"
    ]  # fmt: skip


def test_a_part_that_fails_or_crashes_does_not_take_the_others_along(check: Check) -> None:
    crash, failure = "import os\ndef test_it():\n    os.abort()\n", "def test_it():\n    assert 1 == 2, 'two'\n"
    lines = check(crash=crash, failure=failure, last=FIGURE)
    assert outcomes(lines) == [("crash", "failed"), ("failure", "failed"), ("last", "passed")]
    assert lines[0] == {"code": 1}
    assert [line["why"] for line in lines if line.get("outcome") == "failed"] == [
        "test_crash.py: pytest ended with -6, see log.txt", "AssertionError: two"
    ]  # fmt: skip


def test_steps_that_are_given_together_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    waits = """
import pathlib, time
def test_it():
    pathlib.Path({own!r}).touch()
    until_s = time.monotonic() + 60
    while not pathlib.Path({other!r}).exists():
        assert time.monotonic() < until_s, "the other one was not begun"
        time.sleep(0.01)
"""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    marks = [str(tmp_path / name) for name in "ab"]
    for at, name in enumerate("ab"):
        text = waits.format(own=marks[at], other=marks[1 - at])
        (tmp_path / "tests" / "gpu" / f"test_{name}.py").write_text(text)
    results = gpu_check.Results(tmp_path / "results.jsonl")
    results.path.touch()
    gpu_check.run("both", ("test_a.py", "test_b.py"), dict(os.environ), time.monotonic() + 60, results)
    assert (tmp_path / "log.txt").read_text().count("1 passed") == 2


@pytest.mark.ci
def test_what_the_budget_does_not_suffice_for_is_cut_off_and_figures_stay(check: Check) -> None:
    slow = f"{FIGURE}\ndef test_slow():\n    import time\n    time.sleep(60)\n"
    lines = check(8.0, slow=slow, never=FIGURE)
    assert [line["figure"] for line in lines if "figure" in line] == ["first"]
    assert outcomes(lines) == [("slow", "passed"), ("slow", "cut off"), ("never", "not run")]


def test_a_test_that_would_not_end_in_time_is_not_begun(check: Check) -> None:
    lines = check(long=f"{FIGURE}\n@pytest.mark.takes(100)\ndef test_long():\n    raise AssertionError\n")
    assert outcomes(lines) == [("long", "passed"), ("long", "skipped")]
    assert lines[-1]["why"].startswith("the budget: test_long takes 100 s, ")


def test_a_wheelhouse_keeps_pip_from_any_index() -> None:
    command = ["make", "-n", "-p", "gpu-check", "WHEELHOUSE=wheels", f"PYTHON={sys.executable}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert "PIP_NO_INDEX = 1" in said
    assert f"PIP_FIND_LINKS = {ROOT / 'wheels'}" in said or "PIP_FIND_LINKS = $(abspath $(WHEELHOUSE))" in said


@pytest.mark.parametrize("layers", [LOCAL, ENGINE], ids=["local", "transformer engine"])
def test_megatron_lm_takes_the_flags_of_the_jobs_that_it_starts(layers: Sequence[str]) -> None:
    args = judged([*SMALL, *layers, *DETERMINISTIC, "--data-path", "corpus"], 1)
    assert (args.device, args.deterministic_mode) == ("cuda", True)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_protection_takes_the_job_with_buffers_of_a_flex_dispatcher(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object, HybridEPBuffer=object))
    flags = [*SMALL, *LOCAL, *LAYOUT, *DETERMINISTIC, *FLEX, "--moe-flex-dispatcher-backend", backend, *PROTECTED]
    args = judged([*flags, "--data-path", "corpus"], RANKS)
    assert (args.moe_token_dispatcher_type, args.moe_ckpt_strategy) == ("flex", "full")


@pytest.mark.parametrize("strategy", ["full", "sparse"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_protection_takes_the_jobs_with_graphs_and_refuses_drawn_numbers_in_captured_modules(
    graphs: str, strategy: str
) -> None:
    job = [*SMALL, *GRAPHS[graphs], *WARM, *DETERMINISTIC, *STRATEGIES[strategy], "--data-path", "corpus"]
    assert judged(job, 1).cuda_graph_impl != "none"
    if graphs != "whole-iterations":
        with pytest.raises(UsageError, match="draw none"):
            judged([*job, "--hidden-dropout", "0.1"], 1)


@pytest.mark.ci
def test_each_test_of_a_gpu_is_in_one_step() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--collect-only", "-p", "no:cacheprovider", "tests/gpu"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout
    tests = [line.removeprefix("tests/gpu/") for line in said.splitlines() if "::" in line]

    def holds(step: str, test: str) -> bool:
        files, _, chosen = step.partition(" -k ")
        named = not chosen or Expression.compile(chosen).evaluate(lambda name, **_: name in test)
        return test.split("::")[0] in files.split() and named

    steps = [step for part in gpu_check.PARTS.values() for one in part.steps for step in gpu_check.at_once(one)]
    assert len(tests) > 40
    found = {test: [step for step in steps if holds(step, test)] for test in tests}
    several = [those for test, those in found.items() if len(those) != 1]
    assert several == [["test_engine.py", "test_engine.py -k compiled"]], "what the large model needs as well"


def test_jobs_of_the_check_have_data_for_each_split_and_ids_of_their_own(tmp_path: Path) -> None:
    documents = len(open_corpus(corpus(tmp_path)).sequence_lengths)
    assert documents * 0.05 >= 1  # of a split without documents Megatron-Core builds samples for ever
    one, other = (Job(tmp_path / "killed", tmp_path, "") for _ in range(2))
    assert one.job_id != other.job_id  # a fault strikes once in a job
