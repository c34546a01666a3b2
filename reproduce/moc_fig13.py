"""MoC-System Fig. 13 and 6.2.5: an iteration with a checkpoint at scale, on other machines and for other models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.policy.interval import in_iterations, young
from moe_ckpt.report import Fact
from moe_ckpt.simulator.ettr import TrainingRun, moc_overhead_s, moc_save_overhead_s

from .figure import Figure, Rows, bars, lines, published
from .moc_iteration import MocIteration, MocIterationCost, cost_of, machines

GPUS = (32, 64, 128, 256, 512, 1024)
"""Sizes of the panels. The text names 64, 256 and 1024."""

SEQ_LENGTHS = (512, 1024, 2048, 4096)
"""Of panel (d); the paper's are not in its text."""


_PASSES_AND_SNAPSHOTS = ("forward_backward_s", "base_snapshot_s")


@cache
def panels() -> dict[str, dict[str, MocIterationCost]]:
    """Bars by panel and label, as far as they differ: (f) is the persisted bytes of (a)."""
    given = published("moc")["fig13"]
    at = MocIteration("a800", given["general_gpus"])
    settings: dict[str, dict[str, MocIteration]] = {
        "a: A800, DP + EP": {str(gpus): MocIteration("a800", gpus) for gpus in GPUS},
        "b: A800, DP + EP + TP": {str(gpus): MocIteration("a800", gpus, given["tensor_parallel"]) for gpus in GPUS},
        "c: H100, DP + EP": {str(gpus): MocIteration("h100", gpus) for gpus in GPUS},
        "d: sequence length": {str(length): replace(at, seq_length=length) for length in SEQ_LENGTHS},
        "e: model size": {name: replace(at, hidden_size=size) for name, size in given["hidden_sizes"].items()},
    }
    return {panel: {label: cost_of(at) for label, at in group.items()} for panel, group in settings.items()}


def rates_that_agree() -> tuple[float, float]:
    """Bytes per second of a node's NICs, from and to, with which all that the text says of panel (a) holds.

    Base-Async is hidden with 1024 GPUs and not with 512; MoC-Async's snapshot lasts longer than the passes with 64 and
    not with 128. Both follow from the exchange between nodes, which goes with one over the rate.
    """
    group = panels()["a: A800, DP + EP"]
    assumed = machines()["a800"].node_bytes_per_s

    def rate(gpus: str, moc: bool) -> float:
        one = group[gpus]
        room_s = (one.moc_snapshot_s if moc else one.base_snapshot_s) - (one.forward_backward_s - one.exchange_s)
        return assumed * one.exchange_s / room_s

    return max(rate("64", True), rate("512", False)), min(rate("128", True), rate("1024", False))


MTBF_S = 3600.0
RESTART_S = 300.0
"""Of the comparison of 6.2.5, which gives no rates: assumed."""


def overheads() -> dict[str, tuple[int, float, float]]:
    """By strategy: (interval, seconds of saving one checkpoint, share of the training time lost), eq. 12 and 13.

    On 256 A800 GPUs. The full method takes the interval that Young's estimate gives it; MoC the same one (strategy 1 of
    6.2.5), and one with the same share of time for saving, or every iteration where it saves for nothing (strategy 2).
    """
    one = panels()["a: A800, DP + EP"][str(published("moc")["fig13"]["general_gpus"])]
    full_s = moc_save_overhead_s(one.base_snapshot_s, one.forward_backward_s)
    moc_s = moc_save_overhead_s(one.moc_snapshot_s, one.forward_backward_s)
    iteration_s, iterations = one.forward_backward_s, 100_000
    run = TrainingRun(iterations, iteration_s, iteration_s / MTBF_S, RESTART_S)
    interval = in_iterations(young(full_s, MTBF_S), iteration_s)
    shorter = max(1, round(interval * moc_s / full_s))
    chosen = {
        "full": (interval, full_s),
        "MoC, same interval": (interval, moc_s),
        "MoC, shorter interval": (shorter, moc_s),
    }
    return {
        name: (every, save_s, moc_overhead_s(save_s, every, run) / (iterations * iteration_s))
        for name, (every, save_s) in chosen.items()
    }


