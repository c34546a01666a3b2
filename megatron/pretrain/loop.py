"""Runs `pretrain` of `megatron.training`, protected, on GPUs or on the CPU, with what an entry script gives to it.

Its flags are Megatron-LM's, those of checkpoints, and a few of the driver's own: `--device`, `--freeze-experts`,
`--fp8-main-params` and `--metrics-*`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe import wait_for_rank
from megatron.core.dist_checkpointing.moe.boot_clock import boot_id, since_boot_s
from megatron.core.dist_checkpointing.moe.replication.interface import FLAG as INTERFACE
from megatron.core.dist_checkpointing.moe.replication.interface import of_local_rank, use_for_gloo
from megatron.pretrain import low_precision
from megatron.pretrain.device import add_device, device_of
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import InvalidInput, TrainingFailure
from megatron.pretrain.flags import refuse
from megatron.pretrain.initialize import Launch, shut_down, start_process_group, use_cpu
from megatron.pretrain.logs import configure_logging
from megatron.pretrain.metrics import IterationReport, Metrics, MetricsSettings, RunFacts, protection_fields
from megatron.pretrain.metrics.settings import add_flags as add_metrics_flags
from megatron.pretrain.metrics.settings import from_flags
from megatron.pretrain.old_flags import refuse_old_flags
from megatron.pretrain.worker import exit_code_of, final_exit_code

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What Megatron-LM's `pretrain` takes from an entry script."""

    datasets_provider: Callable[..., Any]
    model_provider: Callable[..., Any]
    forward_step: Callable[..., Any]


def run(argv: Sequence[str], parts: Parts, *, recover_only: bool = False) -> int:
    """Train with these flags.

    Args:
        argv: The flags.
        parts: The parts of the training script.
        recover_only: Training ends, with a checkpoint, once it has recovered.

    Returns:
        The exit code: 0 done or left as asked, 1 failed, 2 flags or inputs that cannot work.
    """

    def train(launch: Launch) -> None:
        _train(launch, parts, device_of(argv), _early(argv).moe_ckpt_interface, recover_only=recover_only)

    return in_worker(argv, train)


def in_worker(argv: Sequence[str], work: Callable[[Launch], None]) -> int:
    """Do `work` in a process whose flags are Megatron-LM's; exit code as of `run`.

    Args:
        argv: The flags.
        work: The work, given the place of this process in the job.
    """
    try:
        with driver_errors():
            wait_for_rank()  # in scripts whose `main` does not: a standby has no place before
            launch = Launch.from_environment()
    except InvalidInput as error:  # nothing is logged yet: one line for each node
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        return final_exit_code(error.exit_code)
    configure_logging(launch)
    sys.argv = [sys.argv[0], *_flags_of_engine(), *argv]  # where Megatron-LM looks for them
    try:
        with driver_errors(), flag_errors():
            refuse_old_flags(argv)
            work(launch)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        return final_exit_code(code) if code == InvalidInput.exit_code else code
    except Exception as error:
        return exit_code_of(error, launch)
    finally:
        shut_down()
    return 0


def _flags_of_engine() -> list[str]:
    """Before those that were given: of Transformer Engine's attentions the one that the CPU has kernels for."""
    on_cpu = sys.modules.get("megatron.pretrain.testing.te_on_cpu")  # looked up: a job on GPUs never imports it
    return ["--attention-backend", "unfused"] if on_cpu is not None and on_cpu.is_loaded() else []


_OTHER_MODEL = "; load it into the model that it was saved from"
_CHECKS = {
    "megatron.training.arguments": "",
    "megatron.training.argument_utils": "",
    "megatron.training.datasets.data_samplers": "",  # of a corpus that has no sample
    "megatron.core.datasets.indexed_dataset": "",  # of one that is not there
    "megatron.training.checkpointing.check_checkpoint_args": _OTHER_MODEL,
}
"""Modules and functions, with what to do where what they say does not tell it."""


