"""`moe-ckpt completion`: what a shell needs to complete commands, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MOE_CKPT_COMPLETE"

HELP = """Print the script with which SHELL completes moe-ckpt's commands, options and paths on <Tab>.

Put one of these lines where your shell starts (~/.bashrc, ~/.zshrc, ~/.config/fish/config.fish):

\b
    eval "$(moe-ckpt completion bash)"
    eval "$(moe-ckpt completion zsh)"
    moe-ckpt completion fish | source

or keep the script, so that shells start without running moe-ckpt:

\b
    $ moe-ckpt completion bash > ~/.local/share/bash-completion/completions/moe-ckpt

bash has to be 4.4 or newer. Exit codes: 0 printed, 2 wrong usage.
"""


@click.command(help=HELP)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """See `HELP`; the argument above explains `shell`."""
    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(script(context.find_root().command, {}, "moe-ckpt", VARIABLE).source())