def figure() -> Figure:
    """Fig. 13 beside what the text says of it (MoC 6.2.4), and the comparison of 6.2.5."""
    (lowest, highest), given, groups = rates_that_agree(), published("moc")["fig13"], panels()
    a, said, assumed = groups["a: A800, DP + EP"], statements(), machines()["a800"].node_bytes_per_s
    return Figure(
        "moc_fig13",
        {
            "figure": "MoC-System Fig. 13",
            "panels": {
                name: {
                    label: vars(one) | {field: getattr(one, field) for field in _WHOLE.values()}
                    for label, one in group.items()
                }
                for name, group in groups.items()
            },
            "node_bytes_per_s_that_agree": [lowest, highest],
            "statements": [{"statement": text, "holds": holds} for text, holds in said.items()],
            "overheads": {
                name: {"interval": every, "save_s": save_s, "overhead_share": share}
                for name, (every, save_s, share) in overheads().items()
            },
            "published": given,
        },
        (
            *map(_panel, groups.values()),
            ((label, one.base_persist_bytes, one.moc_persist_bytes, one.moc_persist_bytes / one.base_persist_bytes)
                 for label, one in a.items()),
            ((name, *found) for name, found in overheads().items()),
            ((text, "holds" if holds else "does not hold") for text, holds in said.items()),
        ),
        _draw,
        (
            Fact("Experts that MoC-Async saves", given["moc_expert_share"], "share"),
            Fact("Network of an A800 node, assumed", f"{assumed / 1e9:g} GB/s"),
            Fact("With which the text of (a) holds", f"{lowest / 1e9:.1f} to {highest / 1e9:.1f} GB/s"),
        ),
    )  # fmt: skip


def statements() -> dict[str, bool]:
    """What the text says of the figure, and whether it comes out."""
    by_panel = {name[0]: list(group.values()) for name, group in panels().items()}
    a, lengths, sizes = by_panel["a"], by_panel["d"], by_panel["e"]
    passes_s, snapshots_s = ([getattr(bar, field) for bar in a] for field in _PASSES_AND_SNAPSHOTS)
    hidden = {panel: [bar.base_snapshot_s <= bar.forward_backward_s for bar in by_panel[panel]] for panel in "abc"}
    only_1024, above_64 = ([gpus > most for gpus in GPUS] for most in (512, 64))
    passes, snapshots = (getattr(sizes[-1], field) / getattr(sizes[0], field) for field in _PASSES_AND_SNAPSHOTS)
    return {
        "(a) passes take longer with more GPUs": _rises(passes_s),
        "(a) Base-Async is hidden from 1024 GPUs on": hidden["a"] == only_1024,
        "(a) passes bound MoC-Async above 64 GPUs": [bar.forward_backward_s > bar.moc_snapshot_s for bar in a]
        == above_64,
        "(a) snapshots stay similar": max(snapshots_s) < 1.05 * min(snapshots_s),
        "(b) Base-Async is hidden from 1024 GPUs on": hidden["b"] == only_1024,
        "(c) Base-Async is not hidden even with 1024 GPUs": not any(hidden["c"]),
        "(d) passes grow with the sequence, snapshots do not": _rises(bar.forward_backward_s for bar in lengths)
        and len({bar.base_snapshot_s for bar in lengths}) == 1,
        "(e) the larger the model, the more MoC-Async saves": _rises(
            bar.base_async_s - bar.moc_async_s for bar in sizes
        ),
        "(e) snapshots grow more than passes": snapshots > passes,
        "(f) persisted bytes grow with GPUs, and MoC's are a fraction": _rises(bar.base_persist_bytes for bar in a)
        and all(bar.moc_persist_bytes < bar.base_persist_bytes / 4 for bar in a),
        "MoC-Async is never slower than Base-Async, nor that than Baseline": all(
            bar.moc_async_s <= bar.base_async_s < bar.baseline_s for group in by_panel.values() for bar in group
        ),
    }


def _rises(values: Iterable[float]) -> bool:
    return all(before < after for before, after in itertools.pairwise(values))


_WHOLE = {"Baseline": "baseline_s", "Base-Async": "base_async_s", "MoC-Async": "moc_async_s"}


def _panel(group: Mapping[str, MocIterationCost]) -> Rows:
    fields = (*_PASSES_AND_SNAPSHOTS, "moc_snapshot_s", *_WHOLE.values())
    return [(label, *(getattr(bar, field) for field in fields)) for label, bar in group.items()]


def _draw(axes: list[Any]) -> None:
    for axis, (name, group) in zip(axes, panels().items(), strict=False):
        series = {label: [getattr(one, field) for one in group.values()] for label, field in _WHOLE.items()}
        bars(axis, list(group), series, title=f"({name[0]}){name[2:]}", ylabel="s (line: passes)")
        axis.plot(range(len(group)), [one.forward_backward_s for one in group.values()], "k_", markersize=24)
    group = panels()["a: A800, DP + EP"]
    series = {
        "all experts": [one.base_persist_bytes / 1e12 for one in group.values()],
        "MoC": [one.moc_persist_bytes / 1e12 for one in group.values()],
    }
    lines(axes[5], list(group), series, title="(f) persisted files", ylabel="TB", yscale="log")
