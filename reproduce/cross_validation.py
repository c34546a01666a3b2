"""Cross-validation of the simulator on MoEvement Tables 3 and 7: errors on what it was not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean, median
from typing import Any, cast

from megatron.core.dist_checkpointing.moe.types import LOW_PRECISIONS
from moe_ckpt.report import Fact
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.constants import MOEVEMENT, Constants
from moe_ckpt.simulator.cost import MOEVEMENT_UTILISATION, iteration_cost
from moe_ckpt.simulator.events import Estimate, estimate
from moe_ckpt.simulator.sources import sourced
from moe_ckpt.simulator.systems.links import SystemSetting

from . import table7
from .evaluation import AZURE, DURATION_S, H100, cluster_of, cost_of
from .figure import COLOURS, NAMES, Figure, Rows, decimals, minutes, published
from .jobs import MTBF_S, azure_job, h100_job
from .paper_systems import PAPER_SYSTEMS
from .table3 import PublishedCell, published_cell

MODELS = ("MoE-LLaVa", "GPT-MoE", "DeepSeek-MoE")
"""Whose rows are at hand."""

RATES = tuple(mtbf_s for mtbf_s in MTBF_S if mtbf_s != 1200)
ITERATION_S = {"MoE-LLaVa": 1.70, "GPT-MoE": 2.10, "DeepSeek-MoE": 2.90}
"""That follow from the table: an overhead in seconds by the same one in per cent."""

FITTED: dict[str, Mapping[str, tuple[float, float]]] = {
    "checkfreq": {"cold_launch_s": (40.0, 280.0), "upload_slowdown": (0.0, 0.4)},
    "gemini": {"cold_launch_s": (40.0, 280.0)},
    "moc": {"pec_slowdown": (0.0, 0.3), "pec_blocking_s": (0.0, 10.0), "pec_lost_per_hour": (0.5, 6.0)},
    "moevement": {"contention": (0.0, 2.0), "local_restart_s": (0.0, 30.0)},
}
"""Constants that are found again without what is left out, and between which values they are looked for. Gemini's
copies have the contention that is found for MoEvement without the same cells."""

ADOPTED = {
    "contention": "moevement",
    "local_restart_s": "moevement",
    "cold_launch_s": "gemini",
    "upload_slowdown": "checkfreq",
}
"""Which of them the simulator takes over, of which system's fit to all cells: `tools/simulator_constants.py`."""

NULL_BOUNDS = {"share": (0.0, 1.2), "recovery_s": (0.0, 2000.0)}
"""Of the null model share / (1 + recovery_s / MTBF), two numbers for each system and nothing of models or hardware."""

TARGET = 0.015

Cells = tuple[tuple[str, int], ...]
"""Models, and mean times between failures in seconds."""

CELLS: Cells = tuple((model, mtbf_s) for model in MODELS for mtbf_s in RATES)


@dataclass(frozen=True)
class Held:
    """What came of leaving something out: the constants that were found without it, and errors in ETTR on it; and the
    same of the null model."""

    system: str
    left_out: str
    constants: dict[str, float]
    errors: dict[str, float]
    null_constants: dict[str, float]
    null_errors: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean of the errors' sizes."""
        return fmean(map(abs, self.errors.values()))


@cache
def _published(system: str, model: str, mtbf_s: int) -> PublishedCell:
    return published_cell(model, mtbf_s, system)


@cache
def _setting(model: str) -> SystemSetting:
    return SystemSetting(azure_job(model), cost_of(azure_job(model), AZURE), cluster_of(AZURE), MOEVEMENT)


def predicted(system: str, model: str, mtbf_s: int, constants: Constants) -> float:
    """ETTR by the closed form, with these constants."""
    if system == "moevement":
        behaviour = _moevement(model, constants)
    else:
        behaviour = PAPER_SYSTEMS[system].behaviour(replace(_setting(model), constants=constants), mtbf_s)
    return closed_form(behaviour, mtbf_s, DURATION_S)


