"""The `moe-ckpt` command: its subcommands, and how errors reach the person at the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import click

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import SECRET_FILE, read_secret

from .advise import advise
from .completion import completion
from .convert import convert
from .diff import diff
from .digest import digest
from .flags import flags
from .gc import gc
from .inspect import inspect
from .plan import plan
from .report import report
from .sign import sign
from .simulate import simulate
from .status import status
from .verify import verify


class GroupedCommands(click.Group):
    """Lists its commands by what a person wants to do."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As `click.Group.format_commands`, in the sections of `GROUPS`."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(90)) for name in names])


GROUPS = {
    "Before a run": ("flags", "plan", "advise", "simulate"),
    "While it runs, and after": ("status", "report"),
    "Checkpoints": ("inspect", "verify", "digest", "diff", "convert", "sign", "gc"),
    "Shell": ("completion",),
}


@click.group(cls=GroupedCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="megatron-moe-ckpt", prog_name="moe-ckpt")
def commands() -> None:
    """Plan and look at MoE training checkpoints without a GPU and without torchrun; nothing stored in them is run.

    \b
    $ moe-ckpt flags full                   # which flags are there, and which do I need?
    $ moe-ckpt advise --help                # which strategy should I use, and what will I get?
    $ moe-ckpt plan --help                  # what will the checkpoints of my job be?
    $ moe-ckpt inspect checkpoints/         # what is in there, is it whole, who holds what?
    $ moe-ckpt verify checkpoints/          # is every byte what was saved, and can it be restored?
    $ moe-ckpt digest checkpoints/          # which state did this run reach?
    $ moe-ckpt diff one/ other/             # are two states equal, and where do they differ?
    $ moe-ckpt gc checkpoints/              # what takes space and is not needed any more?
    $ moe-ckpt report run/metrics.jsonl     # what happened, what did protection cost, where did the time go?
    $ moe-ckpt status                       # is my running job protected, and if not, why?
    $ moe-ckpt convert --to dense snapshots/ dense/   # a checkpoint that any Megatron loads
    $ moe-ckpt digest --help
    """


_COMMANDS = (
    advise, completion, convert, diff, digest, flags, gc, inspect, plan, report, sign, simulate, status,
    verify,
)  # fmt: skip
for command in _COMMANDS:
    commands.add_command(command)


def _take_secret() -> None:
    """Read what a job with a secret has sealed. Raises UsageError for a file of it that cannot be used."""
    if os.environ.get(SECRET_FILE):
        from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret

        use_secret(read_secret(None))


def main() -> None:
    """Runs `moe-ckpt`; exit code 0, 1 for a checkpoint that cannot be read, 2 for wrong usage, 130 for Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as where a shell has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
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
        click.echo(f"moe-ckpt: {error}", err=True)
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
