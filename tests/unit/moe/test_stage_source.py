"""What a stage gets from logs in place of its neighbours, and how the schedules get it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import fingerprint
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import StageSource
from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, Reader, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.types import Direction, boundary_key

SHAPE = (3, 1, 2)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def sent(direction: Direction, microbatch: int) -> torch.Tensor:
    """What a microbatch sends."""
    start = (100 if direction is BACKWARD else 0) + 10 * microbatch
    return torch.arange(start, start + 6, dtype=torch.bfloat16).reshape(SHAPE)


Log = Callable[..., Reader]


@pytest.fixture
def log_with(tmp_path: Any) -> Log:
    """Makes the log of an iteration with two microbatches, sent in both directions in turn, and with fingerprints."""

    def made(**received: list[int]) -> Reader:
        return sealed_log(tmp_path, received)

    return made


@pytest.fixture
def log(log_with: Log) -> Reader:
    """One without fingerprints, as earlier versions wrote it."""
    return log_with()


def sealed_log(folder: Any, received: dict[str, list[int]]) -> Reader:
    named = {
        boundary_key(direction, 0, microbatch): sent(direction, microbatch)
        for microbatch in (1, 0)
        for direction in (BACKWARD, FORWARD)
    }
    prints = {f"received/{way}": torch.tensor(values, dtype=torch.int64) for way, values in received.items()}
    fields = [Field(key, "bfloat16", SHAPE) for key in named]
    fields += [Field(key, "int64", tuple(values.shape)) for key, values in prints.items()]
    store, snapshot = FilesystemStore(folder, 2), SnapshotId(7, 2, "log")
    with store.reserve(snapshot, Layout.of(fields)) as writer:
        for key, tensor in (named | prints).items():
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


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(("impl", "is_static"), [("transformer_engine", True), ("local", True), ("none", False)])
def test_what_a_graph_sends_is_logged_from_a_copy_as_a_later_microbatch_writes_to_its_memory(
    impl: str, is_static: bool
) -> None:
    through, logged = communicator(cuda_graph_impl=impl), list[tuple[Any, torch.Tensor]]()
    through.sink = cast("Any", SimpleNamespace(sent=lambda way, tensor: logged.append((way, tensor))))
    output = torch.zeros(SHAPE, dtype=torch.bfloat16)
    through._record(output, None)
    through._record(None, output)
    output.fill_(1)  # what the graph of the next microbatch does, before a copy beside training has begun
    assert [way for way, _ in logged] == [FORWARD, BACKWARD]
    assert all(bool(tensor.any()) != is_static for _, tensor in logged)


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


SENDS = tuple(boundary_key(BACKWARD, 0, microbatch) for microbatch in (0, 1))


def source_that_sent(log: Reader, *tensors: torch.Tensor) -> StageSource:
    """What is fed by the stage before, and has sent it these gradients."""
    source = StageSource({FORWARD: log}, "cpu", SENDS, "stage 3")
    for tensor in tensors:
        source.dropped(BACKWARD, tensor)
    return source


def test_what_is_sent_again_is_compared_with_what_the_neighbour_received(log_with: Log) -> None:
    tensors = [sent(BACKWARD, microbatch) for microbatch in (0, 1)]
    log = log_with(backward=[int(fingerprint(tensor)) for tensor in tensors])
    assert source_that_sent(log, *tensors).differences() == []


def test_a_tensor_that_is_sent_otherwise_is_named_by_stage_iteration_and_microbatch(log_with: Log) -> None:
    tensors = [sent(BACKWARD, microbatch) for microbatch in (0, 1)]
    log = log_with(backward=[int(fingerprint(tensor)) for tensor in tensors])
    tensors[1].view(torch.uint8).view(-1)[5] ^= 1
    (difference,) = source_that_sent(log, *tensors).differences() or ()
    assert difference.startswith("the gradients backward/chunk0/microbatch1 that stage 3 sends in iteration 7 have the")
    assert f"{int(fingerprint(tensors[1])) % 2**64:016x}" in difference and "rank 2 received" in difference


def test_without_fingerprints_nothing_is_said_to_be_alike(log: Reader) -> None:
    assert source_that_sent(log, sent(BACKWARD, 0), sent(BACKWARD, 1)).differences() is None


def test_a_fingerprint_that_was_not_taken_leaves_the_rest_to_be_compared(log_with: Log) -> None:
    tensors = [sent(BACKWARD, microbatch) for microbatch in (0, 1)]
    log = log_with(backward=[int(fingerprint(tensors[0])), 0])
    assert source_that_sent(log, *tensors).differences() is None
    assert len(source_that_sent(log, tensors[1], tensors[0]).differences() or ()) == 1


def test_fewer_tensors_than_were_received_are_not_called_alike(log_with: Log) -> None:
    first = sent(BACKWARD, 0)
    log = log_with(backward=[int(fingerprint(first)), int(fingerprint(sent(BACKWARD, 1)))])
    assert source_that_sent(log, first).differences() is None


@pytest.mark.usefixtures("single_process_group")
def test_what_comes_is_told_to_the_sink_once_it_is_there(log: Reader) -> None:
    told: list[tuple[Direction, Any]] = []
    one = communicator()
    one.sink = SimpleNamespace(
        receiving=lambda way: lambda tensor: told.append((way, tensor)), sent=lambda way, tensor: None
    )
    one.source = StageSource({FORWARD: log, BACKWARD: log}, "cpu")
    activation = one.recv_forward(SHAPE, False)
    assert [(way, tensor is activation) for way, tensor in told] == [(FORWARD, True)]
    gradient, requests = one.send_backward_recv_backward(torch.zeros(SHAPE), True, SHAPE, overlap_p2p_comm=True)
    assert len(told) == 1, "whether it has come is not known before its request was waited for"
    requests["recv_next"].wait()
    assert told[1][0] is BACKWARD and told[1][1] is gradient


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
    one.sink = SimpleNamespace(
        sent=lambda direction, tensor: told.append((direction, tensor)), receiving=lambda direction: lambda tensor: None
    )
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