def _moevement(model: str, constants: Constants) -> Behaviour:
    """As `PAPER_SYSTEMS` has it: both constants that are fitted change nothing of its windows, which take long to find,
    and its seconds are linear in them."""
    without, copied = _moevement_at(model, 0.0), _moevement_at(model, 1.0)
    assert constants.contention is not None
    return replace(
        without,
        overhead_s=without.overhead_s + constants.contention * (copied.overhead_s - without.overhead_s),
        expected_recovery_s=without.expected_recovery_s + constants.local_restart_s,
    )


@cache
def _moevement_at(model: str, contention: float) -> Behaviour:
    constants = replace(MOEVEMENT, contention=contention, local_restart_s=0.0)
    return PAPER_SYSTEMS["moevement"].behaviour(replace(_setting(model), constants=constants), 3600)


def errors(system: str, cells: Cells, constants: Constants) -> dict[str, float]:
    """ETTR, ours less the published, by cell."""
    found = {}
    for model, mtbf_s in cells:
        ours = predicted(system, model, mtbf_s, constants)
        found[f"{model} {minutes(mtbf_s)}"] = ours - _ettr(system, model, mtbf_s)
    return found


def _ettr(system: str, model: str, mtbf_s: int) -> float:
    there = _published(system, model, mtbf_s).ettr
    assert there is not None, f"{model} at {mtbf_s} s is not at hand"
    return there


def changed(values: Mapping[str, float]) -> Constants:
    """MoEvement's constants with these instead."""
    return replace(MOEVEMENT, **cast("Any", dict(values)))


@cache
def fit(system: str, cells: Cells) -> dict[str, float]:
    """The constants of a system that leave the least squares of ETTR on these cells."""
    shared = {"contention": fit("moevement", cells)["contention"]} if system == "gemini" else {}

    def loss(values: Mapping[str, float]) -> float:
        return sum(error * error for error in errors(system, cells, changed({**shared, **values})).values())

    return {**shared, **minimum(loss, FITTED[system])}


@cache
def null_fit(system: str, cells: Cells) -> dict[str, float]:
    """The two numbers of the null model that leave the least squares on these cells."""

    def loss(values: Mapping[str, float]) -> float:
        return sum(error * error for error in null_errors(system, cells, values).values())

    return minimum(loss, NULL_BOUNDS, least=1e-4)


def null_errors(system: str, cells: Cells, values: Mapping[str, float]) -> dict[str, float]:
    """ETTR, the null model's less the published, by cell."""
    return {
        f"{model} {minutes(mtbf_s)}": null_ettr(values, mtbf_s) - _ettr(system, model, mtbf_s)
        for model, mtbf_s in cells
    }


def null_ettr(values: Mapping[str, float], mtbf_s: float) -> float:
    """What the null model says of any job."""
    return values["share"] / (1 + values["recovery_s"] / mtbf_s)


def minimum(
    loss: Callable[[Mapping[str, float]], float], bounds: Mapping[str, tuple[float, float]], least: float = 0.002
) -> dict[str, float]:
    """Where a function of a few numbers is least between these bounds: one coordinate after the other, with steps
    that are halved until they are this share of the range."""
    best = {name: (low + high) / 2 for name, (low, high) in bounds.items()}
    lowest, share = loss(best), 0.25
    while share > least:
        moved = False
        for name, (low, high) in bounds.items():
            for step in (share, -share):
                tried = best | {name: min(high, max(low, best[name] + step * (high - low)))}
                if tried != best and (value := loss(tried)) < lowest:
                    best, lowest, moved = tried, value, True
        share = share if moved else share / 2
    return best


@cache
def held_out(by: str) -> tuple[Held, ...]:
    """One model (`by` "model") or one failure rate ("MTBF") left out after the other, for each system."""
    groups: Sequence[Any] = MODELS if by == "model" else RATES
    found = []
    for system in FITTED:
        for left in groups:
            out = tuple(cell for cell in CELLS if left in cell)
            others = tuple(cell for cell in CELLS if cell not in out)
            values, null = fit(system, others), null_fit(system, others)
            wrong, null_wrong = errors(system, out, changed(values)), null_errors(system, out, null)
            found.append(Held(system, left if by == "model" else minutes(left), values, wrong, null, null_wrong))
    return tuple(found)


