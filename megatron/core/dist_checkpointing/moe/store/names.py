"""What the files of a dense checkpoint are called. No torch."""

from __future__ import annotations

import re

TRACKER = "latest_checkpointed_iteration.txt"
"""In a --save folder: names the newest complete iteration."""

INDEX = ".metadata"
"""Index of torch.distributed.checkpoint: which entry is where in the shards."""

FORMAT = "metadata.json"
"""Megatron-Core's commit marker, written last: how the iteration was saved."""

COMMON = "common.pt"
"""What is the same on all ranks; since Megatron-Core 0.17 an object in the shards instead."""

SHARD_SUFFIX = ".distcp"

ITERATION = re.compile(r"iter_(\d{7,})")
"""A published iteration in a --save folder."""

STAGED = re.compile(r"\.iter_(\d{7,})\.(saving|removing)")
"""An iteration that is being written or removed, or was when its process died."""
