"""Which dense checkpoint Megatron-LM is to load: the newest one whose bytes are those that were saved."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.dense import integrity
from moe_ckpt.dense.chain import MANIFEST, read_chain
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import NAME, FileSum, damaged, shares
from moe_ckpt.dense.merged import open_merged
from moe_ckpt.dense.names import (
    COMMON,
    FORMAT,
    INDEX,
    INFORMING_BYTES,
    ITERATION,
    RELEASE,
    TRACKER,
    iteration_of,
    read_beside,
    tracked_name,
)

from ..core_versions.training import replaced
from ..errors import StoreFailure, UnreadableCheckpoint, UsageError, format_error
from ..storage.manifest import is_keyed
from .directory import CheckpointDirectory
from .writing import RankFailure, await_everywhere, on_rank_zero, raise_on_all_ranks

log = logging.getLogger(__name__)

# Compares the bytes of a checkpoint with what was saved, before any of them is loaded.


def require_intact(sums: Mapping[Path, FileSum]) -> None:
    """Compare all files with their sums, each rank its share of them; a collective over all ranks.

    Raises RankFailure on every rank, which names the file, if any has changed.
    """
    readers, at = _readers(sums)
    own = shares(sums, readers)[at]
    with ThreadPoolExecutor(1, "integrity") as beside:
        summing = beside.submit(damaged, {path: sums[path] for path in own})
        await_everywhere(summing, f"reading {len(own)} files of {next(iter(sums), Path()).parent} for their checksums")
        found = summing.result()
    raise_on_all_ranks(f"{found[0]}; restore the file or take another iteration" if found else None)


def _readers(sums: Mapping[Path, FileSum]) -> tuple[int, int]:
    """Among how many ranks the files are shared out, and which of these this one is; a collective over all ranks.

    All ranks, or where nodes have copies of their own the ranks of a node: what another one reads says nothing of it.
    """
    try:
        found = min(sums).stat() if sums else None
    except OSError:  # whoever reads it says so
        found = None
    # All but device and inode, which clients of shared storage may number. Copies were made at other times.
    one = zlib.crc32(repr(found and integrity.identity(found)[2:]).encode())
    least = torch.tensor([one, -one], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    low, high = least.tolist()
    if low == -high:
        return dist.get_world_size(), dist.get_rank()
    _warn(
        "%s is not the same folder on all nodes: each node compares all of its files",
        min(sums).parent if sums else "--load",
    )
    ranks, at = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "-1"))
    return (ranks, at) if 0 <= at < ranks else (1, 0)  # started by who tells less: each rank reads all


@dataclass(frozen=True)
class _LoadChoice:
    """A checkpoint that may be loaded.

    settings: arguments with which Megatron-LM loads this one. is_tracker_lost: the tracker has to be written again.
    """

    root: Path
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_tracker_lost: bool = False

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def track(self) -> None:
        """Point the tracker at it. Raises UsageError."""
        try:
            CheckpointDirectory(self.root).track(_iteration(self.name))
        except OSError as error:
            raise UsageError(f"--load {self.root}: {TRACKER} is empty; repair it ({format_error(error)})") from error


@contextlib.contextmanager
def intact_checkpoint(args: Any, load_arg: str = "load") -> Iterator[Path | None]:
    """A block in which Megatron-LM loads the newest checkpoint that is as it was saved. A collective.

    Args:
        args: Of Megatron-LM. In the block they name that checkpoint, if it is not the one that they named.
        load_arg: The argument that names the folder.

    Yields:
        The folder of that checkpoint; None where there is none.

    Raises:
        UnreadableCheckpoint: On all ranks: there are checkpoints, and none that was asked for is intact.
        StoreFailure: On all ranks, behind the block: the one that was loaded was replaced meanwhile.
        UsageError: On all ranks: the tracker names no checkpoint.
    """
    seen = _Seen()
    chosen = _chosen(on_rank_zero(lambda: _candidates(args, load_arg), (UsageError,)), args, seen)
    if chosen is None:
        yield None
        return
    with replaced(args, **chosen.settings):
        yield chosen.folder
    seen.require_same()


def has_chain(folder: Path) -> bool:
    """Whether a checkpoint says which others its experts are loaded from."""
    return (folder / MANIFEST).exists()


def has_stale_experts(folder: Path) -> bool:
    """Whether some of a checkpoint's experts are loaded from others, as they were there."""
    try:
        chain = read_chain(folder)
    except UnreadableCheckpoint:
        return False  # loading refuses it
    return chain is not None and not chain.is_complete


