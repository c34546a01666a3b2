"""What the scripts in this folder have in common: each runs the `moe-ckpt` command that it is named after."""

import sys
from os.path import abspath, basename, dirname, splitext


def run(script: str) -> None:
    """Run the command with the arguments that `script` was given."""
    # Python puts a script's folder first, where inspect.py would take the place of its own module.
    sys.path[:] = [path for path in sys.path if abspath(path) != dirname(abspath(__file__))]
    from moe_ckpt import main

    sys.argv.insert(1, splitext(basename(script))[0])
    main()
