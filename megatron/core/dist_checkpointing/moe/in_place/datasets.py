"""Data of a training loop whose process stays: datasets are built once, iterators over them again after each fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from ..errors import PeerLost

_TOLD = "moe-ckpt-stock-data"
_TIMEOUT_S = 600.0


class Datasets:
    """A provider of datasets that remembers what it gave."""

    def __init__(self, provider: Callable[..., Any]) -> None:
        self._provider = provider
        self._given: dict[str, Any] = {}
        self.is_distributed = getattr(provider, "is_distributed", False)

    def __call__(self, *sizes: Any, **options: Any) -> Any:
        # By sizes asked for: a loop that asks for other sizes after a fault gets them.
        asked_for = repr((sizes, options))
        if asked_for not in self._given:
            self._given = {asked_for: self._provider(*sizes, **options)}
        return self._given[asked_for]


def become(old: Any, new: Any) -> None:
    """Let iterators that others hold read what new ones would read.

    Args:
        old: One of them, a sequence of any depth, or None.
        new: As many.
    """
    if isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            become(one, other)
    elif old is not None:
        # In place: the loop, its callbacks and wrappers have it in variables of their own.
        vars(old).clear()
        vars(old).update(vars(new))


def tell(facts: dict[str, Any]) -> None:
    """For survivors: what all ranks agreed on when data were built."""
    # The store of this attempt, which replacements have, too; no collective works for them yet.
    _get_default_store().set(_TOLD, json.dumps(facts))


def survivors_facts() -> dict[str, Any]:
    """For a process that comes to them. Raises PeerLost."""
    store = _get_default_store()
    try:
        store.wait([_TOLD], timedelta(seconds=_TIMEOUT_S))
    except RuntimeError:
        raise PeerLost(f"waited {_TIMEOUT_S:g} s for a survivor to tell which data there are") from None
    facts: dict[str, Any] = json.loads(store.get(_TOLD))
    return facts
