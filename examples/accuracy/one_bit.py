"""The driver, with the last bit of one initial weight flipped: how far apart runs end by chance alone.

`scripts/train_cpu.sh` starts it with MOE_CKPT_SCRIPT.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch


def flip(model: torch.nn.Module) -> None:
    """That bit, of the last weight of the model."""
    weight = list(model.parameters())[-1].data.view(-1)[:1]
    if weight.dtype != torch.float32:
        raise SystemExit(f"one_bit.py: weights are {weight.dtype}, not fp32: train without --bf16")
    weight.view(torch.int32).bitwise_xor_(1)


if __name__ == "__main__":
    import pretrain_gpt_moe

    build = pretrain_gpt_moe.model_provider

    def flipped(*given: Any, **named: Any) -> Any:
        """The model as `pretrain_gpt_moe.py` builds it, but for that bit."""
        model = build(*given, **named)
        flip(model)
        return model

    with mock.patch.object(pretrain_gpt_moe, "model_provider", flipped):
        sys.exit(pretrain_gpt_moe.train(sys.argv[1:]))
