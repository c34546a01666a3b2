"""Every benchmark starts, measures with tiny sizes, and prints its table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from world import ROOT

ROWS = {
    "api_overhead": "with / without the calls",
    "training_thread": "| total / loop |",
    "planning": "| recovery of one stage, 1024 ranks, 16 stages |",
    "control_plane": "| 64 | 63 |",
    "transports": "process-group",
    "snapshot": "| full, replica, storage / NVRx local async |",
    "every_iteration": "| sparse/4 |",
    "slow_links": "A fault every 10,000 iterations, beyond the interval ahead: ",
    "replay": "| all but the embedding |",
    "recovery": "| of that with new processes |",
    "replica_loss": "| torchft, quick |",
    "roll_forward": "times the bytes of gradients, training is back",
    "drill": "By ETTR ahead: ",
    "localized_recovery": "| PP=2, EP=2 | detection until training is where it was, s |",
    "planned_kills": "| until training is back |",
    "memory_peaks": "beyond its imports",
    "pec_accuracy": "| 1234 | Dynamic-K | 1 |",
    "figure_jobs": "selective_ablation: ",
}
"""What each prints at last."""


def test_every_benchmark_is_run_here_and_by_make_bench() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\n    start(main" in path.read_text()}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (named,) = [line.split()[2:] for line in makefile.splitlines() if line.startswith("BENCHMARKS = ")]
    assert scripts == set(ROWS) == set(named)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_prints_its_table(name: str, corpus: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--turns", "1"]
    environment = os.environ | {"MOE_CKPT_CORPUS": corpus, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    assert ROWS[name] in ended.stdout
    assert not re.search("could not be installed|Not measured: ", ended.stdout)


@pytest.mark.ci
def test_the_thread_that_trains_takes_no_longer_in_an_iteration_than_is_allowed() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "training_thread.py"), "--turns", "24"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.ci
def test_what_connecting_again_takes_is_measured_in_rounds() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "reconnection.py"), "--ranks", "4"]
    ended = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sockets of a rank: " in ended.stdout and "CPU of a rank" in ended.stdout


@pytest.mark.ci
def test_a_rank_of_512_takes_no_more_of_a_recovery_than_it_may() -> None:
    code = "import control_plane, json; print(json.dumps(control_plane.job(512, 5)))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=300, check=True)
    job = json.loads(ended.stdout.splitlines()[-1])
    for rank in job["ranks"]:
        assert rank["bytes"] <= 100_000 and rank["messages"] <= 110 and rank["peers"] <= 18, rank
        assert rank["inventory_s"] + rank["plan_s"] <= 0.05, rank
    for name, told in job["agreements"].items():
        assert told["bytes"] <= (400_000 if "sizes" in name else 40_000) and told["messages"] <= 75, (name, told)
    for window in job["windows"]:
        assert window["fixed_s"] <= 1 and window["budget_s"] <= 3, window


REPORTS = """
import contextlib, io, json, runpy, sys
_, folder, *names = sys.argv
sys.path.insert(0, folder)
pages = {}
for name in names:
    sys.argv = [name, "--report"]
    with contextlib.redirect_stdout(io.StringIO()) as page:
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, name
    pages[name] = page.getvalue()
print(json.dumps(pages))
"""
"""In one process, which imports torch once. Kept runs keep what is asked for."""


@pytest.mark.ci
def test_what_was_kept_makes_the_pages_that_are_there() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REPORTS, str(ROOT / "benchmarks"), *PAGES]
    pages = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    for name, page in PAGES.items():
        expected = (ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
        assert pages[name] == expected, f"run {name}.py --report --write"


PAGES = {
    "control_plane": "control-plane.md",
    "snapshot": "snapshot.md",
    "every_iteration": "every-iteration.md",
    "slow_links": "slow-links.md",
    "recovery": "recovery.md",
    "replica_loss": "replica-loss.md",
    "roll_forward": "roll-forward.md",
    "localized_recovery": "localized-recovery.md",
    "planned_kills": "planned-kills.md",
    "memory_peaks": "memory-peaks.md",
    "pec_accuracy": "pec-accuracy.md",
    "drill": "chaos.md",
}
