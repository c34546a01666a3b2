"""Parses the flags of Megatron-LM: without reading its sources at every parse, and with one line for a wrong one."""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from typing import Any, NoReturn

from megatron.pretrain.errors import InvalidInput


def refuse(message: str) -> NoReturn:
    """Take the place of `ArgumentParser.error`, with which every rank prints the usage of all flags."""
    raise InvalidInput(message)


def print_arguments_once(attempt: int) -> None:
    """Leave out Megatron-LM's list of all arguments, 870 lines, where an earlier attempt of the job has printed it."""
    from megatron.training import arguments

    if attempt and hasattr(arguments, "_print_args"):
        arguments._print_args = lambda title, args: None


def cache_docstrings() -> None:
    """Read the docstrings that become `--help` once per process.

    Megatron-LM makes flags of 26 dataclasses. Whenever it builds its parser, which it does twice in a start, it parses
    the source of each with `ast`: half a second. Checked with 0.19.2; another release may do without.
    """
    from megatron.training import argument_utils

    factory = getattr(argument_utils, "ArgumentGroupFactory", None)
    read = getattr(factory, "_get_field_docstrings", None)
    if factory is None or read is None or hasattr(read, "__wrapped__"):
        return
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(read)
    def read_once(self: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(self, source)
        return dict(known[source])

    factory._get_field_docstrings = read_once


def read_docstrings() -> None:
    """Fill the cache: for a process that has time now, and parses flags later."""
    from megatron.training import arguments

    cache_docstrings()
    arguments.add_megatron_arguments(ArgumentParser(add_help=False))
