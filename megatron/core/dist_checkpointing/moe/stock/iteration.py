"""An iteration of the stock loop: how it came out, what stages send, what the loop counts, and what follows it."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from ..core_versions.training import forget_auxiliary_losses, replaced
from ..device import Arriving
from ..errors import UsageError
from ..megatron_state.trainer_state import COMMAND, SAMPLES, random_states, restore_random
from ..ports import Json
from ..recovery.timeline import RecoveryTimeline
from ..snapshot.coordinator import ProtectionReport
from .dense import AT_LEAST, newest_iteration
from .seams import Call


@dataclass(frozen=True)
class StockIteration:
    """How one iteration of the loop came out on this rank.

    losses: as the loop reports them, on the last pipeline stage. duration_s: of passes and step. stall_s: how long
    training waited for checkpoints. protection: None where nothing is protected, and in a replay. recovery: with the
    first new iteration after one. learning_rate, loss_scale: of the next iteration, as the loop logs them.
    """

    iteration: int
    losses: Mapping[str, float]
    grad_norm: float | None
    skipped: bool
    replayed: bool
    duration_s: float
    stall_s: float = 0.0
    protection: ProtectionReport | None = None
    recovery: RecoveryTimeline | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None


Report = Callable[[StockIteration], None]


def mean_loss(losses: Sequence[Mapping[str, torch.Tensor]]) -> Arriving | None:
    """The loss as the loop reports it: over microbatches and data-parallel ranks; None off the last pipeline stage.

    losses: what the forward step returned for each microbatch; its first entry is the one that is trained for.
    """
    if not losses:
        return None
    name = "lm loss" if "lm loss" in losses[0] else next(iter(losses[0]))
    parts = [part[name].view(-1) for part in losses]
    if parts[0].numel() == 1:
        return Arriving(torch.cat(parts).mean())
    total = torch.vstack(parts).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return Arriving(total[0] / total[1])


# What stages of a pipeline send each other, through the communicator that lets a single one replay from it.


def boundary(manager: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a schedule through which the stages of a pipeline send what a single one can replay from.

    Args:
        manager: The checkpoint manager, with the communicator.
        options: The options that the loop gives the schedule.

    Raises:
        UsageError: `pretrain` was given a communicator of its own.
    """
    if manager.communicator is None:
        return {}
    if options.get("p2p_communicator") is not None:
        raise UsageError(
            "`pretrain` was given a p2p_communicator, but what stages send has to go through that of the checkpoint"
            " subsystem: use --moe-ckpt-recovery global, or do without it"
        )
    return {"p2p_communicator": manager.communicator, "pg_collection": manager.process_groups}


_NEVER = -1
"""Of an iteration of the loop, by its own count."""

# Counts the iterations that all ranks train together, in place of those since a rank entered the loop's `train`.
#
# After a local recovery the two differ: a rank that replayed has entered `train` some iterations before the first
# common one, a rank that waited enters it there. What the loop does by its own count, and what has a collective of all
# ranks in it, would then be reached by some ranks only: the line of the first iteration is logged behind a barrier, and
# process groups get their timeout of after the start behind another one. `docs/internals/decisions/067-iterations-
# since-train.md` has a table of all that depends on the entry.


