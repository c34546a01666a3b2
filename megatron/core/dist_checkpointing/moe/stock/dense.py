"""The stock loop's own checkpoints: which it has and would load, and how they are saved whole and loaded as saved."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from megatron.core.utils import unwrap_model
from moe_ckpt.dense.names import INFORMING_BYTES, TRACKER, iteration_of, read_beside

from ..core_versions.training import is_in_doubt, replaced, saving_without_padding
from ..dense_saves.choosing import has_chain, has_stale_experts, intact_checkpoint
from ..dense_saves.directory import CheckpointDirectory
from ..dense_saves.saving import DenseSaves, is_doubtful, mark_doubtful
from ..dense_saves.writing import on_rank_zero
from ..errors import UsageError
from ..extensions import load
from ..megatron_state import raw_state
from ..megatron_state.trainer_state import DEVICE, TRACKED
from ..runtime.opening import one_spelling
from ..runtime.session import Loadable
from ..runtime.watcher import waiting_for_no_rank
from .seams import Call

log = logging.getLogger(__name__)

LOST = "tokens_lost_in_faults"
"""In the `args` of a checkpoint, by MoE layer."""
AT_LEAST = "tokens_lost_at_least"
"""Likewise: set where updates of other tokens are lost, which were not counted."""


class StockSaves:
    """What the hooks do around the loop's saving and loading. Methods are collectives.

    Args:
        args: Of Megatron-LM.
        secret: Path of the job's secret, if that is not in the environment.
        protects: Whether checkpoints are published whole and judged before they are loaded; state of few bits is saved
            as it is in any case.

    Attributes:
        device_states: Random states of another kind of device, by name, which are saved in place of those of this one.
        loaded: Folder of the checkpoint that is loaded, or was last; None before, and where the loop chooses.
        recorded_args: Of Megatron-LM, of the job that saved the checkpoint that was loaded last; None before.
    """

    def __init__(self, args: Any, secret: str | None, *, protects: bool) -> None:
        self._args, self._protects, self._secret = args, protects, secret
        self._is_raw = False
        self.device_states: Mapping[str, bytes] = {}
        self.recorded_args: Any = None
        self.loaded: Path | None = None
        self._experts: Any = None

    @cached_property
    def _saves(self) -> DenseSaves:
        return DenseSaves(self._secret, waiting_for_no_rank)  # for a loop that saves

    def protect(self, chunks: Any, *, loaded: bool) -> None:
        """Training continues here.

        Args:
            chunks: The model chunks of this rank.
            loaded: Whether it does so from the checkpoint that was loaded last.
        """
        if self._experts is not None:
            self._experts.close()
            self._experts = None
        if self._protects and getattr(self._args, "save_experts", None) is not None:
            self._experts = load("partial_saves.saving").ExpertSaves(
                self._args, chunks, self.loaded if loaded else None
            )

    def load(self, call: Call) -> Any:
        """`load_checkpoint`, of the newest checkpoint that is intact.

        Raises:
            UnreadableCheckpoint: None is.
            UsageError: Nothing is there that Megatron-LM loads, and the flags say that nothing is trained then.
        """
        with contextlib.ExitStack() as stack:
            if call["optimizer"] is not None:
                stack.enter_context(loading(self._args, call["ddp_model"], call["optimizer"]))
            if self._protects:
                self.loaded = stack.enter_context(intact_checkpoint(self._args, call["load_arg"]))
            try:
                return call.go_on()
            except SystemExit as ending:
                if ending.code:
                    raise
                name = str(call["load_arg"])
                # To a launcher, and to Slurm's next jobs, exit code 0 would say that training has ended.
                flag = f"--{name.replace('_', '-')} {getattr(self._args, name, None)}"
                raise UsageError(
                    f"{flag}: Megatron-LM found nothing there that it loads, for the reason above, and nothing is"
                    " trained without it; see that the folder is there"
                ) from ending

    @property
    def lost_tokens(self) -> Sequence[int] | None:
        """What faults have cost the checkpoint that was loaded, with what its older experts lack; None: not known."""
        known: Sequence[int] | None = getattr(self.recorded_args, LOST, None)
        at_least = getattr(self.recorded_args, AT_LEAST, False)
        if known is not None and self.loaded is not None and has_stale_experts(self.loaded):
            counted = load("partial_saves.loading").with_stale_experts(known, self.loaded)
            known, at_least = counted or known, at_least or counted is None
        if known is not None and at_least:
            setattr(self._args, AT_LEAST, True)  # later checkpoints say so too
            if self._args.rank == 0:
                log.warning("more tokens are lost than are counted: %s is of older copies of some experts", self.loaded)
        return known

    def load_shards(self, call: Call) -> Any:
        """Core's `load` inside of it."""
        folder = self.loaded
        if folder is None or Path(call["checkpoint_dir"]) != folder:
            return call.go_on()
        if has_chain(folder):
            strategy = load("partial_saves.loading").merging(folder, call["sharded_strategy"], call["strict"])
            call = call.replacing(sharded_strategy=strategy)
        state_dict = call.go_on()
        self.recorded_args = state_dict.get("args", self.recorded_args)
        return state_dict

    def save(self, call: Call) -> Any:
        """`save_checkpoint`; a checkpoint that cannot be written is reported, and training continues."""
        to_local = call["non_persistent_ckpt"] and self._args.non_persistent_ckpt_type == "local"
        if to_local or not saves_raw(self._args, call["optimizer"]):
            return self._save_whole(call)
        self._is_raw = True
        try:
            with generating(call["model"], call["optimizer"]):
                return self._save_whole(call)
        finally:
            self._is_raw = False

    def _save_whole(self, call: Call) -> Any:
        with saving_without_padding(call["optimizer"]):
            return self._save_published(call)

    def _save_published(self, call: Call) -> Any:
        root = None if call["release"] or not self._protects else self._root(transient=call["non_persistent_ckpt"])
        if root is None:
            result = call.go_on()
            if self._protects and not (call["release"] or call["non_persistent_ckpt"]):
                mark_doubtful(self._args.save, call["iteration"], in_doubt=is_in_doubt())
            return result
        save = partial(self._save, call, root)
        result = self._saves.checkpoint(root, call["iteration"], save, self._experts, in_doubt=is_in_doubt())
        if not (getattr(self._args, "async_save", False) or self._saves.has(root, call["iteration"])):
            self._args.log_progress = False  # or the loop writes down that it was saved
        return result

    def _save(self, call: Call, root: str) -> Any:
        if self._experts is None:
            return call.go_on()
        with self._experts.generating(call["optimizer"], CheckpointDirectory(root), call["iteration"]):
            return call.go_on()

    def shards(self, call: Call) -> Any:
        """Core's `save` inside of it."""
        if getattr(self._args, "fp8_param_gather", False) or getattr(self._args, "fp4_param_gather", False):
            force_all_tensors_to_non_fp8(call["sharded_state_dict"])  # core would pickle those of few bits
        if self._is_raw:
            call = call.replacing(content_metadata={**(call["content_metadata"] or {}), _TYPE: raw_state.SHARDING})
        if not self._protects:
            return call.go_on()
        given = call.everything()
        for states in self._random_states(given["sharded_state_dict"]) if self.device_states else ():
            states["cuda_rng_state"] = self._of_device(DEVICE, states["cuda_rng_state"])
            tracked = states["rng_tracker_states"]
            states["rng_tracker_states"] = {
                name: self._of_device(f"{TRACKED}{name}", own) for name, own in tracked.items()
            }
        return self._saves.shards(call.given_otherwise, given)

    def _random_states(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        shard = state_dict.get("rng_state")
        return [] if shard is None else list(shard.data)

    def _of_device(self, name: str, own: torch.Tensor) -> torch.Tensor:
        given = self.device_states.get(name)
        return own if given is None else torch.frombuffer(bytearray(given), dtype=torch.uint8)

    def has(self, iteration: int) -> bool:
        """Whether this iteration, which was to be saved, was published."""
        root = self._root(transient=False) if self._protects else None
        return root is None or self._saves.has(root, iteration)

    def _root(self, *, transient: bool) -> str | None:
        """Where checkpoints go to; None for formats and storage in which nothing is renamed or summed up."""
        args = self._args
        if getattr(args, "ckpt_format", None) != "torch_dist" or not args.save:
            return None
        root = str(args.save)
        if transient:
            if args.non_persistent_ckpt_type != "global":
                return None
            root = args.non_persistent_global_ckpt_dir or str(Path(root) / "non_persistent")
        return None if "://" in root else root


def written_folder(args: Any) -> str | None:
    """Where the loop saves checkpoints, None where it saves none, or not to a folder."""
    save = getattr(args, "save", None)
    return None if save is None or "://" in str(save) else str(save)


def newest_checkpoint(args: Any) -> Loadable:
    """What loading gives; it lacks something without random states, or without the newest of some experts. A
    collective: rank 0 looks.
    """
    # Megatron-LM takes 0 for none.
    asked_for = bool(getattr(args, "ckpt_step", None)) or bool(args.finetune) or args.load is None
    found = Loadable(asked_for=asked_for, in_part=bool(args.finetune or args.no_load_optim))
    own = not asked_for and args.save is not None and one_spelling(args.load) == one_spelling(args.save)
    if own and args.no_save_optim and not args.no_load_optim:
        return replace(found, lacks=True)  # loading would fail

    def looked() -> Loadable:
        step = getattr(args, "ckpt_step", None)
        if args.load is None or (iteration := step or _iteration_in(args.load)) < 0:
            return found
        folder = CheckpointDirectory(args.load).folder(iteration)
        if step and not folder.exists():
            return found
        lacks = (own and args.no_save_rng and not args.no_load_rng) or (not asked_for and has_stale_experts(folder))
        return replace(found, iteration=iteration, lacks=lacks, in_doubt=is_doubtful(args.load, iteration))

    return on_rank_zero(looked)


def newest_iteration(folder: str | None) -> int:
    """The newest iteration of which a folder has a whole checkpoint, -1 if none. A collective: rank 0 looks."""
    return on_rank_zero(lambda: -1 if folder is None else _iteration_in(folder))


def _iteration_in(folder: str) -> int:
    try:
        text = read_beside(Path(folder) / TRACKER, INFORMING_BYTES).decode(errors="replace").strip()
    except OSError:
        return -1
    if not text:  # its writer was killed
        return max(CheckpointDirectory(folder).continued(), default=-1)
    # A released model, which training begins from; or what loading refuses, such as more digits than `int` takes.
    return iteration_of(text) or 0


# Checkpoints of the stock loop with state of few bits as it is, which Megatron-Core would save in fp32.
#
# The loop's `generate_state_dict` asks each model chunk, and then the optimizer, for its `sharded_state_dict`; what was
# loaded goes to the optimizer's `load_state_dict`. In the blocks below these do as `megatron_state.raw_state` does.

_TYPE = "distrib_optim_sharding_type"
_FIXED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *(
        "use_tp_pp_dp_mapping",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "data_parallel_size",
        "context_parallel_size",
    ),
    *("use_precision_aware_optimizer", "bf16", "fp16", "main_params_dtype", "fp8_main_params", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_amax_history_len", "fp4_param_gather"),
)
"""Arguments under which alone such state loads: to cast it, or to cut it elsewhere, gives it other scales."""
_BUCKETS = (
    *("num_distributed_optimizer_instances", "overlap_grad_reduce", "ddp_num_buckets", "ddp_bucket_size"),
    *("ddp_pad_buckets_for_high_nccl_busbw", "overlap_param_gather_with_optimizer_step"),
)
"""Where data-parallel ranks share parameters, these decide where they are cut."""


def saves_raw(args: Any, optimizer: Any) -> bool:
    """Whether what Megatron-Core saves of a job would not come back to the bit.

    Args:
        args: Of Megatron-LM.
        optimizer: Of the loop; None where nothing is trained.
    """
    scaled = getattr(args, "fp8", None) and (args.fp8_recipe == "delayed" or args.fp8_param_gather)
    scaled = scaled or getattr(args, "fp4_param_gather", False)
    if optimizer is None or not (scaled or getattr(args, "use_precision_aware_optimizer", False)):
        return False
    return args.ckpt_format == "torch_dist" and not args.dist_ckpt_optim_fully_reshardable


@contextlib.contextmanager
def generating(chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """A block in which the loop saves a checkpoint of this state.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Its optimizer.
    """

    def of_optimizer(*unused: Any, is_loading: bool = False, **options: Any) -> dict[str, Any]:
        return raw_state.raw_state_dict(chunks, optimizer, is_loading=is_loading)

    with _silent_modules(chunks), replaced(optimizer, sharded_state_dict=of_optimizer):
        yield


@contextlib.contextmanager
def loading(args: Any, chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """A block in which the loop loads a checkpoint into this state, whichever way it was saved.

    Args:
        args: Of Megatron-LM.
        chunks: The model chunks of this rank.
        optimizer: Its optimizer.

    Raises:
        UsageError: In the block: the state is another layout's, or in other dtypes.
    """
    read_metadata = dist_checkpointing.load_content_metadata

    with contextlib.ExitStack() as stack:

        def read(*given: Any, **options: Any) -> Any:
            found = read_metadata(*given, **options)
            if (found or {}).get(_TYPE) == raw_state.SHARDING:
                saved = (options.get("preloaded_state_dict") or {}).get("args")
                if not (args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False)):
                    _refuse_others(saved, args)
                load_state = partial(raw_state.load_raw_state_dict, chunks, optimizer)
                stack.enter_context(generating(chunks, optimizer))
                stack.enter_context(replaced(optimizer, load_state_dict=load_state))
            return found

        stack.enter_context(replaced(dist_checkpointing, load_content_metadata=read))
        if getattr(args, "use_precision_aware_optimizer", False):
            reload = partial(_reload_weights_and_masters, optimizer.reload_model_params, optimizer)
            stack.enter_context(replaced(optimizer, reload_model_params=reload))
        yield


def _reload_weights_and_masters(reload: Callable[..., None], optimizer: Any, *given: Any, **options: Any) -> None:
    reload(*given, **options)
    raw_state.reload_masters_of(optimizer)


@contextlib.contextmanager
def _silent_modules(chunks: Sequence[Any]) -> Iterator[None]:
    """Let chunks leave out what modules of Transformer Engine would pickle, while they are asked for their state."""

    def of_chunk(generate: Callable[..., Any], *given: Any, **options: Any) -> Any:
        with raw_state.without_module_scales(chunks):
            return generate(*given, **options)

    with contextlib.ExitStack() as stack:
        for chunk in unwrap_model(list(chunks)):
            stack.enter_context(replaced(chunk, sharded_state_dict=partial(of_chunk, chunk.sharded_state_dict)))
        yield


def _refuse_others(saved: Any, args: Any) -> None:
    shares = args.data_parallel_size * args.context_parallel_size > 1
    for name in _FIXED + _BUCKETS * shares:
        before, now = getattr(saved, name, None), getattr(args, name, None)
        if before != now:
            raise UsageError(
                f"--load {args.load}: it holds state of few bits as it was on each rank, but {name} was {before} and is"
                f" {now}; train with the same, or pass --no-load-optim"
            )
