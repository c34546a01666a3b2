"""Strategies by name, one line each; a job imports the one that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import NamedTuple, cast

from ..types import Piece
from .base import GATE_UNIT, BufferSpec, Job, LossReport, Strategy, Throughput
from .interval_policy import Costs


class _Registered(NamedTuple):
    """module: where it is. kind: the class there. settings: what names of settings begin with that are for it."""

    module: str
    kind: str
    settings: tuple[str, ...] = ()


_REGISTRY = {
    "full": _Registered(".full", "Full"),
    "pec": _Registered("..extensions.lossy.pec", "Pec", ("pec_", "plt_")),
    "selective": _Registered("..extensions.lossy.selective", "Selective", ("budget_", "capacity_boost")),
    "sparse": _Registered(".sparse", "Sparse", ("window", "ordering", "reorder_", "replay_", "recovery")),
}


class _Strategies(Mapping[str, type[Strategy]]):
    def __getitem__(self, name: str) -> type[Strategy]:
        module = import_module(_REGISTRY[name].module, __name__)
        return cast("type[Strategy]", getattr(module, _REGISTRY[name].kind))

    def __iter__(self) -> Iterator[str]:
        return iter(_REGISTRY)

    def __len__(self) -> int:
        return len(_REGISTRY)


STRATEGIES: Mapping[str, type[Strategy]] = _Strategies()
"""A strategy is imported when it is taken from here."""


def owners_of(setting: str) -> tuple[str, ...]:
    """Names of the strategies that a setting is for; none where it is for all."""
    return tuple(name for name, one in _REGISTRY.items() if setting.startswith(one.settings))


__all__ = [
    "GATE_UNIT",
    "STRATEGIES",
    "BufferSpec",
    "Costs",
    "Job",
    "LossReport",
    "Piece",
    "Strategy",
    "Throughput",
    "owners_of",
]
