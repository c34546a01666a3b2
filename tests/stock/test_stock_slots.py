"""What standbys have ready before they have a rank, and what a fault does not cost those that stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from stock_jobs import ALONE, StockJob
from stock_recording import counting_objects
from world import ROOT

pytestmark = pytest.mark.ci

NewJob = Callable[..., StockJob]


@pytest.mark.full
def test_a_standby_has_imported_the_tokenizers_before_it_has_a_rank() -> None:
    code = (
        "import sys, megatron.pretrain.core_import\n"
        "from megatron.pretrain.warm_up import warm_up\n"
        "warm_up(['--device', 'cpu'])\n"
        "before = set(sys.modules)\n"
        "import megatron.core.tokenizers.text.models\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_after_a_fault_nobody_looks_through_what_was_imported(new_job: NewJob, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    new_job(ALONE).run(hooks=[partial(counting_objects, str(counted))])
    assert int(counted.read_text()) < 10_000, "modules alone are more than 80,000"
