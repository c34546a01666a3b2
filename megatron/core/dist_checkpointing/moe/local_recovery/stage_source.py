"""What a pipeline stage gets from its neighbours in an iteration that it runs again without them (MoEvement 3.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from ..errors import UnreadableCheckpoint
from ..ports import Field, Reader
from ..types import Direction


class StageSource:
    """The `ports.BoundarySource` of one iteration, from the logs of the ranks that sent to this one.

    Between two ranks tensors of one direction arrive in the order in which they were sent, which is that of the records
    in the sender's log. Each record is read, and so verified, when it is asked for.

    logs: by direction, the open log of the sender on that side, where that does not take part in the replay: of the
        rank one stage before for FORWARD, one stage after for BACKWARD. With virtual stages the first stage is after
        the last one. A log may stand for both directions; only records of the right one are taken.
    device: where the tensors go.
    """

    def __init__(self, logs: Mapping[Direction, Reader], device: torch.device | str | int) -> None:
        self._logs, self._device = dict(logs), device
        self._left = {direction: deque(_sent(direction, log)) for direction, log in self._logs.items()}

    def serves(self, direction: Direction) -> bool:
        """As `ports.BoundarySource.serves`."""
        return direction in self._logs

    def received(self, direction: Direction) -> torch.Tensor | None:
        """As `ports.BoundarySource.received`; also raises UnreadableCheckpoint for a record that is damaged."""
        if direction not in self._logs:
            return None
        log, left = self._logs[direction], self._left[direction]
        if not left:
            raise UnreadableCheckpoint(
                f"the {log.manifest.snapshot} has no more tensors that were sent {direction.value}, but the replay"
                " needs more: it was written with other flags"
            )
        field = left.popleft()
        return _tensor(field, log.read(field.key), self._device)

    def check_all_taken(self) -> None:
        """To be called after the iteration. Raises UnreadableCheckpoint if a log had more than the iteration took."""
        for direction, left in self._left.items():
            if left:
                raise UnreadableCheckpoint(
                    f"the {self._logs[direction].manifest.snapshot} has {len(left)} tensors, {left[0].key} the first,"
                    " that the replay did not take: it was written with other flags"
                )


def _sent(direction: Direction, log: Reader) -> list[Field]:
    return [field for field in log.manifest.layout.fields if field.key.startswith(f"{direction.value}/")]


def _tensor(field: Field, data: memoryview, device: torch.device | str | int) -> torch.Tensor:
    """A tensor of its own: kernels may sum up otherwise where memory is aligned otherwise than torch does it."""
    tensor = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device="cpu")
    np.copyto(tensor.view(-1).view(torch.uint8).numpy(), np.frombuffer(data, np.uint8))
    return tensor.to(device)
