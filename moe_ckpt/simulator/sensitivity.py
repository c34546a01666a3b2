"""What a recommendation owes to constants that were fitted or assumed: ETTR at both ends of a band of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from .choices import Question
from .closed_form import ettr
from .constants import FOUND, MOEVEMENT, Constants
from .systems import SYSTEMS, CheckpointSystem

STOCK = "torch_dist_async"
"""Megatron-Core's own asynchronous checkpoints, which need nothing of this project."""


@dataclass(frozen=True)
class Sensitivity:
    """A constant at an end of its band: the interval that would be recommended, and ETTR by formula of the recommended
    system and of `STOCK`."""

    constant: str
    value: float
    interval: int
    ettr: float
    stock_ettr: float


STORAGE, FASTER_STORAGE = "storage_bytes_per_s", 10
"""Of a cluster of any size its preset assumes one rate; large ones have so many times more."""


def bands(constants: Constants, contention: float) -> dict[str, tuple[float, float]]:
    """The fitted constants that jobs of this project depend on, and between which values they may lie.

    Args:
        constants: Those of the question.
        contention: The share of copies that slows training now.
    """
    found = {
        # From what the link takes of the memory's rate to what a small model's iterations were longer on one H100;
        # what was fitted to DeepSpeed over 10 Gb/s lies between them.
        "contention": tuple(sorted((contention, FOUND["measured"]["contention"]))),
        "network_share": (constants.network_share / 2, min(1.0, constants.network_share * 1.2)),
        "persist_stall_s": (0.0, 2 * constants.persist_stall_s),
        "upload_slowdown": tuple(sorted((constants.upload_slowdown, MOEVEMENT.upload_slowdown))),
    }
    if not constants.knows_restart:
        found["cold_launch_s"] = (constants.cold_launch_s / 4, 2 * constants.cold_launch_s)
    return {name: (low, high) for name, (low, high) in found.items()}


def sensitivity(question: Question, system: CheckpointSystem) -> Iterator[Sensitivity]:
    """Both ends of the band of each fitted constant, and faster storage, whose rate is assumed of most clusters.

    Args:
        question: The job, its cluster and the mean time between faults.
        system: That is recommended, with its settings.
    """
    setting = question.setting
    faster = FASTER_STORAGE * setting.cluster.storage_bytes_per_s
    tried: dict[str, tuple[float, ...]] = {**bands(setting.constants, setting.contention), STORAGE: (faster,)}
    for name, ends in tried.items():
        for value in ends:
            given = cast("Any", {name: value})
            if name == "upload_slowdown" and setting.constants.persist_slowdown == setting.constants.upload_slowdown:
                given["persist_slowdown"] = value  # what uploads of this project take was not fitted apart
            if name == STORAGE:
                asked = replace(setting, cluster=replace(setting.cluster, **given))
            else:
                asked = replace(setting, constants=replace(setting.constants, **given))
            if name != "network_share":  # nothing else moves a window, and to find one takes longest
                asked.__dict__["settled"] = setting.settled
            found = [one.behaviour(asked, question.mtbf_s) for one in (system, SYSTEMS[STOCK])]
            ettrs = [ettr(one, question.mtbf_s, question.run_s) for one in found]
            yield Sensitivity(name, value, found[0].interval, *ettrs)
