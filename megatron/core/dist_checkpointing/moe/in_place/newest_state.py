"""Before the model is built: whether what this job left is a state of this model, by what its manifest says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import MoECheckpointConfig
from ..errors import MoECheckpointError, UsageError
from ..ports import Manifest
from ..runtime.process_info import ProcessInfo, slot_of
from ..storage.objects import open_durable
from ..storage.slot_reader import SEALED, SlotReader


def refuse_another_model(config: MoECheckpointConfig, changes: Callable[[Mapping[str, Any]], Sequence[str]]) -> None:
    """Refuse a state of another model: training would begin from iteration 0, for no tensor is found.

    Args:
        config: The settings.
        changes: What differs between what that state says of its loop, and this run.

    Raises:
        UsageError: Names what differs.
    """
    place = ProcessInfo.from_environment()
    if not place.job_id:  # others are named when all ranks have met
        return
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0")  # no process group says it yet
    found = newest_state(slot_of(config, place), config.persist_dir, rank, place.job_id)
    where, recorded = (found[0], found[1].facts.scalars.get("trainer")) if found is not None else ("", None)
    if isinstance(recorded, Mapping) and (told := "; ".join(changes(recorded))):
        raise UsageError(
            f"{told}, but {where} has the state of this job as it was: start with the settings of before, or under"
            " another job id"
        )


def newest_state(slot: Path, storage: str | None, rank: int, job_id: str) -> tuple[str, Manifest] | None:
    """Where the newest state of a rank lies, in memory or else in storage, and its manifest.

    Args:
        slot: The folder of its snapshots in memory, there or not.
        storage: `--moe-ckpt-persist-dir`, if it is given.
        rank: The rank.
        job_id: Of the job: storage may have others too.

    Returns:
        None where nothing can be read yet, as where a secret is still to be taken.
    """
    reader = SlotReader(slot)
    with contextlib.suppress(MoECheckpointError, ValueError):
        newest = max((entry for entry in reader.entries() if entry.state == SEALED), key=lambda one: one.snapshot)
        return str(slot), reader.manifest(newest)
    with contextlib.suppress(MoECheckpointError):
        if storage is not None:
            stored = open_durable(storage, rank)
            for snapshot in reversed(stored.snapshots(rank).sealed):
                with stored.open(snapshot) as found:
                    if found.manifest.facts.job == job_id:
                        return storage, found.manifest
    return None
