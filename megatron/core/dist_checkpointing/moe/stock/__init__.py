"""Protects the training loop of Megatron-LM itself, `megatron.training.pretrain`, with two lines in a script of a user:

    args = parse_and_validate_args(extra_args_provider=stock.arguments)         # --moe-ckpt-* flags
    stock.protected(pretrain)(config, datasets_provider, model_type, forward_step)

The wheels of Megatron-Core have that loop from 0.17 on. Where the flags name no strategy, it runs as if it were not
protected.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress

import torch

from ..core_versions.training import ending_with_their_trainer, results_in_process
from ..errors import UsageError
from ..manager import MoECheckpointManager
from ..runtime.peer_links import set_for_parking
from ..standby.verdict import leave_early, permanent_errors_end_the_job
from ..versions import found_versions
from .flags import arguments
from .hooks import Hooks
from .iteration import Report, StockIteration
from .seams import SAVING, SAVING_SEAMS, TRAINING, installed, shipped_helpers
from .survivors import Survivors

__all__ = ["StockIteration", "arguments", "protected", "shipped_helpers"]


def protected[Result](
    pretrain: Callable[..., Result],
    report: Report | None = None,
    connect: Callable[[], object] | None = None,
    *,
    recover_only: bool = False,
) -> Callable[..., Result]:
    """`pretrain` of Megatron-LM, protected as the `--moe-ckpt-*` flags say.

    Args:
        pretrain: The function of Megatron-LM.
        report: Gets how each iteration came out, on every rank.
        connect: Starts torch.distributed, in scripts that do not leave that to `pretrain`; called before it, unless
            that is done, and again where this process stays after a fault.
        recover_only: Training ends, with a checkpoint, once it has recovered.

    Raises:
        UsageError: When it is called, before training begins: the loop is not one that is known.
        SystemExit: In place of an error that would come again at each restart, where `moe-ckpt-run` started the job.
    """

    @functools.wraps(pretrain)
    @permanent_errors_end_the_job()
    def run(*arguments: object, **options: object) -> Result:
        # A source tree is no distribution that pip knows, or lies before another one.
        core = str(found_versions()["megatron-core"].version)
        try:
            loop = importlib.import_module(TRAINING)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"there is no {TRAINING} beside Megatron-Core {core}: install its wheel, or put a"
                " whole Megatron-LM on PYTHONPATH"
            ) from error
        strategy = ""
        # Core 0.17 reads its flags later; `flags.read` refuses a parser that does not know ours.
        with suppress(AssertionError, AttributeError):
            strategy = loop.get_args().moe_ckpt_strategy
        # Without a strategy nothing but torch's watchdog ends a collective that hangs.
        if torch.cuda.is_available() and not torch.distributed.is_initialized() and strategy != "none":
            set_for_parking("nccl")
        survivors = Survivors(loop, core, connect)
        hooks = Hooks(loop, core, MoECheckpointManager, report, survivors, recover_only=recover_only)
        saving = installed(importlib.import_module(SAVING), hooks.of_saving(), core, SAVING_SEAMS, is_on=hooks.is_on)
        synchronous = results_in_process(lambda: bool(getattr(loop.get_args(), "async_save", False)))
        training = installed(loop, hooks.by_name(), core, is_on=hooks.is_on)
        background = ending_with_their_trainer()
        with shipped_helpers(), synchronous, background, hooks, survivors.building(), training, saving:
            try:
                return pretrain(*arguments, **options)
            except SystemExit as ending:
                with suppress(AssertionError):  # core 0.17 reads its flags in here: `--help` ends before they are known
                    args = loop.get_args()
                    # Set by each iteration that begins; core ends so with `--exit-interval` and the like, and SIGTERM.
                    last = getattr(args, "curr_iteration", None)
                    if not ending.code and last is not None and last + 1 < args.train_iters:
                        leave_early()
                raise

    return run
