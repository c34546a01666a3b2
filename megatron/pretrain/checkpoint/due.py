"""When dense checkpoints are saved."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe import MoECheckpointManager
from megatron.pretrain.checkpoint.hf_export import Exports
from megatron.pretrain.checkpoint.save import Saver
from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.progress import log_progress


class Checkpoints:
    """Saves where `--save-interval` asks for it, and at the end; without `--save` never. Methods are collectives."""

    def __init__(self, state: TrainingState, manager: MoECheckpointManager) -> None:
        self._state, self._manager = state, manager
        self._exports = exports = Exports(state.config, state.progress.iteration)
        # Nothing here refers to itself in a circle: what a survivor had before a fault goes at once, with its memory.
        self._saver = Saver(state, lambda: exports.needed) if state.config.checkpoint.save else None
        self._noted_iteration: int | None = None

    @property
    def has_newest(self) -> bool:
        """Whether the iteration at which training stands is saved."""
        return self._saver is not None and self._saver.saved_iteration == self._state.progress.iteration

    def save_if_due(self) -> None:
        """After an iteration."""
        if self._saver is not None:
            self._saver.poll()
            self._note_saved()
            self._exports.poll()
            if self._is_due:
                self._save(self._saver)

    def save_if_missed(self) -> None:
        """After a recovery: a fault may have struck before what was due was written."""
        if self._saver is not None and self._is_due:
            if not self._saver.is_published(self._state.progress.iteration):
                self._save(self._saver)
            else:
                self._exports.saved(self._state.progress.iteration)

    def finish(self, *, early: bool = False) -> None:
        """Wait for what is being written, and save the last iteration if that was not saved yet.

        early: there is no time to wait for exports, which the next start can make.
        """
        if self._saver is None:
            return
        self._saver.wait()
        if self._state.progress.iteration and not self.has_newest:
            self._save(self._saver)
            self._saver.wait()
        self._note_saved()
        if early:
            self._exports.abandon()
        self._exports.finish()

    def abandon(self) -> None:
        """Give up what is being written; no collective."""
        self._exports.abandon()
        if self._saver is not None:
            self._saver.abandon()

    @property
    def _is_due(self) -> bool:
        interval = self._state.config.checkpoint.save_interval
        return bool(interval) and self._state.progress.iteration % (interval or 1) == 0

    def _note_saved(self) -> None:
        """Write down in the progress file what was published since the last call."""
        assert self._saver is not None
        if self._saver.saved_iteration != self._noted_iteration:
            self._noted_iteration = self._saver.saved_iteration
            log_progress(self._state, f"Saved checkpoint\tIteration: {self._noted_iteration}")
            if self._noted_iteration is not None:
                self._exports.saved(self._noted_iteration)

    def _save(self, saver: Saver) -> None:
        saver.save()
        self._note_saved()
        self._manager.saved()
