"""Starts a job on this machine with torchrun's elastic agents: checks flags first, and reports failures in a line."""

from __future__ import annotations

from megatron.pretrain.exit_noise import end_at_once_when_interrupted, end_with, outlive_readers
from moe_ckpt.megatron_core import refuse_unsupported_versions

if __name__ == "__main__":
    end_at_once_when_interrupted()  # until there are processes to end
    outlive_readers()
    # Before torch; and skips core: nothing is trained here, and importing all of it takes longest.
    refuse_unsupported_versions()

# isort: split

import argparse
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron.pretrain.bound_store import bound_store
from megatron.pretrain.device import wants_engine_on_cpu
from megatron.pretrain.errors import InvalidInput, PretrainError
from megatron.pretrain.nodes import NodeRange, Nodes, run_nodes
from megatron.pretrain.old_flags import refuse_old_flags
from megatron.pretrain.processes import NODE_LEAVES, NODE_NAME
from megatron.pretrain.rendezvous import BACKEND, register_backend
from megatron.pretrain.standby.health_options import HealthOptions, add_launcher_flags

HERE = "127.0.0.1"
"""Where all nodes meet, which are played on this machine."""
MONITOR_INTERVAL_S = 0.1
CAN_BE_GIVEN_TIME = "shutdown_timeout" in LaunchConfig.__annotations__
"""Older releases of torch, 2.11 for one, always wait as long as newer ones by default."""
SHUTDOWN_TIMEOUT_S = 60 if CAN_BE_GIVEN_TIME else 30
"""How long workers may take to end after SIGTERM: an iteration and a save."""
LAST_CALL_S = 15.0
JOIN_TIMEOUT_S = 300
"""How long a node waits for the others, which may have to end their workers first."""


def main(argv: Sequence[str]) -> int:
    """Exit code of the job: 0, 2 for flags and inputs that cannot work, 1 when the restarts are used up."""
    options = _parse(argv)
    try:
        return _run_agent(options) if options.rdzv_endpoint is not None else _run(options)
    except PretrainError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    _check_flags(options)
    return _run_nodes(options)


def _check_flags(options: argparse.Namespace) -> None:
    """Raises PretrainError for what each rank would refuse for a reason that can be seen here; Megatron-LM judges its
    own flags later."""
    refuse_old_flags(options.flags)
    _refuse_fewer_nodes(options, any(flag.partition("=")[0] == "--moe-ckpt-elastic" for flag in options.flags))
    if wants_engine_on_cpu(options.flags):
        from megatron.pretrain.testing import te_on_cpu

        try:
            te_on_cpu.find()
        except te_on_cpu.MissingWheel as error:
            raise InvalidInput(f"--device cpu --transformer-impl transformer_engine: {error}") from None


