"""Flags that simulation and advice share: the batch, the cluster, and how often it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..simulator.clusters import cluster as preset_cluster
from ..simulator.clusters import load_cluster, presets
from ..simulator.constants import COMEBACKS, THIS_PROJECT
from ..simulator.cost import MEGATRON_UTILISATION, iteration_cost
from ..simulator.flags import systems_of
from ..simulator.inputs import Cluster, TokenDispatch, TrainingJob
from ..simulator.profiles import load_profile
from ..simulator.systems import SYSTEMS
from ..simulator.systems.links import SystemSetting
from .from_job import measured
from .plan.options import PlannedJob, number
from .values import Duration


def system_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flag for `chosen_systems`."""
    return click.option(
        "--system", "systems", type=click.Choice([*SYSTEMS, "full", "pec", "selective", "sparse"]), multiple=True,
        help="A system, or a strategy's name; repeatable [default: all].",
    )(function)  # fmt: skip


def chosen_systems(words: tuple[str, ...]) -> tuple[str, ...]:
    """The systems that --system names, each once; all without one."""
    return tuple(dict.fromkeys(name for word in words for name in systems_of(word))) or tuple(SYSTEMS)


def with_training_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the batch, the cluster, how tokens are exchanged, what was measured, and how processes come back."""
    names = ", ".join(presets())
    for option in reversed(
        (
            number("--global-batch-size", default=512, show_default=True, help="Samples of an iteration."),
            number("--micro-batch-size", default=1, show_default=True, help="Samples of a rank's microbatch."),
            number("--seq-length", default=2048, show_default=True, help="Tokens of a sample."),
            click.option(
                "--overlap-moe-expert-parallel-comm", "overlaps", is_flag=True, help="As Megatron's flag of this name."
            ),
            click.option("--moe-enable-deepep", "once_per_node", is_flag=True, help="As Megatron's flag of this name."),
            number(
                "--moe-router-group-topk", "nodes_per_token", default=None, help="Nodes that a token goes to at most."
            ),
            click.option(
                "--cluster",
                "cluster_name",
                default="azure-nc96ads-a100",
                show_default=True,
                metavar="NAME|FILE",
                help=f"A preset ({names}), or a JSON file with the same fields.",
            ),
            click.option(
                "--profile",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="What `moe-ckpt profile` measured, instead of a cluster.",
            ),
            click.option(
                "--from",
                "job_file",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="--metrics-jsonl of a job that ran: its iteration time, rates and restarts count.",
            ),
            click.option(
                "--iteration-time",
                "iteration_time_s",
                type=Duration(),
                metavar="TIME",
                help="Of training without checkpoints [default: estimated].",
            ),
            click.option(
                "--restart-mode",
                "comeback",
                type=click.Choice(list(COMEBACKS)),
                default="cold",
                show_default=True,
                help="How processes come back: as new ones, from standbys, or in place.",
            ),
            click.option(
                "--restart",
                "restart_s",
                type=Duration(),
                metavar="TIME",
                help="Until all run again: restart + rendezvous + build of a timeline [default: by ranks and mode].",
            ),
        )
    ):
        function = option(function)
    return function


def machine_of(
    job: PlannedJob,
    global_batch_size: int,
    micro_batch_size: int,
    seq_length: int,
    cluster_name: str,
    profile: Path | None,
    restart_s: float | None,
    *,
    comeback: str = "cold",
    iteration_time_s: float | None = None,
    job_file: Path | None = None,
    overlaps: bool = False,
    once_per_node: bool = False,
    nodes_per_token: int | None = None,
) -> SystemSetting:
    """The job on its cluster; what is given counts before what a job measured, and that before what is estimated.

    Raises UsageError for a batch that does not fit the layout, and no such cluster, UnreadableCheckpoint for a job_file
    that no job wrote.
    """
    share = micro_batch_size * job.topology.dp
    if global_batch_size % share:
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} x"
            f" {job.topology.dp} data-parallel ranks = {share}"
        )
    batch = global_batch_size, global_batch_size // share, seq_length
    exchange = TokenDispatch(overlaps, once_per_node, nodes_per_token)
    training = TrainingJob(job.shape, job.topology, job.precision, *batch, exchange)
    constants = replace(THIS_PROJECT, comeback=comeback)
    if profile is None:
        cluster = _cluster(cluster_name)
        machine = SystemSetting(training, iteration_cost(training, cluster, MEGATRON_UTILISATION), cluster, constants)
    else:
        machine = load_profile(profile).setting(training, constants)
    if job_file is not None:
        machine = measured(job_file).applied(machine, replicas=constants.replicas)
    if iteration_time_s is not None:
        machine = replace(machine, cost=machine.cost.lasting(iteration_time_s))
    if restart_s is not None:
        machine = replace(machine, constants=replace(machine.constants, restart_s=restart_s))
    return machine


def checked_mtbf(machine: SystemSetting, mtbf_s: float) -> None:
    """Raises UsageError for a mean time between faults in which no job comes back once."""
    down_s = machine.constants.detect_s + machine.launch_s + machine.meet_s
    if mtbf_s <= down_s:
        raise UsageError(
            f"--mtbf {mtbf_s:g}s is not longer than a restart takes ({down_s:.3g} s with its detection): it would never"
            " train; say how long yours takes with --restart, or --restart-mode in-place"
        )


def _cluster(name: str) -> Cluster:
    is_file = name.casefold() not in presets() and (Path(name).suffix or len(Path(name).parts) > 1)
    return load_cluster(Path(name)) if is_file else preset_cluster(name)