class _Seen:
    """The files of a checkpoint as they were compared: Megatron-LM opens them by name once more. Rank 0 looks."""

    def __init__(self) -> None:
        self._folder, self._sums = Path(), dict[Path, FileSum]()
        self._files = dict[Path, tuple[int, ...]]()

    def take(self, folder: Path, sums: Mapping[Path, FileSum] | None) -> None:
        """The files of this one, from now on. Raises UnreadableCheckpoint."""
        self._folder, self._sums = folder, dict(sums or {})
        try:
            self._files = self._found()
        except OSError as error:
            raise UnreadableCheckpoint(f"{folder} cannot be read: {error}; take another iteration") from error

    def require_same(self) -> None:
        """Compare once more what was touched since, as by whoever links or groups files: most often it is as it was.

        A collective. Raises StoreFailure on all ranks where another one took its place.
        """
        touched, replaced = on_rank_zero(self._touched)
        if not (touched or replaced):
            return
        try:
            require_intact(touched)
            raise_on_all_ranks(f"{replaced} is another file" if replaced else None)
        except RankFailure as failure:
            raise StoreFailure(f"a checkpoint was saved again while it was loaded: {failure}; start again") from None

    def _touched(self) -> tuple[dict[Path, FileSum], str]:
        now = self._found()
        paths = [path for path, one in self._files.items() if now.get(path) != one]
        if self._sums:
            return {path: self._sums[path] for path in paths}, ""
        # Without sums, by what a writer changes: length and time.
        other = [path for path in paths if now.get(path, ())[2:4] != self._files[path][2:4]]
        return {}, str(other[0]) if other else ""

    def _found(self) -> dict[Path, tuple[int, ...]]:
        # Without sums also files in folders, as of a rank: of those a folder tells nothing.
        paths = [*self._sums] or [one for one in self._folder.rglob("*") if one.is_file()]
        found = dict[Path, tuple[int, ...]]()
        for path in paths:
            with contextlib.suppress(OSError):  # a link that leads nowhere, or a name that is gone
                found[path] = integrity.identity(path.stat())
        return found


def _chosen(candidates: list[_LoadChoice], args: Any, seen: _Seen) -> _LoadChoice | None:
    """The first that is intact; None if there are none. Raises UnreadableCheckpoint. A collective."""
    refused: list[str] = []
    for candidate in candidates:
        try:
            _require_intact(candidate, args, seen)
        except (UnreadableCheckpoint, RankFailure) as error:
            refused.append(f"{candidate.name}: {error}")
            continue
        if refused:
            _warn("loading %s in its place; refused %s", candidate.folder, "; ".join(refused))
        if candidate.is_tracker_lost:
            on_rank_zero(candidate.track, (UsageError,))
        return candidate
    if refused:
        raise UnreadableCheckpoint(
            f"--load {candidates[-1].root}: no usable checkpoint; {'; '.join(refused)}; nothing was loaded"
        )
    return None


def _require_intact(candidate: _LoadChoice, args: Any, seen: _Seen) -> None:
    """Raises UnreadableCheckpoint or RankFailure, on all ranks."""

    def look() -> Mapping[Path, FileSum] | None:
        found = _sums(candidate.folder, args)
        seen.take(candidate.folder, found)
        return found

    sums = on_rank_zero(look, (UnreadableCheckpoint,))
    if sums is None:
        _warn("%s has no %s: it is loaded without being verified", candidate.folder, NAME)
    else:
        require_intact(sums)


