"""What survivors have in memory comes back under another layout: nodes are lost for good, and there is no storage."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from attempts import Cluster
from fault_hooks import once_sealed
from runs import Layout, flags, published
from test_resharding_snapshots import BIAS, UNTIED, assert_same_optimizer, assert_same_state, padded
from world import Hook, Outcome

pytestmark = pytest.mark.ci

FULL = "--moe-ckpt-strategy full --moe-ckpt-interval 2".split()
SEALED = 4
"""The iteration of which all have a snapshot when nodes are lost."""


def attempt(
    cluster: Cluster, layout: Layout, nodes: int, *extra: object, hooks: Sequence[Hook] = (), distributed: bool = True
) -> Outcome:
    """One start of the same job on so many nodes of equal size."""
    places = ["--moe-ckpt-memory-dir", str(cluster.memory)]
    argv = flags(cluster.corpus, layout, *places, *map(str, extra), distributed=distributed)
    each = layout.ranks // nodes
    environments = [
        {"MOE_CKPT_NODE": f"node-{rank // each}", "LOCAL_RANK": str(rank % each), "TORCHELASTIC_RESTART_COUNT": "0"}
        | {"TORCHELASTIC_RUN_ID": f"elastic-{cluster.memory.name}"}
        for rank in range(layout.ranks)
    ]
    return cluster.world.start(argv, layout.ranks, hooks, environments).wait_or_restart()


FOUR = Layout(tp=1, pp=2, ep=1, ranks=4)
EIGHT = Layout(tp=1, pp=2, ep=2, ranks=8)
# Untied where three replicas share the optimizer: Megatron-Core 0.16 saved tied masters 128 elements off there.
CHANGES = [
    (FOUR, 2, ("--bf16",), Layout(tp=1, pp=2, ep=1, ranks=2), 1),
    (Layout(tp=1, pp=1, ep=2, ranks=2), 1, UNTIED, FOUR, 2),
    (EIGHT, 4, ("--bf16", *BIAS, *UNTIED), Layout(tp=1, pp=2, ep=1, ranks=6), 3),
    (Layout(tp=1, pp=2, ep=1, ranks=6), 3, ("--bf16", *UNTIED), EIGHT, 4),
    (Layout(tp=1, pp=1, ep=4, ranks=4), 4, (), Layout(tp=1, pp=1, ep=1, ranks=3), 3),
    (Layout(tp=2, pp=1, ep=2, ranks=4), 2, ("--bf16", *UNTIED), Layout(tp=2, pp=1, ep=1, ranks=2), 1),
    (Layout(tp=1, pp=4, ep=1, ranks=4), 2, (), Layout(tp=1, pp=2, ep=1, ranks=2), 1),
    (EIGHT, 2, (), Layout(tp=1, pp=2, ep=2, ranks=4), 1),
]
"""From which layout on how many nodes, with which model, to which layout on how many; nodes left keep their memory."""


@pytest.mark.parametrize(
    ("source", "nodes", "model", "layout", "left"),
    [
        pytest.param(*change, id=f"{change[0]}-to-{change[3]}", marks=[pytest.mark.full] if at else [])
        for at, change in enumerate(CHANGES)
    ],
)
def test_survivors_of_lost_nodes_bring_every_bit_back_under_another_layout(
    source: Layout, nodes: int, model: tuple[str, ...], layout: Layout, left: int, cluster: Cluster, tmp_path: Path
) -> None:
    same = [*FULL, *padded(source), *model, "--train-iters", 6, "--moe-ckpt-replicas", min(1, nodes - 1)]
    lost = attempt(
        cluster, source, nodes, *same, "--save", tmp_path / "before", "--save-interval", SEALED,
        "--moe-ckpt-inject-fault", f"{source.ranks - 1}@6",
        hooks=(once_sealed(cluster.memory, SEALED, min(2, nodes) * source.ranks),),
    )  # fmt: skip
    assert -signal.SIGKILL in lost.codes, lost.said
    for node in range(left, nodes):
        shutil.rmtree(cluster.memory / f"node-{node}")
    again = [*FULL, *padded(layout), *model, "--moe-ckpt-replicas", min(1, left - 1), "--train-iters", 6]
    again += ["--save", tmp_path / "after", "--save-interval", SEALED]
    outcome = attempt(cluster, layout, left, *again)
    assert set(outcome.codes) == {0}, outcome.said
    (told,) = [line for line in outcome.lines if f"resharding: iteration {SEALED} from layout" in line]
    assert "from memory of rank" in told
    assert_same_state(tmp_path / "before", tmp_path / "after", SEALED)
    assert_same_optimizer(tmp_path / "before", tmp_path / "after", SEALED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "nodes", "layout", "left"),
    [
        (FOUR, 2, Layout(tp=1, pp=1, ep=1, ranks=2), 1),
        (Layout(tp=1, pp=1, ep=2, ranks=4), 2, Layout(tp=1, pp=2, ep=2, ranks=4), 2),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_windows_in_memory_of_survivors_are_run_again_in_their_layout_and_come_back_in_this_one(
    source: Layout, nodes: int, layout: Layout, left: int, cluster: Cluster, tmp_path: Path
) -> None:
    sparse = ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", 2]
    lost = attempt(
        cluster, source, nodes, *sparse, *padded(source), "--train-iters", 9, "--moe-ckpt-replicas", 1,
        "--save", tmp_path / "before", "--save-interval", 1, "--moe-ckpt-inject-fault", f"{source.ranks - 1}@8",
        hooks=(once_sealed(cluster.memory, 6, 2 * source.ranks),),
    )  # fmt: skip
    assert -signal.SIGKILL in lost.codes, lost.said
    for node in range(left, nodes):
        shutil.rmtree(cluster.memory / f"node-{node}")
    again = [*sparse, *padded(layout), "--moe-ckpt-replicas", min(1, left - 1), "--override-opt_param-scheduler"]
    # Fewer iterations than were trained: what was restored is saved as it is.
    outcome = attempt(cluster, layout, left, *again, "--train-iters", 1, "--save", tmp_path / "after")
    assert set(outcome.codes) == {0}, outcome.said
    (iteration,) = published(tmp_path / "after")
    assert iteration >= SEALED, "the newest window of which all shares were in memory"
    assert_same_state(tmp_path / "before", tmp_path / "after", iteration, but="scheduler")  # of other lengths
    assert_same_optimizer(tmp_path / "before", tmp_path / "after", iteration)


def test_where_a_lost_share_is_in_no_memory_one_line_says_so_and_memory_stays(cluster: Cluster) -> None:
    source, layout = Layout(tp=1, pp=1, ep=1, ranks=2), Layout(tp=1, pp=1, ep=1, ranks=1)
    same = [*FULL, *padded(source), "--train-iters", 6, "--moe-ckpt-replicas", 0]
    sealed = once_sealed(cluster.memory, SEALED, source.ranks)
    lost = attempt(cluster, source, 2, *same, "--moe-ckpt-inject-fault", "1@6", hooks=(sealed,))
    assert -signal.SIGKILL in lost.codes, lost.said
    shutil.rmtree(cluster.memory / "node-1")
    left = sorted(cluster.memory.glob("*/*/slot-*/*.json"))
    outcome = attempt(cluster, layout, 1, *same)
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = [line for line in outcome.lines if line.startswith("memory of an older layout has")]
    assert "memory of rank 0 has shares of iteration" in line
    assert sorted(cluster.memory.glob("*/*/slot-*/*.json")) == left


def test_memory_that_only_a_flag_keeps_from_a_layout_stays_and_slots_without_a_process_are_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    source, other, fewer = (Layout(tp=1, pp=pp, ep=1, ranks=ranks) for pp, ranks in ((1, 2), (2, 2), (1, 1)))
    same = [*FULL, *padded(other), "--train-iters", 6, "--moe-ckpt-replicas", 0, "--hidden-dropout", 0.1]
    saved = ["--save", tmp_path, "--save-interval", SEALED - 1]
    sealed = once_sealed(cluster.memory, SEALED, source.ranks)
    lost = attempt(cluster, source, 1, *same, *saved, "--moe-ckpt-inject-fault", "1@6", hooks=(sealed,))
    assert -signal.SIGKILL in lost.codes, lost.said
    left = sorted(cluster.memory.glob("*/*/slot-*/*.json"))
    refused = attempt(cluster, other, 1, *same, "--load", tmp_path)
    assert set(refused.codes) == {2}, refused.said
    (line,) = [line for line in refused.lines if line.startswith("memory holds iteration")]
    assert "training draws random numbers (hidden_dropout 0.1), which come out otherwise in another layout" in line
    assert sorted(cluster.memory.glob("*/*/slot-*/*.json")) == left
    accepted = attempt(cluster, fewer, 1, *same, "--load", tmp_path, "--moe-ckpt-reshard", "inexact")
    assert set(accepted.codes) == {0}, accepted.said
    assert any(f"resharding: iteration {SEALED} from layout" in line for line in accepted.lines), accepted.said
    assert not [*cluster.memory.glob("*/*/slot-001")]
