"""What a standby does before it knows its rank: it imports all that training needs, and builds a model for practice."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Sequence
from importlib import import_module

from megatron.pretrain.errors import PretrainError
from megatron.pretrain.loops import has_stock_loop

# Optimizers import torch._dynamo when one is made.
_OWN_LOOP = "torch._dynamo megatron.pretrain.pretraining"
_STOCK_LOOP = "torch._dynamo megatron.training megatron.core.dist_checkpointing.moe.stock megatron.pretrain.stock_model"
_STOCK_TOKENIZERS = "megatron.core.tokenizers.text.models"
"""Megatron-LM (0.19) imports them, and `transformers` with them, once flags have been parsed."""
RANKS = "MOE_CKPT_RANKS"
"""Environment variable in which a launcher tells a standby how many ranks the job has."""


def warm_up(argv: Sequence[str]) -> None:
    """Choose the device and import what these flags need; flags that cannot work are for the ranks to refuse."""
    from megatron.pretrain.initialize import use_cpu

    is_stock = has_stock_loop()
    with contextlib.suppress(PretrainError, SystemExit):
        device = _device(argv, is_stock)
        if device == "cpu":
            use_cpu(stock_loop=is_stock)
        for name in (_STOCK_LOOP if is_stock else _OWN_LOOP).split():
            import_module(name)
        if is_stock:
            warm_up_stock_flags()
        # On a GPU the model would take memory that belongs to the rank that trains there.
        if device == "cpu" and not is_stock and RANKS in os.environ:
            rehearse(argv, int(os.environ[RANKS]))


def warm_up_stock_flags() -> None:
    """Import and read what Megatron-LM needs from the moment on that it parses its flags."""
    from megatron.pretrain.stock_flags import read_docstrings

    with contextlib.suppress(ImportError):  # which each release keeps elsewhere
        import_module(_STOCK_TOKENIZERS)
    read_docstrings()


def rehearse(argv: Sequence[str], ranks: int) -> None:
    """Build the model of rank 0 among process groups that connect nobody, and drop it: the first build of a process
    takes many times as long as another one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core.dist_checkpointing.moe.in_place.building import rehearsed
    from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups
    from megatron.pretrain.assemble import build_state
    from megatron.pretrain.config import parse_config
    from megatron.pretrain.config.validate import resolve
    from megatron.pretrain.initialize import make_groups, probe_environment, seed
    from megatron.pretrain.tokenizer import build_tokenizer

    config = resolve(parse_config(argv), probe_environment(ranks))
    data = config.data
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    make_groups(config)
    seed(config.training)
    with rehearsed():
        build_state(config, build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size))
    ProcessGroups.taken_down()
    gc.collect()


def _device(argv: Sequence[str], is_stock: bool) -> str:
    if is_stock:
        from megatron.pretrain.stock_loop import device_of

        return device_of(argv)
    from megatron.pretrain.config import parse_config

    return str(parse_config(argv).parallel.device)
