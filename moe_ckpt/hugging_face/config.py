"""`config.json` of a model of Hugging Face: read with names in its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError


class Config:
    """What `config.json` says.

    Args:
        values: its content.
        place: how errors call it.
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 or more. Raises UsageError for any other value.

        Args:
            name: Key in the config.
            default: Value where the key is missing or null; None: it has to be there.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{self.place}: {name} is {value!r}, which must be a whole number")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Any value; null counts as none.

        Args:
            name: Key in the config.
            default: Value where the key is missing or null.
        """
        value = self.values.get(name)
        return default if value is None else value

    def require(self, name: str, *allowed: Any) -> None:
        """Raises UsageError where a value, if there is one, means a model that Megatron's modules do not compute."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise UsageError(f"{self.place}: {name} {value!r} cannot be converted, only {allowed[0]!r} can")

    def rope(self) -> dict[str, Any]:
        """Base and scaling of rotary embeddings, from `rope_theta` and `rope_scaling`, or `rope_parameters`."""
        found = dict(self.get("rope_parameters") or self.get("rope_scaling") or {})
        found["rope_theta"] = found.get("rope_theta", self.get("rope_theta", 10000.0))
        found["rope_type"] = found.get("rope_type", found.get("type", "default"))
        return found


def base_of(rope: Mapping[str, Any], place: str) -> int:
    """The base of rotary embeddings, which is a whole number in Megatron. Raises UsageError.

    Args:
        rope: Parameters of rotary embeddings, with `rope_theta`.
        place: Name of the config in the error.
    """
    base = rope["rope_theta"]
    if base != int(base):
        raise UsageError(f"{place}: rope_theta {base} cannot be converted: Megatron takes whole numbers")
    return int(base)
