"""MoEvement Fig. 13: ETTR as MoEvement's techniques are added one by one."""

from __future__ import annotations

from functools import cache
from statistics import fmean

from moe_ckpt.report import Fact
from moe_ckpt.simulator.closed_form import ettr

from .evaluation import AZURE, behaviour_of
from .figure import Figure, bars, decimals, published
from .jobs import MODELS, azure_job
from .paper_systems import PaperMoEvement
from .skewness import alpha_of, dirichlet

MTBF_S = 600
"""Not published for this figure: the highest failure rate of Table 3."""

STEPS = {
    "sparse": PaperMoEvement(skips_weight_gradients=False, reorder=False, local=False),
    "skip": PaperMoEvement(skips_weight_gradients=True, reorder=False, local=False),
    "reorder": PaperMoEvement(skips_weight_gradients=True, reorder=True, local=False),
    "log": PaperMoEvement(skips_weight_gradients=True, reorder=True, local=True),
}
LABELS = {
    "sparse": "sparse checkpointing",
    "skip": "+ frozen operators skip",
    "reorder": "+ popular experts last",
    "log": "+ upstream logging",
}

LATER = tuple(STEPS)[1:]

SKEWNESS = 0.05
"""Of the experts' popularity (appendix D). Fig. 4 shows that shares differ, not by how much: with 0.05 the most popular
of 64 experts has about a tenth of the tokens."""

DRAWS = range(4)


@cache
def steps() -> dict[str, dict[str, tuple[float, float]]]:
    """By model and step, E[R] in seconds and ETTR by the closed form; means over draws of the popularity."""
    return {model: {step: _mean(model, system) for step, system in STEPS.items()} for model in MODELS}


def _mean(model: str, system: PaperMoEvement) -> tuple[float, float]:
    job = azure_job(model)
    alpha = alpha_of(SKEWNESS, job.shape.num_experts)
    found = [behaviour_of(system, job, AZURE, MTBF_S, dirichlet(alpha, job.shape.num_experts, seed)) for seed in DRAWS]
    return fmean(of.expected_recovery_s for of in found), fmean(ettr(of, MTBF_S) for of in found)


def saved(model: str, step: str) -> float:
    """Share of E[R] that a step saves of what the step before it takes."""
    return 1 - steps()[model][step][0] / _before(model, step)


def helps() -> str:
    """Whether each step shortens the recovery, for a person; a tenth of a second is nothing."""
    longer = [f"\"{LABELS[step][2:]}\" lengthens those of {model}" for model in MODELS for step in LATER
              if steps()[model][step][0] - _before(model, step) > 0.1]  # fmt: skip
    return "each step shortens recoveries or changes nothing" + f", except that {', '.join(longer)}" * bool(longer)


def _before(model: str, step: str) -> float:
    return steps()[model][dict(zip(LATER, STEPS, strict=False))[step]][0]


def figure() -> Figure:
    """The figure as a table, with what the text says of it."""
    paper, found = published()["fig13"], steps()
    data = {
        model: {step: {"expected_recovery_s": recovery_s, "ettr": value} for step, (recovery_s, value) in of.items()}
        for model, of in found.items()
    }
    series = {label: [found[model][step][1] for model in MODELS] for step, label in LABELS.items()}
    return Figure(
        "fig13",
        {"models": data, "published": paper},
        (
            ((model, *(decimals(value) for _, value in of.values())) for model, of in found.items()),
            ((model, *(recovery_s for recovery_s, _ in of.values()), *(saved(model, step) for step in LATER))
                 for model, of in found.items()),
            ((model, decimals(paper["sparse_ettr"][model]), paper["reorder_gain"][model],
                  decimals(paper["all_ettr"])) for model in MODELS),
        ),
        lambda axes: bars(axes[0], MODELS, series, ylabel="ETTR", ylim=(0, 1.15)),
        (Fact("Skewness of the experts' popularity", SKEWNESS, "text"),),
        {"helps": helps()},
    )  # fmt: skip
