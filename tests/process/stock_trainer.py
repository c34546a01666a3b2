"""The training loop of Megatron-LM in the hands of a hook, which runs its iterations one at a time.

The loop's `train` makes everything ready; where it calls `train_step` for the first time, the hook has its turn.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

NORM_REDUCTION = "reduce_max_stat_across_model_parallel_group"


@contextlib.contextmanager
def before_training(examine: Callable[[Trainer], None]) -> Iterator[None]:
    """Call `examine` before the first iteration, and train on from the state that it leaves."""
    import megatron.training
    from megatron.training import training

    pretrain = megatron.training.pretrain

    @functools.wraps(pretrain)
    def examined(*arguments: Any, **options: Any) -> Any:
        # By now training is protected, which it refuses to be once these functions are replaced.
        step, build = training.train_step, training.build_train_valid_test_data_iterators
        datasets: list[Callable[[], Any]] = []
        validation: list[Any] = []

        @functools.wraps(build)
        def building(provider: Any) -> Any:
            kept = functools.cache(provider)
            datasets.append(lambda: kept(training.get_train_valid_test_num_samples())[0])
            iterators = build(kept)
            validation.append(iterators[1])
            return iterators

        @functools.wraps(step)
        def first_step(*given: Any, **named: Any) -> Any:
            training.train_step = step
            bound = inspect.signature(step).bind(*given, **named).arguments
            of_chunks = isinstance(bound["data_iterator"], list)
            trainer = Trainer(bound, datasets, validation if of_chunks else validation[0])
            examine(trainer)
            if training.should_disable_forward_pre_hook(trainer.args):  # the loop enables them after its first step
                training.disable_forward_pre_hook(trainer.chunks, param_sync=False)
            trainer.args.curr_iteration = trainer.state.iteration
            return step(*given, **named)

        with (
            mock.patch.object(training, "train_step", first_step),
            mock.patch.object(training, "build_train_valid_test_data_iterators", building),
        ):
            return pretrain(*arguments, **options)

    with mock.patch.object(megatron.training, "pretrain", examined):
        yield


@contextlib.contextmanager
def instead_of_training(examine: Callable[[Trainer], Any], folder: str) -> Iterator[None]:
    """End well after `examine`, with a file of this rank in the folder that has the facts it found."""

    def run(trainer: Trainer) -> None:
        facts = examine(trainer)
        (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))
        raise SystemExit(0)

    with before_training(run):
        yield


@contextlib.contextmanager
def after_training(examine: Callable[[Any], None]) -> Iterator[None]:
    """Call `examine` behind the last iteration, with `chunks` and `optimizer` as they then are."""
    import megatron.training
    from megatron.training import training

    pretrain = megatron.training.pretrain

    @functools.wraps(pretrain)
    def examined(*arguments: Any, **options: Any) -> Any:
        train = training.train  # by now training is protected

        @functools.wraps(train)
        def trained(*given: Any, **named: Any) -> Any:
            result = train(*given, **named)
            bound = inspect.signature(train).bind(*given, **named).arguments
            examine(SimpleNamespace(chunks=bound["model"], optimizer=bound["optimizer"]))
            return result

        with mock.patch.object(training, "train", trained):
            return pretrain(*arguments, **options)

    with mock.patch.object(megatron.training, "pretrain", examined):
        yield


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """Run the schedules with other settings of Megatron-Core than Megatron-LM takes on this device."""
    import pretrain_gpt_moe

    build_model = pretrain_gpt_moe.model_provider

    @functools.wraps(build_model)
    def build(*given: Any, **named: Any) -> Any:
        model = build_model(*given, **named)
        vars(model.config).update(settings)
        return model

    with mock.patch.object(pretrain_gpt_moe, "model_provider", build):
        yield


class Trainer:
    """The objects that the loop trains, and its iterations.

    Attributes:
        args: Of Megatron-LM.
        config: Of the model.
        state: What training keeps beside weights and moments; its `iteration` is where training stands.
        manager: Protects passes and steps; does nothing unless another one is put here.
        data: What the next iterations read.
        validation: What evaluations read.
    """

    def __init__(self, given: dict[str, Any], datasets: list[Callable[[], Any]], validation: Any) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState
        from megatron.core.dist_checkpointing.moe.stock.iteration import StockCounts
        from megatron.training import training

        self._given, self._datasets, self.validation = given, datasets, validation
        self.args, self.data, self.config = training.get_args(), given["data_iterator"], given["config"]
        self.chunks, self.optimizer, self.scheduler = (
            given[name] for name in ("model", "optimizer", "opt_param_scheduler")
        )
        self.state = LiveTrainerState(self.optimizer, self.scheduler, StockCounts(self.args, training, {}))
        self.manager = self.managed()
        if training.should_disable_forward_pre_hook(self.args):  # as the loop does after its first step
            training.enable_forward_pre_hook(self.chunks)

    @property
    def microbatches(self) -> int:
        """Of an iteration, on this rank."""
        from megatron.training import training

        return int(training.get_num_microbatches())

    def managed(self, session: Any = None, **options: Any) -> Any:
        """A manager around this session, or as the options say; it does nothing without either."""
        from megatron.core.dist_checkpointing.moe import MoECheckpointManager

        sizes = {name: getattr(self.args, name) for name in ("global_batch_size", "micro_batch_size", "seq_length")}
        iterations = self.args.train_iters
        return MoECheckpointManager(
            self.chunks, self.optimizer, self.scheduler, train_iters=iterations, session=session, **sizes, **options
        )

    def communicate(self, communicator: Any) -> Any:
        """Let the schedules send and receive through `communicator`; returns the session that says so."""
        from megatron.core.dist_checkpointing.moe.runtime.session import Session

        session = Session()
        session.communicator = communicator
        self.manager = self.managed(session)
        return session

    def iterate(self) -> Any:
        """One iteration, without logging, evaluation and checkpoints; how it came out."""
        from megatron.core.dist_checkpointing.moe.types import StepJournal
        from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
        from megatron.training import training

        self.args.curr_iteration = self.state.iteration
        options = {"data_iterator": self.data, "forward_backward_func": self.forward_backward}
        norms, reduce = [], getattr(training, NORM_REDUCTION)

        def noting(norm: float | None, **named: Any) -> float | None:
            norms.append(norm)
            reduced: float | None = reduce(norm, **named)
            return reduced

        with mock.patch.object(training, NORM_REDUCTION, noting):
            # Without what is wrapped around it: that is the manager's turn here.
            losses, skipped, *_ = inspect.unwrap(training.train_step)(
                **self._given | options | {"iteration": self.state.iteration}
            )
        self.args.consumed_train_samples += self.args.global_batch_size
        self.state.iteration += 1
        self.manager.step_done()
        clear_aux_losses_tracker()
        loss = float(losses["lm loss"]) if losses else None
        norm = norms[0]  # as gradients were clipped by it: the loop rounds it to fp32
        return StepJournal(None if norm is None else float(norm), bool(skipped), loss)

    def forward_backward(self, **options: Any) -> Any:
        """The passes of one iteration."""
        from megatron.core.dist_checkpointing.moe.stock.iteration import boundary, mean_loss
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self.manager.forward_backward():
            losses = get_forward_backward_func()(**options | boundary(self.manager, options))
        self.manager.loss = mean_loss(losses)
        return losses

    def evaluate(self, **options: Any) -> None:
        """An evaluation as the loop does it; options: of its schedules."""
        from megatron.training import training

        training.evaluate_and_print_results(
            f"iteration {self.state.iteration}",
            self._given["forward_step_func"],
            self.validation,
            self.chunks,
            self.state.iteration,
            None,
            self.config,
            **options,
        )

    @torch.no_grad()
    def forward(self) -> None:
        """The forward passes of one iteration."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        machine = get_rerun_state_machine()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)  # as in evaluations
        get_forward_backward_func()(
            forward_step_func=self._given["forward_step_func"],
            data_iterator=self.data,
            model=self.chunks,
            num_microbatches=self.microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=True,
        )
        machine.set_mode(mode)

    def read_on(self) -> None:
        """Read data from where training stands."""
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training.training import build_pretraining_data_loader

        read = []
        with torch.random.fork_rng(devices=()):  # an iterator draws its seed
            for dataset in self._datasets:
                loader = build_pretraining_data_loader(dataset(), self.args.consumed_train_samples)
                read.append(None if loader is None else RerunDataIterator(iter(loader)))
        self.data = read if isinstance(self._given["data_iterator"], list) else read[0]

    def sharded_state_dict(self) -> dict[str, Any]:
        """What the loop would save."""
        from megatron.core.dist_checkpointing.moe.stock import dense
        from megatron.core.utils import unwrap_model
        from megatron.training import checkpointing

        metadata = {"metadata": checkpointing._build_sharded_state_dict_metadata(self.args)}
        is_raw = dense.saves_raw(self.args, self.optimizer)
        with dense.generating(self.chunks, self.optimizer) if is_raw else contextlib.nullcontext():
            found = checkpointing.generate_state_dict(
                self.args,
                unwrap_model(self.chunks),
                self.optimizer,
                self.scheduler,
                None,
                optim_sd_kwargs=metadata,
                model_sd_kwargs=metadata,
            )
        return {name: value for name, value in found.items() if name != "args"}
