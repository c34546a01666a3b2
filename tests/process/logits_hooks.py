"""In place of training: the logits of the model that a job has loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def logits_written(tokens: torch.Tensor, file: str) -> Iterator[None]:
    """Run the model of the only rank over `tokens` [batch, sequence]; the file gets [batch, sequence, vocabulary]."""
    from megatron.core.utils import unwrap_model
    from megatron.pretrain.loop import Trainer

    def run(self: Trainer) -> None:
        (model,) = unwrap_model(self._state.chunks)
        model.eval()
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        hidden = torch.ones(length, length).tril().view(1, 1, length, length) < 0.5
        with torch.no_grad():
            torch.save(model(tokens, positions, hidden), file)

    with mock.patch.object(Trainer, "run", run):
        yield
