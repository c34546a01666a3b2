"""Reports on dense checkpoints: ours or stock, one iteration or a whole --save folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.lease import writer_of
from moe_ckpt.dense.chain import Chain, read_chain
from moe_ckpt.dense.components import OBJECT_RULES, TENSOR_RULES, component_of, in_order
from moe_ckpt.dense.integrity import NAME as INTEGRITY
from moe_ckpt.dense.names import COMMON, ITERATION, RELEASE, TRACKER
from moe_ckpt.report import Fact, Report, Table, table

from .location import Inspection, age_of
from .saved_iterations import SavedIteration, nothing_tracked, saved_iteration, saved_iterations, tracked

if TYPE_CHECKING:
    from moe_ckpt.dense.dense import DenseCheckpoint

_DEGREES = (
    ("TP", "tensor_model_parallel_size"),
    ("PP", "pipeline_model_parallel_size"),
    ("VPP", "virtual_pipeline_model_parallel_size"),
    ("CP", "context_parallel_size"),
    ("EP", "expert_model_parallel_size"),
    ("ETP", "expert_tensor_parallel_size"),
    ("DP", "data_parallel_size"),
)


def saves_report(root: Path, now_s: float) -> Inspection:
    """A --save folder; a problem is why its newest iteration cannot be read, or why a job does not look for it.

    Raises UnreadableCheckpoint for a folder without iterations.

    Args:
        root: The `--save` folder.
        now_s: Current time, in seconds since 1970, for the ages of files.
    """
    found = saved_iterations(root)
    if not found:
        raise UnreadableCheckpoint(f"{root} has a {TRACKER}, but no iteration: there is nothing to restore from")
    newest, why = _newest(root, found), ""
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()
    if newest is None:
        why = f"{root}: none of its {len(found)} iterations is whole: there is nothing to restore from"
    else:
        why = nothing_tracked(root, RELEASE if newest.iteration is None else str(newest.iteration))
        try:
            facts, tables = _content(newest, now_s)
        except UnreadableCheckpoint as error:
            why = str(error)
    own = (
        Fact("Newest iteration", newest.iteration if newest and newest.iteration is not None else None, "count"),
        Fact("Tracker names", tracked(root) or None),
        Fact("Iteration folders", len(found), "count"),
        Fact("Whole iterations", sum(saved.is_complete for saved in found), "count"),
        Fact("Bytes of all", sum(saved.nbytes for saved in found), "bytes"),
    )
    tables = (_iterations(found, now_s), *tables)
    notes = (*filter(None, [writer_of(str(root))]), *_notes(newest))
    return Inspection(Report(f"Checkpoints in {root}", (*own, *facts), tables, notes), why)


def iteration_report(folder: Path, now_s: float) -> Inspection:
    """One iteration; a problem is what it lacks. Raises UnreadableCheckpoint.

    Args:
        folder: The folder of the iteration.
        now_s: Current time, in seconds since 1970, for the ages of files.
    """
    saved = saved_iteration(folder)
    facts, tables = _content(saved, now_s)
    why = "" if saved.is_complete else f"{folder} is {saved.state}; take another iteration"
    return Inspection(Report(f"Checkpoint in {folder}", facts, tables, _notes(saved)), why)


def _newest(root: Path, found: tuple[SavedIteration, ...]) -> SavedIteration | None:
    """The one that is loaded: the tracker's, else the newest whole one, not newer than the tracker's."""
    last = ITERATION.fullmatch(tracked(root))
    whole = [saved for saved in found if saved.is_complete and not saved.left]
    named = next((saved for saved in whole if saved.tracked), None)
    older = [saved for saved in whole if not last or (saved.iteration is not None and saved.iteration <= int(last[1]))]
    return named or next(reversed(older), None)


def _content(saved: SavedIteration, now_s: float) -> tuple[tuple[Fact, ...], tuple[Table, ...]]:
    """What the index and the common part of an iteration say."""
    from moe_ckpt.dense.dense import open_dense

    checkpoint, chain = open_dense(saved.folder), read_chain(saved.folder)
    # A namespace, and from others than Megatron maybe a dict. Whatever it is, it only informs.
    given = checkpoint.common.get("args")
    members = given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
    arguments = {str(name): value for name, value in members.items()}
    metadata = checkpoint.common.get("content_metadata")
    sharding = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, Mapping) else None
    where = f"in {COMMON}" if (saved.folder / COMMON).is_file() else "among the shards"
    facts = (
        Fact("Iteration", _count(checkpoint.common.get("iteration")), "count"),
        Fact("Age", age_of(saved.written_s, now_s), "seconds"),
        Fact("Bytes", saved.nbytes, "bytes"),
        Fact("World size", _count(arguments.get("world_size")), "count"),
        Fact("Layout", _layout(arguments)),
        Fact("Format", f"torch_dist 1, common part {where}"),
        Fact("Optimizer", sharding if isinstance(sharding, str) else None),
        Fact("Integrity file", "yes" if saved.has_integrity else "no: bytes cannot be checked"),
        Fact("Consumed samples", _count(arguments.get("consumed_train_samples")), "count"),
        Fact("Tensors", len(checkpoint.tensors), "count"),
        Fact("Experts", _experts(chain)),
    )
    return facts, (_components(checkpoint), *_chain_table(chain), _arguments(arguments))


def _components(checkpoint: DenseCheckpoint) -> Table:
    entries, nbytes = Counter[str](), Counter[str]()
    sizes = {name: prod(info.shape) * info.dtype.itemsize for name, info in checkpoint.tensors.items()}
    extents = {name: checkpoint.index.objects[name].length_bytes for name in checkpoint.objects}
    for rules, found in ((TENSOR_RULES, sizes), (OBJECT_RULES, extents)):
        for name, size in found.items():
            component = component_of(name, rules)
            entries[component] += 1
            nbytes[component] += size
    rows = ((component, entries[component], nbytes[component]) for component in in_order(tuple(entries)))
    return table("Components", "component | entries:count | size:bytes", rows)


def _layout(arguments: Mapping[str, Any]) -> str | None:
    degrees = [f"{short} {degree}" for short, name in _DEGREES if (degree := _count(arguments.get(name)))]
    return ", ".join(degrees) or None


def _experts(chain: Chain | None) -> str | None:
    if chain is None:
        return "all here"
    older = sorted(chain.iterations - {chain.iteration})
    return f"all here ({chain.num_experts} of a layer)" if not older else f"some, others in iterations {older}"


def _iterations(found: tuple[SavedIteration, ...], now_s: float) -> Table:
    rows = (
        (
            saved.folder.name,
            saved.state,
            "yes" if saved.tracked else "",
            "yes" if saved.has_integrity else "no",
            saved.nbytes,
            age_of(saved.written_s, now_s),
            list(saved.needs),
        )
        for saved in reversed(found)
    )
    return table("Iterations", "iteration | state | tracked | integrity | size:bytes | age:seconds | needs", rows)


def _chain_table(chain: Chain | None) -> Iterator[Table]:
    """Which iteration has the newest copy of each expert, of a checkpoint that was saved with some of them."""
    if chain is not None:
        rows = (
            (str(operator), chain.left_out(operator), holder, chain.iteration - holder, f"iter_{holder:07d}")
            for holder in sorted(chain.iterations)
            for operator in chain.held_by(holder)
        )
        yield table("Operators", "operator | part | iteration:count | behind:count | held by", rows)


def _arguments(arguments: Mapping[str, Any]) -> Table:
    rows = ((name, str(value)) for name, value in sorted(arguments.items()) if not _is_unset(value))
    return table("Arguments", "argument | value", rows)


def _count(value: object) -> int | None:
    """A whole number, None for all else."""
    return value if type(value) is int and abs(value) < 2**63 else None


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, int | float | list | tuple) and not value)


def _notes(saved: SavedIteration | None) -> tuple[str, ...]:
    if saved is None or saved.has_integrity:
        return ()
    return (f"{saved.folder.name} has no {INTEGRITY}, as stock Megatron saves: its bytes cannot be checked.",)
