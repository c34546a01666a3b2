"""Numbers that a device has made, on their way to the host."""

from __future__ import annotations

import time

import torch

_POLL_S = 0.0005
_LONGEST_S = 600.0


class Arriving:
    """A copy of a small tensor: the thread that trains makes it and continues, whoever needs it waits.

    Args:
        source: May be changed, or given up, after that.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not source.is_cuda:
            self._copy = source.detach().clone()
            return
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copy.copy_(source.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Its value on the host, from any thread. Raises TimeoutError where the device does not come there."""
        deadline_s = time.monotonic() + _LONGEST_S
        while self._arrived is not None and not self._arrived.query():  # CUDA waits without a timeout
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {_LONGEST_S:g} s for a number that the device has to make")
            time.sleep(_POLL_S)
        return self._copy

    def __float__(self) -> float:
        return float(self.wait())

    def __int__(self) -> int:
        return int(self.wait())


def arriving(number: float | torch.Tensor | None) -> float | Arriving | None:
    """A number that is known, or on its way."""
    return Arriving(number) if isinstance(number, torch.Tensor) else number
