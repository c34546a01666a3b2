"""Where a job trains, as its flags say: known before Megatron-LM is imported, which looks at the device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_device(parser: argparse.ArgumentParser) -> None:
    """The flag."""
    import torch  # once it is known to be there

    # By its file too: a GPU that has failed would make its node one that trains on the CPU, and waits for the others.
    has_gpu = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
    default = "cuda" if has_gpu else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default, help="where to train")


def device_of(argv: Sequence[str]) -> str:
    """That of the flags, of which others are not judged."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_device(parser)
    return str(parser.parse_known_args(list(argv))[0].device)


def values_of(argv: Sequence[str], *flags: str) -> dict[str, str | None]:
    """The values of these flags, by their names in Python; none where one lacks its value, as the parser will say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags:
        parser.add_argument(flag)
    try:
        return vars(parser.parse_known_args(list(argv))[0])
    except (argparse.ArgumentError, SystemExit):
        return {}


def wants_engine_on_cpu(argv: Sequence[str]) -> bool:
    """Whether these flags are of a run on the CPU with Transformer Engine; others than the two are not judged."""
    found = values_of(argv, "--device", "--transformer-impl")
    return found == {"device": "cpu", "transformer_impl": "transformer_engine"}
