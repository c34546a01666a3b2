"""The training state of a simulated rank, whose right bytes are known for every iteration."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from megatron.core.dist_checkpointing.moe.ports import Field, Json
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part

from .world import World

RANDOM = "random/"
SAMPLES_PER_ITERATION = 8

_HEADER_BYTES = 4
_COMPONENTS = (
    ("weight", Part.COMPUTE, "bfloat16"),
    ("weight/master", Part.MASTER, "float32"),
    ("weight/exp_avg", Part.MOMENTS, "float32"),
    ("weight/exp_avg_sq", Part.MOMENTS, "float32"),
)


@lru_cache(maxsize=1 << 16)
def expected_bytes(owner: int, key: str, iteration: int, nbytes: int) -> bytes:
    """What the tensor `key` of `owner` must be after `iteration`: bytes that no other tensor has at any time.

    They begin with the iteration, so that it is found again without a search.
    """
    source = random.Random(xxh3_64_intdigest(f"{owner} {key} {iteration}".encode()))
    return (iteration.to_bytes(_HEADER_BYTES, "little") + source.randbytes(nbytes))[:nbytes]


def version_of(owner: int, key: str, data: bytes | bytearray | memoryview) -> int | None:
    """After which iteration `data` was the right state of a tensor; None when never, as when it is torn or foreign."""
    iteration = int.from_bytes(bytes(data[:_HEADER_BYTES]), "little")
    return iteration if bytes(data) == expected_bytes(owner, key, iteration, len(data)) else None


@dataclass(frozen=True)
class FakeTensor:
    """One tensor of a rank's state. in_forward: WEIGHTS have it too, and forward passes change it (router buffers)."""

    field: Field
    in_forward: bool = False

    @property
    def key(self) -> str:
        """The key of its record."""
        return self.field.key

    def serves(self, part: Part) -> bool:
        """Whether a snapshot with this part has it."""
        return bool(self.field.part & part) or (self.in_forward and Part.COMPUTE in part)


class FakeModel:
    """The live state of one rank: tensors of its operators, and random states.

    shards: parameters of each operator that this rank owns, at least 2. Every router has a buffer that forward passes
    change. All is as after iteration 0; the optimizer's step of t makes it `expected_bytes` of t. What was restored as
    of an earlier iteration is so until the next step. While operators are `frozen`, a step changes only the others, and
    makes garbage of them unless all that it reads is right.
    """

    def __init__(self, world: World, rank: int, shards: Mapping[OperatorId, int]) -> None:
        self.rank, self._world = rank, world
        self.tensors: dict[str, FakeTensor] = {tensor.key: tensor for tensor in _tensors(shards)}
        self.random_sizes = {f"{RANDOM}cpu": 48, f"{RANDOM}cuda": 24}
        self._sizes = {key: tensor.field.nbytes for key, tensor in self.tensors.items()} | self.random_sizes
        self.live = {key: bytearray(nbytes) for key, nbytes in self._sizes.items()}
        self.build_again()

    def build_again(self) -> None:
        """The state of iteration 0, as in a process that has just started."""
        self.iteration, self._is_exact = 0, True
        self.frozen: frozenset[OperatorId] | None = None
        for key in self._sizes:
            self._become(key, 0)

    @property
    def operators(self) -> frozenset[OperatorId]:
        """The operators of which this rank owns state."""
        return frozenset(tensor.field.operator for tensor in self.tensors.values() if tensor.field.operator)

    def forward_backward(self) -> None:
        """The passes of the next iteration: router buffers and random states change, one by one."""
        self._is_exact = self.frozen is None or self._reads_right(self.frozen)
        for key in self._changing():
            self._world.event(f"forward pass changes {key}")
            self._become(key, self.iteration + 1)

    @property
    def is_exact(self) -> bool:
        """Whether all that the passes read was right, so that they send on what is right."""
        return self._is_exact

    def spoil(self) -> None:
        """What came from another stage was not right: the next step makes garbage."""
        self._is_exact = False

    def step(self) -> None:
        """The optimizer's step of the next iteration: all else changes, tensor by tensor."""
        changed = set(self._changing())
        for key in self._sizes:
            if key not in changed and not self._is_frozen(key):
                self._world.event(f"step changes {key}")
                self._become(key, self.iteration + 1)
                if not self._is_exact:
                    self.set(key, b"\xff" * self._sizes[key])
        self.iteration += 1

    def versions(self) -> dict[str, int | None]:
        """The iteration of every live tensor, by key; all equal `iteration` when nothing is wrong, stale or mixed."""
        return {key: version_of(self.rank, key, data) for key, data in self.live.items()}

    def wrong(self) -> dict[str, int | None]:
        """Live tensors that are not as they must be after `iteration`, and what they are."""
        return {key: version for key, version in self.versions().items() if version != self.iteration}

    def set(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write a live tensor."""
        self.live[key][:] = data

    def derive(self, weight: FakeTensor) -> None:
        """Cast master weights to compute weights: they become those of the same iteration."""
        master = self.live[f"{weight.key}/master"]
        version = version_of(self.rank, f"{weight.key}/master", master)
        self.set(weight.key, b"\xff" * weight.field.nbytes)
        if version is not None:
            self._become(weight.key, version)

    def scalars(self) -> dict[str, Json]:
        """Training's progress."""
        return {"iteration": self.iteration, "consumed_samples": self.iteration * SAMPLES_PER_ITERATION}

    def _reads_right(self, frozen: frozenset[OperatorId]) -> bool:
        """Whether compute weights, buffers and random states, and all state of active operators, are of now."""
        read = [
            key
            for key, tensor in self.tensors.items()
            if tensor.serves(Part.COMPUTE) or tensor.field.operator not in frozen
        ]
        versions = self.versions()
        return all(versions[key] == self.iteration for key in (*read, *self.random_sizes))

    def _is_frozen(self, key: str) -> bool:
        return bool(self.frozen) and key in self.tensors and self.tensors[key].field.operator in (self.frozen or ())

    def _become(self, key: str, iteration: int) -> None:
        self.live[key][:] = expected_bytes(self.rank, key, iteration, self._sizes[key])

    def _changing(self) -> list[str]:
        return [key for key, tensor in self.tensors.items() if tensor.in_forward] + list(self.random_sizes)


def _tensors(shards: Mapping[OperatorId, int]) -> Iterator[FakeTensor]:
    for operator, numel in sorted(shards.items()):
        for name, part, dtype in _COMPONENTS:
            yield FakeTensor(Field(f"{operator}.{name}", dtype, (numel,), part, operator))
        if operator.kind is OperatorKind.ROUTER:
            bias = Field(f"{operator}.expert_bias", "float32", (8,), Part.MASTER, operator)
            yield FakeTensor(bias, in_forward=True)


def spread(operators: Iterable[OperatorId], rank: int, world_size: int, numel: int = 16) -> dict[OperatorId, int]:
    """Shards for tests: experts to one rank each in turn, all else to all ranks, of different sizes."""
    owned = [
        (at, operator)
        for at, operator in enumerate(sorted(operators))
        if not operator.is_expert or operator.expert % world_size == rank
    ]
    return {operator: numel + at % 3 for at, operator in owned}
