"""A machine with another name than before: its memory is found, by the right job, and by one node only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.runtime.process_info import NODE_NAME, ProcessInfo, take_over_renamed
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.ownership import OWNER_FILE

LAYOUT = Layout.of([Field("w", "uint8", (10,))])


def left(base: Path, node: str, job: str = "job", *, sealed: bool = True) -> None:
    """What two ranks of a job that has ended left under a name."""
    base.chmod(0o700)
    (base / node).mkdir(exist_ok=True, mode=0o700)
    for slot in range(2):
        store = MemoryStore(base / node, job, slot, [4096])
        if sealed:
            with store.reserve(SnapshotId(5, slot), LAYOUT) as writer:
                writer.put("w", bytes(10))
                writer.seal(Facts(job))
        store.close()


def come(base: Path, node: str, nodes: tuple[str, ...] = (), *, is_named: bool = False) -> None:
    place = ProcessInfo(0, node, "job", is_named=is_named)
    take_over_renamed(MoECheckpointConfig(memory_dir=str(base)), place, nodes or (node,))


def folders(base: Path) -> list[str]:
    return sorted(str(path.relative_to(base)) for path in base.glob("*/*") if path.is_dir())


def test_what_lies_under_the_name_of_before_is_that_of_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left(tmp_path, "before")
    come(tmp_path, "now")
    assert folders(tmp_path) == ["now/job"] and not (tmp_path / "before").exists()
    assert "before" in caplog.text and "now" in caplog.text
    with MemoryStore(tmp_path / "now", "job", 1, [4096]).open(SnapshotId(5, 1)) as reader:
        assert bytes(reader.read("w")) == bytes(10)


def test_ranks_of_one_node_come_together_and_one_of_them_moves_it(tmp_path: Path) -> None:
    left(tmp_path, "before")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: come(tmp_path, "now"), range(8)))
    assert folders(tmp_path) == ["now/job"]


def test_an_attempt_under_the_new_name_that_came_to_nothing_is_not_in_the_way(tmp_path: Path) -> None:
    left(tmp_path, "before")
    left(tmp_path, "now", sealed=False)
    come(tmp_path, "now")
    assert folders(tmp_path) == ["now/job"] and len(list(tmp_path.glob("now/job/*/*.json"))) == 4


def test_a_name_with_snapshots_of_its_own_takes_no_other(tmp_path: Path) -> None:
    left(tmp_path, "before")
    left(tmp_path, "now")
    come(tmp_path, "now")
    assert folders(tmp_path) == ["before/job", "now/job"]


@pytest.mark.parametrize("nodes", [("now", "peer"), ("peer", "now")])
def test_nodes_that_start_at_the_same_time_take_nothing_from_each_other(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    left(tmp_path, "peer")
    come(tmp_path, "now", nodes)
    assert folders(tmp_path) == ["peer/job"]


def test_a_name_that_was_given_takes_no_other_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left(tmp_path, "node-0")
    come(tmp_path, "node-1", is_named=True)
    assert folders(tmp_path) == ["node-0/job"]
    line = caplog.messages[-1]
    assert (
        f"set it to node-0 to continue from there, or delete what is not needed (rm -r {tmp_path}/node-0/job)" in line
    )
    come(tmp_path, "node-1", ("node-0", "node-1"), is_named=True)
    come(tmp_path, "node-0", is_named=True)
    assert [said for said in caplog.messages if "stays as it is" in said] == [line], (
        "nothing is left of a node that runs, or continues from its own"
    )


def test_of_several_names_a_user_chooses(tmp_path: Path) -> None:
    left(tmp_path, "one")
    left(tmp_path, "two")
    with pytest.raises(UsageError) as refused:
        come(tmp_path, "now")
    line = str(refused.value)
    assert "one, two" in line and f"set {NODE_NAME}" in line and f"rm -r {tmp_path}/one/job {tmp_path}/two/job" in line
    assert folders(tmp_path) == ["one/job", "two/job"]


def test_another_jobs_memory_is_not_this_ones(tmp_path: Path) -> None:
    left(tmp_path, "before", "elder")
    come(tmp_path, "now")
    assert folders(tmp_path) == ["before/elder"]


@contextmanager
def held_by_another_process(owner: Path) -> Iterator[None]:
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(owner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.kill()
        holder.wait()


def test_what_a_process_holds_under_another_name_stays_with_it(tmp_path: Path) -> None:
    """As of a container beside this one."""
    left(tmp_path, "beside")
    with held_by_another_process(tmp_path / "beside" / "job" / "slot-001" / OWNER_FILE):
        come(tmp_path, "now")
        assert folders(tmp_path) == ["beside/job"]
    come(tmp_path, "now")
    assert folders(tmp_path) == ["now/job"]


def test_what_others_could_have_filled_is_refused(tmp_path: Path) -> None:
    left(tmp_path, "before")
    os.chmod(tmp_path / "before" / "job", 0o777)
    with pytest.raises(UsageError, match="can be written by others"):
        come(tmp_path, "now")
    assert folders(tmp_path) == ["before/job"]
