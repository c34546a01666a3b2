"""Run the tests that need a GPU, and fail where none of them ran: a check that tested nothing says nothing.

Results go to benchmarks/results/gpu/, see tests/gpu/conftest.py. Exit code: 0 all that ran passed, 1 something failed
or nothing ran, 2 there is no GPU to run on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]


def no_gpu() -> str:
    """Why torch sees no GPU, in one line; empty where it sees one."""
    if torch.cuda.is_available():
        return ""
    built = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{built} is built for CPUs: remove the virtual environment, and make it anew on a machine with a GPU"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver says
        return f"{built} for CUDA {torch.version.cuda}: {str(error).splitlines()[0]}"
    return f"{built} for CUDA {torch.version.cuda} finds no GPU"


def ran(report: Path) -> tuple[int, list[str]]:
    """How many tests of a report passed, and why others were skipped."""
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    skipped = [found.get("message") or "" for case in cases if (found := case.find("skipped")) is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return len(cases) - len(skipped) - len(failed), sorted(set(skipped))


def main() -> int:
    """See above."""
    if why := no_gpu():
        sys.stderr.write(f"gpu-check: nothing was tested: {why}\n")
        return 2
    report = ROOT / "build" / "gpu-check.xml"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-rs", f"--junit-xml={report}", *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    passed, skipped = ran(report) if report.is_file() else (0, [])
    for reason in skipped:
        sys.stderr.write(f"gpu-check: NOT tested: {reason}\n")
    if not passed:
        sys.stderr.write("gpu-check: nothing was tested: no test ran\n")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
