"""Writes an ordinary complete `torch_dist` checkpoint from a partial iteration and those that it needs, offline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically
from megatron.core.dist_checkpointing.moe.types import OperatorId

from .chain import stacked_name, stacked_object_name
from .dense_writer import DenseWriter
from .integrity import damaged, identities, refuse_saved_again, seal, sums_of
from .merged import MergedCheckpoint, open_merged
from .names import COMMON, INDEX_BYTES, TRACKER, new_iteration_folder, read_beside
from .staging import staging

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given the bytes that there are to do, a context with a function that takes bytes as they are done."""


def _unwatched(nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda done_bytes: None)


def export_merged(source: Path | str, target: Path | str, watch: Watch = _unwatched) -> Path:
    """Writes the merged checkpoint that `source` stands for into the folder `target`, and its tracker beside it.

    Memory is needed for one piece of a tensor at a time.

    Args:
        source: an iteration, or a `--save` directory, whose tracker then names it.
        watch: is called with the bytes that are to be compared with their checksums and written; what it yields is
            called with the bytes that are done.

    Returns:
        `target/iter_XXXXXXX`, published by one rename, with tensors named as in an iteration that was saved whole.

    Raises:
        UsageError: there is nothing to merge, or something is in the way.
        UnreadableCheckpoint: files have changed since they were saved, or meanwhile, or as `open_merged`.
        OSError: `target` cannot be written.
    """
    named = _opened(source)
    before = identities(part.directory for part in named.parts.values())
    # Once more, now that its files are known: a job that goes back saves an iteration again, and swaps the folder.
    merged = _opened(named.newest.directory)
    if merged.chain != named.chain:
        raise UnreadableCheckpoint(f"{named.newest.directory} was saved again while it was read; try again")
    root = Path(target)
    final = new_iteration_folder(root, merged.chain.iteration)
    sums = sums_of(merged.parts.values())
    with watch(sum(saved.nbytes for saved in sums.values()) + _entry_bytes(merged)) as advance:
        # What is written gets checksums of its own, so this is the last place where damage can be told.
        if damage := damaged(sums, advance):
            raise UnreadableCheckpoint(f"{damage[0]}; restore the file or take another iteration")
        with staging(final, "merging") as folder:
            _write(merged, folder, advance)
            refuse_saved_again(before)
    write_atomically(root / TRACKER, str(merged.chain.iteration).encode())
    return final


def _opened(source: Path | str) -> MergedCheckpoint:
    merged = open_merged(source)
    if merged is None or merged.chain.is_complete:
        raise UsageError(f"{source} was saved whole, there is nothing to merge; use it as it is")
    return merged


def _entry_bytes(merged: MergedCheckpoint) -> int:
    """Bytes of all tensors as they are stored, which is nearly everything."""
    of_experts = merged.experts[merged.chain.iteration].names
    chunks = [chunk for name, info in merged.newest.tensors.items() if name not in of_experts for chunk in info.chunks]
    for operator in merged.chain.experts:
        chunks += [chunk for _, tensor, _ in merged.tensors_of(operator) for chunk in tensor.stored]
    return sum(chunk.extent.length_bytes for chunk in chunks)


def _write(merged: MergedCheckpoint, folder: Path, advance: Callable[[int], None]) -> None:
    with DenseWriter(folder, advance) as writer:
        of_experts = merged.experts[merged.chain.iteration].names
        newest = merged.newest
        for name, info in newest.tensors.items():
            if name not in of_experts:
                writer.tensor(name, info.shape, info.dtype)
                for chunk in info.chunks:
                    writer.piece(name, chunk, writer.copied(newest, chunk.extent, name))
        for name, extent in newest.index.objects.items():
            if name not in of_experts:
                writer.object(name, writer.copied(newest, extent, name))
        for iteration in sorted(merged.chain.iterations):
            for operator in merged.chain.held_by(iteration):
                _write_expert(merged, operator, writer)
    common = newest.directory / COMMON
    if common.is_file():
        write_atomically(folder / COMMON, read_beside(common, INDEX_BYTES))
    writer.write_index(folder)
    seal(folder)


def _write_expert(merged: MergedCheckpoint, operator: OperatorId, writer: DenseWriter) -> None:
    chain = merged.chain
    for common, tensor, part in merged.tensors_of(operator):
        name = stacked_name(common, operator.layer, chain.stacked_layers)
        writer.tensor(name, (*chain.leading_axes, *tensor.shape), tensor.dtype)
        for piece, stored in merged.stacked_pieces(operator, tensor):
            if stored.sizes == piece.sizes:
                place = writer.copied(part, stored.extent, name)
            else:
                place = writer.saved(part.read_piece(name, tensor.dtype, stored).clone().reshape(piece.sizes))
            writer.piece(name, piece, place)
    for common, stored_name, part in merged.objects_of(operator):
        name = stacked_object_name(chain, common, operator)
        writer.object(name, writer.copied(part, part.index.objects[stored_name], name))
