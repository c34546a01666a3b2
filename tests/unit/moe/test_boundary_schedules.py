"""Megatron-Core's own schedules send what the plan of a log says: each stage run alone, its neighbours faked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.policy.rollback import sends
from megatron.core.dist_checkpointing.moe.types import Direction, Topology
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.pretrain.testing import cpu_device

SHAPE = (2, 1, 3)
SIDES = ("prev", "next")
MARK = 1000.0  # the number in a tensor is MARK * chunk + microbatch + 1


class Group:
    """As much of a process group as schedules ask for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Arrived:
    """The handle of a transfer that is done."""

    def wait(self) -> None:
        return None


class Neighbours(P2PCommunicator):
    """Gives ones for all that is received, and notes the numbers of what is sent."""

    def __init__(self, group: Group, config: TransformerConfig) -> None:
        self.pp_group, self.config = group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.sent: dict[Direction, list[tuple[int, int]]] = {direction: [] for direction in Direction}

    def _communicate(self, **asked: Any) -> Any:
        for direction, name in ((Direction.FORWARD, "next"), (Direction.BACKWARD, "prev")):
            tensor = asked[f"tensor_send_{name}"]
            if tensor is not None:
                chunk, microbatch = divmod(int(tensor.flatten()[0]) - 1, int(MARK))
                self.sent[direction].append((chunk, microbatch))
        received = [torch.ones(SHAPE, requires_grad=True) if asked[f"recv_{side}"] else None for side in SIDES]
        handles = {f"recv_{side}": Arrived() for side in SIDES if asked[f"recv_{side}"]}
        handles |= {f"send_{side}": Arrived() for side in SIDES if asked[f"tensor_send_{side}"] is not None}
        return (*received, None if asked.get("wait_on_reqs", True) else handles)


class Chunk(torch.nn.Module):
    """A model chunk whose output, and whose gradient by its input, are the number of chunk and microbatch."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index, self.microbatch = config, index, 0
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        number = MARK * self.index + self.microbatch + 1
        self.microbatch += 1
        output = self.weight + torch.full(SHAPE, number)
        return output if self.input is None else output + number * (self.input - self.input.detach())


def schedule_of(
    topology: Topology, stage: int, microbatches: int, group: int | None, *, overlap: bool = False
) -> dict[Direction, tuple[tuple[int, int], ...]]:
    """What a stage sends in one iteration of core's own schedule."""
    interleaved = topology.vpp > 1
    config = TransformerConfig(
        num_layers=topology.pp * topology.vpp,
        hidden_size=SHAPE[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if interleaved else None,
        microbatch_group_size_per_vp_stage=group or topology.pp,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=overlap and microbatches % topology.pp == 0,
    )
    chunks = [Chunk(config, index) for index in range(topology.vpp)]
    neighbours = Neighbours(Group(stage, topology.pp), config)
    groups, alone = ProcessGroupCollection(), Group(0, 1)
    groups.tp = groups.cp = groups.dp_cp = alone
    groups.embd = groups.pos_embd = None
    groups.pp = neighbours.pp_group
    run = get_forward_backward_func(topology.pp, topology.vpp if interleaved else None)
    run(
        forward_step_func=lambda data, chunk: (chunk(), lambda output: (output.sum() * microbatches, torch.zeros(()))),
        data_iterator=[None] * topology.vpp,
        model=chunks,
        num_microbatches=microbatches,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
        p2p_communicator=neighbours,
        pg_collection=groups,
    )
    return {direction: tuple(sent) for direction, sent in neighbours.sent.items()}


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu(single_process_group: None) -> Iterator[None]:
    with cpu_device.installed():
        yield


def check(topology: Topology, microbatches: int, group: int | None, *, overlap: bool = False) -> None:
    for stage in range(topology.pp):
        planned = {way: sends(topology, stage, microbatches, way, group) for way in Direction}
        assert schedule_of(topology, stage, microbatches, group, overlap=overlap) == planned, f"stage {stage}"


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_1f1b_sends_what_is_planned(pp: int, microbatches: int) -> None:
    check(Topology(pp, pp=pp), microbatches, None)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(2, 2, 4), (2, 2, 8), (4, 2, 4), (4, 2, 8), (2, 4, 6), (3, 3, 9)]
)
def test_the_interleaved_schedule_sends_what_is_planned(pp: int, vpp: int, microbatches: int, overlap: bool) -> None:
    check(Topology(pp, pp=pp, vpp=vpp), microbatches, None, overlap=overlap)


@settings(max_examples=examples(25))
@given(st.data())
def test_whatever_the_group_of_microbatches_is_the_interleaved_schedule_sends_what_is_planned(
    data: st.DataObject,
) -> None:
    pp, vpp = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 3))
    group = data.draw(st.integers(pp, pp + 3))
    last = data.draw(st.sampled_from([0, *range(pp, group)]))
    check(Topology(pp, pp=pp, vpp=vpp), data.draw(st.integers(1, 2)) * group + last, group)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6))
def test_chunks_take_turns_as_in_cores_own_table(microbatches: int, vpp: int, group: int) -> None:
    topology = Topology(3, pp=3, vpp=vpp)
    table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(microbatches, vpp, group)]
    assert list(sends(topology, 1, microbatches, Direction.FORWARD, group)) == table
