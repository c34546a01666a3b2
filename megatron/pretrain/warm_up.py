"""What a standby does before it knows its rank: it imports all that training needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module

from megatron.pretrain.errors import PretrainError
from megatron.pretrain.loops import has_stock_loop

# Optimizers import torch._dynamo when one is made.
_OWN_LOOP = "torch._dynamo megatron.pretrain.job"
_STOCK_LOOP = "torch._dynamo megatron.training megatron.core.dist_checkpointing.moe.stock megatron.pretrain.stock_model"


def warm_up(argv: Sequence[str]) -> None:
    """Choose the device and import what these flags need; flags that cannot work are for the ranks to refuse."""
    from megatron.pretrain.initialize import use_cpu

    is_stock = has_stock_loop()
    with contextlib.suppress(PretrainError, SystemExit):
        if _device(argv, is_stock) == "cpu":
            use_cpu(stock_loop=is_stock)
        for name in (_STOCK_LOOP if is_stock else _OWN_LOOP).split():
            import_module(name)


def _device(argv: Sequence[str], is_stock: bool) -> str:
    if is_stock:
        from megatron.pretrain.stock_loop import device_of

        return device_of(argv)
    from megatron.pretrain.config import parse_config

    return str(parse_config(argv).parallel.device)
