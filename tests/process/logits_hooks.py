"""In place of training: the logits of the model that a job has loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from stock_trainer import Trainer, before_training


@contextlib.contextmanager
def logits_written(tokens: torch.Tensor, file: str) -> Iterator[None]:
    """Run the model of the only rank over `tokens` [batch, sequence]; the file gets [batch, sequence, vocabulary]."""
    from megatron.core.utils import unwrap_model

    def examine(trainer: Trainer) -> None:
        (model,) = unwrap_model(trainer.chunks)
        model.eval()
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        hidden = torch.ones(length, length).tril().view(1, 1, length, length) < 0.5
        with torch.no_grad():
            torch.save(model(tokens, positions, hidden), file)
        raise SystemExit(0)

    with before_training(examine):
        yield
