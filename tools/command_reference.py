#!/usr/bin/env python3
"""Write docs/commands.md from what the commands of `moe-ckpt` say of themselves."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from made_page import write_or_check

from moe_ckpt.commands.main import commands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEADING = """# Commands

Made by `python tools/command_reference.py` from the help texts of the commands; change them there. Each command also
takes `--help`. All exit with 0 if all is well, 1 if what they examined is not, and 2 if they were called wrongly
(`verify` also with 3); an error is one line that says what was found, where, and what to do.
"""


def render() -> str:
    """The whole page: a table of all commands, then a section for each, and for each group of them."""
    found = [*every("moe-ckpt", commands)]
    rows = [
        f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(_summary(command))} |"
        for name, command in found
        if not isinstance(command, click.Group)
    ]
    table = ["| command | what it is for |", "|---|---|", *rows, ""]
    return "\n".join([HEADING, *table, *(line for name, command in found for line in section(name, command))])


def every(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command with its full name, and all commands in it, in the order of names."""
    if not command.hidden:
        yield name, command
    if isinstance(command, click.Group):
        for part, inner in sorted(command.commands.items()):
            yield from every(f"{name} {part}", inner)


def section(name: str, command: click.Command) -> Iterator[str]:
    """Heading, usage, help text, and a row for each option."""
    usage = [_argument(parameter) for parameter in command.params if isinstance(parameter, click.Argument)]
    usage += ["COMMAND"] * isinstance(command, click.Group)
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    yield from (f"## {name}", "", f"`{' '.join((name, *['[OPTIONS]'] * bool(options), *usage))}`", "")
    for paragraph in _help(command).split("\n\n"):
        yield from (*_markdown(paragraph), "")
    if options:
        yield from ("| option | |", "|---|---|")
        context = click.Context(command)
        yield from (
            f"| {_cell(_names(option))} | {_cell((option.get_help_record(context) or ('', ''))[1])} |"
            for option in options
        )
        yield ""


def _markdown(paragraph: str) -> list[str]:
    """Lines that click must not wrap, those after a line with a backspace, are examples and figures: code."""
    first, _, rest = paragraph.partition("\n")
    if first.strip() == "\b":
        return textwrap.indent(textwrap.dedent(rest), "    ").splitlines()
    return [line.replace("*", "\\*").replace("<", "\\<") for line in paragraph.splitlines()]


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").strip()


def _summary(command: click.Command) -> str:
    text = " ".join(_help(command).split("\n\n")[0].split())
    return re.split(r"(?<=\.)(?<!Fig\.)(?<!App\.) ", text)[0]


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or str(argument.name).upper()
    many = f"{name}..." if argument.nargs != 1 and not name.endswith("...") else name
    return many if argument.required or many.startswith("[") else f"[{many}]"


def _names(option: click.Option) -> str:
    value = option.metavar or ("|".join(map(str, option.type.choices)) if isinstance(option.type, click.Choice) else "")
    value = value or option.type.name.upper()
    flags = ", ".join((*option.opts, *option.secondary_opts))
    return f"`{flags if option.is_flag else f'{flags} {value}'}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """As `write_or_check`."""
    return write_or_check(arguments, __doc__, PAGE, render, "the commands say", __file__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
