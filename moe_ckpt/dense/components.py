"""Which component of the training state each entry of a dense checkpoint belongs to; no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MODEL = "model weights"
MASTER = "master weights"
ROUTER = "router buffers"
OPTIMIZER = "optimizer"
LOSS_SCALER = "loss scaler"
RNG = "rng"
SCHEDULER = "scheduler"
DATA_POSITION = "data position"
OTHER = "other"
LEFT_OUT = "left out"

# The order of the lines of a digest; moments, named by their optimizer, stand where MOMENTS does.
_MOMENTS = "moments"
_ORDER = (MODEL, MASTER, _MOMENTS, ROUTER, OPTIMIZER, LOSS_SCALER, RNG, SCHEDULER, DATA_POSITION, OTHER)

_CHAIN = r"(?:chained_\d+\.)?"
_BUCKET = rf"{_CHAIN}optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\.dtype_.+\.bucket_idx_\d+"

# (full match of the name, component); the first that matches counts; "\1" is the group, i.e. the name of the moment.
TENSOR_RULES = (
    (rf"{_CHAIN}optimizer\.state\.(?:fp32_param|param|master|master_scale)\..+", MASTER),
    (rf"{_CHAIN}optimizer\.state\.(\w+)\..+", r"\1"),
    (rf"{_BUCKET}\.param", MASTER),
    (rf"{_BUCKET}\.(\w+)", r"\1"),
    (rf"{_CHAIN}optimizer\..+", OPTIMIZER),
    (r".+\.router\.(?:expert_bias|local_tokens_per_expert|global_tokens_per_expert|ga_steps|qb_beta\w*)", ROUTER),
    (r"rng_state(?:[./].+)?", RNG),
    (r".+", MODEL),
)
OBJECT_RULES = (
    (rf"{_CHAIN}optimizer\..+\.grad_scaler/.+", LOSS_SCALER),
    (rf"{_CHAIN}optimizer\..+\.param_state_sharding_type/.+", LEFT_OUT),
    (rf"{_CHAIN}optimizer\..+", OPTIMIZER),
    (r"rng_state/.+", RNG),
    (r".+", OTHER),
)
# Of the part that is common to all ranks; names are paths of keys joined with dots.
COMMON_RULES = (
    (r"iteration|(?:args\.)?(?:consumed|skipped)_\w+_samples", DATA_POSITION),
    (r"args(?:\..+)?", LEFT_OUT),
    (r"content_metadata(?:\..+)?", LEFT_OUT),
    (r"optimizer\.(?:\d+\.)?param_state_sharding_type", LEFT_OUT),
    (r"optimizer\.(?:\d+\.)?grad_scaler(?:\..+)?", LOSS_SCALER),
    (r"optimizer(?:\..+)?", OPTIMIZER),
    (r"(?:opt_param_scheduler|lr_scheduler)(?:\..+)?", SCHEDULER),
    (r"rng_state(?:\..+)?", RNG),
    (r".*", OTHER),
)

# Megatron-Core starts each parameter of a distributed-optimizer bucket at a multiple of this many elements.
PARAMETER_ALIGNMENT = 64


def component_of(name: str, rules: Sequence[tuple[str, str]]) -> str:
    """The component of an entry. Raises ValueError for an entry without a rule.

    Args:
        name: Name of the entry in the index.
        rules: Regular expressions for whole names, each with the component, which may refer to groups; the first match
            counts.
    """
    for pattern, component in rules:
        found = re.fullmatch(pattern, name, flags=re.DOTALL)
        if found is not None:
            return found.expand(component)
    raise ValueError(f"no rule for the entry {name!r}")


def in_order(components: Sequence[str]) -> tuple[str, ...]:
    """Returns `components` in the order of a digest's lines; moments by name."""

    def place(component: str) -> tuple[int, str]:
        return _ORDER.index(component if component in _ORDER else _MOMENTS), component

    return tuple(sorted(components, key=place))


def is_bucket(name: str) -> bool:
    """Says whether the tensor `name` is a flat bucket of the distributed optimizer (`dp_reshardable`)."""
    return re.fullmatch(rf"{_BUCKET}\.\w+", name) is not None


@dataclass(frozen=True)
class ComponentSlice:
    """A piece [start, stop) of a flat bucket, in elements, and the rank that wrote it."""

    start: int
    stop: int
    writer: str


def padding_spans(pieces: Sequence[ComponentSlice]) -> tuple[tuple[int, int], ...]:
    """Returns the spans [start, stop) of a bucket that are alignment padding, in elements.

    Megatron-Core saves the gaps between parameters as pieces of uninitialised memory and does not mark them. They are
    known by their place: a parameter starts at a multiple of 64, so a short piece that starts elsewhere, behind another
    of the same writer, and reaches to the next multiple (or the writer's end) is a gap; so is what another writer goes
    on with after a gap. A short piece at a writer's start behind a parameter is the rest of that parameter.
    """
    ordered = sorted(pieces, key=lambda piece: piece.start)
    spans: list[tuple[int, int]] = []
    for before, piece, after in zip([None, *ordered], ordered, [*ordered[1:], None], strict=False):
        if before is None or piece.start % PARAMETER_ALIGNMENT == 0 or piece.stop - piece.start >= PARAMETER_ALIGNMENT:
            continue
        ends_gap = piece.stop % PARAMETER_ALIGNMENT == 0 or (after is not None and after.writer != piece.writer)
        behind_gap = bool(spans) and spans[-1][1] == piece.start
        if ends_gap and (before.writer == piece.writer or behind_gap):
            spans.append((piece.start, piece.stop))
    return tuple(spans)