def _refuse_fewer_nodes(options: argparse.Namespace, is_elastic: bool) -> None:
    if options.nnodes.least < options.nnodes.most and not is_elastic:
        raise InvalidInput(
            f"--nnodes {options.nnodes}: a job continues with fewer nodes only as --moe-ckpt-elastic MIN:MAX allows;"
            f" give that flag, or --nnodes {options.nnodes.most}"
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron.pretrain.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True, help="processes per node")
    parser.add_argument(
        "--nnodes", type=NodeRange.parse, default=NodeRange(1, 1), metavar="N|MIN:MAX",
        help="simulated nodes, each an agent on this machine; MIN:MAX with --moe-ckpt-elastic",
    )  # fmt: skip
    parser.add_argument("--spares", type=int, help="spare nodes that replace lost ones (default: --max-restarts)")
    parser.add_argument("--spare-after-s", type=float, default=0.0, help="seconds until a spare joins")
    parser.add_argument(
        "--last-call-s", type=float, default=LAST_CALL_S,
        help="with MIN:MAX: seconds that a rendezvous waits for more nodes",
    )  # fmt: skip
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts of all workers after a failure")
    add_launcher_flags(parser)
    parser.add_argument("--rdzv-endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--rdzv-id", default=f"local-{uuid.uuid4().hex[:12]}", help=argparse.SUPPRESS)
    parser.add_argument("script", help="the training script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    return parser.parse_args(argv)


def _run_nodes(options: argparse.Namespace) -> int:
    """Run one agent per node to its end; the worst exit code of them."""
    if options.nnodes.most == 1:
        options.rdzv_endpoint = f"{HERE}:0"  # the agent's store takes a free port as it is made
        return _run_agent(options)
    # Kept here and not by an agent, so that it survives the loss of any node.
    store = bound_store(HERE)
    options.rdzv_endpoint = f"{HERE}:{store.port}"
    command = [sys.executable, "-m", "megatron.pretrain.launch"]
    for name in "nproc_per_node nnodes max_restarts moe_ckpt_standbys last_call_s rdzv_endpoint rdzv_id".split():
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += [*HealthOptions.of(options).arguments(), options.script, *options.flags]
    nodes = Nodes(
        options.nnodes.most,
        options.nnodes.least,
        options.max_restarts if options.spares is None else options.spares,
        options.spare_after_s,
    )
    late_s = SHUTDOWN_TIMEOUT_S + 10
    return run_nodes(command, nodes, run_id=options.rdzv_id, patience_s=late_s)


def _run_agent(options: argparse.Namespace) -> int:
    # A fresh store per round of the rendezvous: one shared over restarts still holds the addresses of dead workers.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from megatron.core.dist_checkpointing.moe.standby.slot import end_with_parent
    from megatron.core.dist_checkpointing.moe.standby.verdict import verdict_of_ranks

    if options.nnodes.most > 1:  # else this process is the launcher itself
        end_with_parent(f"{os.environ.get(NODE_NAME)}: the launcher of this node has ended, so it ends too")
    os.environ.setdefault("MOE_CKPT_PATIENCE_S", str(SHUTDOWN_TIMEOUT_S))
    register_backend()
    config = LaunchConfig(
        min_nodes=options.nnodes.least,
        max_nodes=options.nnodes.most,
        nproc_per_node=options.nproc_per_node,
        run_id=options.rdzv_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=options.rdzv_endpoint,
        local_addr=HERE,  # all nodes are on this machine, and so are those who may connect
        # Several agents meet at the store of the launcher that started them, see nodes.py.
        rdzv_configs={"join_timeout": JOIN_TIMEOUT_S, "last_call_timeout": options.last_call_s}
        | ({"is_host": False} if options.nnodes.most > 1 else {}),
        max_restarts=options.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        **({"shutdown_timeout": SHUTDOWN_TIMEOUT_S} if CAN_BE_GIVEN_TIME else {}),
    )
    from megatron.pretrain.standby.health_agent import NodeExcluded, own_agents  # once Megatron-Core is skipped

    try:
        own = own_agents(options.moe_ckpt_standbys, HealthOptions.of(options))
        with verdict_of_ranks() as verdict, own, _patient(options.nnodes):
            elastic_launch(config, sys.executable)("-u", options.script, *options.flags)
            return verdict()
    except NodeExcluded as error:
        sys.stderr.write(f"{error}\n")
        return NODE_LEAVES if options.nnodes.most > 1 else 1
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
        # The exit code of whoever closed it says how the job ended.
        return int(not (isinstance(error, RendezvousClosedError) and options.nnodes.most > 1))


@contextmanager
def _patient(nodes: NodeRange) -> Iterator[None]:
    """In this block nodes that join wait for the end of an iteration, where the number of nodes may change."""
    from megatron.core.dist_checkpointing.moe.standby.verdict import kept_folder
    from megatron.pretrain.standby.growth import patient_nodes

    if nodes.least == nodes.most:
        yield
        return
    joining = tempfile.TemporaryDirectory(prefix="moe-ckpt-joining-")
    with joining as folder, kept_folder(folder), patient_nodes(Path(folder)):
        yield


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
