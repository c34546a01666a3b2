"""The stock loop's own checkpoints: which it has and would load, and how they are saved whole and loaded as saved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..dense_saves.choosing import has_chain, intact_checkpoint
from ..dense_saves.directory import CheckpointDirectory
from ..dense_saves.saving import DenseSaves
from ..extensions import load
from ..megatron_state.random_states import DEVICE, TRACKED
from ..storage.small_files import INFORMING_BYTES, read_small
from .seams import Call

TRACKER = "latest_checkpointed_iteration.txt"


class StockSaves:
    """What the hooks do around the loop's saving and loading, where training is protected. Methods are collectives.

    Args:
        args: Of Megatron-LM.
        secret: Path of the job's secret, if that is not in the environment.

    Attributes:
        device_states: Random states of another kind of device, by name, which are saved in place of those of this one.
        recorded_args: Of Megatron-LM, of the job that saved the checkpoint that was loaded last; None before.
    """

    def __init__(self, args: Any, secret: str | None) -> None:
        self._args, self._saves = args, DenseSaves(secret)
        self.device_states: Mapping[str, bytes] = {}
        self.recorded_args: Any = None
        self._loaded: Path | None = None
        self._experts: Any = None

    def protect(self, chunks: Any, *, loaded: bool) -> None:
        """Training goes on here; loaded: from the checkpoint that was loaded last."""
        if self._experts is not None:
            self._experts.close()
            self._experts = None
        if getattr(self._args, "save_experts", None) is not None:
            self._experts = load("partial_saves.saving").ExpertSaves(
                self._args, chunks, self._loaded if loaded else None
            )

    def load(self, call: Call) -> Any:
        """`load_checkpoint`, of the newest checkpoint that is intact. Raises UnreadableCheckpoint, UsageError."""
        with intact_checkpoint(self._args, call["load_arg"]) as self._loaded:
            return call.go_on()

    def load_shards(self, call: Call) -> Any:
        """Core's `load` inside of it."""
        folder = self._loaded
        if folder is None or Path(call["checkpoint_dir"]) != folder:
            return call.go_on()
        if has_chain(folder):
            strategy = load("partial_saves.loading").merging(folder, call["sharded_strategy"], call["strict"])
            call = call.replacing(sharded_strategy=strategy)
        state_dict = call.go_on()
        self.recorded_args = state_dict.get("args", self.recorded_args)
        return state_dict

    def save(self, call: Call) -> Any:
        """`save_checkpoint`; a checkpoint that cannot be written is reported, and training goes on."""
        root = None if call["release"] else self._root(transient=call["non_persistent_ckpt"])
        if root is None:
            return call.go_on()
        result = self._saves.checkpoint(root, call["iteration"], partial(self._save, call, root), self._experts)
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
        root = self._root(transient=False)
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


def newest_checkpoint(args: Any) -> tuple[int, bool]:
    """The iteration that loading gives, -1 if there is nothing to load; and whether the flags name a certain one.

    A collective.
    """
    asked_for = getattr(args, "ckpt_step", None) is not None or bool(args.finetune) or args.load is None
    return newest_iteration(args.load), asked_for


def newest_iteration(folder: str | None) -> int:
    """The newest iteration of which a folder has a whole checkpoint, -1 if none. A collective: rank 0 looks."""
    found = [_iteration_in(folder) if folder is not None and torch.distributed.get_rank() == 0 else -1]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def _iteration_in(folder: str) -> int:
    try:
        text = read_small(Path(folder) / TRACKER, INFORMING_BYTES, through_links=True).decode(errors="replace").strip()
    except OSError:
        return -1
    if not text:  # its writer was killed
        return max(CheckpointDirectory(folder).iterations(), default=-1)
    # A released model, which training begins from.
    return int(text) if text.isdecimal() else 0
