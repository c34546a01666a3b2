"""What a stage gets from logs in place of its neighbours, and how the schedules get it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
from megatron.core.dist_checkpointing.moe.local_recovery.stage_source import StageSource
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, Reader, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.types import Direction, boundary_key

SHAPE = (3, 1, 2)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def sent(direction: Direction, microbatch: int) -> torch.Tensor:
    """What a microbatch sends."""
    start = (100 if direction is BACKWARD else 0) + 10 * microbatch
    return torch.arange(start, start + 6, dtype=torch.bfloat16).reshape(SHAPE)


@pytest.fixture
def log(tmp_path: Any) -> Reader:
    """The log of an iteration with two microbatches, sent in both directions in turn."""
    named = {
        boundary_key(direction, 0, microbatch): sent(direction, microbatch)
        for microbatch in (1, 0)
        for direction in (BACKWARD, FORWARD)
    }
    store, snapshot = FilesystemStore(tmp_path, 2), SnapshotId(7, 2, "log")
    with store.reserve(snapshot, Layout.of(Field(key, "bfloat16", SHAPE) for key in named)) as writer:
        for key, tensor in named.items():
            writer.put(key, tensor.view(torch.uint8).numpy())
        writer.seal(Facts("job"))
    return store.open(snapshot)


def communicator(**changes: Any) -> BoundaryCommunicator:
    """A communicator of a pipeline of one stage: whatever is really sent or received there fails."""
    config = {
        "use_ring_exchange_p2p": False,
        "virtual_pipeline_model_parallel_size": None,
        "variable_seq_lengths": False,
        "mtp_standalone": False,
        "batch_p2p_comm": False,
        "pipeline_dtype": torch.bfloat16,
        "timers": None,
    }
    return BoundaryCommunicator(torch.distributed.group.WORLD, SimpleNamespace(**config | changes))


def test_tensors_come_in_the_order_in_which_the_neighbour_sent_them(log: Reader) -> None:
    source = StageSource({FORWARD: log}, "cpu")
    assert [source.received(FORWARD).tolist() for _ in range(2)] == [
        sent(FORWARD, 1).tolist(),
        sent(FORWARD, 0).tolist(),
    ]
    source.check_all_taken()


def test_one_log_serves_both_directions_when_one_neighbour_is_on_both_sides(log: Reader) -> None:
    source = StageSource({FORWARD: log, BACKWARD: log}, "cpu")
    assert torch.equal(source.received(BACKWARD), sent(BACKWARD, 1))
    assert torch.equal(source.received(FORWARD), sent(FORWARD, 1))
    assert torch.equal(source.received(BACKWARD), sent(BACKWARD, 0))


def test_a_side_without_a_log_is_not_served(log: Reader) -> None:
    source = StageSource({FORWARD: log}, "cpu")
    assert (source.serves(FORWARD), source.serves(BACKWARD)) == (True, False)
    assert source.received(BACKWARD) is None


def test_a_log_with_too_few_tensors_is_refused(log: Reader) -> None:
    source = StageSource({FORWARD: log}, "cpu")
    for _ in range(2):
        source.received(FORWARD)
    with pytest.raises(
        UnreadableCheckpoint, match="log of rank 2 after iteration 7 has no more tensors that were sent f"
    ):
        source.received(FORWARD)


def test_a_log_with_too_many_tensors_is_refused(log: Reader) -> None:
    source = StageSource({FORWARD: log}, "cpu")
    source.received(FORWARD)
    with pytest.raises(UnreadableCheckpoint, match="has 1 tensors, forward/chunk0/microbatch0 the first"):
        source.check_all_taken()


def test_a_damaged_tensor_is_never_served(log: Reader, tmp_path: Any) -> None:
    (segment,) = (path for path in tmp_path.rglob("*") if path.is_file() and "manifest" not in path.name)
    data = bytearray(segment.read_bytes())
    _, offset = log.manifest.layout.places[boundary_key(FORWARD, 0, 1)]
    data[offset] ^= 1
    segment.write_bytes(data)
    with pytest.raises(UnreadableCheckpoint, match="forward/chunk0/microbatch1"):
        StageSource({FORWARD: log}, "cpu").received(FORWARD)


@pytest.mark.usefixtures("single_process_group")
def test_a_served_tensor_wants_a_gradient_as_a_received_one_does(log: Reader) -> None:
    one = communicator()
    one.source = StageSource({FORWARD: log, BACKWARD: log}, "cpu")
    activation, gradient = one.recv_forward(SHAPE, False), one.recv_backward(SHAPE, False)
    assert torch.equal(activation, sent(FORWARD, 1))
    assert torch.equal(gradient, sent(BACKWARD, 1))
    assert activation.requires_grad and activation.is_leaf and gradient.requires_grad


@pytest.mark.usefixtures("single_process_group")
def test_what_goes_to_a_side_that_is_served_is_told_and_dropped(log: Reader) -> None:
    told: list[tuple[Direction, Any]] = []
    one = communicator()
    one.sink = SimpleNamespace(sent=lambda direction, tensor: told.append((direction, tensor)))
    one.source = StageSource({FORWARD: log, BACKWARD: log}, "cpu")
    output, gradient = torch.zeros(SHAPE), torch.ones(SHAPE)
    one.send_forward_backward_recv_forward_backward(output, gradient, True, True, SHAPE)
    assert [
        (direction, tensor is given) for (direction, tensor), given in zip(told, (output, gradient), strict=True)
    ] == [
        (FORWARD, True),
        (BACKWARD, True),
    ]


@pytest.mark.usefixtures("single_process_group")
def test_a_schedule_that_overlaps_finds_a_request_for_each_served_tensor(log: Reader) -> None:
    one = communicator()
    one.source = StageSource({FORWARD: log, BACKWARD: log}, "cpu")
    _, requests = one.send_forward_recv_forward(torch.zeros(SHAPE), True, SHAPE, overlap_p2p_comm=True)
    assert list(requests) == ["recv_prev"]
    requests["recv_prev"].wait()
    _, requests = one.send_backward_recv_backward(torch.zeros(SHAPE), True, SHAPE, overlap_p2p_comm=True)
    assert list(requests) == ["recv_next"]
    _, requests = one.send_backward_recv_backward(torch.zeros(SHAPE), False, SHAPE, overlap_p2p_comm=True)
    assert requests == {}


@pytest.mark.usefixtures("single_process_group")
def test_a_tensor_of_another_model_is_refused(log: Reader) -> None:
    one = communicator(pipeline_dtype=torch.float32)
    one.source = StageSource({FORWARD: log}, "cpu")
    with pytest.raises(UnreadableCheckpoint, match=r"bfloat16 \[3, 1, 2\] where this model takes torch.float32"):
        one.recv_forward(SHAPE, False)


@pytest.mark.usefixtures("single_process_group")
def test_stages_that_exchange_in_a_ring_cannot_be_left_out() -> None:
    with pytest.raises(UsageError, match="use_ring_exchange_p2p"):
        communicator(use_ring_exchange_p2p=True)
