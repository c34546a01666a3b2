"""`moe-ckpt-run`: torchrun that lets ranks keep their processes when others are lost, whose slots go to standbys.

    moe-ckpt-run --moe-ckpt-standbys 1 [options of torchrun] SCRIPT [flags]

The script calls `wait_for_rank` of `megatron.core.dist_checkpointing.moe` once it has imported what it needs; a script
that does not gets new processes, as under torchrun. The launcher can also leave a sick node (`--moe-ckpt-strikes`,
`--moe-ckpt-health-check`) with exit code 75, and end ranks that hang (`--moe-ckpt-hang-timeout`). With
`--rdzv-backend=c10d` nodes meet again after one was lost half way, or cut off for a while, and a spare that was never
needed ends with 0. Everything else is torchrun's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.pretrain.allocation_units import add_unit_flags, export_unit
from megatron.pretrain.exit_noise import end_at_once_when_interrupted, end_with, outlive_readers
from megatron.pretrain.processes import NODE_LEAVES
from megatron.pretrain.standby.health_options import HealthOptions, add_launcher_flags
from moe_ckpt.megatron_core import refuse_unsupported_versions

# What torchrun does when it starts a process: before a standby has a rank.
_AT_START = {"redirects": "0", "tee": "0", "run_path": False, "numa_binding": None}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a job to its end; ends as torchrun does."""
    end_at_once_when_interrupted()  # until there are processes to end
    outlive_readers()
    refuse_unsupported_versions()
    end_with(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    # Torch takes seconds to import, in which Ctrl-C may come; and what needs Megatron-Core comes once that is skipped.
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    from megatron.core.dist_checkpointing.moe.standby.verdict import verdict_of_ranks
    from megatron.pretrain.errors import TrainingFailure
    from megatron.pretrain.rendezvous import BACKEND, reason_of, register_backend
    from megatron.pretrain.spare_nodes import SpareHandler, SpareNotNeeded
    from megatron.pretrain.standby.health_agent import NodeExcluded, own_agents

    options = parse_options(argv)
    refuse_what_cannot_start(options)
    meet_at_own_store(options)
    # A fresh store for each start of ranks: one shared over restarts still holds the addresses of dead ranks.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if options.rdzv_backend == "c10d":
        register_backend(SpareHandler)
        options.rdzv_backend = BACKEND
    try:
        with verdict_of_ranks() as verdict, own_agents(options.moe_ckpt_standbys, HealthOptions.of(options)):
            record(run)(options)
            return verdict()
    except SpareNotNeeded as end:  # its job has ended, maybe before a pod started this launcher again
        if not str(end):
            return 0
        sys.stderr.write(f"moe-ckpt-run: error: {end}\n")
        return 1
    except (DistNetworkError, RendezvousError, TrainingFailure) as error:  # a port that is taken, a node that is late
        where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        said = reason_of(error) if isinstance(error, RendezvousError) else str(error).partition("\n")[0]
        reason = _VAIN.get(type(error).__name__, said)
        sys.stderr.write(f"moe-ckpt-run: error: no rendezvous at {where}: {reason}\n")
        return 1
    except NodeExcluded as error:
        sys.stderr.write(f"moe-ckpt-run: {error}\n")
        return NODE_LEAVES
    except SignalException as stop:
        sys.stderr.write(f"moe-ckpt-run: stopped by signal {stop.sigval.name}\n")
        return 128 + int(stop.sigval)


_VAIN = {
    "RendezvousClosedError": "another node has ended the job",
    "RendezvousTimeoutError": "too few nodes came in time (--rdzv-conf join_timeout=, last_call_timeout= in seconds)",
}
"""Errors of torch that have no words."""


RESTARTS = 20
_EXAMPLES = """
one node of 8 GPUs, of which any may fail:
  moe-ckpt-run --nproc-per-node 8 --moe-ckpt-standbys 1 SCRIPT [flags] --moe-ckpt-strategy full

each of 16 nodes; a node is excluded after 3 failures within 10 minutes:
  moe-ckpt-run --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id run-12 --rdzv-endpoint HOST:29400 \\
      --moe-ckpt-standbys 1 --moe-ckpt-strikes 3/10m SCRIPT [flags] --moe-ckpt-strategy full

All options of torchrun apply: torchrun --help. Flags of SCRIPT: moe-ckpt flags.
"""
_USAGE = "%(prog)s [options of torchrun] [--moe-ckpt-...] SCRIPT [flags]"


def _own_help() -> str:
    """What torchrun lacks, and how a job is started; its own options are a page that its users know."""
    parser = argparse.ArgumentParser(
        prog="moe-ckpt-run", usage=_USAGE, epilog=_EXAMPLES, add_help=False,
        description="torchrun with hot standbys: surviving ranks keep their processes when others are lost. Ranks are"
        f" restarted {RESTARTS} times, or as often as --max-restarts says.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_launcher_flags(parser)
    add_unit_flags(parser)
    return parser.format_help()


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """torchrun's options and ours. Ends the process with exit code 2 for those that cannot work together."""
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog, parser.usage = "moe-ckpt-run", _USAGE
    if "PET_MAX_RESTARTS" not in os.environ:  # with torchrun's own default, 0, no standby would ever be needed
        parser.set_defaults(max_restarts=RESTARTS)
    add_launcher_flags(parser)
    add_unit_flags(parser)
    _add_newer_options(parser)
    parser.format_help = _own_help  # type: ignore[method-assign]
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"no such option before SCRIPT: {unknown[0]}; give flags of SCRIPT behind it")
    if options.moe_ckpt_standbys < 0:
        parser.error(f"--moe-ckpt-standbys {options.moe_ckpt_standbys}: give how many, 0 for none")
    given = [name for name, none in _AT_START.items() if getattr(options, name, none) != none]
    if options.moe_ckpt_standbys and given:
        parser.error(
            f"--{given[0].replace('_', '-')} is done when a process starts, and a standby has no rank then: leave it"
            " out, or give --moe-ckpt-standbys 0"
        )
    export_unit(parser, options)
    if given_s := getattr(options, "shutdown_timeout", None):
        os.environ.setdefault("MOE_CKPT_PATIENCE_S", str(given_s))  # ranks that park count on it
    if wanted := getattr(options, _NOT_THERE, None):
        os.environ.pop("MOE_CKPT_PATIENCE_S", None)  # ranks would count on the time that they do not get
        sys.stderr.write(
            f"moe-ckpt-run: this release of torch has no --shutdown-timeout: ranks get 30 s to end, not {wanted}\n"
        )
    return options


_NOT_THERE = "moe_ckpt_shutdown_timeout"


def _add_newer_options(parser: argparse.ArgumentParser) -> None:
    """What the scripts of this project give to torchrun, and torch 2.11, for one, does not know."""
    for option, name in (("shutdown-timeout", _NOT_THERE), ("signals-to-handle", "moe_ckpt_signals")):
        with suppress(argparse.ArgumentError):  # torch has it
            parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}", dest=name, help=argparse.SUPPRESS)


