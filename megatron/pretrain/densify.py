"""Recovers from snapshots in storage, replays what they need, saves a dense checkpoint, ends: `moe-ckpt convert`."""

import sys

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.pretrain.stock_loop import run_stock

if __name__ == "__main__":
    sys.exit(run_stock(sys.argv[1:], recover_only=True))
