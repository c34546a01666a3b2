"""The flags of checkpoints beside those of Megatron-LM, and which of its flags do not go with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from .. import features
from ..config import MoECheckpointConfig, add_flags, from_namespace
from ..contradictions import contradictions
from ..errors import UsageError
from ..extensions import load
from ..extensions.partial_saves.flags import ExpertSaveFlags, unfit_expert_saves
from ..in_place.process_restart import missing_kernels
from ..manager import unfit_graphs
from ..megatron_state.quantization import keeps_scales
from ..runtime.process_info import ranks_of_node
from ..standby.slot import wait_for_rank
from ..standby.verdict import permanent_errors_end_the_job
from ..storage.small_files import SECRET_FILE
from ..strategies import STRATEGIES
from .seams import SEAMS, is_known


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--moe-ckpt-*` to Megatron-LM's parser: an `extra_args_provider`, or a part of the user's own.

    A standby waits here for its rank, which the parser reads from the environment next: see `wait_for_rank`.
    """
    wait_for_rank()
    with permanent_errors_end_the_job():
        _refuse_unverified_flags(sys.argv)
    choices = {"strategy": ("none", *STRATEGIES)}
    add_flags(parser, MoECheckpointConfig, "checkpoint subsystem", MoECheckpointConfig.PREFIX, choices)
    add_flags(parser, ExpertSaveFlags, "checkpoints with some of the experts")
    return _with_own_help_first(parser)


def _refuse_unverified_flags(argv: Sequence[str]) -> None:
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    given = {word.partition("=")[0]: word.partition("=")[2] or following for word, following in pairs}
    if given.get("--moe-ckpt-strategy", "none") == "none":
        return  # Megatron-LM's checkpoints are not verified
    if "--use-checkpoint-args" in given and _has_secret(given.get("--moe-ckpt-secret-file")):
        raise UsageError(
            "--use-checkpoint-args does not go with a secret: Megatron-LM reads the checkpoint before its signature is"
            " verified; give the flags of the model"
        )


