"""Operators, the units of a snapshot, and the parts of their state."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from ..errors import UsageError


class OperatorKind(enum.IntEnum):
    """What an operator does in its layer; the values give the order of operators within a layer."""

    EMBEDDING = 0
    NON_EXPERT = 1  # attention, norms, a dense or shared-expert FFN: all of a layer but its router and routed experts
    ROUTER = 2  # the gate
    EXPERT = 3
    HEAD = 4  # final norm and output layer


@dataclass(frozen=True, order=True, slots=True)
class OperatorId:
    """One operator of the model: MoEvement section 3.2 calls it the independently snapshotable unit.

    `layer` counts from 0 over the whole model, whatever the pipeline layout; the embedding has layer -1 and the head
    has the number of layers, so that ids sort from the input of the model to its output. `expert` is the global expert
    id, and -1 for operators that are no experts. Every tie between operators is broken by this order.
    """

    layer: int
    kind: OperatorKind
    expert: int = -1

    @property
    def is_expert(self) -> bool:
        """Whether this is a routed expert."""
        return self.kind is OperatorKind.EXPERT

    def __str__(self) -> str:
        if self.kind in (OperatorKind.EMBEDDING, OperatorKind.HEAD):
            return self.kind.name.lower()
        suffix = str(self.expert) if self.is_expert else ""
        return f"layer{self.layer}.{self.kind.name.lower()}{suffix}"


def expert(layer: int, index: int) -> OperatorId:
    """The operator of a routed expert.

    Args:
        layer: The layer, counted from 0 over the whole model.
        index: The global id of the expert in it.
    """
    return OperatorId(layer, OperatorKind.EXPERT, index)


class Part(enum.Flag):
    """Which components of an operator's training state a snapshot holds.

    Three bits name the components as MoEvement Table 7 does: compute weights, master weights, and the moments of the
    optimizer. A snapshot of a whole operator is `MASTER_AND_MOMENTS`, what the papers call its full state: the compute
    weights are left out where they are the cast of the master weights, and count as MASTER where they are not, with
    master weights of less than 32 bits. `EVERYTHING` is what the checkpoints of MoC
    eq. 5 store (B_w + B_o bytes per parameter). `CONSTANT` is no component: it says that training does not change the
    operator, so that this copy is its state after any later iteration as well.
    """

    NOTHING = 0
    COMPUTE = 1
    MASTER = 2
    MOMENTS = 4
    CONSTANT = 8
    MASTER_AND_MOMENTS = MASTER | MOMENTS
    EVERYTHING = COMPUTE | MASTER | MOMENTS


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each component of the training state (MoEvement Table 7).

    `source` says where the setting comes from. `recasts` says whether compute weights are the cast of what is kept as
    master weights, so that a full state can leave them out. The table takes that for granted in all rows.
    """

    name: str
    compute_bytes: int
    master_bytes: int
    first_moment_bytes: int
    second_moment_bytes: int
    source: str = ""
    recasts: bool = True

    def __post_init__(self) -> None:
        for field in ("compute_bytes", "master_bytes", "first_moment_bytes", "second_moment_bytes"):
            if getattr(self, field) < 1:
                raise UsageError(f"precision {self.name}: {field} is {getattr(self, field)}, but must be at least 1")

    @property
    def moments_bytes(self) -> int:
        """Bytes per parameter of both moments."""
        return self.first_moment_bytes + self.second_moment_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes per parameter of a full state, from which training continues exactly."""
        return self.bytes_per_parameter(Part.MASTER_AND_MOMENTS) + (0 if self.recasts else self.compute_bytes)

    def exact(self) -> Precision:
        """As it is in training: an optimizer casts the weights before it rounds the masters to less than 32 bits."""
        return replace(self, recasts=self.master_bytes >= 4)

    def bytes_per_parameter(self, part: Part) -> int:
        """Bytes that one parameter takes in a snapshot with this part."""
        return (
            (self.compute_bytes if Part.COMPUTE in part else 0)
            + (self.master_bytes if Part.MASTER in part else 0)
            + (self.moments_bytes if Part.MOMENTS in part else 0)
        )


FP16_FP32 = Precision("fp16-fp32", 2, 4, 4, 4, "mixed precision, also bf16: MoEvement section 3.2")
FP32 = Precision("fp32", 4, 4, 4, 4, "no mixed precision: the compute weights are the master weights")
LOW_PRECISIONS = (
    Precision("fp16-fp16", 2, 2, 2, 2, "Collage; MoEvement Table 7, row 1"),
    Precision("fp8-fp32", 1, 4, 4, 4, "Micikevicius et al. 2022; MoEvement Table 7, row 2"),
    Precision("fp8-fp16-fp32", 1, 2, 4, 4, "Mellempudi et al. 2019; MoEvement Table 7, row 3"),
    Precision("fp8-fp16-fp8", 1, 2, 1, 2, "FP8-LM, Peng et al. 2023; MoEvement Table 7, row 4"),
    Precision("fp8-fp8", 1, 1, 1, 2, "FP8-LM, Peng et al. 2023; MoEvement Table 7, row 5"),
)
PRECISIONS = {precision.name: precision for precision in (FP16_FP32, FP32, *LOW_PRECISIONS)}


@dataclass(frozen=True, slots=True)
class OperatorSize:
    """Bytes of one operator's state where they are copied: a whole operator, or one rank's shard of it."""

    full_bytes: int
    weights_bytes: int


def scaled(nbytes: float) -> str:
    """Bytes as people read them, in decimal units: `74.8 MB`, `0 B`."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
