"""What the passes of an iteration change by themselves, so that it ends alike however often they are run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .operators import is_constant
from .quantization import quantization_tensors


class PassState:
    """Buffers of modules, such as expert biases, and what delayed scaling keeps, as they are before an iteration.

    Core runs passes again to see whether a doubtful result comes out again, and where activations had no page. It puts
    back random states alone, so expert biases would move twice; but only once in a process that was begun since, which
    judges results by other statistics and has no pages in its first iteration.

    Args:
        live: All of it, as training changes it.
    """

    def __init__(self, live: Iterable[torch.Tensor] = ()) -> None:
        live = list(live)
        # One kernel copies all of a kind, where each tensor would take one of its own.
        kinds = dict.fromkeys((one.dtype, one.device) for one in live)
        self._live = [[one for one in live if (one.dtype, one.device) == kind] for kind in kinds]
        self._noted: list[list[torch.Tensor]] = []

    @classmethod
    def of(cls, chunks: Sequence[torch.nn.Module]) -> PassState:
        """That of a rank whose model chunks have allocated all of it."""
        buffers = [one for chunk in chunks for name, one in chunk.named_buffers() if not is_constant(name)]
        return cls([*buffers, *quantization_tensors(chunks).values()])

    @torch.no_grad()
    def note(self) -> None:
        """Passes are about to begin; on the current stream, ahead of them."""
        self._noted = self._noted or [[torch.empty_like(one) for one in of_kind] for of_kind in self._live]
        for noted, live in zip(self._noted, self._live, strict=True):
            torch._foreach_copy_(noted, live)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as `note` found it, if it was called, behind what passes have done on the current stream."""
        for noted, live in zip(self._noted, self._live, strict=False):
            torch._foreach_copy_(live, noted)
