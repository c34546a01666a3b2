"""Snapshots in storage come back under another parallel layout: every bit of weights, master weights and moments."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from attempts import Cluster
from runs import Layout, Start, Train, digest, published, reports_in

from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.digest import state_entries

SAME = (
    "--global-batch-size 24 --num-layers 4 --attention-dropout 0 --train-iters 3 --dist-ckpt-optim-fully-reshardable"
).split()
VOCABULARY = 768
"""What the vocabulary is padded to in all layouts."""
UNTIED = ("--untie-embeddings-and-output-weights",)
BIAS = (
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
).split()
ASKED = ["--moe-ckpt-take-over", "any"]
"""Each job here continues from what one with another id stored."""
FULL = ["--moe-ckpt-strategy", "full", "--moe-ckpt-interval", 1, "--moe-ckpt-persist-interval", 1, *ASKED]


def padded(layout: Layout) -> tuple[object, ...]:
    """The flags that pad the vocabulary alike whatever the number of tensor ranks."""
    return (*SAME, "--make-vocab-size-divisible-by", VOCABULARY // layout.tp)


# How Megatron names the groups of an optimizer's parameters, whose random states there are, and its own arguments
# depend on the layout.
OF_THE_LAYOUT = ("optimizer", "rng", "other")


@dataclass(frozen=True)
class Source:
    """A job that stores its state: its layout, the flags of its model, its optimizer."""

    layout: Layout
    flags: tuple[str, ...] = ()
    distributed: bool = True

    def __str__(self) -> str:
        return f"{self.layout}{'' if self.distributed else '-plain'}"


TIED = Source(Layout(tp=1, pp=2, ep=2), ("--bf16",))
WIDE = Source(Layout(tp=2, pp=2, ep=1), ("--bf16",))
DEEP = Source(Layout(tp=1, pp=4, ep=2, ranks=8), UNTIED)
VIRTUAL = Source(Layout(tp=1, pp=2, ep=4, ranks=8, vpp=2), ("--bf16", *BIAS))
CONTEXT = Source(Layout(tp=1, pp=2, ep=2, cp=2), UNTIED)
CUT = Source(Layout(tp=2, pp=1, ep=2, etp=1), ("--bf16", *UNTIED))
CUT_EXPERTS = Source(Layout(tp=1, pp=1, ep=2, etp=2), UNTIED)
EVEN = Source(Layout(tp=1, pp=2, ep=2), ("--bf16", *BIAS))
PLAIN = Source(Layout(tp=2, pp=1, ep=2), ("--bf16", *UNTIED), distributed=False)

CHANGES = [
    (TIED, Layout(tp=2, pp=1, ep=1, ranks=6), True),
    (TIED, Layout(tp=2, pp=1, ep=2), False),
    (WIDE, Layout(tp=1, pp=1, ep=2, ranks=6), True),
    (WIDE, Layout(tp=1, pp=1, ep=4), True),
    (WIDE, Layout(tp=4, pp=1, ep=1), True),
    (DEEP, Layout(tp=1, pp=2, ep=1, ranks=6), True),
    (DEEP, Layout(tp=1, pp=2, ep=4, ranks=8), True),
    (DEEP, Layout(tp=2, pp=2, ep=1, ranks=4, vpp=2), True),
    (DEEP, Layout(tp=1, pp=1, ep=1, ranks=1), True),
    (VIRTUAL, Layout(tp=1, pp=2, ep=2, ranks=4), True),
    (VIRTUAL, Layout(tp=2, pp=2, ep=2, ranks=8), True),
    (VIRTUAL, Layout(tp=1, pp=4, ep=1, ranks=4), True),
    (CONTEXT, Layout(tp=2, pp=1, ep=2), True),
    (TIED, Layout(tp=1, pp=1, ep=2, cp=2), True),
    (EVEN, Layout(tp=1, pp=2, ep=2, first=1), True),
    (CUT, Layout(tp=1, pp=1, ep=2, etp=2), True),
    (CUT_EXPERTS, Layout(tp=2, pp=2, ep=1), True),
    (PLAIN, Layout(tp=1, pp=2, ep=4, ranks=8), True),
    (PLAIN, Layout(tp=4, pp=1, ep=1), False),
    (PLAIN, Layout(tp=1, pp=1, ep=1, ranks=3), False),
]
"""From where, to where, and whether with the distributed optimizer there."""

Stored = Callable[[Source, Train], Path]


@pytest.fixture
def memory(cluster: Cluster) -> list[object]:
    """The flags of a memory folder that no other job has."""
    return ["--moe-ckpt-memory-dir", cluster.memory]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The folder of a job with its storage and its dense checkpoint of iteration 3; each job runs once."""
    done: dict[Source, Path] = {}

    def run(source: Source, train: Train) -> Path:
        if source not in done:
            folder = done[source] = tmp_path_factory.mktemp("stored")
            flags = [
                *FULL,
                *padded(source.layout),
                *source.flags,
                "--moe-ckpt-persist-dir",
                folder / "storage",
                "--save",
                folder,
            ]
            flags += ["--moe-ckpt-memory-dir", folder]
            train(source.layout, *flags, hooks=source.layout.hooks, distributed=source.distributed)
        return done[source]

    return run