@contextlib.contextmanager
def flag_errors() -> Iterator[None]:
    """Turn what Megatron-LM says of its own flags, and of the corpus and checkpoint they name, into the driver's error.

    With core 0.17 it looks at them inside `pretrain`, and with all releases at some of them when the model is built:
    so they are known by the modules that they come from, or through. What core asserts may have no words of its own.
    """
    try:
        yield
    except SystemExit as ending:
        # Code 0 would say that training has ended, to a launcher and to the next job of a chain.
        if not ending.code and "megatron.training.checkpointing.load_args_from_checkpoint" in _places(ending):
            raise InvalidInput("Megatron-LM ended over the checkpoint of --use-checkpoint-args, see above") from ending
        raise
    except (AssertionError, ValueError) as error:
        advice = [_CHECKS[place] for place in _places(error) if place in _CHECKS]
        if not advice:
            raise
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or "see where in its code"
        raise InvalidInput(f"invalid Megatron-LM arguments: {' '.join(said.split())}{advice[-1]}") from error


@contextlib.contextmanager
def load_errors() -> Iterator[None]:
    """Turn what core says, on all ranks, of a checkpoint of another model into the driver's error."""
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        yield
    except CheckpointException as error:
        reasons = [reason for reason, _ in error.failures.values() if isinstance(reason, CheckpointingException)]
        if not reasons or "megatron.training.checkpointing.load_checkpoint" not in _places(error):
            raise
        raise InvalidInput(f"--load: {' '.join(str(reasons[0]).split())}{_OTHER_MODEL}") from error


def _places(error: BaseException) -> Iterator[str]:
    """The modules and functions that an error came through."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        yield module
        yield f"{module}.{frame.f_code.co_name}"


def _early(argv: Sequence[str]) -> argparse.Namespace:
    """Flags that count before Megatron-LM parses them all."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(INTERFACE)
    return parser.parse_known_args(list(argv))[0]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Those of the driver and of checkpoints, for Megatron-LM's parser."""
    from megatron.core.dist_checkpointing.moe import stock

    add_device(parser)
    parser.add_argument(
        "--freeze-experts",
        action="store_true",
        default=None,  # as in snapshots of jobs that had no such flag
        help="train all but routed experts, which stay as they were loaded or initialized (MoC Table 4, FT-w.o.E)",
    )
    low_precision.add_flags(parser)
    add_metrics_flags(parser)
    parser.error = refuse  # type: ignore[method-assign]
    return stock.arguments(parser)


def start_megatron(device: str, launch: Launch) -> None:
    """Bring up Megatron-LM as its loop does, without training: flags, process groups and random states.

    Args:
        device: `cpu` or `cuda`.
        launch: The place of this process in the job.
    """
    _choose(device, launch.attempt)
    if device == "cuda":
        torch.cuda.set_device(launch.local_rank)

    from megatron.core.dist_checkpointing.moe.stock import shipped_helpers  # once the device is chosen
    from megatron.training import arguments
    from megatron.training.training import initialize_megatron

    start_process_group("gloo" if device == "cpu" else "nccl", launch, _GROUP_TIMEOUT)
    if "extra_args_provider" in signature(initialize_megatron).parameters:  # core 0.17 parses the flags itself
        with shipped_helpers():
            initialize_megatron(extra_args_provider=add_flags)
        return
    arguments.parse_and_validate_args(extra_args_provider=add_flags)
    with shipped_helpers():
        initialize_megatron()


_GROUP_TIMEOUT = datetime.timedelta(minutes=10)


def _choose(device: str, attempt: int) -> None:
    """Before Megatron-LM is imported.

    Raises:
        InvalidInput: The device is not there.
        TrainingFailure: It is not there any more, or not on a node that has come since: not for good, as a spare may
            take the node's place.
    """
    if device == "cpu":
        use_cpu()
    elif not torch.cuda.is_available():
        if attempt:
            raise TrainingFailure(f"no CUDA device of {os.uname().nodename} can be used any more: see nvidia-smi there")
        raise InvalidInput("no CUDA device on this machine; pass --device cpu to train without one")