def _with_own_help_first(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `--help` begin with these flags, and print it also where Megatron-LM's has a bare `%`, as with 0.19."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
    *others, checkpoints, expert_saves = parser._action_groups
    parser._action_groups = [checkpoints, expert_saves, *others]
    # Else hundreds of lines that name each flag of Megatron-LM, with an error as well.
    parser.usage = parser.usage or "%(prog)s [flags]; moe-ckpt flags lists those of checkpoints"
    return parser


def read(args: argparse.Namespace) -> MoECheckpointConfig:
    """What these flags were given. Raises UsageError when the parser did not know them."""
    try:
        return from_namespace(MoECheckpointConfig, args, MoECheckpointConfig.PREFIX)
    except AttributeError as error:
        raise UsageError(
            "Megatron-LM's parser does not know --moe-ckpt-strategy and its like: pass"
            " extra_args_provider=stock.arguments where arguments are parsed"
        ) from error


def check(config: MoECheckpointConfig, args: argparse.Namespace, version: str) -> str:
    """Judge the flags of a job before it begins.

    Args:
        config: The settings of the checkpoint subsystem.
        args: Of Megatron-LM.
        version: The version of Megatron-Core.

    Returns:
        A warning, or an empty text.

    Raises:
        UsageError: Flags cannot work together, or this strategy was not tested with the version of Megatron-Core.
    """
    if wrong := "; ".join((*refusals(config, args), *missing_kernels(args))):
        raise UsageError(wrong)
    if is_known(version):
        return ""
    known = f"Megatron-Core {version} was never tested with: known are {', '.join(SEAMS)}"
    if _repeats(config):
        raise UsageError(
            f"{known}. --moe-ckpt-strategy {config.strategy} runs iterations again after a fault, which depends on what"
            " core does inside: use a known release, or --moe-ckpt-strategy full"
        )
    return f"{known}; training continues with --moe-ckpt-strategy {config.strategy}, which relies on little of it"


def check_unused(config: MoECheckpointConfig, args: argparse.Namespace) -> None:
    """Refuse settings that have no effect without a strategy, and faults of missing ranks.

    Args:
        config: The settings of the checkpoint subsystem.
        args: Of Megatron-LM.

    Raises:
        UsageError: There are such settings.
    """
    unused = contradictions(config, world_size=args.world_size, num_experts=0, use_distributed_optimizer=False)
    if wrong := "; ".join((*unused, *unfit_expert_saves(args, config.strategy))):
        raise UsageError(wrong)


def refusals(config: MoECheckpointConfig, args: argparse.Namespace) -> Iterator[str]:
    """A sentence for each flag of Megatron-LM that would break what is promised.

    Args:
        config: The settings of the checkpoint subsystem.
        args: Of Megatron-LM.
    """
    yield from features.refusals(features.Loop.MEGATRON_LM, config)
    stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
    may_repeat_alone = _repeats(config) and config.recovery != "global" and stages > 1
    others = _REPEATING if _repeats(config) else () if config.strategy in ("full", "none") else _LOSING
    rules = (*_ALWAYS, *others, *(_REPEATING_ALONE if may_repeat_alone else ()))
    for name, applies, reason in rules:
        value = getattr(args, name, None)
        if value is not None and applies(value):
            shown = "" if value is True else f" {_shown(value)}"
            yield f"--{name.replace('_', '-')}{shown} does not go with --moe-ckpt-strategy {config.strategy}: {reason}"
    yield from unfit_graphs(config, args)
    yield from _unfit_numerics(config, args)
    if getattr(args, "optimizer_cpu_offload", False) and args.optimizer_offload_fraction < 1:
        yield (
            f"--optimizer-offload-fraction {args.optimizer_offload_fraction} does not go with --moe-ckpt-strategy"
            f" {config.strategy}: what stays on the device counts its steps where no snapshot has them; use 1.0"
        )
    yield from unfit_expert_saves(args, config.strategy)
    yield from _unfit_folders(config, args)
    if config.elastic is not None:
        yield from _unfit_sizes(config, args)


def _unfit_folders(config: MoECheckpointConfig, args: argparse.Namespace) -> Iterator[str]:
    """A sentence where checkpoints could not be verified when they are loaded, or not be compared with snapshots."""
    load, save, kind = (getattr(args, name, None) for name in ("load", "save", "ckpt_format"))
    if _has_secret(config.secret_file):
        given = {"--ckpt-format": kind} if save and kind not in (None, "torch_dist") else {}
        given |= {flag: place for flag, place in (("--load", load), ("--save", save)) if "://" in str(place)}
        yield from (
            f"{flag} {what} does not go with a secret: no such checkpoint is signed" for flag, what in given.items()
        )
    if config.persist_dir is not None and "://" in str(load):
        yield (f"--load {load} does not go with --moe-ckpt-persist-dir: which of both is newer is not known; mount it")


def _has_secret(file: str | None) -> bool:
    return bool(file or os.environ.get(SECRET_FILE))


def _unfit_numerics(config: MoECheckpointConfig, args: argparse.Namespace) -> Iterator[str]:
    """A sentence where a restore, which casts weights from masters, or a replay would come to other bits."""
    unfit = f"does not go with --moe-ckpt-strategy {config.strategy}"
    cast_to = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), None)
    if getattr(args, "qk_clip", False) and cast_to:
        yield (
            f"--qk-clip {unfit} and --{cast_to}: core rounds clipped weights apart from their masters, and a restore"
            " casts these; leave it out, or use --moe-ckpt-strategy none"
        )
    if _repeats(config):
        yield from _unfit_replays(args, unfit)


def _unfit_replays(args: argparse.Namespace, unfit: str) -> Iterator[str]:
    """A sentence where frozen operators draw no numbers, or where evaluations change random states or histories: a lost
    rank comes back by a replay, which repeats none of them."""
    if getattr(args, "fp4", None):
        yield (
            f"--fp4-format {unfit}: gradients are rounded by random numbers, of which a frozen operator draws none; use"
            " full or pec"
        )
    if getattr(args, "tp_comm_overlap", False) and getattr(args, "tp_comm_bulk_wgrad", True):
        yield (
            f"--tp-comm-overlap {unfit} without --disable-tp-comm-bulk-wgrad: Transformer Engine reduces gradients of"
            " inputs within products that frozen weights leave out"
        )
    if not getattr(args, "eval_iters", 0):
        return
    changed = "and evaluations, which change what a replay starts from: use --eval-iters 0, or strategy full"
    if keeps_scales(args):
        yield f"delayed scaling (--fp8-recipe delayed, attention in fp8) {unfit} {changed}"
    for name in ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased"):
        if (value := getattr(args, name, None)) is not None and value is not False:
            yield f"--{name.replace('_', '-')} {value} {unfit} {changed}"


def _unfit_sizes(config: MoECheckpointConfig, args: argparse.Namespace) -> Iterator[str]:
    """A sentence for each reason why the job cannot shrink or grow as `--moe-ckpt-elastic` says."""
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(args, name, None):
            yield (
                f"--{name.replace('_', '-')} does not go with --moe-ckpt-elastic {config.elastic}: each batch would"
                " have to divide under each number of replicas; train with one --global-batch-size"
            )
    if (instances := getattr(args, "num_distributed_optimizer_instances", 1)) > 1:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not go with --moe-ckpt-elastic {config.elastic}:"
            " each number of replicas would have to divide by it; use 1"
        )
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = (getattr(args, "expert_tensor_parallel_size", None) or tp) * args.expert_model_parallel_size
    yield from load("elastic.sizes").inelastic(
        config,
        world_size=args.world_size,
        replica_ranks=tp * pp * args.context_parallel_size,
        node_ranks=ranks_of_node(),
        expert_ranks=experts * pp if args.num_experts else 1,
        global_batch=args.global_batch_size,
        micro_batch=args.micro_batch_size,
    )


