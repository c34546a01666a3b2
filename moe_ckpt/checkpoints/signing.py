"""Signs dense checkpoints that somebody made without the job's secret, so that a job with it takes them."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.manifest import KEYED, is_keyed, unkeyed
from megatron.core.dist_checkpointing.moe.storage.small_files import SECRET_FILE
from moe_ckpt.dense import integrity
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import Advance, unwatched
from moe_ckpt.dense.names import read_if_there

from .location import LocationKind
from .recognition import recognize
from .saves import saved_iterations


def signed_folders(place: str) -> tuple[Path, ...]:
    """The iterations at a place that can be signed: one, or all complete ones of a --save folder, oldest first.

    Raises UsageError for a place without any, and without a secret to sign with.
    """
    if not is_keyed():
        raise UsageError(f"there is no secret to sign with: give the file of the job's in {SECRET_FILE}")
    kind = recognize(place)
    if kind is LocationKind.ITERATION:
        return (Path(place),)
    if kind is not LocationKind.SAVES:
        raise UsageError(f"{place} is {kind.value}: snapshots are signed by the job that makes them, or not at all")
    folders = tuple(saved.folder for saved in saved_iterations(Path(place)) if saved.is_complete)
    if not folders:
        raise UsageError(f"{place} has no complete iteration")
    return folders


def sign(folder: Path, advance: Advance = unwatched) -> bool:
    """Seal an iteration with the secret of this process, once its bytes are those that were saved.

    Returns:
        Whether it was not signed before.

    Raises:
        UnreadableCheckpoint: it is damaged, incomplete, or signed with another secret.
        OSError: it cannot be written.
    """
    content = read_if_there(folder / integrity.NAME)
    if content is not None and content.startswith(KEYED):
        _refuse_damage(folder, advance)
        integrity.expected(folder, open_dense(folder).common)
        return False
    with unkeyed():
        _refuse_damage(folder, advance)
        integrity.expected(folder, open_dense(folder).common)
    integrity.seal(folder)
    return True


def _refuse_damage(folder: Path, advance: Advance) -> None:
    """Raises UnreadableCheckpoint for files that are not what was saved."""
    if damage := integrity.check(folder, advance=advance):
        raise UnreadableCheckpoint(f"{damage[0]}; it is not signed: restore the file or take another iteration")
