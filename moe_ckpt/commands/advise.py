"""`moe-ckpt advise`: which checkpoint system to use for a job, with which settings, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from moe_ckpt.report import Fact, Report, Table, table
from moe_ckpt.report.progress import steps

from ..simulator.advise import EXACT, Advice, described
from ..simulator.advise import advise as advise_on
from ..simulator.choices import Choice, Question
from ..simulator.closed_form import ettr
from ..simulator.constants import predicted_seconds
from ..simulator.flags import STRATEGIES, flags_of
from ..simulator.sensitivity import sensitivity
from ..simulator.systems import SYSTEMS
from .job_flags import JobFlags, checked_mtbf, chosen_systems, job_command, number, system_option
from .values import Duration, HoursType

QUICK = ("gemini", "torch_dist_async")
"""Systems whose behaviour is arithmetic."""

HELP = """Say which checkpoint system suits a job, and with which settings.

Every exact system is tried with the settings that its own policy chooses for this model, layout, cluster and failure
rate, and simulated with the same faults; first answers, by formula, come at once on standard error. What does not fit
the host memory is refused. A system that may lose updates is tried where no exact one can be used, or by --system.

\b
    $ moe-ckpt advise --model DeepSeek-MoE --pp 12 --ep 8 --world-size 96 --micro-batch-size 4 \\
          --cluster azure-nc96ads-a100 --mtbf 30m
    $ moe-ckpt advise --model Mixtral-8x7B --pp 4 --ep 8 --cluster h100-dgx --mtbf 3h --host-memory-gb 500
    $ moe-ckpt advise --model Qwen3-30B-A3B --ep 8 --world-size 128 --cluster h100-dgx --mtbf 12h --from metrics.jsonl

