"""What a job on one machine opens to others: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Launch, Layout, flags

pytestmark = pytest.mark.ci

SCRIPT = Path(__file__).with_name("listening.py")


@pytest.mark.parametrize(
    ("nodes", "standbys", "launchers"),
    [
        pytest.param("1", "0", 1, id="one node", marks=pytest.mark.full),
        pytest.param("2", "1", 2, id="two nodes with standbys"),
        pytest.param("2", "0", 2, id="two nodes", marks=pytest.mark.full),
    ],
)
def test_no_process_of_a_job_listens_on_all_interfaces(
    nodes: str, standbys: str, launchers: int, launch: Launch, corpus: str
) -> None:
    layout = Layout(pp=2, ep=1, ranks=2)
    ranks = str(layout.ranks // int(nodes))
    argv = ["scripts/train_cpu.sh", *flags(corpus, layout)]
    ended = launch(argv, MOE_CKPT_SCRIPT=str(SCRIPT), NPROC=ranks, NNODES=nodes, STANDBYS=standbys)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"launchers: {launchers}\n" in ended.stdout
    addresses = [line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("listens at")]
    assert "127.0.0.1" in addresses
    assert not {"0.0.0.0", "::"} & set(addresses)
