"""A rank that loses its peer parks the state on its GPU, and the next process has it back; skipped without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_place import DEVICE, copy_engine, needs_device, sized
from no_trainer import NoTrainer

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker, ParkPorts
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, StepPhase, decide
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import PARKED, Part, expert

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
