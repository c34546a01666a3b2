"""What pipeline stages send each other, as core's schedules do it, but observable, and replaceable by what was sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from ..core_versions.training import uses_cuda_graphs
from ..errors import UnreadableCheckpoint, UsageError
from ..ports import BoundarySink, BoundarySource, WaitObserver
from ..types import Direction

Received = tuple[torch.Tensor | None, torch.Tensor | None, Any]


class BoundaryCommunicator(P2PCommunicator):
    """Core's communicator between neighbouring pipeline stages; both schedules take it beside `process_groups`.

    sink: gets each tensor before it is sent, also those that are then dropped, and each that has come, in the order of
        asking.
    source: as long as it is set, gives what would come from the sides that it serves, and what would go to these sides
        is told to it and dropped; the other sides are real. None: all are.
    waits: is told when this stage waits for the others.

    pp_group: the ranks of one pipeline. config: of the model; its `pipeline_dtype` is that of all tensors.
    Raises UsageError for ring exchange, of which a stage cannot be left out.
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any) -> None:
        if config.use_ring_exchange_p2p:
            raise UsageError("what stages send cannot be followed with use_ring_exchange_p2p: switch it off")
        super().__init__(pp_group, config)
        self.sink: BoundarySink | None = None
        self.source: BoundarySource | None = None
        self.waits: WaitObserver | None = None

    def connect(self) -> None:
        """Connect the whole pipeline: NCCL wants all of its ranks in the first batch of sends; a collective over them.

        Needed once before only some stages run.
        """
        torch.distributed.barrier(group=self.pp_group)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Received:
        """As core's, through which all communication passes; tensors that are served are there at once."""
        # Before core's sends: a tensor may be freed, or written again, as soon as they have ended.
        self._record(tensor_send_next, tensor_send_prev)
        prev_is_served, next_is_served = self._serves(Direction.FORWARD), self._serves(Direction.BACKWARD)
        self._drop(tensor_send_next if next_is_served else None, tensor_send_prev if prev_is_served else None)
        # What only sends may wait too, where the other stage has not asked for it yet: for gloo a send is over then.
        with self.waits.waiting() if self.waits is not None and wait_on_reqs else nullcontext():
            from_prev, from_next, requests = super()._communicate(
                tensor_send_next=None if next_is_served else tensor_send_next,
                tensor_send_prev=None if prev_is_served else tensor_send_prev,
                recv_prev=recv_prev and not prev_is_served,
                recv_next=recv_next and not next_is_served,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        if recv_prev and prev_is_served:
            from_prev = self._served(Direction.FORWARD, tensor_shape)
        if recv_next and next_is_served:
            from_next = self._served(Direction.BACKWARD, tensor_shape)
        # Without waiting, schedules expect a handle for each tensor that they asked for, by these names.
        handles = {} if wait_on_reqs else dict(requests)
        for name, way, tensor in (
            ("recv_prev", Direction.FORWARD, from_prev if recv_prev else None),
            ("recv_next", Direction.BACKWARD, from_next if recv_next else None),
        ):
            if tensor is not None:
                waits = None if wait_on_reqs else self.waits
                come = self.sink.receiving(way) if self.sink is not None else None
                handles[name] = _Arriving(handles.get(name), come, tensor, waits)
                if wait_on_reqs:
                    handles[name].wait()
        return from_prev, from_next, requests if wait_on_reqs else handles

    def _record(self, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None) -> None:
        if self.sink is None:
            return
        for way, tensor in ((Direction.FORWARD, tensor_send_next), (Direction.BACKWARD, tensor_send_prev)):
            if tensor is not None:
                # A graph's output is memory that the graph of a later microbatch writes again, on training's stream,
                # which waits for no copy of ours. So the log gets a copy that is made on that stream before.
                self.sink.sent(way, tensor.clone() if uses_cuda_graphs(self.config) else tensor)

    def _drop(self, to_next: torch.Tensor | None, to_prev: torch.Tensor | None) -> None:
        assert self.source is not None or (to_next is None and to_prev is None)
        for way, tensor in ((Direction.FORWARD, to_next), (Direction.BACKWARD, to_prev)):
            if self.source is not None and tensor is not None:
                self.source.dropped(way, tensor)

    def _serves(self, direction: Direction) -> bool:
        return self.source is not None and self.source.serves(direction)

    def _served(self, direction: Direction, shape: Any) -> torch.Tensor:
        assert self.source is not None
        tensor: torch.Tensor = self.source.received(direction)
        expected = tensor.shape if self.config.variable_seq_lengths else torch.Size(shape)
        if tensor.shape != expected or tensor.dtype != self.config.pipeline_dtype:
            raise UnreadableCheckpoint(
                f"a boundary log has a tensor of {tensor.dtype} {list(tensor.shape)} where this model takes"
                f" {self.config.pipeline_dtype} {list(expected)}: it was written with other flags"
            )
        # As what core receives: the schedules read the gradient of it.
        return tensor.requires_grad_()


class _Arriving:
    """In place of the request of a tensor. request: None where it is there.

    come: is called once it is, of the sink. waits: is told while it is waited for.
    """

    def __init__(
        self,
        request: Any,
        come: Callable[[torch.Tensor], None] | None,
        tensor: torch.Tensor,
        waits: WaitObserver | None,
    ) -> None:
        self._request, self._come, self._tensor, self._waits = request, come, tensor, waits

    def wait(self) -> None:
        """As core's request."""
        if self._request is not None:
            with self._waits.waiting() if self._waits is not None else nullcontext():
                self._request.wait()
        if self._come is not None:
            self._come(self._tensor)
            self._come = None


def process_groups() -> ProcessGroupCollection:
    """The groups that a schedule takes beside a communicator: those that it would look up without one."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
