"""A program for one worker: the parser of Megatron-LM is built with and without docstrings that are cached."""

from __future__ import annotations

import ast
import json
import sys
from argparse import ArgumentParser
from unittest import mock

from megatron.pretrain.initialize import use_cpu


def main() -> dict[str, object]:
    """Whether both have the same flags and help, and how often each parser had sources parsed."""
    use_cpu()

    from megatron.pretrain.flags import cache_docstrings
    from megatron.training import argument_utils, arguments

    factory, name = argument_utils.ArgumentGroupFactory, "_get_field_docstrings"
    # Workers are forked from a server that has filled the cache.
    setattr(factory, name, getattr(getattr(factory, name), "__wrapped__", getattr(factory, name)))

    def built() -> tuple[list[str], int]:
        with mock.patch.object(ast, "parse", wraps=ast.parse) as parse:
            parser = arguments.add_megatron_arguments(ArgumentParser())
        actions = [(one.option_strings, one.dest, one.default, one.nargs, one.help) for one in vars(parser)["_actions"]]
        return [repr(action) for action in actions], parse.call_count

    plain = built()
    cache_docstrings()
    first, second = built(), built()
    return {"same": plain[0] == first[0] == second[0], "parsed": [plain[1], first[1], second[1]]}


if __name__ == "__main__":
    sys.stdout.write(f"\nfacts: {json.dumps(main())}\n")
