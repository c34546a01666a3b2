"""The implementations of `ports.Transport`, by the name that `--moe-ckpt-transport` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .staged import of_training
from .tcp import TcpTransport

TRANSPORTS: Mapping[str, Callable[..., TcpTransport]] = {"tcp": TcpTransport, "process-group": of_training}
"""All take the store, this rank, the number of ranks, the transport's name, its timeout in seconds, and `address`."""