def copy_of(storage: Path, into: Path) -> Path:
    shutil.copytree(storage, into / "storage")
    return into / "storage"


def master_weights(folder: Path, iteration: int) -> dict[str, str]:
    """Checksums of the optimizer's tensors by the parameter's name: each kind of optimizer has prefixes of its own."""
    found = {}
    for entry in state_entries(open_dense(folder / f"iter_{iteration:07d}")):
        named = re.fullmatch(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?(\w+?)\.(.+)", entry.name)
        if named and entry.tensor is not None:
            sum_ = xxhash.xxh3_128()
            for block in entry.read():
                sum_.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            found[f"{named[1]}/{named[2]}"] = sum_.hexdigest()
    return found


def assert_same_optimizer(one: Path, other: Path, iteration: int = 3) -> None:
    here, there = master_weights(one, iteration), master_weights(other, iteration)
    assert {name.split("/")[0] for name in here} >= {"param", "exp_avg", "exp_avg_sq"}
    assert here == there


def assert_same_state(one: Path, other: Path, iteration: int = 3, but: str = "") -> None:
    here, there = digest(one, iteration), digest(other, iteration)
    assert {"model weights", "master weights", "exp_avg", "exp_avg_sq", "scheduler", "data position"} <= here.keys()
    for component in here.keys() | there.keys() - set(OF_THE_LAYOUT):
        if component not in (*OF_THE_LAYOUT, but):
            assert here.get(component) == there.get(component), component


@pytest.mark.parametrize(
    ("source", "layout", "distributed"),
    [
        pytest.param(*change, id=f"{change[0]}-to-{change[1]}", marks=[pytest.mark.full] if at else [])
        for at, change in enumerate(CHANGES)
    ],
)
def test_every_bit_comes_back_under_another_layout(
    source: Source,
    layout: Layout,
    distributed: bool,
    stored: Stored,
    memory: list[object],
    train: Train,
    tmp_path: Path,
) -> None:
    folder = stored(source, train)
    storage = copy_of(folder / "storage", tmp_path)
    flags = [
        *FULL,
        *padded(layout),
        *source.flags,
        *memory,
        "--moe-ckpt-persist-dir",
        storage,
        "--save",
        tmp_path / "save",
    ]
    outcome = train(layout, *flags, hooks=layout.hooks, distributed=distributed)
    assert any("resharding: iteration 3 from layout" in line for line in outcome.lines), outcome.said
    if distributed is source.distributed:
        assert_same_state(folder, tmp_path / "save")
    assert_same_optimizer(folder, tmp_path / "save")


@pytest.mark.full
def test_training_continues_as_from_a_dense_checkpoint_of_the_same_state(
    stored: Stored, memory: list[object], train: Train, tmp_path: Path
) -> None:
    folder, layout = stored(TIED, train), Layout(tp=2, pp=1, ep=2)
    longer = [*padded(layout), *TIED.flags, "--train-iters", 5, "--override-opt_param-scheduler"]
    snapshots, dense = tmp_path / "snapshots", tmp_path / "dense"
    storage = copy_of(folder / "storage", tmp_path)
    train(layout, *FULL, *longer, *memory, "--moe-ckpt-persist-dir", storage, "--metrics-jsonl", snapshots)
    train(layout, *longer, "--load", folder, "--ckpt-step", 3, "--metrics-jsonl", dense)
    assert losses(snapshots) == losses(dense)
    assert sorted(losses(dense)) == [4, 5]
    # What the other layout stored is superseded, share by share, whichever rank has which number now.
    left = {path.name for path in storage.iterdir()}
    assert left == {f"iter_{iteration:07d}-rank_{rank:05d}-snapshot" for iteration in (4, 5) for rank in range(4)}


def losses(reports: Path) -> dict[int, str]:
    told = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_train_samples")
    return {one["iteration"]: repr([one.get(name) for name in told]) for one in reports_in(reports)}


@pytest.mark.full
def test_a_job_that_shrinks_and_grows_again_keeps_every_bit(
    stored: Stored, memory: list[object], train: Train, tmp_path: Path
) -> None:
    folder = stored(DEEP, train)
    storage, fewer = copy_of(folder / "storage", tmp_path), Layout(tp=1, pp=2, ep=1, ranks=6)
    flags = [
        *FULL,
        *padded(DEEP.layout),
        *DEEP.flags,
        *memory,
        "--moe-ckpt-persist-dir",
        storage,
        "--override-opt_param-scheduler",
    ]
    train(fewer, *flags, "--train-iters", 5, "--save", tmp_path / "six")
    train(DEEP.layout, *flags, "--train-iters", 5, "--save", tmp_path / "eight")
    assert_same_state(tmp_path / "six", tmp_path / "eight", 5)


def test_where_training_draws_random_numbers_that_has_to_be_asked_for(
    stored: Stored, memory: list[object], train: Train, start: Start, tmp_path: Path
) -> None:
    folder, layout = stored(TIED, train), Layout(tp=1, pp=1, ep=2, ranks=2)
    storage = copy_of(folder / "storage", tmp_path)
    flags = [*FULL, *padded(layout), *TIED.flags, *memory, "--moe-ckpt-persist-dir", storage, "--hidden-dropout", 0.1]
    outcome = start(layout, *flags).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = [line for line in outcome.lines if line.startswith("--moe-ckpt-persist-dir has")]
    assert "give --moe-ckpt-reshard inexact" in line
    assert "hidden_dropout 0.1" in line
    assert "world_size 4, pp 2, ep 2" in line


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["pec", "selective"])
def test_experts_of_different_ages_come_back_as_they_do_in_their_own_layout(
    strategy: str, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    lossy = ["--moe-ckpt-strategy", strategy, "--moe-ckpt-persist-interval", 1, "--bf16", *ASKED]
    own, other = Layout(tp=1, pp=2, ep=2), Layout(tp=2, pp=1, ep=1, ranks=2)
    memory = ["--moe-ckpt-memory-dir", cluster.memory]
    train(own, *lossy, *padded(own), *memory, "--train-iters", 6, "--moe-ckpt-persist-dir", tmp_path / "storage")
    found = []
    for layout in (own, other):
        folder = tmp_path / str(layout)
        storage = copy_of(tmp_path / "storage", folder)
        # Fewer iterations than were trained: what was restored is saved as it is.
        ended = ["--train-iters", 1, "--override-opt_param-scheduler", "--save", folder]
        train(layout, *lossy, *padded(layout), *memory, *ended, "--moe-ckpt-persist-dir", storage)
        found.append(published(folder))
    assert found[0] == found[1]
    assert_same_optimizer(tmp_path / str(own), tmp_path / str(other), *found[0])


WINDOWS = [
    (Layout(tp=1, pp=1, ep=2, ranks=2), Layout(tp=1, pp=1, ep=2, ranks=4)),
    (Layout(tp=1, pp=2, ep=2, ranks=4), Layout(tp=1, pp=1, ep=2, ranks=2)),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("own", "other"),
    [pytest.param(*change, id=f"{change[0]}-to-{change[1]}", marks=[pytest.mark.full] if at else [])
     for at, change in enumerate(WINDOWS)],
)  # fmt: skip
def test_a_window_of_another_layout_is_run_again_there_and_comes_back_here(
    own: Layout, other: Layout, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    sparse = ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", 2, "--moe-ckpt-persist-interval", 1, *ASKED]
    sparse += ["--moe-ckpt-memory-dir", cluster.memory, "--moe-ckpt-persist-dir", tmp_path / "storage"]
    train(own, *sparse, *padded(own), "--save", tmp_path / "saved", "--save-interval", 1, "--train-iters", 6)
    # Fewer iterations than were trained: what was restored is saved as it is.
    ended = ["--train-iters", 1, "--override-opt_param-scheduler", "--save", tmp_path / "new"]
    outcome = train(other, *sparse, *padded(other), *ended)
    assert any("in separate processes on this node" in line for line in outcome.out[0].splitlines())
    (iteration,) = published(tmp_path / "new")
    assert iteration > 1
    assert not list((tmp_path / "new").glob(".*")), "what was made on the way is gone"
    assert_same_state(tmp_path / "saved", tmp_path / "new", iteration, but="scheduler")
    assert_same_optimizer(tmp_path / "saved", tmp_path / "new", iteration)


@pytest.mark.full
def test_a_window_whose_optimizer_core_does_not_bring_to_a_layout_is_refused_and_stays(
    start: Start, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    own, other = Layout(tp=1, pp=2, ep=2, ranks=4), Layout(tp=2, pp=1, ep=1, ranks=2)
    sparse = ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", 2, "--moe-ckpt-persist-interval", 1, *ASKED]
    sparse += ["--moe-ckpt-memory-dir", cluster.memory, "--moe-ckpt-persist-dir", tmp_path / "storage"]
    train(own, *sparse, *padded(own), "--train-iters", 4)
    before = sorted((tmp_path / "storage").glob("iter_*"))
    outcome = start(other, *sparse, *padded(other), "--train-iters", 4).wait()
    assert set(outcome.codes) == {2}, outcome.said
    assert "Megatron-Core cannot bring the optimizer's state to this parallel layout" in outcome.said
    assert "Traceback" not in outcome.said
    assert sorted((tmp_path / "storage").glob("iter_*")) == before


@pytest.mark.full
def test_a_window_that_cannot_be_run_again_is_refused_with_the_reason_and_stays(
    start: Start, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    own, other, storage = Layout(tp=1, pp=1, ep=2, ranks=2), Layout(tp=1, pp=1, ep=2, ranks=4), tmp_path / "storage"
    sparse = ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", 2, "--moe-ckpt-persist-interval", 1, *ASKED]
    sparse += ["--moe-ckpt-memory-dir", cluster.memory, "--moe-ckpt-persist-dir", storage]
    train(own, *sparse, *padded(own), "--train-iters", 4)
    for segment in storage.glob("iter_*/segment.bin"):
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
    before = sorted(storage.rglob("*"))
    outcome = start(other, *sparse, *padded(other)).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = [line for line in outcome.lines if "could not be run again there" in line]
    assert "of the layout world_size 2, ep 2 could not be run again there:" in line
    assert line.endswith("all that was made of them is left")
    assert sorted(storage.rglob("*")) == before