def _warn(line: str, *values: object) -> None:
    if dist.get_rank() == 0:
        log.warning(line, *values)


def _sums(folder: Path, args: Any) -> Mapping[Path, FileSum] | None:
    """What the files of a checkpoint were, None if nobody wrote that down. Raises UnreadableCheckpoint."""
    if not folder.is_dir():
        raise UnreadableCheckpoint(f"{folder} is missing; take another iteration")
    is_sealed = is_keyed() or (folder / NAME).exists()
    sums = integrity.expected(folder, {}) if is_sealed else None
    if is_sealed and sums is None:  # only ever seen where somebody replaces or removes it now
        raise UnreadableCheckpoint(f"{folder / NAME} vanished while it was read; take another iteration")
    merged = open_merged(folder)
    if merged is not None:  # its experts are loaded from other checkpoints, too
        return integrity.sums_of(merged.parts.values())
    if is_sealed:
        return sums
    others = any(folder.glob("mp_rank_0*")) or (args.ckpt_format != "torch_dist" and not args.auto_detect_ckpt_format)
    return None if others else integrity.expected(folder, open_dense(folder).common)


def _candidates(args: Any, load_arg: str) -> list[_LoadChoice]:
    """What Megatron-LM would load, and what may be taken in its place, best first. Raises UsageError."""
    root, asked = _root(args, load_arg), getattr(args, "ckpt_step", None)
    transient, without = _transient(args, root), {"non_persistent_ckpt_type": None}
    is_saved_to = root is not None and args.save is not None and root.resolve() == Path(args.save).resolve()
    if root is not None and is_saved_to:
        with contextlib.suppress(OSError):  # then an older one is taken
            CheckpointDirectory(root).restore_replaced()
    # In a folder that has nothing to do with `--load` it may be this training's, since it went back.
    is_left = bool(asked and transient) and (is_saved_to or args.non_persistent_global_ckpt_dir is None)
    found: list[_LoadChoice] = []
    if asked and root is not None:
        found = [_LoadChoice(root, f"iter_{asked:07d}", without if is_left else {})]
        _refuse_two_iterations(found[0], args)
    elif root is not None:
        found = _tracked(CheckpointDirectory(root))
    if transient is None or is_left or (found and _iteration(found[0].name) > _iteration(transient.name)):
        return found
    return [transient, *(_LoadChoice(each.root, each.name, {**each.settings, **without}) for each in found)]


def _refuse_two_iterations(choice: _LoadChoice, args: Any) -> None:
    """Raises UsageError where Megatron-LM would load the optimizer of another iteration."""
    tracked, pretrained = _tracker(choice.root) or "", getattr(args, "pretrained_checkpoint", None)
    if (
        getattr(args, "use_distributed_optimizer", False)
        and not (args.finetune or args.no_load_optim or str(choice.root) == pretrained)
        and any(choice.folder.glob("mp_rank_0*"))
        and iteration_of(tracked) != args.ckpt_step
    ):
        raise UsageError(
            f"--ckpt-step {args.ckpt_step}: of checkpoints of format torch Megatron-LM loads the distributed optimizer"
            f" of the iteration that {choice.root / TRACKER} names, {tracked}; write {args.ckpt_step} there"
        )


