"""Memory, storage and peers that protection cannot work with: one line that says what to do, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, recovered
from fault_hooks import once_sealed
from guarantee_hooks import folders_of_their_own, little_space, newer_core, storage_vanishes
from runs import Layout, flags
from world import Hook, Outcome

from megatron.core.dist_checkpointing.moe.storage.manifest import checksum
from megatron.core.dist_checkpointing.moe.storage.ownership import Claim
from megatron.core.dist_checkpointing.moe.storage.slot_reader import written_over

LAYOUT = Layout(pp=2, ep=1, ranks=2)
OTHER_LAYOUT = Layout(pp=1, ep=2, ranks=2)
FULL = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2", "--log-interval", "1000")
NODE = "node-0"

Run = Callable[..., Outcome]


@pytest.fixture
def run(cluster: Cluster) -> Run:
    """Runs one attempt of a job on one node, however it ends."""

    def run_once(*extra: object, hooks: tuple[Hook, ...] = (), layout: Layout = LAYOUT) -> Outcome:
        job = f"job-{cluster.memory.name}"
        argv = flags(
            cluster.corpus,
            layout,
            "--moe-ckpt-memory-dir",
            str(cluster.memory),
            *FULL,
            *map(str, extra),
        )
        environments = [
            {"MOE_CKPT_NODE": NODE, "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": job} for rank in range(layout.ranks)
        ]
        return cluster.world.start(argv, layout.ranks, hooks, environments).wait_or_restart()

    return run_once


def refused(outcome: Outcome) -> str:
    """The one line on standard error with which all ranks ended before training."""
    assert set(outcome.codes) == {2}, outcome.said
    assert "Traceback" not in outcome.said
    assert len(outcome.warnings) == 1, outcome.said
    return outcome.warnings[0]


@pytest.fixture
def other_job(cluster: Cluster) -> Iterator[Claim]:
    """Another job in the same memory dir, that lives."""
    (cluster.memory / NODE).mkdir()
    claim = Claim(cluster.memory / NODE, "other", 0)
    yield claim
    claim.release()


@pytest.mark.ci
def test_a_memory_dir_that_is_too_small_on_one_rank_is_refused_with_the_number_and_leaves_no_memory_behind(
    run: Run, cluster: Cluster
) -> None:
    line = refused(run("--moe-ckpt-strict", hooks=(partial(little_space, 123_000, (1,)),)))
    assert re.match(
        r"rank 1: memory dir \S+ has 0\.000 GB free, but the \d+ new segments need \d\.\d+ GB: enlarge", line
    )
    assert not list(cluster.memory.rglob("segment-*"))


def test_a_memory_dir_that_is_too_small_costs_protection_and_not_training(run: Run) -> None:
    outcome = run(hooks=(partial(little_space, 123_000, (1,)),))
    assert set(outcome.codes) == {0}, outcome.said
    (line,) = outcome.warnings
    assert "is not larger; enlarge the tmpfs" in line and "training is not protected" in line


@pytest.mark.ci
def test_a_memory_dir_of_a_live_job_is_refused_and_the_job_named(run: Run, other_job: Claim) -> None:
    line = refused(run())
    assert f"is in use by job other, slot 0, process {os.getpid()}" in line
    assert other_job.directory.is_dir()


@pytest.mark.ci
def test_what_a_crashed_job_of_another_id_left_is_not_touched(run: Run, other_job: Claim) -> None:
    left = other_job.directory / "segment-000.bin"
    left.write_bytes(b"state")
    other_job.release()
    line = refused(run())
    assert "was left behind by job other, which has ended" in line
    assert f"rm -r {other_job.directory.parent}" in line
    assert left.read_bytes() == b"state"


@pytest.mark.ci
def test_storage_that_nodes_do_not_share_is_refused_and_the_node_named(run: Run, tmp_path: Path) -> None:
    hook = partial(folders_of_their_own, str(tmp_path))
    line = refused(run("--moe-ckpt-persist-dir", "snapshots", hooks=(hook,)))
    host = re.escape(socket.gethostname())
    assert re.match(
        rf"rank 1: --moe-ckpt-persist-dir snapshots on {host} is not the folder that rank 0 writes to: give one that",
        line,
    )


def test_more_replicas_than_peers_are_refused(run: Run) -> None:
    line = refused(run("--moe-ckpt-replicas", "2"))
    assert "--moe-ckpt-replicas 2" in line and "at most 1" in line


def test_a_newer_core_is_refused_by_a_strategy_that_replays(run: Run) -> None:
    line = refused(run("--moe-ckpt-interval", "1", "--moe-ckpt-strategy", "sparse", hooks=(newer_core,)))
    assert "megatron-core 0.20.0 (/image/core) is newer" in line
    assert "--moe-ckpt-strategy sparse" in line


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def durable(storage: Path) -> tuple[object, ...]:
    """Flags with which iterations 2, 4 and 6 become persistent."""
    return "--moe-ckpt-persist-dir", storage, "--moe-ckpt-persist-interval", "2"


def test_strict_training_ends_with_the_reason_when_storage_fails(run: Run, storage: Path) -> None:
    outcome = run(*durable(storage), "--moe-ckpt-strict", hooks=(partial(storage_vanishes, str(storage), 3),))
    assert set(outcome.codes) == {1}, outcome.said
    assert any("was NOT persisted" in line and "because of --moe-ckpt-strict" in line for line in outcome.warnings)
    assert "Traceback" not in outcome.said


def test_training_continues_when_storage_fails_and_says_so(run: Run, storage: Path) -> None:
    outcome = run(*durable(storage), hooks=(partial(storage_vanishes, str(storage), 3),))
    assert set(outcome.codes) == {0}, outcome.said
    assert any("was NOT persisted" in line and "training continues" in line for line in outcome.warnings)


@pytest.mark.ci
def test_persistent_snapshots_of_another_layout_are_named_and_stay(run: Run, storage: Path) -> None:
    first = run(*durable(storage))
    assert set(first.codes) == {0}, first.said
    there = contents(storage)
    assert there
    outcome = run(*durable(storage), "--train-iters", "1", layout=OTHER_LAYOUT)
    assert set(outcome.codes) == {2}, outcome.said
    assert any("give --load, or another folder" in line and "parallel layout" in line for line in outcome.lines)
    assert contents(storage) == there


def make_newer(manifest: Path) -> None:
    """Say that a later version wrote it, with a right checksum."""
    body = written_over(manifest.read_bytes()).split(b'"manifest":', 1)[1][:-2]
    assert body.startswith(b'{"format":1,')
    body = body.replace(b'{"format":1,', b'{"format":2,', 1)
    manifest.write_bytes(b'{"xxh3":"' + checksum(body).encode() + b'","manifest":' + body + b"}\n")
    assert json.loads(manifest.read_bytes())["manifest"]["format"] == 2


def contents(storage: Path) -> dict[str, bytes]:
    """Every file of every sealed snapshot."""
    return {str(path.relative_to(storage)): path.read_bytes() for path in sorted(storage.glob("iter_*/*"))}


@pytest.fixture
def killed(run: Run, storage: Path, cluster: Cluster) -> Outcome:
    """A job that was killed in iteration 6, with iteration 4 in memory, and iterations 2 and 4 persistent."""
    hooks = (once_sealed(cluster.memory, 4, LAYOUT.ranks),)
    outcome = run(*durable(storage), "--moe-ckpt-inject-fault", "1@6:step", hooks=hooks)
    assert any(outcome.codes), outcome.said
    return outcome


@pytest.mark.ci
def test_what_a_crashed_attempt_of_the_same_job_left_is_adopted(killed: Outcome, run: Run, storage: Path) -> None:
    outcome = run(*durable(storage), "--moe-ckpt-inject-fault", "1@6:step")
    assert set(outcome.codes) == {0}, outcome.said
    assert recovered(outcome)[0] == "recovered iteration 4 exactly", outcome.said
    assert any(line.startswith("  own memory of node 0") for line in recovered(outcome)), outcome.said


@pytest.mark.ci
def test_files_that_only_inform_and_strange_ones_cost_what_they_tell_and_no_start(
    killed: Outcome, run: Run, storage: Path, cluster: Cluster
) -> None:
    slots = sorted(cluster.memory.glob("*/*/slot-*"))
    marks, notes = slots[0] / "marks.json", slots[1] / "diverged.json"
    marks.write_text('[{"attempt": "x", "times": {"detected": 1e999}}]')
    os.mkfifo(notes)
    for slot in slots:
        (slot / "status.json").unlink(missing_ok=True)
        (slot / "status.json").mkdir()
        (slot / "owner.json").write_text("[" * 100_000)
    segment = slots[0] / "segment-098.bin"
    segment.mkdir()
    manifest = storage / "iter_0000005-rank_00000-snapshot" / "manifest.json"
    manifest.parent.mkdir()
    os.mkfifo(manifest)
    outcome = run(*durable(storage), "--moe-ckpt-inject-fault", "1@6:step")
    assert set(outcome.codes) == {0}, outcome.said
    assert "Traceback" not in outcome.said
    assert recovered(outcome)[0] == "recovered iteration 4 exactly", outcome.said
    for path in (marks, notes, segment, manifest):
        assert any(str(path) in line for line in outcome.said.splitlines()), (path, outcome.said)


def test_newer_formats_in_memory_are_told_and_stay(killed: Outcome, run: Run, storage: Path, cluster: Cluster) -> None:
    """To continue from older copies would free them."""
    for path in storage.glob("iter_0000004-*"):  # it depends on the pace whether the killed job came to write it
        shutil.rmtree(path)
    changed = sorted(cluster.memory.glob("*/*/slot-*/segment-*.iter_0000004-*.json"))
    for path in changed:
        make_newer(path)
    outcome = run(*durable(storage))
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = {line for line in outcome.lines if "memory holds iteration 4 of this job" in line}
    assert "written in format 2, but this version reads up to 1" in line
    assert changed and all(path.exists() for path in changed)


@pytest.mark.ci
def test_newer_formats_in_storage_are_told_and_stay(run: Run, storage: Path) -> None:
    first = run(*durable(storage), "--train-iters", "12")
    assert set(first.codes) == {0}, first.said
    older, newest = sorted({path.name[:12] for path in storage.glob("iter_*")})
    changed = sorted(storage.glob(f"{newest}-*/manifest.json"))
    for path in changed:
        make_newer(path)
    newer = [path.read_bytes() for path in changed]
    outcome = run(*durable(storage), "--train-iters", "12")
    assert set(outcome.codes) == {0}, outcome.said
    assert recovered(outcome)[0] == f"recovered iteration {int(older[5:])} exactly", outcome.said
    assert any("written in format 2, but this version reads up to 1" in line for line in outcome.lines), outcome.said
    assert [path.read_bytes() for path in changed] == newer
