"""Signs dense checkpoints that somebody made without the job's secret, so that a job with it takes them."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import KEYED, unkeyed

from . import integrity
from .dense import open_dense
from .integrity import Advance, unwatched
from .names import read_if_there


def sign(folder: Path, advance: Advance = unwatched) -> bool:
    """Seal an iteration with the secret of this process, once its bytes are those that were saved.

    Args:
        folder: The folder of the iteration.
        advance: Called with the number of bytes that were read since its last call.

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