def _tracked(directory: CheckpointDirectory) -> list[_LoadChoice]:
    """What the tracker names, and what is older. Nothing without a tracker, as Megatron-LM has it."""
    root, iterations = directory.root, directory.continued()
    text = _tracker(root)
    if text is None:
        return []
    if not text:  # its writer was killed: all that is published was published whole
        return [_older(root, iteration, is_tracker_lost=True) for iteration in iterations]
    try:
        named = _LoadChoice(root, tracked_name(root / TRACKER, text))
    except UnreadableCheckpoint as error:
        raise UsageError(f"--load {root}: {error}; repair the tracker, or remove it to begin again") from error
    tracked = _iteration(named.name)  # nothing is older than a release
    return [named, *(_older(root, iteration) for iteration in iterations if 0 < iteration < tracked)]


def _older(root: Path, iteration: int, *, is_tracker_lost: bool = False) -> _LoadChoice:
    return _LoadChoice(root, f"iter_{iteration:07d}", {"ckpt_step": iteration}, is_tracker_lost)


def _tracker(root: Path) -> str | None:
    """What it says, None where there is none. Raises UsageError where it cannot be read: nobody means to begin
    again."""
    try:
        return read_beside(root / TRACKER, INFORMING_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"--load {root}: {root / TRACKER} cannot be read ({error.strerror}); repair the tracker, or remove it to"
            " begin again"
        ) from error


def _root(args: Any, load_arg: str) -> Path | None:
    load, pretrained = getattr(args, load_arg), getattr(args, "pretrained_checkpoint", None)
    if pretrained is not None and (load is None or not (Path(load) / TRACKER).is_file()):
        return Path(pretrained)
    return None if load is None else Path(load)


def _transient(args: Any, root: Path | None) -> _LoadChoice | None:
    """The checkpoint of `--non-persistent-ckpt-type global`, if there is one."""
    if getattr(args, "non_persistent_ckpt_type", None) != "global":
        return None
    folder = args.non_persistent_global_ckpt_dir or (None if root is None else root / "non_persistent")
    iteration = None if folder is None else iteration_of(_tracker(Path(folder)) or "")
    return None if folder is None or iteration is None else _LoadChoice(Path(folder), f"iter_{iteration:07d}")


def _iteration(name: str) -> int:
    return -1 if name == RELEASE else int(name.removeprefix("iter_"))


# What `--load` names, where that is nearly a folder of checkpoints.


def one_iteration(args: Any) -> str:
    """Let `--load` of one iteration's folder mean that iteration; returns what is said of it, empty if it is none.

    Megatron-LM looks for a tracker there, finds none, and begins again. Raises UsageError for a folder that holds
    something else than its checkpoints.
    """
    given, here = args.load, Path(args.load).absolute()
    if "://" in given or (here / TRACKER).exists() or not here.is_dir():
        return ""
    if ITERATION.fullmatch(here.name) and any((here / name).exists() for name in (INDEX, FORMAT, COMMON)):
        iteration = _iteration(here.name)
        if iteration == 0 and _tracker(here.parent) != "0":
            raise UsageError(
                f"--load {given}: Megatron-LM takes --ckpt-step 0 for none; give a folder whose {TRACKER} says 0"
            )
        args.load, args.ckpt_step = str(here.parent), iteration or None
        step = f" --ckpt-step {iteration}" * bool(iteration)
        return f"--load {given} is one iteration: taken as --load {args.load}{step}"
    if here.name == RELEASE:
        raise UsageError(f"--load {given} is what {TRACKER} of a released model names: give the folder above it")
    if any(here.glob("iter_*-rank_*")):
        raise UsageError(f"--load {given} holds snapshots, not checkpoints: give it as --moe-ckpt-persist-dir")
    if (here / "config.json").exists() and any(here.glob("*.safetensors")):
        raise UsageError(f"--load {given} is a Hugging Face model: moe-ckpt convert --from hf makes a checkpoint of it")
    if left := CheckpointDirectory(here).iterations():
        way = f"give --ckpt-step {left[0]}" if left[0] else f"write 0 into a {TRACKER} there"  # 0 counts as none
        return (
            f"--load {given} has no {TRACKER}, so training begins again; to continue from its iteration {left[0]} {way}"
        )
    return ""