Exit codes: 0 printed; 1 a file cannot be read; 2 wrong usage.
"""


@job_command(HELP)
@click.option("--mtbf", "mtbf_s", type=Duration(), required=True, metavar="TIME", help="Between faults of the job.")
@number("--host-memory-gb", default=None, help="For checkpoints, on a node [default: half, as a tmpfs has].")
@click.option("--hours", "run_s", type=HoursType(), metavar="TIME", help="Of a run [default: 12h, or 40 faults].")
@number("--seeds", default=20, maximum=1000, show_default=True, help="Runs that are simulated of each setting.")
@system_option
def advise(
    flags: JobFlags,
    mtbf_s: float,
    host_memory_gb: int | None,
    run_s: float | None,
    seeds: int,
    systems: tuple[str, ...],
) -> Report:
    """See `HELP`; the option above each parameter explains it."""
    machine = flags.setting
    checked_mtbf(machine, mtbf_s)
    names = chosen_systems(systems) if systems else EXACT
    question = Question(
        machine.job,
        machine.cost,
        machine.cluster,
        constants=machine.constants,
        mtbf_s=mtbf_s,
        memory_bytes=flags.limit_bytes if host_memory_gb is None else host_memory_gb * 10**9,
        duration_s=run_s,
        seeds=seeds,
        replicas=flags.config.replicas,
    )
    for line in first_answers(question, names):
        click.echo(line, err=True)
    with steps("trying systems", len(names)) as done:
        found = advise_on(question, names, done)
    if found.recommended is None and not systems:
        found = advise_on(question)
    report = as_report(question, found)
    return replace(report, notes=(*report.notes, *flags.model_note, *flags.left_out("replicas", "memory_limit")))


def first_answers(question: Question, names: Sequence[str]) -> Iterator[str]:
    """By formula, what takes no time to find, before runs are simulated.

    Args:
        question: The job, its cluster and the mean time between faults.
        names: Systems that will be tried.
    """
    iteration_s = question.cost.iteration_s
    yield f"[moe-ckpt] advise: systems={len(names)} runs_of_each={question.seeds} iteration={iteration_s:.3g}s"
    for name in (name for name in QUICK if name in names):
        behaviour = question.behaviour(SYSTEMS[name])
        share = ettr(behaviour, question.mtbf_s, question.run_s)
        yield f"[moe-ckpt] advise: first_answer={name} interval={behaviour.interval} ettr_by_formula={100 * share:.1f}%"


def as_report(question: Question, advice: Advice) -> Report:
    """Advice as a person reads it: flags to paste, why in three sentences, then systems by the papers' names.

    Args:
        question: The job, its cluster, the mean time between faults and the memory limit.
        advice: The answer: the best setting of each system, and the recommended one.
    """
    chosen = advice.recommended
    assumed = f"Rates and costs: {question.cluster.source}. {question.constants.source}"
    replays = chosen is not None and STRATEGIES[chosen.system] == "sparse"
    impossible = table("Cannot run this job", "system | why", advice.impossible.items())
    gpus = question.job.topology.world_size
    return Report(
        f"Checkpoints of {question.job.shape.name} on {gpus} GPUs of {question.cluster.name}",
        (
            Fact("Flags", None if chosen is None else flags_of(question, chosen) or "none: no checkpoints"),
            *(Fact(label, text) for label, text in zip(("Why", "Cost", "Beside it"), advice.explanation, strict=False)),
            Fact("Would async torch_dist do", advice.stock or None),
            Fact("Recommended", None if chosen is None else recommended_as(chosen)),
            Fact("Settings", None if chosen is None else described(chosen)),
            Fact("Expected ETTR", None if chosen is None else chosen.ettr.mean, "share"),
            Fact("Recovery seconds", predicted_seconds(question.constants)),
            Fact("Iteration", question.cost.iteration_s, "seconds"),
            Fact("Mean time between faults", question.mtbf_s, "seconds"),
            Fact("Host memory of a node for checkpoints", question.limit_bytes, "bytes"),
        ),
        (_systems(advice), _settings(question, advice), _parts(advice), _sensitivity(question, advice), impossible),
        (*advice.reasons, *[_REPEATABLE] * replays, assumed),
    )


_REPEATABLE = (
    "GPUs repeat iterations to the bit under --deterministic-mode only; what it costs is not in the prediction. Under"
    " Megatron-Core 0.17 and 0.18 also set the variables of docs/gpu.md."
)


def recommended_as(chosen: Choice) -> str:
    """A system by its paper's name and by the strategy of the flags."""
    strategy = STRATEGIES[chosen.system]
    return chosen.system if strategy in ("none", chosen.system) else f"{strategy} ({chosen.system})"


def _sensitivity(question: Question, advice: Advice) -> Table:
    """Of the recommendation, to each fitted constant."""
    chosen = advice.recommended
    tried = None if chosen is None or chosen.never else chosen.tried
    rows = (
        (one.constant, f"{one.value:.3g}", one.interval, one.ettr, one.stock_ettr)
        for one in (sensitivity(question, tried) if tried is not None else ())
    )
    columns = "constant | at | interval:count | ETTR by formula:share | async torch_dist:share"
    return table("Sensitivity to what was fitted or assumed", columns, rows)


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


def _settings(question: Question, advice: Advice) -> Table:
    columns = "system | interval:count | W:count | r:count | recovery | K of N:share | budget:share | flags"
    rows = (
        (
            choice.system,
            None if choice.never else choice.interval,
            choice.window,
            choice.settings.get("replicas"),
            {True: "local", False: "global"}.get(choice.settings.get("local")),  # type: ignore[arg-type]
            choice.k_share,
            choice.budget,
            flags_of(question, choice) or "-",
        )
        for choice in advice.choices
    )
    return table("Settings of each", columns, rows)


def _parts(advice: Advice) -> Table:
    """Where a mean fault's time goes."""
    names = ("detect", "restart", "rendezvous", "fetch", "replay")
    columns = "system | " + " | ".join(f"{name}:seconds" for name in names)
    rows = ((choice.system, *(choice.parts_s[name] for name in names)) for choice in advice.choices if not choice.never)
    return table("A fault, by the parts of its timeline", columns, rows)