def mean_error(by: str, system: str) -> float:
    """Mean size of the errors on all that was left out."""
    return fmean(abs(error) for held in held_out(by) if held.system == system for error in held.errors.values())


def null_mean_error(by: str, system: str) -> float:
    """The same of the null model."""
    return fmean(abs(error) for held in held_out(by) if held.system == system for error in held.null_errors.values())


def won(system: str) -> str:
    """Of the models and failure rates left out, and of the ends of Table 7, where ours is nearer: for a person."""
    folds = [
        [fmean(map(abs, held.errors.values())) < fmean(map(abs, held.null_errors.values())) for held in held_out(by)
         if held.system == system] for by in ("model", "MTBF")
    ]  # fmt: skip
    ends = [abs(one.ours - one.published) < abs(one.null - one.published) for one in other_table()
            if one.system == system]  # fmt: skip
    return ", ".join(f"{sum(each)} of {len(each)}" for each in (*folds, ends))


def gain(by: str, system: str) -> Estimate:
    """By how much ours is nearer than the null model, over the models or the failure rates left out."""
    return estimate(
        [
            fmean(map(abs, held.null_errors.values())) - fmean(map(abs, held.errors.values()))
            for held in held_out(by)
            if held.system == system
        ]
    )


def beats_null(system: str) -> bool:
    """Whether constants of a system are better than two numbers, whatever is left out; else none is adopted."""
    by_table = table_error(system) < table_error(system, "null")
    return by_table and all(mean_error(by, system) < null_mean_error(by, system) for by in ("model", "MTBF"))


@cache
def adopted() -> dict[str, float]:
    """The constants that the simulator takes over, found from all cells; of a system that beats the null model."""
    return {name: float(f"{fit(system, CELLS)[name]:.3g}") for name, system in ADOPTED.items() if beats_null(system)}


@dataclass(frozen=True)
class OtherTable:
    """An end of a range of ETTR in Table 7, and what is predicted there from Table 3 alone."""

    system: str
    what: str
    published: float
    ours: float
    null: float


@cache
def other_table() -> tuple[OtherTable, ...]:
    """Table 7 left out. CheckFreq's and Gemini's ends are recomputed by App. C from overhead and recovery."""
    paper, found = published()["table7"], []
    for system, mtbf_s, ends in (
        ("checkfreq", 3600, _recomputed(paper["checkfreq_recovery_1h_s"], (0.03, 0.03))),
        ("checkfreq", 600, _recomputed(paper["checkfreq_recovery_10m_s"], (0.03, 0.03))),
        ("gemini", 600, _recomputed(paper["gemini_recovery_10m_s"], paper["gemini_overhead_share_10m"])),
        ("moc", 3600, paper["moc_ettr_1h"]),
        ("moc", 600, paper["moc_ettr_10m"]),
        ("moevement", None, paper["moevement_ettr"]),
    ):
        rates, null = (mtbf_s,) if mtbf_s else table7.MTBF_S, null_fit(system, CELLS)
        constants = changed(fit(system, CELLS))
        ours = [ettr for rate in rates for ettr in _table7_ettrs(system, rate, constants)]
        nulls = [null_ettr(null, rate) for rate in rates]
        for end, there, choose in zip(("lowest", "highest"), ends, (min, max), strict=True):
            what = f"{end} ETTR, {minutes(mtbf_s) if mtbf_s else '10 to 60 min'}"
            found.append(OtherTable(system, what, there, choose(ours), choose(nulls)))
    return tuple(found)


