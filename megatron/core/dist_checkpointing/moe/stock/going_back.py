"""`--ckpt-step` into the folder that is saved to: training goes back once, and on from there after faults.

Megatron-LM leaves the tracker at the newest checkpoint until the first save, and a launcher gives the same flags at
each start. Here the tracker names the iteration as soon as training stands on it, and a file says which job went back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ckpt.dense.names import TRACKER
from moe_ckpt.dense.went_back import RECORD, WentBack, gone_back, went_back

from ..dense_saves.directory import CheckpointDirectory
from ..dense_saves.writing import on_rank_zero
from ..runtime.opening import one_spelling
from ..storage.system import write_atomically

log = logging.getLogger(__name__)


def followers(job: str, takes_over: Callable[[str], bool], args: Any) -> frozenset[str]:
    """The jobs that have followed `--ckpt-step`, this one among them where earlier starts did: then `args` have none.

    A collective: rank 0 looks.

    Args:
        job: This one's id.
        takes_over: Whether this job continues what another one stored.
        args: Of Megatron-LM.

    Returns:
        Their ids; none where this start has to follow it.
    """
    jobs = on_rank_zero(lambda: _followers(job, takes_over, args))
    if jobs:
        if dist.get_rank() == 0:
            log.warning(
                "--ckpt-step %d was followed by an earlier start (%s): training goes on from what was saved since; to"
                " go back once more, remove %s", args.ckpt_step, ", ".join(sorted(jobs)), Path(args.save) / RECORD,
            )  # fmt: skip
        args.ckpt_step = None
    return jobs


def came_to(iteration: int, args: Any, job: str, *, loaded: bool) -> None:
    """Let the tracker name the iteration that was asked for, where training continues from it. A collective.

    Args:
        iteration: From which training continues.
        args: Of Megatron-LM.
        job: This one's id.
        loaded: Whether it was loaded, and not restored from a snapshot.
    """
    if loaded and iteration == args.ckpt_step:
        on_rank_zero(lambda: _go_back(args, iteration, job))
    elif not loaded and args.ckpt_step and dist.get_rank() == 0:
        log.warning(
            "--ckpt-step %d holds for the first start of a job: this one continues from its iteration %d",
            args.ckpt_step, iteration,
        )  # fmt: skip


def _folder(args: Any) -> Path | None:
    """Where training is both loaded from and saved to."""
    same = args.load and args.save and "://" not in args.load and one_spelling(args.load) == one_spelling(args.save)
    return Path(args.save) if same else None


def _followers(job: str, takes_over: Callable[[str], bool], args: Any) -> frozenset[str]:
    root = _folder(args)
    found = WentBack() if root is None else went_back(root)
    if (
        root is None
        or found.iteration != args.ckpt_step
        or not any(one == job or takes_over(one) for one in found.jobs)
    ):
        return frozenset()
    if job not in found.jobs:  # of a chain of jobs the next one has to know all
        found = replace(found, jobs=(*found.jobs, job))
        with suppress(OSError):
            write_atomically(root / RECORD, found.encoded())
    return frozenset(found.jobs)


def _go_back(args: Any, iteration: int, job: str) -> None:
    if (root := _folder(args)) is None:
        return
    directory = CheckpointDirectory(root)
    try:
        directory.track(iteration)  # first: a flag that counts as followed needs a tracker of this training
        if getattr(args, "non_persistent_ckpt_type", None) == "global":  # and none that is read before it
            transient = Path(args.non_persistent_global_ckpt_dir or root / "non_persistent")
            (transient / TRACKER).unlink(missing_ok=True)
        write_atomically(root / RECORD, gone_back(root, iteration, job, directory.iterations()).encoded())
    except OSError as error:
        log.error("the next start goes back to iteration %d again: %s", iteration, error)
    if left := sorted(one for one in directory.iterations() if one > iteration):
        says = "training goes back to iteration %d: %s in %s are left, and only --ckpt-step loads them"
        log.warning(says, iteration, ", ".join(map(str, left)), root)
