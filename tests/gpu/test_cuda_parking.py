"""A rank that loses its peer parks the state on its GPU, and the next process has it back; skipped without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_place import DEVICE, copy_engine, needs_cuda, needs_device, sized
from no_trainer import NoTrainer

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker, ParkPorts
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import GRADIENT, LiveBuffers, LiveGradients
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import SteppedTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer, Upload, write_record
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, StepPhase, decide
from megatron.core.dist_checkpointing.moe.ports import Facts, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.system import LOCK_BYTES, address_of
from megatron.core.dist_checkpointing.moe.types import GRADIENTS, PARKED, Part, expert

pytestmark = needs_device

EXPERT = expert(0, 0)
NUMEL = sized(256 << 20, 1 << 18)
WAIT_S = 60.0
TRAINER: Any = NoTrainer()


def piece(field: str, part: Part, tensor: torch.Tensor) -> StateTensor:
    shard = Shard(GlobalName(EXPERT, "weight"), 0, tensor.numel(), tensor.numel())
    return StateTensor(shard, field, part, tensor, (0,))


def test_what_survives_is_parked_in_time_and_comes_back_to_the_bit(shm: Path, record: Callable[..., None]) -> None:
    draw = torch.Generator(DEVICE).manual_seed(3)
    tensors = [
        piece("master", Part.MASTER, torch.randn(NUMEL, generator=draw, device=DEVICE)),
        piece("exp_avg", Part.MOMENTS, torch.randn(NUMEL, generator=draw, device=DEVICE)),
    ]
    was = [one.tensor.clone() for one in tensors]
    engine = copy_engine()
    capturer = LiveCapturer(tensors, TRAINER, engine)
    store = MemoryStore(shm, "job", 0, [1], area="standby")
    identity = Identity("job", {"pp": 2}, capturer.operators, timeline=(("a", 0),))
    ports = ParkPorts(
        store=store,
        capturer=capturer,
        trainer=TRAINER,
        clock=SystemClock(),
        rank=0,
        facts=identity.facts,
        moving=LiveBuffers(tensors),
    )
    parker = Parker(ports)
    store.resize(parker.sizes())
    engine.prepare(store.views())
    parker.note(4)
    begun_s = time.monotonic()
    parked = parker.park(decide(StepPhase.PASSES, Cause.PEER_LOST, 4), {"journal": {}}, WAIT_S)
    took_s = time.monotonic() - begun_s
    assert parked.iteration == 4, parked.why
    record("parking", bytes=parked.nbytes, seconds=took_s)
    restorer = LiveRestorer(tensors, lambda recast: None)
    restorer.poison()
    with store.open(SnapshotId(4, 0, PARKED)) as reader:
        restorer.restore(reader.read, {Part.MASTER_AND_MOMENTS: [EXPERT]})
    restorer.complete()
    assert all(torch.equal(one.tensor, value) for one, value in zip(tensors, was, strict=True))
    engine.close()
    store.close()
    assert took_s < 25.0


@needs_cuda("copies over the borders of page-locked pieces")
def test_gradients_are_parked_over_the_border_of_two_locked_pieces_and_read_where_they_are(shm: Path) -> None:
    nbytes = LOCK_BYTES + (64 << 20)
    store, locks = MemoryStore(shm, "job", 0, [nbytes]), PageLocks()
    locks.begin(store.views())
    locks.settle(WAIT_S)
    main = torch.zeros(nbytes // 4, device=DEVICE)
    main.grad = torch.randn_like(main)
    was = main.grad.clone()
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.frombuffer(store.views()[0], dtype=torch.float32).copy_(main.grad)
    nothing: Any = SimpleNamespace(finish=lambda optimizer: None)
    shard, name = piece("master", Part.MASTER, main).shard, SnapshotId(5, 0, GRADIENTS)
    gradients = LiveGradients(nothing, [SteppedTensor(shard, main, torch.float32)], lambda: nothing)
    with store.reserve(name, Layout.of(gradients.fields())) as writer:
        gradients.copy(writer.buffer)
        writer.seal(Facts("job"))
    main.grad.zero_()
    with store.open(name) as reader:
        data, upload = reader.read(shard.key(GRADIENT)), Upload(locks.reach)
        assert locks.reach(address_of(data)) == LOCK_BYTES
        write_record("it", data, main.grad, upload)
        upload.end()
        del data
    assert torch.equal(main.grad, was)
    locks.release()
    store.close()
