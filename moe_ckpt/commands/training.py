"""Flags that simulation and advice share: the batch, the cluster, and how often it fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..simulator.clusters import cluster as preset_cluster
from ..simulator.clusters import load_cluster, presets
from ..simulator.constants import THIS_PROJECT
from ..simulator.cost import MEGATRON_UTILISATION, iteration_cost
from ..simulator.inputs import Cluster, TrainingJob
from ..simulator.profiles import load_profile
from ..simulator.systems.links import SystemSetting
from .plan.options import PlannedJob, number

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a number with s, m or h behind it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds; a number that was converted before passes."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", str(value).lower(), re.ASCII)
        seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
        if not seconds:
            self.fail(f"{value} must be seconds above 0, or a number with m or h behind it, such as 30m", param, ctx)
        return seconds


def with_training_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `global_batch_size`, `micro_batch_size`, `seq_length`, `cluster_name`, `profile` and `restart_s`."""
    names = ", ".join(presets())
    for option in reversed(
        (
            number("--global-batch-size", default=512, show_default=True, help="Samples of an iteration."),
            number("--micro-batch-size", default=1, show_default=True, help="Samples of a rank's microbatch."),
            number("--seq-length", default=2048, show_default=True, help="Tokens of a sample."),
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
                "--restart",
                "restart_s",
                type=Duration(),
                default=THIS_PROJECT.global_restart_s,
                show_default=True,
                metavar="TIME",
                help="Until all processes run again: restart + rendezvous + build of a recovery's timeline.",
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
    restart_s: float,
) -> SystemSetting:
    """The job on its cluster. Raises UsageError for a batch that does not fit the layout, or no such cluster."""
    share = micro_batch_size * job.topology.dp
    if global_batch_size % share:
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} x"
            f" {job.topology.dp} data-parallel ranks = {share}"
        )
    batch = global_batch_size, global_batch_size // share, seq_length
    training = TrainingJob(job.shape, job.topology, job.precision, *batch)
    constants = replace(THIS_PROJECT, global_restart_s=restart_s)
    if profile is None:
        cluster, utilisation = _cluster(cluster_name), MEGATRON_UTILISATION
    else:
        measured = load_profile(profile)
        cluster, utilisation = measured.cluster, measured.utilisation
        constants = replace(constants, frozen_saves=measured.frozen_saves)
    return SystemSetting(training, iteration_cost(training, cluster, utilisation), cluster, constants)


def _cluster(name: str) -> Cluster:
    is_file = name.casefold() not in presets() and (Path(name).suffix or len(Path(name).parts) > 1)
    return load_cluster(Path(name)) if is_file else preset_cluster(name)
