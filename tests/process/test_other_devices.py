"""Snapshots of a job on GPUs on machines without one: what comes back to the last bit, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout, Start, Train, digest, published
from test_convert import convert
from world import node_memory

from megatron.core.dist_checkpointing.moe.ports import Layout as RecordLayout
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from moe_ckpt.dense.dense import open_dense

pytestmark = pytest.mark.ci

LAYOUT = Layout(tp=1, pp=1, ep=2, ranks=2)
ITERATIONS = 4
SAME = ["--train-iters", ITERATIONS, "--attention-dropout", 0]
FULL = "--moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-persist-interval 1 --moe-ckpt-take-over any".split()
SPARSE = "--moe-ckpt-strategy sparse --moe-ckpt-window 2 --moe-ckpt-persist-interval 2 --moe-ckpt-take-over any".split()
OF_A_GPU = bytes(range(1, 17))
"""As many bytes as `torch.cuda.get_rng_state` has: a seed and an offset, of 8 bytes each."""
ENDED = ["--train-iters", 1, "--override-opt_param-scheduler"]
"""Fewer iterations than were trained: what was restored is saved as it is, but for the scheduler's length."""


def is_of_the_device(key: str) -> bool:
    return key == "random/device" or key.startswith("random/tracker/")


def of_a_gpu(storage: Path, into: Path) -> Path:
    """The snapshots of a job on CPUs as one on GPUs stores them: only states of device generators differ."""
    source, target = FilesystemStore(storage, 0), FilesystemStore(into, 0)
    for snapshot in source.snapshots().sealed:
        with source.open(snapshot) as reader:
            manifest = reader.manifest
            small = (len(OF_A_GPU),)
            fields = [replace(at, shape=small) if is_of_the_device(at.key) else at for at in manifest.layout.fields]
            with target.reserve(snapshot, RecordLayout.of(fields)) as writer:
                for one in fields:
                    writer.put(one.key, OF_A_GPU if is_of_the_device(one.key) else reader.read(one.key))
                writer.seal(manifest.facts)
    return into


Stored = Callable[[list[str]], Path]


@pytest.fixture(scope="module")
def done() -> dict[tuple[str, ...], Path]:
    """Folders of jobs, by loop and strategy."""
    return {}


@pytest.fixture
def stored(cluster: Cluster, done: dict[tuple[str, ...], Path], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The folder of a job, with its dense checkpoint and what a job on GPUs would have stored."""

    def run(strategy: list[str]) -> Path:
        job = tuple(strategy)
        if job not in done:
            folder = done[job] = tmp_path_factory.mktemp("stored")
            with node_memory() as memory:
                places = ["--save", folder / "saved", "--save-interval", 1, "--moe-ckpt-persist-dir", folder / "cpu"]
                Cluster(cluster.world, cluster.corpus, memory).run(LAYOUT, *SAME, *strategy, *places)
            of_a_gpu(folder / "cpu", folder / "gpu")
        return done[job]

    return run


def differing(one: Path, other: Path) -> set[str]:
    """Components of the one checkpoint in a folder that the other folder has otherwise: which one depends on how far
    storage had come when the job ended."""
    (iteration,) = published(one)
    here, there = digest(one, iteration), digest(other, iteration)
    assert here.keys() == there.keys()
    return {component for component in here if here[component] != there[component]}


@pytest.mark.full
def test_a_conversion_on_a_cpu_carries_random_states_of_gpus_along_unchanged(stored: Stored, tmp_path: Path) -> None:
    folder = stored(FULL)
    ended = convert(folder / "gpu", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert differing(tmp_path, folder / "saved") == {"rng"}
    checkpoint = open_dense(tmp_path)
    names = [name for name in checkpoint.objects if name.startswith("rng_state")]
    assert names
    for name in names:
        (states,) = checkpoint.read_object(name)
        found = [states["cuda_rng_state"], *states["rng_tracker_states"].values()]
        assert len(found) > 1
        assert {bytes(state.numpy()) for state in found} == {OF_A_GPU}
        assert states["torch_rng_state"].nbytes > len(OF_A_GPU)


@pytest.mark.full
def test_what_was_converted_loads_on_a_cpu_without_its_random_states(
    stored: Stored, train: Train, tmp_path: Path
) -> None:
    assert convert(stored(FULL) / "gpu", tmp_path / "dense").returncode == 0
    loading = ["--load", tmp_path / "dense", "--no-load-rng"]
    train(LAYOUT, *SAME, *ENDED, *loading, "--save", tmp_path / "again")
    assert differing(tmp_path / "again", tmp_path / "dense") == {"rng", "scheduler"}


def test_a_cpu_restores_all_else_of_a_gpu_exactly_and_names_the_random_states_that_it_leaves(
    stored: Stored, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    folder = stored(FULL)
    places = ["--moe-ckpt-memory-dir", cluster.memory, "--moe-ckpt-persist-dir", folder / "gpu"]
    outcome = train(LAYOUT, *SAME, *ENDED, *FULL, *places, "--save", tmp_path)
    (line,) = [line for line in outcome.warnings if "another device type" in line]
    assert line.startswith("random states not restored, saved on another device type: device, tracker/")
    # Of random numbers only the seeds of data loaders were drawn, at the start of each job.
    assert differing(tmp_path, folder / "saved") == {"rng", "scheduler"}


@pytest.mark.full
def test_where_training_draws_random_numbers_a_cpu_restores_nothing_of_a_gpu_unless_that_is_accepted(
    stored: Stored, start: Start, cluster: Cluster
) -> None:
    folder = stored(FULL)
    places = ["--moe-ckpt-memory-dir", cluster.memory, "--moe-ckpt-persist-dir", folder / "gpu"]
    drawing = [*SAME, *ENDED, *FULL, *places, "--attention-dropout", 0.1]
    refused = start(LAYOUT, *drawing).wait()
    assert set(refused.codes) == {2}, refused.said
    assert "training draws random numbers there (attention_dropout 0.1): start on that kind of device" in refused.said
    assert "give --moe-ckpt-reshard inexact" in refused.said
    accepted = start(LAYOUT, *drawing, "--moe-ckpt-reshard", "inexact").wait()
    assert set(accepted.codes) == {0}, accepted.said


@pytest.mark.full
def test_windows_of_a_gpu_are_refused_on_a_cpu_which_cannot_repeat_their_iterations(
    stored: Stored, tmp_path: Path
) -> None:
    ended = convert(stored(SPARSE) / "gpu", tmp_path / "dense")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "were made on another kind of device, and their iterations have to be run again" in ended.stderr
    assert not list((tmp_path / "dense").glob("iter_*"))
