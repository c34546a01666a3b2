"""A training job on this rank: what it trains, and training it, also through faults in which this process stays."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

from megatron.core.dist_checkpointing.moe import MoECheckpointManager, Timestamps
from megatron.core.dist_checkpointing.moe.in_place.building import own_build
from megatron.core.dist_checkpointing.moe.in_place.called_off import unless_called_off
from megatron.core.dist_checkpointing.moe.in_place.kept_process import KeptProcess
from megatron.core.dist_checkpointing.moe.seats.seat import own_seat
from megatron.pretrain.assemble import build_metrics, build_state, run_facts
from megatron.pretrain.batches import build_splits
from megatron.pretrain.checkpoint.protect import resume
from megatron.pretrain.checkpoint.state import Lineage, Progress
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import PretrainError, TrainingFailure
from megatron.pretrain.initialize import Launch, connect, marks_of_this_process
from megatron.pretrain.loop import Trainer
from megatron.pretrain.progress import log_progress
from megatron.pretrain.tokenizer import build_tokenizer

log = logging.getLogger(__name__)


class Pretraining:
    """Model, optimizer and data of this rank, built once; all ranks are connected."""

    def __init__(self, config: PretrainConfig) -> None:
        data = config.data
        tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
        self._config = config
        with own_build().building():
            self._state, self._transformer = build_state(config, tokenizer)
            self._datasets = build_splits(config, tokenizer)
            self._metrics = build_metrics(config)

    def train(self, launch: Launch, marks: Timestamps) -> None:
        """Resume if there is something to resume from, and train to the end."""
        kept = KeptProcess(self._state.chunks, self._state.optimizer)
        while True:
            manager = None
            try:
                if kept.has_left:
                    unless_called_off(partial(connect, self._config, launch, marks), own_seat())
                    kept.connected()
                manager = resume(self._state, launch, marks)
                self._run(manager, launch)
                break
            except Exception as error:
                kept.stay(error, manager)
                launch = Launch.from_environment()
                marks = marks_of_this_process(own_seat().taken_s, stayed=True)
                # What training counts comes back with the rest of its state, on all ranks alike.
                self._state = dataclasses.replace(self._state, progress=Progress(), lineage=Lineage())
        log_progress(self._state, f"Ended training\tIteration: {self._state.progress.iteration}", launch)
        self._metrics.close()

    def _run(self, manager: MoECheckpointManager, launch: Launch) -> None:
        self._metrics.began(run_facts(self._state, self._transformer, launch.place.job_here))
        while self._state.loads:
            self._metrics.loaded(self._state.loads.pop(0).to_data())
        log_progress(self._state, f"Started training\tIteration: {self._state.progress.iteration}", launch)
        trainer = Trainer(self._state, self._transformer, self._datasets, self._metrics, manager)
        try:
            with driver_errors(), manager.run():
                trainer.run()
        except Exception as error:
            trainer.abandon()
            if isinstance(error, PretrainError) and manager.replays_alone:
                # Rank 0, which speaks for all, may be one of those that wait and know nothing of it.
                raise TrainingFailure(str(error)) from error
            raise
