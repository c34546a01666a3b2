"""`make gpu-check` fails where it tested nothing, and says why in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_driver import DETERMINISTIC, ENGINE, LOCAL, SMALL
from megatron_flags import judged

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails_with_one_line() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_check.py")], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "warn" not in line.lower()]
    assert line.startswith(f"gpu-check: nothing was tested: torch {torch.__version__}")


REPORT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="no TE"/></testcase>
<testcase name="c"><failure message="bad"/></testcase></testsuite></testsuites>"""


def test_only_tests_that_passed_count_and_each_reason_to_skip_is_told(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert gpu_check.ran(tmp_path / "report.xml") == (1, ["no TE"])


def test_a_run_in_which_all_was_skipped_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    test = tmp_path / "tests" / "gpu" / "test_one.py"
    test.parent.mkdir(parents=True)
    test.write_text("import pytest\n@pytest.mark.skip(reason='no device')\ndef test_one():\n    pass\n")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "-q", "-p", "no:cacheprovider"])
    assert gpu_check.main() == 1
    assert "gpu-check: NOT tested: no device" in capsys.readouterr().err
    test.write_text("def test_one():\n    pass\n")
    assert gpu_check.main() == 0


def test_a_wheelhouse_keeps_pip_from_any_index() -> None:
    command = ["make", "-n", "-p", "gpu-check", "WHEELHOUSE=wheels", f"PYTHON={sys.executable}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert "PIP_NO_INDEX = 1" in said
    assert f"PIP_FIND_LINKS = {ROOT / 'wheels'}" in said or "PIP_FIND_LINKS = $(abspath $(WHEELHOUSE))" in said


@pytest.mark.parametrize("layers", [LOCAL, ENGINE], ids=["local", "transformer engine"])
def test_megatron_lm_takes_the_flags_of_the_jobs_that_it_starts(layers: Sequence[str]) -> None:
    args = judged([*SMALL, *layers, *DETERMINISTIC, "--data-path", "corpus"], 1)
    assert (args.device, args.deterministic_mode) == ("cuda", True)
