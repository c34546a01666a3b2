"""What data a run asks for: blends, the split between them, and how samples are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.pretrain.errors import InvalidInput

SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class Blend:
    """Corpus prefixes and, for a weighted blend, one positive weight each; without weights each is read once."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def for_megatron(self) -> tuple[list[str], list[float] | None]:
        """The pair `BlendedMegatronDatasetConfig` takes."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


@dataclass(frozen=True)
class DatasetRequest:
    """The data flags of a run; `num_samples` and the per-split paths are (training, validation, test).

    A path tuple is one prefix, several prefixes, or weight and prefix in turn. `data_path` is shared out by `split`
    ("969,30,1"); `train_data_path`, `valid_data_path` and `test_data_path` exclude it and ignore `split`; `mock`
    excludes all paths. `cache_path` is where sample indices are kept (default: beside the first corpus).
    """

    data_path: tuple[str, ...]
    split: str
    sequence_length: int
    seed: int
    num_samples: tuple[int, int, int]
    cache_path: str | None
    mock: bool
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask: bool
    mmap_bin_files: bool
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()

    @property
    def per_split_paths(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.train_data_path, self.valid_data_path, self.test_data_path

    def check(self) -> None:
        """Raise `InvalidInput` when the fields contradict each other or make no sense by themselves."""
        given = [bool(self.data_path), any(self.per_split_paths), self.mock]
        if sum(given) > 1:
            raise InvalidInput("--data-path, --train/valid/test-data-path and --mock-data exclude each other; give one")
        if not any(given):
            raise InvalidInput("no data: give --data-path, --train-data-path or --mock-data")
        if self.sequence_length < 1:
            raise InvalidInput(f"--seq-length {self.sequence_length}: at least 1 is needed")
        if min(self.num_samples) < 0:
            raise InvalidInput(f"sample counts {self.num_samples} must not be negative")


def parse_split(split: str) -> str:
    """The split in Megatron's spelling: up to three shares separated by commas, none negative, not all zero.

    Raises `InvalidInput` otherwise; Megatron would read any digits it finds and divide by zero.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError as error:
        raise InvalidInput(f'--split "{split}" is not numbers separated by commas, such as 969,30,1') from error
    if len(shares) > len(SPLIT_NAMES) or not all(math.isfinite(share) and share >= 0 for share in shares):
        raise InvalidInput(f'--split "{split}" needs one to three shares (training,validation,test), none negative')
    if sum(shares) == 0:
        raise InvalidInput(f'--split "{split}" sums to 0; give at least one share that is not 0')
    return ",".join(f"{share:f}" for share in shares)


def parse_blend(paths: tuple[str, ...], flag: str) -> Blend | None:
    """The blend a path tuple spells, `None` for an empty one; `flag` names it in errors.

    Weights are recognised when every other entry, from the first, is a number. Raises `InvalidInput` when only some
    are, or when a weight is not positive.
    """
    if not paths:
        return None
    if len(paths) % 2 == 1:
        return Blend(paths, None)
    weights = [_as_number(entry) for entry in paths[::2]]
    if all(weight is None for weight in weights):
        return Blend(paths, None)
    chosen = []
    for entry, weight in zip(paths[::2], weights, strict=True):
        if weight is None or not math.isfinite(weight) or weight <= 0:
            raise InvalidInput(f"{flag} {' '.join(paths)}: `{entry}` stands where a positive weight is expected")
        chosen.append(weight)
    if len(chosen) == 1:
        return Blend(paths[1:], None)
    return Blend(paths[1::2], tuple(chosen))


def _as_number(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None