def meet_at_own_store(options: argparse.Namespace) -> None:
    """Settle where the only node of a job meets itself, as torchrun would, which replaces `--rdzv-id` too: each start
    would be another job."""
    is_alone = str(options.nnodes) in ("1", "1:1") and options.rdzv_backend == "static"
    if is_alone and not options.rdzv_endpoint and options.master_port is None:
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"


def refuse_what_cannot_start(options: argparse.Namespace) -> None:
    """End the process with one line where torchrun would print a traceback, or restart ranks in vain."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    script, wrong = options.training_script, ""
    if not options.module and not options.no_python and not Path(script).is_file():
        wrong = f"SCRIPT {script} is no file: give the path of the training script"
    for read, name in ((parse_min_max_nnodes, "nnodes"), (determine_local_world_size, "nproc_per_node")):
        given = getattr(options, name)
        try:
            found = read(given)
            least, most = found if isinstance(found, tuple) else (found, found)
            if not 1 <= least <= most:
                raise ValueError("give 1 at least, and no MIN above MAX")
        except (ValueError, RuntimeError) as error:
            wrong = wrong or f"--{name.replace('_', '-')} {given}: {error}"
    if options.max_restarts < 0:
        wrong = wrong or f"--max-restarts {options.max_restarts}: give 0 at least"
    if wrong:
        sys.stderr.write(f"moe-ckpt-run: error: {wrong}\n")
        sys.exit(2)
    if options.rdzv_backend == "static" and not options.standalone and parse_min_max_nnodes(options.nnodes)[1] > 1:
        sys.stderr.write(
            "moe-ckpt-run: static rendezvous: no spare can replace a node that is lost; give --rdzv-backend c10d"
            " --rdzv-endpoint HOST:PORT in place of --master-addr and --node-rank\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