def _train(launch: Launch, parts: Parts, device: str, interface: str | None, *, recover_only: bool) -> None:
    _choose(device, launch.attempt)

    from megatron.core.dist_checkpointing.moe import stock
    from megatron.core.enums import ModelType
    from megatron.pretrain.flags import cache_docstrings, print_arguments_once
    from megatron.pretrain.warm_up import import_tokenizers
    from megatron.training import argument_utils, arguments, pretrain

    def connect() -> None:
        """Before the loop does it, which would bind the group to a GPU."""
        start_process_group("gloo", Launch.from_environment(), _GROUP_TIMEOUT, interface)

    import_tokenizers(sys.argv[1:])
    cache_docstrings()
    print_arguments_once(launch.attempt)
    reports = _Reports(launch)
    protected = stock.protected(pretrain, reports, connect if device == "cpu" else None, recover_only=recover_only)
    if device != "cpu" and interface is not None:
        use_for_gloo(of_local_rank(interface, launch.place.local_rank), launch.rank)
    given: list[Any] = [parts.datasets_provider]
    options: dict[str, Any] = {"model_provider": parts.model_provider, "model_type": ModelType.encoder_or_decoder}
    if "extra_args_provider" in signature(pretrain).parameters:  # core 0.17 parses the flags itself
        options["extra_args_provider"] = add_flags
    else:
        args = arguments.parse_and_validate_args(extra_args_provider=add_flags)
        low_precision.check(args)
        given.insert(0, argument_utils.pretrain_cfg_container_from_args(args))
    gc.freeze()  # what is imported: after a fault a process that stays looks through all that the collector does
    with low_precision.optimizers_in_few_bits(), load_errors(), reports.closed_at_a_good_end():
        protected(*given, forward_step_func=parts.forward_step, **options)


class _Reports:
    """Hands the numbers to all sinks. The flags are known when the first iteration ends."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._metrics: Metrics | None = None

    @contextlib.contextmanager
    def closed_at_a_good_end(self) -> Iterator[None]:
        """A block around training, which the loop may also leave by exiting with code 0."""
        try:
            yield
        except SystemExit as ending:
            if not ending.code and self._metrics is not None:
                self._metrics.close()
            raise
        if self._metrics is not None:
            self._metrics.close()

    def __call__(self, done: Any) -> None:
        from megatron.training import get_args

        args = get_args()
        if self._metrics is None:
            self._metrics = self._opened(args, done.iteration - 1, done.duration_s)
        if done.recovery is not None:
            self._metrics.recovered(done.recovery.to_data(), done.iteration - 1)
        self._metrics.record(
            IterationReport(
                iteration=done.iteration,
                consumed_train_samples=args.consumed_train_samples,
                lm_loss=done.losses.get("lm loss"),
                grad_norm=done.grad_norm,
                learning_rate=done.learning_rate,
                loss_scale=done.loss_scale,
                skipped=done.skipped,
                iteration_time_s=done.duration_s,
                stall_s=done.stall_s,
                replayed=done.replayed,
                **protection_fields(done.protection, with_tokens=args.moe_ckpt_log_expert_tokens),
            )
        )

    def _opened(self, args: Any, iteration: int, trained_s: float) -> Metrics:
        # An attempt trains since the first of its iterations began, which has ended now.
        from megatron.training import global_vars
        from megatron.training.training import num_floating_point_operations

        board, run = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        settings = from_flags(args, tensorboard=board, wandb=run)
        is_last = self._launch.rank == self._launch.world_size - 1
        try:
            metrics = Metrics(is_last_rank=is_last, settings=settings)
        except (OSError, InvalidInput) as error:
            # The flags are known on the way only, and here other ranks train already.
            log.critical("metrics disabled: %s", error)
            metrics = Metrics(is_last_rank=False, settings=MetricsSettings())
        metrics.began(
            RunFacts(
                **in_words(args),
                job=self._launch.place.job_here,
                strategy=args.moe_ckpt_strategy,
                world_size=self._launch.world_size,
                train_iters=args.train_iters,
                iteration=iteration,
                tokens_per_iteration=args.global_batch_size * args.seq_length,
                flops_per_iteration=float(num_floating_point_operations(args, args.global_batch_size)),
                at_s=time.time() - trained_s,
                boot=boot_id(),
                since_boot_s=since_boot_s() - trained_s,
            )
        )
        return metrics


def in_words(args: Any) -> dict[str, Any]:
    """Model, layout and software of a job, for people.

    Args:
        args: Of Megatron-LM.
    """
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size,
        "DP": args.data_parallel_size,
    }
    model = f"{args.num_layers} layers, hidden size {args.hidden_size}"
    if args.num_experts:
        model += f", {args.num_experts} experts, top {args.moe_router_topk}"
    packages = ("megatron-moe-ckpt", "megatron-core", "torch")
    return {
        "model": f"{model}; global batch {args.global_batch_size}, {args.seq_length} tokens",
        "layout": " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank",
        "software": ", ".join(f"{name} {_release(name)}" for name in packages),
    }


def _release(package: str) -> str:
    """Its version; a checkout on Python's path, as of this project on a bare machine, has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
