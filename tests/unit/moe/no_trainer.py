"""The trainer's state of tests in which tensors are all that is trained."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.dist_checkpointing.moe.ports import Json


class NoTrainer:
    def scalars(self) -> dict[str, Json]:
        return {}

    def tensors(self) -> Mapping[str, memoryview]:
        return {}

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        """Nothing but tensors is trained here."""
