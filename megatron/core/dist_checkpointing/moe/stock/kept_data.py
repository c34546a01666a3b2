"""Datasets of the stock loop are built once; iterators over them are made anew where training is brought back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .seams import Call

_FACTS = "do_train", "do_valid", "do_test", "eval_iters"
"""What ranks agree on in `args` when data are built."""


class KeptData:
    """Those of this rank. loop: the module that has the loop."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._providers: list[_Datasets] = []
        self._iterators: list[Any] = []

    def build(self, call: Call) -> Any:
        """Make the iterators that a call is to make, of the datasets that its provider gives."""
        if isinstance(call.first, _Datasets):
            return call.go_on()
        provider = _Datasets(call.first)
        iterators = call.instead(provider).go_on()
        self._providers.append(provider)
        self._iterators.append(iterators)
        return iterators

    def renew(self) -> None:
        """Let all iterators go on where `args` say that training stands. Whoever has one of them keeps it."""
        for provider, iterators in zip(self._providers, self._iterators, strict=True):
            _become(iterators, self._loop.build_train_valid_test_data_iterators(provider))

    def facts(self) -> dict[str, Any]:
        """What all ranks have agreed on."""
        return {name: getattr(self._loop.get_args(), name) for name in _FACTS}

    def set_facts(self, facts: dict[str, Any]) -> None:
        """Take what survivors have agreed on."""
        for name, value in facts.items():
            setattr(self._loop.get_args(), name, value)


class _Datasets:
    """A provider of datasets that remembers what it gave."""

    def __init__(self, provider: Callable[..., Any]) -> None:
        self._provider = provider
        self._given: dict[str, Any] = {}
        self.is_distributed = getattr(provider, "is_distributed", False)

    def __call__(self, *sizes: Any, **options: Any) -> Any:
        asked_for = repr((sizes, options))
        if asked_for not in self._given:
            self._given = {asked_for: self._provider(*sizes, **options)}
        return self._given[asked_for]


def _become(old: Any, new: Any) -> None:
    """Let iterators that others hold read what new ones would read."""
    if isinstance(old, list | tuple):
        for one, other in zip(old, new, strict=True):
            _become(one, other)
    elif old is not None:
        vars(old).clear()
        vars(old).update(vars(new))
