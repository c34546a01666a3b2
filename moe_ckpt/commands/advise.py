"""`moe-ckpt advise`: which checkpoint system to use for a job, with which settings, and why."""

from __future__ import annotations

from typing import Any

import click

from moe_ckpt.report import Fact, Report, Table, table

from ..simulator.advise import Advice, described
from ..simulator.advise import advise as advise_on
from ..simulator.choices import Question
from ..simulator.systems import SYSTEMS
from .plan.options import PlannedJob, number, plan_command
from .training import Duration, machine_of, with_training_flags

HELP = """Say which checkpoint system suits a job, and with which settings.

Every system is tried with the settings that its own policy chooses for this model, layout, cluster and failure rate,
and simulated with the same faults. What does not fit the host memory is refused. A system that may lose updates is only
recommended where no exact one can be used; what it would gain is said.

\b
    $ moe-ckpt advise --model DeepSeek-MoE --pp 12 --ep 8 --world-size 96 --micro-batch-size 4 \\
          --cluster azure-nc96ads-a100 --mtbf 30m
    $ moe-ckpt advise --model Mixtral-8x7B --pp 4 --ep 8 --cluster h100-dgx --mtbf 3h --host-memory-gb 500
"""


@plan_command(HELP)
@with_training_flags
@click.option("--mtbf", "mtbf_s", type=Duration(), required=True, metavar="TIME", help="Between faults of the job.")
@number("--host-memory-gb", default=None, help="For checkpoints, on a node [default: 3/4 of the cluster's].")
@click.option("--hours", "run_s", type=Duration(), metavar="TIME", help="Of a run [default: 12h, or 40 faults].")
@number("--seeds", default=20, maximum=1000, show_default=True, help="Runs that are simulated of each setting.")
@click.option("--system", "systems", type=click.Choice(list(SYSTEMS)), multiple=True, help="Repeatable [default: all].")
def advise(
    job: PlannedJob,
    mtbf_s: float,
    host_memory_gb: int | None,
    run_s: float | None,
    seeds: int,
    systems: tuple[str, ...],
    **training: Any,
) -> Report:
    machine = machine_of(job, **training)
    question = Question(
        machine.job,
        machine.cost,
        machine.cluster,
        constants=machine.constants,
        mtbf_s=mtbf_s,
        memory_bytes=None if host_memory_gb is None else host_memory_gb * 10**9,
        duration_s=run_s,
        seeds=seeds,
    )
    return as_report(question, advise_on(question, systems or tuple(SYSTEMS)))


def as_report(question: Question, advice: Advice) -> Report:
    """Advice as a person reads it: the recommendation, all systems side by side, the reasons."""
    chosen = advice.recommended
    assumed = f"Rates and costs: {question.cluster.source}. {question.constants.source}"
    impossible = table("Cannot run this job", "system | why", advice.impossible.items())
    gpus = question.job.topology.world_size
    return Report(
        f"Checkpoints of {question.job.shape.name} on {gpus} GPUs of {question.cluster.name}",
        (
            Fact("Recommended", None if chosen is None else chosen.system),
            Fact("Settings", None if chosen is None else described(chosen)),
            Fact("Expected ETTR", None if chosen is None else chosen.ettr.mean, "share"),
            Fact("Iteration", question.cost.iteration_s, "seconds"),
            Fact("Mean time between faults", question.mtbf_s, "seconds"),
            Fact("Host memory of a node for checkpoints", question.limit_bytes, "bytes"),
        ),
        (_systems(advice), _settings(advice), impossible),
        (*advice.reasons, assumed),
    )


def _systems(advice: Advice) -> Table:
    columns = (
        "system | updates | ETTR:share | +-:share | by formula:share | overhead:share | recovery:seconds"
        " | at worst:seconds | iterations again:count | tokens lost:share | memory:bytes | verdict"
    )
    rows = (
        (
            choice.system,
            "exact" if choice.exact else "lossy",
            choice.ettr.mean,
            choice.ettr.half_width,
            choice.closed_form_ettr,
            choice.overhead_share,
            choice.recovery_s,
            choice.worst_s,
            choice.worst_iterations,
            choice.lost_share,
            choice.memory_bytes,
            "refused" if choice.refused else "recommended" if choice is advice.recommended else "",
        )
        for choice in advice.choices
    )
    return table("Systems", columns, rows)


def _settings(advice: Advice) -> Table:
    columns = "system | interval:count | W:count | r:count | local | K of N:share | budget:share"
    rows = (
        (
            choice.system,
            None if choice.never else choice.interval,
            choice.window,
            choice.settings.get("replicas"),
            choice.settings.get("local"),
            choice.k_share,
            choice.budget,
        )
        for choice in advice.choices
    )
    return table("Settings of each", columns, rows)
