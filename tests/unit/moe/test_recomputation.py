"""Replicas that follow their owner's optimizer: every bit from gradients, and from state when these are missed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_replicator import FakeTransport, Network

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.gradient_replicas.adam_steps import MOST_BUFFERS, AdamSteps
from megatron.core.dist_checkpointing.moe.extensions.gradient_replicas.step_offers import PATIENCE, StepOffers
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import SteppedTensor, allocate_optimizer_state
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.tracking import Status
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.replication.replicator import Replicator
from megatron.core.dist_checkpointing.moe.snapshot.workers import ReplicationWorker, SnapshotTask
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part, StepJournal, expert, full_plan
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.pretrain.testing import cpu_device, te_on_cpu

SIZES = (1031, 4, 65536 + 7)
OPERATORS = tuple(expert(0, index) for index in range(len(SIZES)))
OWNER, PEER = 0, 1
WEIGHTS_BYTES = 4 * sum(SIZES)


def is_found() -> bool:
    try:
        te_on_cpu.find()
    except te_on_cpu.MissingWheel:
        return False
    return True


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device.installed():
        yield


class Trained:
    """Experts that torch's Adam trains, in two groups with settings of their own, and a counter that it does not."""

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.draw = torch.Generator().manual_seed(5)
        self.weights = [torch.nn.Parameter(torch.randn(size, generator=self.draw).to(dtype)) for size in SIZES]
        groups = [{"params": self.weights[:2], "weight_decay": 0.1}, {"params": self.weights[2:], "eps": 1e-6}]
        self.adam = kind(groups, lr=1e-3, **options)
        self.optimizer = FP32Optimizer(self.adam, OptimizerConfig(), lambda optimizer, config=None: None)
        self.counter = torch.zeros(3)
        allocate_optimizer_state(self.optimizer)
        shards = [
            Shard(GlobalName(one, f"{one.expert}.weight"), 0, size, size)
            for one, size in zip(OPERATORS, SIZES, strict=True)
        ]
        self.stepped = list(zip(shards, self.weights, strict=True))
        stepped = [SteppedTensor(*pair, torch.float32) for pair in self.stepped]
        self.steps, self.journal = AdamSteps(self.optimizer, stepped), StepJournal()
        self.state = {"router/buffer": (None, self.counter)} | {
            shard.key(field): (shard.of.operator, tensor)
            for shard, weight in zip(shards, self.weights, strict=True)
            for field, tensor in {"master": weight.data, **self.adam.state[weight]}.items()
        }
        self.layout = Layout.of(
            Field(key, "float32", tuple(tensor.shape), Part.MASTER_AND_MOMENTS, operator)
            for key, (operator, tensor) in self.state.items()
        )

    def train(self, iteration: int, *, skip: bool = False) -> None:
        self.counter += 1
        for group in self.adam.param_groups:
            group["lr"] = 1e-3 / iteration  # schedules continue in skipped iterations as well
        taken = [
            self.take_gradient(one, torch.randn(one.shape, generator=self.draw) * 10.0 ** (iteration % 7 - 3))
            for one in self.weights
        ]
        if not skip:
            self.adam.step()
        for gradient in taken:
            gradient.zero_()  # the next iteration's gradients come to the same memory

    def take_gradient(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Give the optimizer a gradient, in the memory that is returned."""
        weight.grad = gradient
        return gradient

    def bytes(self) -> dict[str, bytes]:
        return {key: tensor.detach().numpy().tobytes() for key, (_, tensor) in self.state.items()}


class Pair:
    """An owner and its peer, with real stores and workers around a network in memory."""

    def __init__(self, place: Path, trained: Trained, own: Sequence[OperatorId] = OPERATORS) -> None:
        self.trained, self.network, self.own = trained, Network(), own
        sizes = (trained.layout.nbytes,) * 4
        self.stores = [MemoryStore(place, "job", rank, sizes) for rank in (OWNER, PEER)]
        self.workers = [self._worker(rank) for rank in (OWNER, PEER)]

    def _worker(self, rank: int) -> ReplicationWorker:
        transport: Any = FakeTransport(self.network, rank, 2)
        owners, peers = ([], [PEER]) if rank == OWNER else ([OWNER], [])
        identity = Identity("job", {}, frozenset(self.own if rank == OWNER else ()))
        replicator = Replicator(transport, peers, owners)
        return ReplicationWorker(
            self.stores[rank], replicator, transport, SystemClock(), identity,
            patience_s=5.0, owners=owners, steps=StepOffers(rank),
        )  # fmt: skip

    def protect(self, iteration: int, *, recorded: bool = True) -> SnapshotTask:
        """One round; what is older than the iteration before goes."""
        step = self.trained.steps.take(self.trained.journal)
        pieces = (Piece("snapshot", full_plan(iteration, OPERATORS)),)
        writer = self.stores[OWNER].reserve(SnapshotId(iteration, OWNER), self.trained.layout)
        for key, (_, tensor) in self.trained.state.items():
            writer.put(key, memoryview(tensor.detach().numpy().reshape(-1)).cast("B"))
        tasks = [
            SnapshotTask(pieces[0].plan, pieces, (writer,), step=step if recorded else None),
            SnapshotTask(pieces[0].plan, pieces, None),
        ]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda worker, task: worker.protect(task), self.workers, tasks))
        for store in self.stores:
            store.free(SnapshotId(max(0, iteration - 2), OWNER))
        assert tasks[OWNER].status is Status.PROTECTED, [task.failures for task in tasks]
        return tasks[OWNER]

    def protect_again(self, iteration: int) -> SnapshotTask:
        """What is there of an iteration, as after the peer was replaced."""
        plan = full_plan(iteration, OPERATORS)
        tasks = [SnapshotTask(plan, (Piece("snapshot", plan),), None) for _ in self.workers]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda worker, task: worker.protect_again(task), self.workers, tasks))
        return tasks[OWNER]

    def replica(self, iteration: int) -> dict[str, bytes]:
        with self.stores[PEER].open(SnapshotId(iteration, OWNER)) as reader:
            return {key: bytes(reader.read(key)) for key in reader.manifest.by_key}


@pytest.mark.parametrize("own", [OPERATORS, ()], ids=["operators", "none"])
def test_what_a_peer_lost_is_sent_again_also_by_a_rank_that_owns_no_operator_of_it(
    own: Sequence[OperatorId], tmp_path: Path
) -> None:
    """It still has the trainer's state, without which no iteration can be recovered."""
    trained = Trained()
    pair = Pair(tmp_path, trained, own)
    trained.train(1)
    pair.protect(1)
    pair.stores[PEER].free(SnapshotId(1, OWNER))
    task = pair.protect_again(1)
    assert task.status is Status.PROTECTED, task.failures
    assert pair.replica(1) == trained.bytes()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(torch.optim.AdamW, {}, id="AdamW"),
        pytest.param(torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.95)}, id="Adam with amsgrad"),
        pytest.param(torch.optim.Adam, {"fused": True}, id="fused Adam"),
    ],
)
def test_after_sixty_steps_of_which_one_was_skipped_a_replica_by_gradients_has_every_bit(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    trained = Trained(kind, **options)
    pair = Pair(tmp_path, trained)
    sent = []
    for iteration in range(1, 61):
        trained.train(iteration, skip=iteration == 30)
        sent.append(pair.protect(iteration).replicated_bytes)
        assert pair.replica(iteration) == trained.bytes()
    state_bytes = sent[0]
    assert state_bytes >= 3 * WEIGHTS_BYTES
    assert sent[29] < 2000, "nothing but the counter and a header for a step that was skipped"
    assert all(WEIGHTS_BYTES < one < WEIGHTS_BYTES + 2000 for one in [*sent[1:29], *sent[30:]])


class ReducedInBf16(Trained):
    """As `--grad-reduce-in-bf16` gives gradients: cast to fp32, and clipped there to a norm of 1.

    Args:
        norm: Of all gradients.
        on_device: Core computes the factor in fp32, as it does where the norm stays on the device.
    """

    def __init__(self, norm: float, on_device: bool) -> None:
        super().__init__()
        self.journal = StepJournal(grad_norm=norm)
        self.factor = min(1.0, float(1.0 / (torch.tensor(norm) + 1e-6)) if on_device else 1.0 / (norm + 1e-6))

    def take_gradient(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        return super().take_gradient(weight, gradient.bfloat16().float() * self.factor)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("norm", [0.25, 1.0, 7.3, 1234.567])
def test_gradients_that_were_reduced_in_bf16_go_in_two_bytes_and_lose_no_bit(
    norm: float, on_device: bool, tmp_path: Path
) -> None:
    trained = ReducedInBf16(norm, on_device)
    pair, sent = Pair(tmp_path, trained), []
    for iteration in range(1, 9):
        trained.train(iteration)
        sent.append(pair.protect(iteration).replicated_bytes)
        assert pair.replica(iteration) == trained.bytes()
    assert all(WEIGHTS_BYTES // 2 < one < WEIGHTS_BYTES // 2 + 2000 for one in sent[1:])


def test_one_gradient_with_more_bits_than_bf16_goes_in_four_bytes_by_itself(tmp_path: Path) -> None:
    trained = ReducedInBf16(7.3, on_device=False)

    def take_gradient(weight: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        taken = ReducedInBf16.take_gradient(trained, weight, gradient)
        if weight is trained.weights[0]:
            taken[-1] = 0.123456
        return taken

    trained.take_gradient = take_gradient  # type: ignore[method-assign]
    pair, sent = Pair(tmp_path, trained), []
    for iteration in (1, 2, 3):
        trained.train(iteration)
        sent.append(pair.protect(iteration).replicated_bytes)
        assert pair.replica(iteration) == trained.bytes()
    least = WEIGHTS_BYTES // 2 + 2 * SIZES[0]
    assert all(least < one < least + 2000 for one in sent[1:])


@pytest.mark.ci
@pytest.mark.skipif(not is_found(), reason="no wheel of Transformer Engine")
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Adam", marks=pytest.mark.full), "bf16"])
def test_after_sixty_steps_of_transformer_engine_a_replica_by_gradients_has_every_bit(kind: str) -> None:
    # In a process of its own: what loads Transformer Engine changes Megatron-Core.
    here = Path(__file__).parent
    path = os.pathsep.join([*map(str, sys.path), str(here)])
    command = [sys.executable, "-W", "ignore", str(here / "following_engine.py"), kind]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert not ended.returncode, ended.stderr


@pytest.fixture
def pair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Pair:
    pair = Pair(tmp_path, Trained())
    caplog.clear()
    return pair


def advanced(pair: Pair, iterations: Sequence[int], **kwargs: Any) -> list[bool]:
    """For each iteration whether its replica came from gradients; it always has every bit."""
    followed = []
    for iteration in iterations:
        pair.trained.train(iteration)
        task = pair.protect(iteration, **kwargs)
        assert task.carried_bytes == pair.trained.layout.nbytes
        followed.append(task.replicated_bytes < 2 * WEIGHTS_BYTES)
        assert pair.replica(iteration) == pair.trained.bytes()
    return followed


def test_a_step_that_was_not_recorded_is_made_up_for_by_state(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert advanced(pair, [1, 2]) == [False, True]
    assert advanced(pair, [3], recorded=False) == [False]
    assert advanced(pair, [4]) == [True]
    (line,) = caplog.messages
    assert line == "rank 0 sends full state of iteration 3 to its peers: its step was not recorded"


def test_an_iteration_without_a_snapshot_is_made_up_for_by_state(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert advanced(pair, [1, 2]) == [False, True]
    pair.trained.train(3)
    pair.trained.steps.take(StepJournal())
    assert advanced(pair, [4, 5]) == [False, True]
    (line,) = caplog.messages
    assert line == "rank 0 sends full state of iteration 4 to its peers: peers confirmed iteration 2 last"


def test_a_peer_that_lost_the_state_before_is_sent_state(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert advanced(pair, [1, 2]) == [False, True]
    pair.stores[PEER].free(SnapshotId(2, OWNER))
    assert advanced(pair, [3, 4]) == [False, True]
    (line,) = caplog.messages
    assert "iter_0000003-rank_00000-snapshot goes whole to rank 1: it does not have the state before" in line


def test_gradients_that_arrive_damaged_never_become_a_replica(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert advanced(pair, [1, 2]) == [False, True]

    def flip(source: int, target: int, count: int, view: memoryview) -> None:
        if source == OWNER and WEIGHTS_BYTES < view.nbytes < 2 * WEIGHTS_BYTES:
            view[-1000] ^= 1

    pair.network.spoil = flip
    assert advanced(pair, [3]) == [False]
    (line,) = caplog.messages
    assert "goes whole to rank 1: the step led to other bits there" in line
    assert advanced(pair, range(4, 4 + PATIENCE)) == [False] * PATIENCE
    assert caplog.messages[-1] == "rank 0: gradient replication disabled, peers cannot repeat steps: sending state"


def test_a_garbled_step_never_becomes_a_replica(pair: Pair) -> None:
    assert advanced(pair, [1]) == [False]

    def garble(source: int, target: int, count: int, view: memoryview) -> None:
        if source == OWNER and WEIGHTS_BYTES < view.nbytes < 2 * WEIGHTS_BYTES:
            view[:12] = b"\xff" * 12

    pair.network.spoil = garble
    assert advanced(pair, [2]) == [False]


def test_two_steps_between_snapshots_are_no_step_to_follow() -> None:
    trained = Trained()
    trained.train(1)
    trained.train(2)
    assert trained.steps.take(StepJournal()) is None
    trained.train(3)
    assert trained.steps.take(StepJournal()) is not None


def test_no_more_memory_is_taken_than_for_the_steps_that_may_be_under_way() -> None:
    trained = Trained()
    under_way = []
    for iteration in range(MOST_BUFFERS):
        trained.train(iteration + 1)
        under_way.append(trained.steps.take(StepJournal()))
    assert all(under_way)
    trained.train(MOST_BUFFERS + 1)
    assert trained.steps.take(StepJournal()) is None
    under_way.pop()
    trained.train(MOST_BUFFERS + 2)
    assert trained.steps.take(StepJournal()) is not None


def test_an_optimizer_that_peers_cannot_repeat_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"cannot follow torch\.optim\.sgd\.SGD: .*use --moe-ckpt-replicate state"):
        Trained(torch.optim.SGD)
    halved = Trained()
    halved.adam.state[halved.weights[0]]["exp_avg"] = torch.zeros(SIZES[0], dtype=torch.float16)
    with pytest.raises(UsageError, match=r"exp_avg in torch\.float16"):
        AdamSteps(halved.optimizer, [])
