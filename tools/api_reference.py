#!/usr/bin/env python3
"""Write docs/api.md from the docstrings of what `megatron.core.dist_checkpointing.moe` offers to training loops."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from made_page import write_or_check

from megatron.core.dist_checkpointing import moe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEADING = """# Python interface

Made by `python tools/api_reference.py` from docstrings; change them there. All of it is imported from
`moe_ckpt.core`; errors are in its module `errors`. A loop that uses it is in
[examples/own_loop](../examples/own_loop/README.md).
"""


def render() -> str:
    """The whole page."""
    first = ["MoECheckpointManager", "MoECheckpointConfig"]
    names = first + [name for name in moe.__all__ if name not in first]
    return "\n".join([HEADING, *(line for name in names for line in section(name, getattr(moe, name)))])


def section(name: str, thing: Any) -> Iterator[str]:
    """Heading, signature, docstring, and the same of public methods."""
    yield from (f"## {name}", "")
    if name == "MoECheckpointManager":
        module = inspect.getdoc(inspect.getmodule(thing)) or ""
        yield from (*prose(module), "")
    if not inspect.isclass(thing) or not issubclass(thing, enum.Enum):
        yield from ("```python", signature(name, thing), "```", "")
    yield from (*prose(inspect.getdoc(thing) or ""), "")
    if inspect.isclass(thing):
        if name == "MoECheckpointConfig":
            yield from (*fields(thing), "")
        yield from (line for member in members(thing) for line in (*method(*member), ""))


def members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties in the order of the source, inherited ones first."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(moe.__name__)]
    for name, member in {name: vars(base)[name] for base in reversed(ours) for name in vars(base)}.items():
        described = isinstance(member, property | classmethod) or inspect.isfunction(member)
        if not name.startswith("_") and described and inspect.getdoc(member):
            yield name, member


def method(name: str, member: Any) -> Iterator[str]:
    """One member."""
    if isinstance(member, property):
        result = inspect.signature(member.fget).return_annotation if member.fget else Any
        yield from (f"### `{name}: {shown(result)}`", "")
    else:
        function = member.__func__ if isinstance(member, classmethod) else inspect.unwrap(member)
        yield from (f"### `{signature(name, function, bound=True)}`", "")
    yield from prose(inspect.getdoc(member) or "")


def fields(kind: type[Any]) -> Iterator[str]:
    """A table of a configuration's fields."""
    yield from ("| Field | Default | Meaning |", "|---|---|---|")
    for field in dataclasses.fields(kind):
        about = " ".join(field.metadata["flag"].help.replace("%%", "%").split()).replace("|", "\\|")
        yield f"| `{field.name}` | `{field.default!r}` | {about} |"


def signature(name: str, thing: Callable[..., Any], *, bound: bool = False) -> str:
    """As in the source, on one line where that is short."""
    found = inspect.signature(thing)
    given = [parameter for at, parameter in enumerate(found.parameters.values()) if at or not bound]
    if dataclasses.is_dataclass(thing) and len(given) > 12:
        return f"{name}(...)"
    text = str(found.replace(parameters=given)).replace("'", "").replace("megatron.core.dist_checkpointing.moe.", "")
    text = re.sub(r"<function (?:\w+\.)*(\w+|<lambda>) at 0x\w+>", r"\1", text)  # an address is another in each process
    return f"{name}{text}".removesuffix(" -> None")


def shown(annotation: Any) -> str:
    """A type as the source has it."""
    return annotation if isinstance(annotation, str) else str(getattr(annotation, "__name__", annotation))


def prose(doc: str) -> Iterator[str]:
    """A Google-style docstring as Markdown: sections become bold, their entries a list."""
    in_section = False
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            in_section = True
            yield from (f"**{line[:-1]}**", "")
        elif in_section and re.match(r"    \S", line):
            entry = re.match(r"    ([\w, ]+): (.*)", line)
            yield f"- `{entry[1]}`: {entry[2]}" if entry else f"- {line.strip()}"
        elif in_section and line.startswith("        "):
            yield f"  {line.strip()}"
        else:
            in_section = in_section and not line.strip()
            yield line


def main(arguments: list[str]) -> int:
    """As `write_or_check`."""
    return write_or_check(arguments, __doc__, PAGE, render, "the docstrings say", __file__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