class CommonIterations:
    """Common iterations since this process was restored, or started.

    Args:
        loop: The module that has the loop.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, self._begun, self._entered = loop, 0, 0
        self._warm_up: int | None = None

    def entered(self, config: Any, *, replays: bool) -> None:
        """The loop's `train` is called: it captures modules in the iteration that a flag names, by its own count.

        Args:
            config: Of the model. It keeps the flag, which in `args` is what the loop has to count to.
            replays: Whether iterations are run again first, behind which modules are captured.
        """
        if getattr(config, "cuda_graph_impl", "none") != "transformer_engine":
            return
        args, self._entered = self._loop.get_args(), self._loop.get_args().iteration
        self._warm_up = config.cuda_graph_warmup_steps if replays else None
        args.cuda_graph_warmup_steps = _NEVER if replays else config.cuda_graph_warmup_steps

    def begin(self) -> None:
        """A common iteration begins. A collective of all ranks in the second one, if a timeout is to be set."""
        self._begun += 1
        args = self._loop.get_args()
        if self._begun == 1 and self._warm_up is not None:
            # One at least: the loop has passed the place of a capture in this iteration.
            args.cuda_graph_warmup_steps = args.curr_iteration - self._entered + max(1, self._warm_up)
        seconds = args.distributed_timeout_seconds_after_init
        if self._begun == 2 and seconds is not None:
            inspect.unwrap(self._loop.update_pg_timeout)(timedelta(seconds=seconds))

    @property
    def is_first(self) -> bool:
        """Whether the current iteration is the first common one; the same on all ranks."""
        return self._begun == 1


# What the loop counts, beside what model, optimizer and scheduler hold: progress in samples and iterations.


_COUNTS = "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"
_OPERATIONS = "num_floating_point_operations_so_far"
_EVALUATED = "evaluated_iteration"
_FLAGS = "flags"


class StockCounts:
    """The `LoopState` of the stock loop: the counts in its `args`, as they stand after the newest whole iteration.

    The loop adds to some of them only a while after the optimizer's step. What is to come until then is added here, so
    that a state that is put aside in between is whole.

    Args:
        args: Of Megatron-LM, which the loop reads them from when it starts.
        loop: The module that has the loop.
        flags: Those that shape an iteration, as they were given: the loop changes some in `args` while it trains.

    Attributes:
        evaluated: The newest iteration behind which the evaluation lies, if one was due.
        recorded_flags: Of the start that made what was restored last, those that shape an iteration; None before.
    """

    def __init__(self, args: Any, loop: Any, flags: dict[str, Json]) -> None:
        self._args, self._loop = args, loop
        self._operations: int | float = getattr(args, _OPERATIONS, 0)
        self._samples_to_come = self._batch = 0
        self._flags = flags
        self._command: dict[str, Json] = {"flags": [*sys.argv[1:]], "folder": os.getcwd()}  # for `moe-ckpt convert`
        self.evaluated = int(getattr(args, "iteration", 0))
        self.recorded_flags: dict[str, Any] | None = None

    @property
    def operations(self) -> int | float:
        """Floating-point operations up to the newest whole iteration."""
        return self._operations

    @property
    def validated(self) -> int:
        """Samples that evaluations have read."""
        return int(self._args.consumed_valid_samples)

    @property
    def batch_grows(self) -> bool:
        """Whether the next iteration trains on more samples than the newest whole one."""
        return 0 < self._batch < self._samples()

    def _samples(self) -> int:
        """Of the current iteration."""
        microbatches = self._loop.get_num_microbatches() * parallel_state.get_data_parallel_world_size()
        return int(self._args.micro_batch_size * microbatches)

    def stepped(self) -> None:
        """The step of an iteration was made; the loop has yet to add its samples."""
        samples = self._samples_to_come = self._batch = self._samples()
        self._operations += self._loop.num_floating_point_operations(self._args, samples)

    def counted(self, operations: float | None = None) -> None:
        """The loop has added them; operations: what it has counted up to now, where that is known."""
        self._samples_to_come = 0
        if operations is not None:
            self._operations = operations

    def evaluate_from(self, iteration: int, validated: int) -> None:
        """Evaluations are done up to that of an iteration.

        Args:
            iteration: The iteration that was evaluated last.
            validated: The samples that all evaluations have read.
        """
        self.evaluated, self._args.consumed_valid_samples = iteration, validated

    def state_dict(self) -> dict[str, Json]:
        """As `LoopState.state_dict`."""
        counts: dict[str, Json] = {name: getattr(self._args, name, 0) for name in _COUNTS}
        counts["consumed_train_samples"] = self._args.consumed_train_samples + self._samples_to_come
        # As text: there are soon more of them than 64 bits take.
        counts |= {_OPERATIONS: repr(self._operations), _EVALUATED: self.evaluated, SAMPLES: self._batch}
        if getattr(self._args, AT_LEAST, False):
            counts[AT_LEAST] = True
        return counts | {_FLAGS: self._flags, COMMAND: self._command}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """As `LoopState.load_state_dict`: let the loop start, or continue, from these counts."""
        for name in _COUNTS:
            setattr(self._args, name, values[name])
        if values.get(AT_LEAST):  # later checkpoints say so too
            setattr(self._args, AT_LEAST, True)
        self._args.iteration = values["iteration"]
        self._operations = _number(values[_OPERATIONS])
        setattr(self._args, _OPERATIONS, self._operations)
        self._samples_to_come, self._batch = 0, values.get(SAMPLES, 0)  # which older snapshots lack
        self.evaluated, self.recorded_flags = values[_EVALUATED], values[_FLAGS]
        self._loop.update_num_microbatches(self._args.consumed_train_samples, consistency_check=False)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


# What a fault kept from following the iteration to which training was brought back: its evaluation and its save.
#
# A rank that outlives a fault puts its state aside as it is after the optimizer's step. When all ranks stand there
# again, the loop continues with the next iteration: what was due in between, no call of the loop comes back to. It is
# made up for here, by the loop's own functions, and reads the very samples that the undisturbed evaluation reads.

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

    def make_up(self) -> bool:
        """Evaluate and save as the iteration at which all ranks stand asks for, where that was not done; whether the
        job has to end there (`--exit-interval`, `--phase-transition-iterations`, both with `--save`)."""
        if not self._recovered or self._train is None:
            return False
        self._agree(knows=True)
        self._pass_by(self._train)
        iteration = self._manager.iteration
        if self._state.evaluated < iteration:
            if self._evaluation_is_due(iteration):
                self._evaluate(self._train, iteration)
            self._state.evaluated = iteration
        # A job that leaves saves: by that the next start knows that it has left there, and is to go further.
        ends, newest = self._exit_is_due(iteration), newest_iteration(self._args.save)
        # With --ckpt-step newer ones are of an earlier training.
        is_there = newest == iteration or (newest > iteration and getattr(self._args, "ckpt_step", None) is None)
        if is_there or not (ends or self._save_is_due(iteration)):
            return False
        self._save(self._train, iteration)
        return ends

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
        if batches <= 0 or getattr(args, "full_validation", False):  # whose readers go around
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
        # One that ends at the limit of time leaves modules in evaluation, and training looks at it again by itself.
        with replaced(self._args, exit_duration_in_mins=None):
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

    def _exit_is_due(self, iteration: int) -> bool:
        args = self._args
        transitions = getattr(args, "phase_transition_iterations", None) or ()
        at_interval = bool(args.exit_interval and iteration % args.exit_interval == 0)
        return bool(args.save) and (at_interval or iteration in transitions)

    def _save_is_due(self, iteration: int) -> bool:
        args = self._args
        at_interval = bool(args.save_interval and iteration % args.save_interval == 0)
        return bool(args.save) and (at_interval or self._state.batch_grows)

    def _save(self, train: Call, iteration: int) -> None:
        # Its means are over the iterations that this process has trained: none yet.
        logger = getattr(self._loop, "one_logger_utils", None)
        with contextlib.nullcontext() if logger is None else replaced(logger, track_e2e_metrics=lambda: None):
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
