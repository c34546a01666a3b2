"""What a fault kept from following the iteration to which training was brought back: its evaluation and its save.

A rank that outlives a fault puts its state aside as it is after the optimizer's step. When all ranks stand there again,
the loop continues with the next iteration: what was due in between, no call of the loop comes back to. It is made up
for here, by the loop's own functions, and reads the very samples that the undisturbed evaluation reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from ..core_versions.training import forget_auxiliary_losses
from ..megatron_state.trainer_state import random_states, restore_random
from .dense import newest_iteration
from .iteration import StockCounts
from .seams import Call

_UNKNOWN = 2**62


class DeferredSaves:
    """Sequence: `agree` when the state is restored; a block of `reading_on` in which data iterators are built; `starts`
    when training does; `make_up` when all ranks stand at one iteration.

    All but `reading_on` and `starts` are collectives; they do nothing where training was not brought back from
    snapshots.
    """

    def __init__(self, loop: Any, state: StockCounts, manager: Any, *, recovered: bool) -> None:
        self._loop, self._state, self._manager, self._recovered = loop, state, manager, recovered
        self._args, self._built_at = loop.get_args(), state.validated
        self._train: Call | None = None

    def agree(self) -> None:
        """Before data are read: some ranks were parked before the evaluation, others after it. Those that have yet to
        replay learn in `make_up` what was read."""
        if self._recovered:
            self._agree(knows=not self._manager.is_replaying)

    @contextlib.contextmanager
    def reading_on(self) -> Iterator[None]:
        """A block in which data iterators are built that read on where evaluations stand.

        The loop takes a count of 0 for a checkpoint that has none, and estimates it.
        """
        args, iteration = self._args, self._args.iteration
        if self._recovered and self._state.validated == 0 and not getattr(args, "phase_transition_iterations", None):
            args.iteration = 0
        try:
            yield
        finally:
            args.iteration, self._built_at = iteration, self._state.validated

    def starts(self, train: Call) -> None:
        """The loop's `train` is called."""
        self._train = train

    def make_up(self) -> None:
        """Evaluate and save as the iteration at which all ranks stand asks for, where that was not done."""
        if not self._recovered or self._train is None:
            return
        self._agree(knows=True)
        self._pass_by(self._train)
        iteration = self._manager.iteration
        if self._state.evaluated < iteration:
            if self._evaluation_is_due(iteration):
                self._evaluate(self._train, iteration)
            self._state.evaluated = iteration
        if self._save_is_due(iteration) and newest_iteration(self._args.save) < iteration:
            self._save(self._train, iteration)

    def _agree(self, *, knows: bool) -> None:
        state = self._state
        counts = (state.evaluated, state.validated) if knows else (_UNKNOWN, _UNKNOWN)
        agreed = torch.tensor(counts, dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
        evaluated, validated = map(int, agreed.tolist())
        if knows:
            state.evaluate_from(evaluated, validated)

    def _pass_by(self, train: Call) -> None:
        """Read what evaluations have read of which only the replayed iterations tell."""
        args = self._args
        samples = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        batches = (self._state.validated - self._built_at) // (samples * args.data_parallel_size)
        if batches <= 0 or getattr(args, "full_validation", False):  # which reads from the start each time
            return
        given = train["valid_data_iterator"]
        machine, random = get_rerun_state_machine(), random_states()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)  # else what is read is kept, to be read again
        for data in given if isinstance(given, list) else [given]:  # one of each model chunk
            for _ in range(batches if data is not None else 0):
                next(data)
        machine.set_mode(mode)
        restore_random(random)

    def _evaluation_is_due(self, iteration: int) -> bool:
        args, first = self._args, getattr(self._args, "start_eval_at_iter", None)
        if not args.do_valid or not args.eval_interval or iteration % args.eval_interval:
            return False
        return first is None or iteration >= first

    def _evaluate(self, train: Call, iteration: int) -> None:
        self._loop.evaluate_and_print_results(
            f"iteration {iteration}",
            train["forward_step_func"],
            train["valid_data_iterator"],
            train["model"],
            iteration,
            train["process_non_loss_data_func"],
            train["config"],
            verbose=False,
            write_to_tensorboard=True,
            non_loss_data_func=train["non_loss_data_func"],
            **train.given("pg_collection", "p2p_communicator"),
        )

    def _save_is_due(self, iteration: int) -> bool:
        args = self._args
        return bool(args.save and args.save_interval and iteration % args.save_interval == 0)

    def _save(self, train: Call, iteration: int) -> None:
        self._loop.save_checkpoint_and_time(
            iteration,
            train["model"],
            train["optimizer"],
            train["opt_param_scheduler"],
            self._state.operations,
            train["checkpointing_context"],
            train_data_iterator=train["train_data_iterator"],
        )


# What the stock loop leaves out while it runs iterations again.
#
# Nothing is evaluated, logged or saved then, and of what the loop sets up in its first iteration, that waits which a
# replay has taken out. Where only some stages of the pipeline replay, the others wait and answer no collective.

_LEFT_OUT = "do_valid", "log_params_norm"
"""What `args` asks for in each iteration, beside its logging: both have collectives over all ranks."""


class SuppressedEffects:
    """Sequence: `begin` before the first replayed iteration; `end` and `go_on` when all ranks stand at one iteration.

    loop: the module that has the loop. manager: of checkpoints.
    """

    def __init__(self, loop: Any, manager: Any) -> None:
        self._args, self._manager = loop.get_args(), manager
        self._asked: dict[str, bool] = {}
        self._mode: RerunMode | None = None
        self._put_off: Call | None = None

    def begin(self) -> None:
        """From here on iterations are run again."""
        for name in _LEFT_OUT:
            self._asked[name] = getattr(self._args, name, False)
            setattr(self._args, name, False)
        if self._manager.replays_alone:
            # Its verdict is a sum over all ranks. What it looks for would show in the loss, which is compared.
            machine = get_rerun_state_machine()
            self._mode = machine.get_mode()
            machine.set_mode(RerunMode.DISABLED)

    def end(self) -> None:
        """What `args` asks for is as it was; does nothing where nothing was replayed."""
        for name, asked in self._asked.items():
            setattr(self._args, name, asked)
        self._asked = {}
        if self._mode is not None:
            get_rerun_state_machine().set_mode(self._mode)
            self._mode = None

    def go_on(self) -> None:
        """Continue with the call that was put off, if any."""
        if self._put_off is not None:
            call, self._put_off = self._put_off, None
            call.go_on()
            _align_gathers(call["model_chunks"], self._args)

    def later(self, call: Call) -> None:
        """Put a call off until the replay has ended."""
        self._put_off = call

    def forget_losses(self) -> None:
        """What a replayed iteration adds to the auxiliary losses that are reported."""
        forget_auxiliary_losses()


def _align_gathers(chunks: Any, args: Any) -> None:
    """As the loop does where it enables the hooks that gather parameters."""
    if args.overlap_param_gather and args.align_param_gather:
        from megatron.core.utils import get_model_config

        functions = [chunk.start_param_sync for chunk in chunks]
        get_model_config(chunks[0]).param_sync_func = functions[0] if len(functions) == 1 else functions
