"""Core's own attention, for latent heads as well: only that of Transformer Engine takes their sizes."""

from __future__ import annotations

import functools
from typing import Any


def latent_attention(original: Any) -> Any:
    """For `LocalSpecProvider.core_attention`: what it returns is told the size of keys and values where MLA has one."""

    @functools.wraps(original)
    def core_attention(self: Any) -> type:
        return _with_sizes(original(self))

    return core_attention


@functools.cache
def _with_sizes(kind: Any) -> type:
    class LatentAttention(kind):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("k_channels", None)
            v_channels = options.pop("v_channels", None)
            super().__init__(*arguments, **options)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentAttention
