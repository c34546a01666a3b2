"""One replaced attribute, and how it is applied and undone."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""Stands for an attribute that does not exist in its owner's own namespace."""


@dataclass(frozen=True)
class Patch:
    """One replaced attribute. `owner` and `name` locate it, `replace` makes the new value from the original one."""

    owner: str
    """Module or class, as `pkgutil.resolve_name` takes it: `torch.cuda` or `torch:Tensor`."""
    name: str
    replace: Callable[[Any], Any]
    """Gets the original (`ABSENT` if there is none); a function of its own for each name, because `torch.compile`
    refuses one object under two torch names that it treats differently."""
    reason: str
    may_be_absent: bool = False
    """True where the attribute is missing from some installations of the checked upstream version."""

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Replace the attribute, and leave in `undo` what puts the original back, or deletes what did not exist.

        Raises:
            AttributeError: there is no such attribute, and it may not be absent. Nothing is changed then.
        """
        owner = pkgutil.resolve_name(self.owner)
        original = getattr(owner, self.name, ABSENT)
        if original is ABSENT and not self.may_be_absent:
            raise AttributeError(
                f"{self.owner} has no {self.name} to map to the CPU: "
                "use a megatron-core and a torch that megatron.pretrain.testing.cpu_device was checked with"
            )
        own = vars(owner).get(self.name, ABSENT)
        undo.callback(_restore, owner, self.name, own)
        setattr(owner, self.name, self.replace(original))


def always(value: object) -> Callable[[Any], Any]:
    """A replacement function that returns `value` whatever it is called with."""

    def replace(original: Any) -> Any:
        def constant(*args: object, **kwargs: object) -> object:
            return value

        return constant

    return replace


def just(value: object) -> Callable[[Any], Any]:
    """A replacement that is `value` itself."""
    return lambda original: value


def eager(original: Any) -> Any:
    """In place of `torch.compile`: functions and modules stay as they are."""

    def compile(model: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if model is None else model

    return compile


def _restore(owner: Any, name: str, own: object) -> None:
    if own is not ABSENT:
        setattr(owner, name, own)
    elif name in vars(owner):
        delattr(owner, name)
