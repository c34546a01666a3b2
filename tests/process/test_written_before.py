"""What an earlier version wrote is read by this one, to the last bit.

`written_before/commit-89056c2.tar.xz` was written by that commit, in a training loop that the driver had before that of
Megatron-LM: of jobs on two ranks, under each strategy, the memory tier and the storage they left after iteration 7 of
10; and two dense checkpoints, one of them of chained expert saves. `commit-2fec0ef.tar.xz` has what jobs of
that size stored up to then in Megatron-LM's loop, whose flags a replay has to have again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster
from click.testing import CliRunner
from runs import Layout, differences, digest, flags

from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from megatron.core.dist_checkpointing.moe.types.layout import SnapshotId
from moe_ckpt.commands.main import commands

ARCHIVES = sorted((Path(__file__).parent / "written_before").glob("*.tar.xz"))
RECOVERED, LAST = 6, 10
LAYOUT = Layout(tp=1, pp=1, ep=2, ranks=2)
MODEL = (
    "--hidden-size 16 --moe-ffn-hidden-size 16 --num-attention-heads 2 --make-vocab-size-divisible-by 2 --bf16 "
    f"--train-iters {LAST} --lr-decay-iters {LAST}"
).split()
FULL = ("--moe-ckpt-strategy", "full")
ENDED = ("--train-iters", "1", "--override-opt_param-scheduler")
"""Fewer iterations than were trained: what was loaded is saved as it is, but for the scheduler's length."""
STRATEGIES = {"full": ("--moe-ckpt-interval", "2"), "sparse": ("--moe-ckpt-window", "2")}
STATE = {"model weights", "master weights", "exp_avg", "exp_avg_sq"}
OTHERWISE = {"optimizer", "rng", "scheduler", "other"}
CHAINED = {
    "model weights": "312be76a43ffe5ff1ee254684692bec9",
    "master weights": "5bddfd70b32cb3db59de4853ad5f8d81",
    "exp_avg": "1035cff467cfba94c964deddb7121fed",
    "exp_avg_sq": "5fd19710c4be1ec1d072dbccdaac73c8",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for path in ARCHIVES:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    return folder


def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def records(store: FilesystemStore | SlotReader) -> str:
    """A digest of all that snapshots hold, read as a recovery reads it, which verifies each record."""
    found = hashlib.sha256()
    for snapshot in sorted(store.snapshots().sealed):
        with store.open(snapshot) as reader:
            for one in reader.manifest.layout.fields:
                found.update(repr((*astuple(snapshot), one.key, one.dtype, one.shape)).encode())
                found.update(reader.read(one.key))
    return found.hexdigest()


STORED = {
    "full": "0b4c89f1075ac15512a1d23f0f219e5331bc1cb3ac98df1a881524b7acdd58a5",
    "pec": "f5bfe7d39dd0be7c68db8c7804e06fa86c58369d7a2b77d3bbfaffab9ff04832",
    "sparse": "91e83b6a89623acf580e000367f29c2c0f0cc2d2b6aaf02ce2c2a1c1c6550ac9",
}
IN_MEMORY = {
    "full": (
        "ad76ee0bd610b61f3becfaaa653631cf4eafd2b571412b6607c2ad67b449b108",
        "bd570efdd5001f50120c50dcc4feef17caf2a16805eb343cc3bc4234168f101e",
    ),
    "sparse": (
        "87ad8d32d72a79331de624c64e803c0de9fa5f1621b2c42684e8b115e93bacf2",
        "4245ce3a65d322023da98a42e0bb6d5b322eaf81810ff7c0b504853fd55bf346",
    ),
}
"""Of both ranks."""


@pytest.mark.parametrize("strategy", STORED)
def test_every_record_in_storage_is_read(strategy: str, written: Path) -> None:
    assert records(FilesystemStore(written / strategy / "storage", 0)) == STORED[strategy]


@pytest.mark.parametrize("strategy", IN_MEMORY)
def test_every_record_in_memory_is_read(strategy: str, written: Path) -> None:
    (job,) = (written / strategy / "memory" / "node-0").iterdir()
    assert tuple(records(SlotReader(slot)) for slot in sorted(job.glob("slot-*"))) == IN_MEMORY[strategy]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_checksum_of_a_dense_checkpoint_is_compared_and_right(kind: str, written: Path) -> None:
    result = CliRunner().invoke(commands, ["verify", str(written / kind / "save")])
    assert result.exit_code == 0, result.output
    assert "every byte by its checksum" in result.output


def test_a_dense_checkpoint_has_the_same_digest(written: Path) -> None:
    assert digest(written / "dense" / "save", RECOVERED) == expected(written / "dense")["saved"]


@pytest.fixture
def loaded(cluster: Cluster, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Digests of what a job loads and, with nothing left to train, saves."""

    def load(folder: Path, *extra: str) -> dict[str, str]:
        cluster.run(LAYOUT, *MODEL, *FULL, *ENDED, *extra, "--load", folder, "--no-load-rng", "--save", tmp_path)
        return digest(tmp_path, RECOVERED)

    return load


def test_a_job_loads_every_bit_of_a_dense_checkpoint_but_its_random_states(
    written: Path, loaded: Callable[..., dict[str, str]]
) -> None:
    was, found = expected(written / "dense")["saved"], loaded(written / "dense" / "save")
    assert set(differences(was, found)) == OTHERWISE
    assert found.keys() == STATE | OTHERWISE | {"data position"}


def test_chained_expert_saves_are_put_together_as_before(
    written: Path, loaded: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    source, merged = written / "experts" / "save", tmp_path / "merged"
    result = CliRunner().invoke(commands, ["convert", "--to", "dense", str(source), str(merged)])
    assert result.exit_code == 0, result.output
    found = {name: made for name, made in digest(merged, RECOVERED).items() if name in STATE}
    assert found == CHAINED
    again = loaded(source, "--dist-ckpt-optim-fully-reshardable")
    assert found == {name: made for name, made in again.items() if name in STATE}


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        ("full", "snapshot of rank 1 after iteration 6"),
        pytest.param("sparse", "window of rank 1 after iteration 5", marks=pytest.mark.full),
    ],
)
def test_snapshots_without_the_counts_of_this_loop_are_refused_by_name_and_stay(
    strategy: str, refused: str, written: Path, cluster: Cluster, tmp_path: Path
) -> None:
    storage = shutil.copytree(written / strategy / "storage", tmp_path / "storage")
    argv = flags(
        cluster.corpus, LAYOUT, *MODEL, "--moe-ckpt-strategy", strategy, *STRATEGIES[strategy],
        "--moe-ckpt-memory-dir", str(cluster.memory), "--moe-ckpt-persist-dir", str(storage),
        "--moe-ckpt-take-over", "any",
    )  # fmt: skip
    outcome = cluster.world.run(argv, LAYOUT.ranks)
    assert set(outcome.codes) == {2}, outcome.said
    lacks = "(persistent): the snapshot lacks trainer state: flags, num_floating_point_operations_so_far"
    assert f"refused: {refused} on rank 1 {lacks}" in outcome.said
    assert records(FilesystemStore(storage, 0)) == STORED[strategy]


@pytest.mark.ci
def test_jobs_continue_exactly_from_snapshots_that_an_earlier_version_of_this_loop_stored(
    written: Path, cluster: Cluster, tmp_path: Path
) -> None:
    ends = {}
    for strategy, settings in STRATEGIES.items():
        storage = shutil.copytree(written / "stock" / strategy / "storage", tmp_path / strategy / "storage")
        given = ("--moe-ckpt-strategy", strategy, *settings, "--moe-ckpt-persist-dir", storage)
        more = ("--moe-ckpt-take-over", "any", "--no-gradient-accumulation-fusion")
        (outcome,) = cluster.run(LAYOUT, *MODEL, *given, *more, "--save", tmp_path / strategy, job=strategy)
        assert f"recovered iteration {RECOVERED} exactly" in outcome.said
        ends[strategy] = digest(tmp_path / strategy, LAST)
    kept = ("--moe-ckpt-persist-dir", tmp_path / "here", "--moe-ckpt-persist-interval", RECOVERED)
    cluster.run(LAYOUT, *MODEL, *FULL, *kept, "--save", tmp_path / "undisturbed", job="undisturbed")
    here, there = trained(tmp_path / "here"), trained(written / "stock" / "full" / "storage")
    assert here.keys() == there.keys()
    # Kernels of other processors come to other bits, where the earlier version trained and where windows are replayed.
    if here == there:
        assert ends["full"] == ends["sparse"] == digest(tmp_path / "undisturbed", LAST)
    else:
        assert not set(differences(ends["full"], ends["sparse"])) - STATE


def trained(folder: Path) -> dict[str, bytes]:
    """What a snapshot in storage has of rank 0's operators."""
    with FilesystemStore(folder, 0).open(SnapshotId(RECOVERED, 0)) as reader:
        fields = (one.key for one in reader.manifest.layout.fields if "/" in one.key and "random" not in one.key)
        return {key: bytes(reader.read(key)) for key in fields}