def _repeats(config: MoECheckpointConfig) -> bool:
    return config.strategy != "none" and STRATEGIES[config.strategy].replays


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(getattr(value, "name", value))


_Rule = tuple[str, Callable[[Any], bool], str]

_SHARDED = "its shards are not those that can be enumerated; use --use-distributed-optimizer"
_SAMPLES = "samples that the data loader passes by are not counted as it is restored"

_ALWAYS: tuple[_Rule, ...] = (
    ("inprocess_restart", bool, "a process that continues holds memory; let the launcher restart it"),
    ("optimizer_cuda_graph", bool, "the step has to be entered again each time, to wait for copies"),
    ("optimizer", lambda kind: kind not in ("adam", "muon"), "its state is not known; use adam or muon"),
    (
        "optimizer",
        lambda kind: kind == "muon" and find_spec("emerging_optimizers") is None,
        "a package is missing: pip install emerging-optimizers",
    ),
    ("fp8_quantizer_factory", bool, "what quantizers of its own keep is not known; leave it out"),
    ("fp4_quantizer_factory", bool, "what quantizers of its own keep is not known; leave it out"),
    ("use_megatron_fsdp", bool, _SHARDED),
    ("use_custom_fsdp", bool, _SHARDED),
    ("use_torch_fsdp2", bool, _SHARDED),
    ("perform_rl_step", bool, "rollouts and the reference model are state that no snapshot has"),
    ("skip_train", bool, "there is nothing to protect"),
    ("vision_pretraining_type", lambda kind: kind == "dino", "a teacher without an optimizer counts as constant"),
    ("logits_save_dir", bool, "logits wait in the process for a checkpoint, and no snapshot has them"),
    ("error_injection_rate", bool, "it draws random numbers in each iteration but the first one of a start"),
    (
        "pipeline_model_parallel_layout",
        lambda layout: any("m" in stage for stage in str(layout).split("|")[:-1]),
        "layers that predict further tokens are protected on the last stage only; put m there",
    ),
    ("moe_router_force_biased", lambda bias: bias < 0, "what it drew first stays in the process; use 0 or above"),
    ("moe_use_upcycling", bool, "save the upcycled checkpoint first, and train from it"),
    ("iterations_to_skip", bool, _SAMPLES),
    (
        "result_rejected_tracker_filename",
        bool,
        "the next start would skip iterations that it has rejected; leave it out",
    ),
    ("adlr_autoresume", bool, "it saves and exits past the loop; use --exit-signal-handler"),
    ("decrease_batch_size_if_needed", bool, _SAMPLES),
    ("dataloader_type", lambda kind: kind in ("external", "cyclic"), "its position is not in `args`; use single"),
    ("fim_data", bool, "each sample draws from a random state that no snapshot has"),
)
_LENGTHS = "core adds up the lengths of sequences over all ranks; use --moe-ckpt-recovery global"
_REPEATING_ALONE: tuple[_Rule, ...] = (
    ("sft", bool, _LENGTHS),
    ("dataloader_inter_document_masking", bool, _LENGTHS),
    (
        "moe_expert_rank_capacity_factor",
        bool,
        "all ranks agree on whether tokens were dropped, also those that do not replay; use --moe-ckpt-recovery global",
    ),
    (
        "timing_log_level",
        lambda level: int(level) > 0,
        "its barriers would wait for stages that do not replay; use level 0 or --moe-ckpt-recovery global",
    ),
)
_EQUAL = "lost tokens are counted as shares of a training with equal batches; use full"
_LOSING: tuple[_Rule, ...] = (("rampup_batch_size", bool, _EQUAL), ("step_batch_size_schedule", bool, _EQUAL))
_REPEATING: tuple[_Rule, ...] = (
    ("rampup_batch_size", bool, "iterations of different shapes cannot be run again; use --moe-ckpt-strategy full"),
    ("step_batch_size_schedule", bool, "iterations of different shapes cannot be run again; use strategy full"),
    ("optimizer_cpu_offload", bool, "operators of an optimizer on the host cannot be frozen; use full or pec"),
    (
        "cpu_offloading_num_layers",
        bool,
        "Transformer Engine counts backward passes of layers, of which a replay skips some; use"
        " --fine-grained-activation-offloading, or full or pec",
    ),
    ("qk_clip", bool, "weights change outside of the optimizer's step; leave it out, or use full with weights of fp32"),
)