def _recomputed(recovery_s: Sequence[float], overhead_share: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest ETTR of ranges, seconds of recovery being those of the whole run."""
    ends = [1 / (1 + over) / (1 + back / DURATION_S) for back, over in zip(recovery_s, overhead_share, strict=True)]
    return min(ends), max(ends)


def _table7_ettrs(system: str, mtbf_s: int, constants: Constants) -> list[float]:
    """ETTR by the closed form in each of the five settings."""
    found = []
    for precision in LOW_PRECISIONS:
        job = h100_job(precision)
        setting = SystemSetting(job, cost_of(job, H100), cluster_of(H100), constants)
        found.append(closed_form(PAPER_SYSTEMS[system].behaviour(setting, mtbf_s), mtbf_s, DURATION_S))
    return found


def table_error(system: str, whose: str = "ours") -> float:
    """Mean size of the errors on Table 7, of ours or of the null model."""
    own = [one for one in other_table() if one.system == system]
    return fmean(abs(getattr(one, whose) - one.published) for one in own)


@cache
def iteration_times() -> dict[str, tuple[float, float, float]]:
    """By model: published seconds, seconds that are predicted with the share of memory's rate that fits the one
    other model best known (DeepSeek-MoE; for itself GPT-MoE), and that share."""
    found = {}
    for model in MODELS:
        known = "GPT-MoE" if model == "DeepSeek-MoE" else "DeepSeek-MoE"
        share = _memory_share(known)
        found[model] = ITERATION_S[model], _iteration_s(model, share), share
    return found


def _memory_share(model: str) -> float:
    """The share of its memory's rate that an A100 reaches where this model's iteration takes as long as published."""

    def wrong(values: Mapping[str, float]) -> float:
        return (_iteration_s(model, values["memory_share"]) - ITERATION_S[model]) ** 2

    return minimum(wrong, {"memory_share": (0.1, 1.0)})["memory_share"]


def _iteration_s(model: str, memory_share: float) -> float:
    utilisation = replace(MOEVEMENT_UTILISATION, memory_share=memory_share)
    return iteration_cost(azure_job(model), cluster_of(AZURE), utilisation).iteration_s


@dataclass(frozen=True)
class Column:
    """How a column of Table 3 agrees in sample: ours by the published, cell by cell."""

    system: str
    what: str
    ratios: tuple[float, ...]

    @property
    def within(self) -> int:
        """Cells within a factor of two."""
        return sum(0.5 <= ratio <= 2 for ratio in self.ratios)

    @property
    def is_predicted(self) -> bool:
        """Whether nearly all cells, nine of ten, are within a factor of two."""
        return self.within >= 0.9 * len(self.ratios)


@cache
def columns() -> tuple[Column, ...]:
    """Seconds of recovery, of overhead, and intervals. MoC's and MoEvement's published recoveries are shorter than any
    restart, so what is run again is also compared alone."""
    found = []
    for system in ("checkfreq", "gemini", "moc", "moevement"):
        whole, again, overhead, interval = [], [], [], []
        for model, mtbf_s in CELLS:
            behaviour = PAPER_SYSTEMS[system].behaviour(_setting(model), mtbf_s)
            there = _published(system, model, mtbf_s)
            assert there.recovery_s and there.overhead_s and there.interval
            fault_s = there.recovery_s / (DURATION_S / mtbf_s)
            down_s = behaviour.fresh().strike(10_000, nodes=frozenset((0,))).down_s
            whole.append(behaviour.expected_recovery_s / fault_s)
            again.append((behaviour.expected_recovery_s - down_s) / fault_s)
            overhead.append(behaviour.overhead_s / there.overhead_s)
            shown = behaviour.window if system == "moevement" else behaviour.interval
            interval.append(shown / there.interval)
        for what, ratios in (
            ("recovery of a fault, whole", whole),
            ("recovery of a fault, run again alone", again),
            ("overhead in seconds", overhead),
            ("interval or window", interval),
        ):
            found.append(Column(system, what, tuple(ratios)))
    return tuple(found)


def figure() -> Figure:
    """The errors, out of sample first."""
    systems, ways = tuple(FITTED), ("model", "MTBF")
    claims, times, agreeing = table7.claims(), iteration_times(), columns()
    held = sum(claim.verdict != "NO" for claim in claims)
    errors_of = {
        system: {by: (mean_error(by, system), null_mean_error(by, system)) for by in ways}
        | {"table": (table_error(system), table_error(system, "null"))}
        for system in systems
    }
    fitted = [one for one in sourced(MOEVEMENT, MOEVEMENT_UTILISATION) if one.kind == "fitted"]
    return Figure(
        "cross_validation",
        {
            "leave_one_out": [
                {"by": by, "system": one.system, "left_out": one.left_out, "constants": one.constants, "mean": one.mean,
                 "ettr_errors": one.errors, "null_constants": one.null_constants, "null_ettr_errors": one.null_errors}
                for by in ways for one in held_out(by)
            ],
            "other_table": [asdict(one) for one in other_table()],
            "mean_error": {
                system: {by: {"ours": ours, "null": null} for by, (ours, null) in found.items()}
                for system, found in errors_of.items()
            },
            "adopted": adopted(),
            "fitted": {one.name: one.source for one in fitted},
            "target": TARGET,
            "iteration_time": {
                model: {"published_s": there, "predicted_s": ours, "memory_share": share}
                for model, (there, ours, share) in times.items()
            },
            "columns": [
                {"system": one.system, "what": one.what, "median_ratio": median(one.ratios), "within_2x": one.within,
                 "cells": len(one.ratios), "predicted": one.is_predicted}
                for one in agreeing
            ],
            "table7": {"ranges": len(claims), "hold_or_within": held},
        },
        (
            ((NAMES[system], *(decimals(error) for by in (*ways, "table") for error in errors_of[system][by]),
              len(FITTED[system]), won(system), *(f"{gain(by, system):+.4f}" for by in ways),
              "yes" if beats_null(system) else "NO") for system in systems),
            ((NAMES[one.system], one.what, *map(decimals, (one.published, one.ours, one.null)))
                 for one in other_table()),
            *(_left_out(by) for by in ways),
            ((one.name, "-" if one.value is None else f"{one.value:.3g}", one.source) for one in fitted),
            ((model, there, ours, ours / there - 1) for model, (there, ours, _) in times.items()),
            ((NAMES[one.system], one.what, f"{median(one.ratios):.2f}", f"{one.within} of {len(one.ratios)}",
              "yes" if one.is_predicted else "not predicted") for one in agreeing),
        ),
        _draw,
        (
            *(Fact(f"{NAMES[of]} ETTR, one model left out",
                   "{} (null model {})".format(*map(decimals, errors_of[of]["model"]))) for of in systems),
            Fact("Fitted constants", len(fitted), "count"),
            Fact("Iteration time, one row left in, worst",
                 max(abs(ours / there - 1) for there, ours, _ in times.values()), "share"),
            Fact("Claims of Table 7 that hold, or whose range contains ours; only its storage is fitted",
                 f"{held} of {len(claims)}"),
        ),
    )  # fmt: skip


def _left_out(by: str) -> Rows:
    rows = (
        (NAMES[one.system], one.left_out, ", ".join(f"{name} {value:.3g}" for name, value in one.constants.items()),
         decimals(one.mean), decimals(fmean(map(abs, one.null_errors.values()))),
         " ".join(f"{error:+.3f}" for error in one.errors.values()))
        for one in held_out(by)
    )  # fmt: skip
    return rows


def _draw(axes: list[Any]) -> None:
    for axis, by in zip(axes, ("model", "MTBF"), strict=True):
        for system in FITTED:
            own = [one for one in held_out(by) if one.system == system]
            points = [(number, error) for number, one in enumerate(own) for error in one.errors.values()]
            axis.scatter(*zip(*points, strict=True), color=COLOURS[system], label=NAMES[system], alpha=0.7)
            nulls = [(number + 0.2, error) for number, one in enumerate(own) for error in one.null_errors.values()]
            axis.scatter(*zip(*nulls, strict=True), color=COLOURS[system], marker="_", alpha=0.7)
        axis.set_xticks(range(len(own)), [one.left_out for one in own])
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=f"one {by} left out", ylabel="ETTR less the published; dash: null model", ylim=(-0.3, 0.3))
    axes[0].legend()
