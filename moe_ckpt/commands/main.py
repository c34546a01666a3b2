"""The `moe-ckpt` command: its subcommands, and how errors reach the person at the terminal."""

from __future__ import annotations

import io
import os
import sys
from collections import UserDict
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

import click

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import SECRET_FILE, read_secret

GROUPS = {
    "Before a run": {
        "flags": "List the flags of checkpoints and of moe-ckpt-run.",
        "plan": "Show what a job's checkpoints take, and where they lie.",
        "advise": "Choose a checkpoint system and settings for a job.",
        "simulate": "Predict overhead, recovery and ETTR under failures.",
    },
    "While it runs, and after": {
        "status": "Say how protected a running job is.",
        "report": "Make an HTML page of runs from their metrics.",
    },
    "Checkpoints": {
        "inspect": "List what a folder of checkpoints holds.",
        "verify": "Read every byte and compare it with its checksum.",
        "digest": "Print a digest for each component of a checkpoint.",
        "diff": "Compare two training states bit by bit.",
        "convert": "Make a torch_dist checkpoint, or Hugging Face weights.",
        "sign": "Sign checkpoints with the secret of a job.",
        "gc": "List checkpoints that are safe to remove, or remove them.",
    },
    "Shell": {"completion": "Print the completion script of a shell."},
}
"""Commands by what a person wants to do, each in words that fit a line of 80."""
_NAMES = tuple(name for names in GROUPS.values() for name in names)


class _Commands(UserDict[str, click.Command]):
    """Imports a command when it is asked for: no other one waits for the simulator."""

    def __missing__(self, name: str) -> click.Command:
        if name not in _NAMES:
            raise KeyError(name)
        found: click.Command = getattr(import_module(f"{__package__}.{name}"), name)
        self.data[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in _NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


class GroupedCommands(click.Group):
    """Lists its commands by what a person wants to do."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As `click.Group.format_commands`, in the sections of `GROUPS`."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([*names.items()])


@click.group(
    cls=GroupedCommands,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="megatron-moe-ckpt", prog_name="moe-ckpt")
def commands() -> None:
    """Plan and look at MoE training checkpoints without a GPU and without torchrun; nothing stored in them is run.

    \b
    $ moe-ckpt flags full                   # which flags are there, and which do I need?
    $ moe-ckpt plan --help                  # what will the checkpoints of my job be?
    $ moe-ckpt verify checkpoints/          # is every byte right, and can it be restored?
    $ moe-ckpt report run/metrics.jsonl     # what happened, what did protection cost, where did the time go?
    $ moe-ckpt status                       # is my running job protected, and if not, why?
    $ moe-ckpt COMMAND --help               # its options, exit codes and an example
    """


def _take_secret() -> None:
    """Read what a job with a secret has sealed. Raises UsageError for a file of it that cannot be used."""
    if os.environ.get(SECRET_FILE):
        from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret

        use_secret(read_secret(None))


def main() -> None:
    """Runs `moe-ckpt`; exit code 0, 1 for a checkpoint that cannot be read, 2 for wrong usage, 130 for Ctrl-C.

    Where `moe_ckpt.main` starts it, also 143 for SIGTERM.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as where a shell has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of an encoding that lacks a character
    try:
        _take_secret()
        code = commands.main(prog_name="moe-ckpt", standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"moe-ckpt: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("moe-ckpt: interrupted", err=True)
        sys.exit(130)
    except MoECheckpointError as error:
        from moe_ckpt.report import printable

        click.echo(f"moe-ckpt: {printable(str(error))}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        _write_no_more()  # who read the output has left
        sys.exit(1)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        what = f"{error.filename} cannot be read" if error.filename else "a file cannot be read, or the output written"
        click.echo(f"moe-ckpt: {what}: {reason}", err=True)
        _write_no_more()
        sys.exit(1)


def _write_no_more() -> None:
    """Nothing that is still to be flushed at the end may fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
