"""Lets Megatron-LM save a dense checkpoint into a hidden folder, and publishes that when it is whole."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megatron.core.dist_checkpointing import validation
from moe_ckpt.dense.dense import require_complete
from moe_ckpt.dense.integrity import FORMAT_VERSION, MARK, FileSum, seal
from moe_ckpt.dense.names import DOUBTFUL

from ..errors import format_error
from ..storage.manifest import is_keyed
from .directory import CheckpointDirectory
from .writing import Finishing, RankFailure, finish, raise_on_all_ranks, summed, take_sums, write_now

log = logging.getLogger(__name__)


class Addition(Protocol):
    """Adds files of its own to checkpoints."""

    def complete(self, staging: Path, iteration: int) -> None:
        """Before a checkpoint is sealed, on rank 0: add to its folder.

        Args:
            staging: The folder, before it gets its name.
            iteration: The iteration that is saved.

        Raises:
            OSError: It cannot be written.
        """

    def published(self, iteration: int) -> None:
        """On all ranks, when the checkpoint is there."""


def mark_doubtful(root: str | Path, iteration: int, *, in_doubt: bool) -> None:
    """A checkpoint was saved in place; rank 0 marks it, or takes the mark of an earlier one away.

    Args:
        root: The folder of all checkpoints.
        iteration: The iteration that was saved.
        in_doubt: Whether core saved to have a doubtful iteration run again from it.
    """
    if dist.get_rank() == 0:
        mark = CheckpointDirectory(root).folder(iteration) / DOUBTFUL
        try:
            mark.touch() if in_doubt else mark.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be changed: %s; a restart may take snapshots for it", mark, error.strerror)


def is_doubtful(root: str | Path, iteration: int) -> bool:
    """Whether a checkpoint was saved to have a doubtful iteration run again from it.

    Args:
        root: The folder of all checkpoints.
        iteration: Of the checkpoint.
    """
    return (CheckpointDirectory(root).folder(iteration) / DOUBTFUL).is_file()


@dataclass(frozen=True)
class _BegunSave:
    """One that Megatron-LM has begun."""

    directory: CheckpointDirectory
    iteration: int
    addition: Addition | None = None
    in_doubt: bool = False

    @property
    def staging(self) -> Path:
        return self.directory.staging(self.iteration)

    @property
    def final(self) -> Path:
        return self.directory.folder(self.iteration)


class DenseSaves:
    """Around each save of a job: `checkpoint` around `save_checkpoint`, and inside of it `shards` around core's `save`.

    Collectives. A checkpoint that cannot be written is reported; training continues, and older ones stay as they are.

    Args:
        secret: Path of the job's secret, if that is not in the environment.
        around_writing: Makes a block around the writing of this rank's shards, which waits for no other rank.
    """

    def __init__(
        self, secret: str | None, around_writing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._secret, self._around_writing = secret, around_writing
        self._begun: _BegunSave | None = None
        self._in_flight: set[_BegunSave] = set()
        self._published: dict[Path, int] = {}

    def has(self, root: str | Path, iteration: int) -> bool:
        """Whether the newest checkpoint that was published is that of this iteration.

        Args:
            root: The folder of all checkpoints.
            iteration: The iteration.
        """
        return self._published.get(Path(root)) == iteration

    def checkpoint(
        self,
        root: str | Path,
        iteration: int,
        save: Callable[[], Any],
        addition: Addition | None = None,
        *,
        in_doubt: bool = False,
    ) -> Any:
        """Save a checkpoint.

        Args:
            root: The folder of all checkpoints.
            iteration: The iteration that is saved.
            save: Saves it below `root`.
            addition: What adds files of its own; None: nothing does.
            in_doubt: Whether core saves to have a doubtful iteration run again.

        Returns:
            What `save` returns; None where it could not be saved.
        """
        begun = _BegunSave(CheckpointDirectory(root), iteration, addition, in_doubt)
        try:
            self._prepare(begun)
            self._begun = begun
            return save()
        except RankFailure as failure:
            self._give_up(begun, str(failure))
            return None
        except BaseException:  # such as a lost rank: survivors save again
            self._in_flight.discard(begun)
            raise
        finally:
            self._begun = None

    def shards(self, save: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """In place of core's `save`.

        Args:
            save: Core's function.
            given: The parameters that it is called with, by name.

        Returns:
            What `save` returns.

        Raises:
            RankFailure: On all ranks, if the checkpoint could not be saved.
        """
        begun = self._begun
        if begun is None or Path(given["checkpoint_dir"]) != begun.final:
            return save(**given)
        if dist.get_rank() == 0:
            with suppress(OSError):  # what Megatron-LM made to write into would look like one that was torn
                begun.final.rmdir()
        is_async = given["async_sharded_save"]
        changed = {
            "checkpoint_dir": str(begun.staging),
            "async_sharded_save": True,
            "async_strategy": given["async_strategy"] if is_async else "mcore",  # as core's own strategy saves in place
            "content_metadata": (given["content_metadata"] or {}) | {MARK: FORMAT_VERSION},
        }
        hashes = given.get("verify_integrity", False)
        if hashes:  # core's list of hashes comes when all files are there, and none that goes again
            changed["verify_integrity"] = False
        request = summed(save(**{**given, **changed}), begun.staging, self._secret)
        self._in_flight.add(begun)
        if not is_async:
            write_now(request, self._around_writing)
        sums: dict[str, FileSum] = {}
        steps = [
            *request.finalize_fns,
            lambda: self._take(begun, sums),  # behind those of core, which wait for the writers of all ranks
            lambda: self._publish(begun, sums, hashes=hashes),
            lambda: self._published_everywhere(begun),
        ]
        if is_async:
            return request._replace(finalize_fns=Finishing(steps, lambda why: self._give_up(begun, why)))
        for step in steps:
            finish(step)
        return None

    def _prepare(self, begun: _BegunSave) -> None:
        """Raises RankFailure, on all ranks, where one of them cannot write to the folder."""
        keep = frozenset(other.iteration for other in self._in_flight if other.directory.root == begun.directory.root)
        problem = None
        if dist.get_rank() == 0:
            try:
                begun.directory.stage(begun.iteration, keep - {begun.iteration}, is_signed=is_keyed())
                begun.directory.require_writable_tracker(begun.iteration)
            except OSError as error:
                problem = format_error(error)
        raise_on_all_ranks(problem)
        try:
            with tempfile.TemporaryFile(dir=begun.staging):
                pass
        except OSError as error:
            problem = format_error(error)
        raise_on_all_ranks(problem)

    def _take(self, begun: _BegunSave, sums: dict[str, FileSum]) -> None:
        if dist.get_rank() == 0:
            sums |= take_sums(begun.staging, dist.get_world_size())

    def _publish(self, begun: _BegunSave, sums: Mapping[str, FileSum], *, hashes: bool) -> None:
        """Raises OSError, UnreadableCheckpoint."""
        if dist.get_rank() == 0:
            # Shards that other nodes wrote to disks of their own are missing here: not a checkpoint to be loaded.
            require_complete(begun.staging)
            if begun.addition is not None:
                begun.addition.complete(begun.staging, begun.iteration)
            if begun.in_doubt:
                (begun.staging / DOUBTFUL).touch()
            if hashes:
                validation.save_integrity_manifest(str(begun.staging))
            begun.directory.require_own(begun.iteration)
            seal(begun.staging, sums)
            begun.directory.require_own(begun.iteration)  # what was read to be signed was in it, too
            begun.directory.place(begun.iteration)

    def _published_everywhere(self, begun: _BegunSave) -> None:
        """A step of its own: that of rank 0 before it may have failed, which ends the save on all ranks."""
        self._in_flight.discard(begun)
        self._published[begun.directory.root] = begun.iteration
        if begun.addition is not None:
            begun.addition.published(begun.iteration)

    def _give_up(self, begun: _BegunSave, why: str) -> None:
        self._in_flight.discard(begun)
        if dist.get_rank() == 0:
            begun.directory.discard(begun.iteration)
            log.error(
                "checkpoint of iteration %d was NOT saved to %s: %s; training continues, and older checkpoints stay",
                begun.iteration,
                begun.directory.root,
                why,
            )
