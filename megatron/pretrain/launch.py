"""Starts a job on this machine with torchrun's elastic agents: checks flags first, and reports failures in a line."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron.pretrain import te_on_cpu
from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.loops import has_stock_loop
from megatron.pretrain.nodes import run_nodes
from megatron.pretrain.processes import NODE_NAME, VERDICT_FILE
from megatron.pretrain.rendezvous import BACKEND, register_backend
from moe_ckpt.megatron_core import refuse_unsupported_versions

MONITOR_INTERVAL_S = 0.1
SHUTDOWN_TIMEOUT_S = 60
"""How long workers may take to end after SIGTERM: an iteration and a save."""
JOIN_TIMEOUT_S = 300
"""How long a node waits for the others, which may have to end their workers first."""


def main(argv: Sequence[str]) -> int:
    """Exit code of the job: 0, 2 for flags and inputs that cannot work, 1 when the restarts are used up."""
    options = _parse(argv)
    if options.rdzv_endpoint is not None:
        return _run_agent(options)
    try:
        _check_flags(options)
    except PretrainError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-launch-") as folder:
        verdict = Path(folder) / "verdict"
        os.environ[VERDICT_FILE] = str(verdict)
        code = _run_nodes(options)
        # Workers that leave a verdict end with 0; one of an attempt that failed in another way does not count.
        return int(verdict.read_text()) if code == 0 and verdict.exists() else code


def _check_flags(options: argparse.Namespace) -> None:
    """Raises PretrainError for flags of the training script that cannot work; Megatron-LM judges its own later."""
    if has_stock_loop():
        return
    from megatron.pretrain.config import parse_config
    from megatron.pretrain.config.validate import resolve
    from megatron.pretrain.initialize import probe_environment

    environment = probe_environment(options.nproc_per_node * options.nnodes)
    if te_on_cpu.asked_for(options.flags):
        environment = replace(environment, **_engine_of_workers())
    resolve(parse_config(options.flags), environment)


def _engine_of_workers() -> dict[str, bool]:
    """What each worker finds that loads Transformer Engine's Python for the CPU, which takes seconds: not done here."""
    try:
        te_on_cpu.find()
    except te_on_cpu.MissingWheel as error:
        raise InvalidInput(f"--device cpu --transformer-impl transformer_engine: {error}") from None
    return {"transformer_engine": True, "engine_on_cpu": True}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron.pretrain.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True, help="processes per node")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes, each played by an agent on this machine")
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts of all workers after a failure")
    parser.add_argument(
        "--standbys", type=int, default=0, help="processes of a node that wait to take lost ranks' seats"
    )
    parser.add_argument("--rdzv-endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--rdzv-id", default=f"local-{uuid.uuid4().hex[:12]}", help=argparse.SUPPRESS)
    parser.add_argument("script", help="the training script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    return parser.parse_args(argv)


def _run_nodes(options: argparse.Namespace) -> int:
    """Run one agent per node to its end; the worst exit code of them."""
    options.rdzv_endpoint = f"localhost:{_free_port()}"
    if options.nnodes == 1:
        return _run_agent(options)
    command = [sys.executable, "-m", "megatron.pretrain.launch"]
    for name in ("nproc_per_node", "nnodes", "max_restarts", "standbys", "rdzv_endpoint", "rdzv_id"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += [options.script, *options.flags]
    patience_s, endpoint = SHUTDOWN_TIMEOUT_S + 10, options.rdzv_endpoint
    return run_nodes(
        command, endpoint, options.nnodes, options.max_restarts, run_id=options.rdzv_id, patience_s=patience_s
    )


def _run_agent(options: argparse.Namespace) -> int:
    # A fresh store per round of the rendezvous: one shared over restarts still holds the addresses of dead workers.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from megatron.core.dist_checkpointing.moe import set_for_parking

    set_for_parking("nccl")  # torch's agent would tell workers otherwise
    os.environ.setdefault("MOE_CKPT_PATIENCE_S", str(SHUTDOWN_TIMEOUT_S))
    register_backend()
    config = LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        run_id=options.rdzv_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=options.rdzv_endpoint,
        # Several agents meet at the store of the launcher that started them, see nodes.py.
        rdzv_configs={"join_timeout": JOIN_TIMEOUT_S} | ({"is_host": False} if options.nnodes > 1 else {}),
        max_restarts=options.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    from megatron.pretrain.seats.agent import seated_workers  # once Megatron-Core is skipped

    try:
        with seated_workers(options.standbys):
            elastic_launch(config, sys.executable)("-u", options.script, *options.flags)
    except SignalException as stop:
        sys.stderr.write(
            f"stopped by signal {stop.sigval.name}; workers had until their end or {SHUTDOWN_TIMEOUT_S} s\n"
        )
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(
            f"training failed after {options.max_restarts} restarts: rank {rank} ended with exit code "
            f"{failure.exitcode}; its last lines above say why\n"
        )
        return 1
    except RendezvousError as error:
        # Closed by an agent that has ended, or nobody came.
        sys.stderr.write(
            f"{os.environ.get(NODE_NAME, 'this node')} waited up to {JOIN_TIMEOUT_S} s for {options.nnodes} nodes to"
            f" meet, in vain: {type(error).__name__}: {error or 'another node has ended the job'}\n"
        )
        return 1
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    refuse_unsupported_versions()  # and skip core: nothing is trained here, and importing all of it takes longest
    sys.exit(main(sys.argv[1:]))
