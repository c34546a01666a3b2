"""What a pipeline stage gets from its neighbours in an iteration that it runs again without them (MoEvement 3.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..errors import UnreadableCheckpoint
from ..ports import Field, Reader
from ..types import Direction, received_key
from .boundary_copies import UNKNOWN, fingerprint

_OTHER = {Direction.FORWARD: Direction.BACKWARD, Direction.BACKWARD: Direction.FORWARD}


class StageSource:
    """The `ports.BoundarySource` of one iteration, from the logs of the ranks that sent to this one.

    Between two ranks tensors of one direction arrive in the order in which they were sent, which is that of the records
    in the sender's log. Each record is read, and so verified, when it is asked for.

    logs: by direction, the open log of the sender on that side, where that does not take part in the replay: of the
        rank one stage before for FORWARD, one stage after for BACKWARD. With virtual stages the first stage is after
        the last one. A log may stand for both directions; only records of the right one are taken.
    device: where the tensors go.
    sends: keys of what this rank sends in an iteration, in its order; with `name` they say what came out otherwise.

    What this rank would send to these stages they have had when the iteration ran first: their logs have fingerprints
    of it, with which `differences` compares.
    """

    def __init__(
        self,
        logs: Mapping[Direction, Reader],
        device: torch.device | str | int,
        sends: Sequence[str] = (),
        name: str = "this rank",
    ) -> None:
        self._name = name
        self._logs, self._device = dict(logs), device
        self._left = {direction: deque(_sent(direction, log)) for direction, log in self._logs.items()}
        self._sends = {way: [key for key in sends if key.startswith(f"{way.value}/")] for way in Direction}
        self._dropped: dict[Direction, list[torch.Tensor]] = {direction: [] for direction in Direction}

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

    def dropped(self, direction: Direction, tensor: torch.Tensor) -> None:
        """As `ports.BoundarySource.dropped`: take its fingerprint, without waiting for the device."""
        if _has_fingerprints(self._receiver(direction), direction):
            self._dropped[direction].append(fingerprint(tensor))

    def differences(self) -> list[str] | None:
        """After the iteration: a sentence for each tensor that is not what the other stages received when it ran first.

        None where some of them were compared with nothing, because the logs have no fingerprints of them, and what was
        compared is alike. Raises UnreadableCheckpoint for fingerprints that are damaged.
        """
        found, all_known = [], True
        for way, tensors in self._dropped.items():
            log = self._receiver(way)
            if log is None:
                continue
            if not _has_fingerprints(log, way):
                all_known = False
                continue
            received: list[int] = np.frombuffer(log.read(received_key(way)), np.int64).tolist()
            sent = torch.cat(tensors).tolist() if tensors else []
            all_known = all_known and len(received) == len(sent) and UNKNOWN not in received
            for at, (ours, theirs) in enumerate(zip(sent, received, strict=False)):
                if theirs not in (ours, UNKNOWN):
                    found.append(self._difference(way, at, ours, theirs, log))
        return found if found or all_known else None

    def _receiver(self, direction: Direction) -> Reader | None:
        """The log of the rank that received what this one sent in a direction: what it sent came the other way."""
        return self._logs.get(_OTHER[direction])

    def _difference(self, way: Direction, at: int, ours: int, theirs: int, log: Reader) -> str:
        key = self._sends[way][at] if at < len(self._sends[way]) else f"{way.value}, tensor {at}"
        what = "activations" if way is Direction.FORWARD else "gradients"
        snapshot = log.manifest.snapshot
        return (
            f"the {what} {key} that {self._name} sends in iteration {snapshot.iteration} have the fingerprint"
            f" {ours & _MASK:016x}, but those that rank {snapshot.rank} received had {theirs & _MASK:016x}"
        )


_MASK = (1 << 64) - 1


def _has_fingerprints(log: Reader | None, direction: Direction) -> bool:
    return log is not None and received_key(direction) in log.manifest.layout.places


def _sent(direction: Direction, log: Reader) -> list[Field]:
    return [field for field in log.manifest.layout.fields if field.key.startswith(f"{direction.value}/")]


def _tensor(field: Field, data: memoryview, device: torch.device | str | int) -> torch.Tensor:
    """A tensor of its own: kernels may sum up otherwise where memory is aligned otherwise than torch does it."""
    tensor = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device="cpu")
    np.copyto(tensor.view(-1).view(torch.uint8).numpy(), np.frombuffer(data, np.uint8))
    return tensor.to(device)
