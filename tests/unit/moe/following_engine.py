"""Run by `test_recomputation`, in a process in which Transformer Engine's Python is loaded: replicas that follow it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron.pretrain.testing import cpu_device, te_on_cpu

te_on_cpu.load()  # before Megatron-Core is imported

import torch  # noqa: E402
from test_recomputation import SIZES, Pair, Trained  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402

from megatron.core.dist_checkpointing.moe.extensions.gradient_replicas.adam_steps import AdamSteps  # noqa: E402
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import SteppedTensor  # noqa: E402
from megatron.core.dist_checkpointing.moe.ports import Field, Layout  # noqa: E402
from megatron.core.dist_checkpointing.moe.types import Part  # noqa: E402

ITERATIONS, SKIPPED = 60, 30


def allocated(groups: list[dict[str, Any]], **options: Any) -> FusedAdam:
    fused = FusedAdam(groups, **options)
    for group in fused.param_groups:
        for parameter in group["params"]:
            fused.initialize_state(parameter, False)
    return fused


class PrecisionAware(Trained):
    """Weights of bf16 whose fp32 masters `FusedAdam` keeps, and gradients as they are reduced: in bf16."""

    def __init__(self) -> None:
        super().__init__(allocated, dtype=torch.bfloat16, master_weights=True, use_decoupled_grad=True)
        stepped = [SteppedTensor(shard, weight, torch.bfloat16) for shard, weight in self.stepped]
        self.steps.close()
        self.steps = AdamSteps(self.optimizer, stepped)
        self.state = {"router/buffer": (None, self.counter)}
        for shard, weight in self.stepped:
            kept = dict(self.adam.state[weight])
            fields = {"compute": weight.data.view(torch.int16), "master": kept.pop("master_param"), **kept}
            self.state |= {shard.key(field): (shard.of.operator, tensor) for field, tensor in fields.items()}
        self.layout = Layout.of(
            Field(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), Part.MASTER_AND_MOMENTS, operator)
            for key, (operator, tensor) in self.state.items()
        )

    def take_gradient(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        weight.decoupled_grad = gradient.bfloat16()  # type: ignore[attr-defined]
        return weight.decoupled_grad  # type: ignore[attr-defined, no-any-return]


def main(kind: str) -> None:
    with cpu_device.installed(), tempfile.TemporaryDirectory() as place:
        trained = PrecisionAware() if kind == "bf16" else Trained(allocated, adam_w_mode=kind != "Adam")
        pair, sent = Pair(Path(place), trained), []
        for iteration in range(1, ITERATIONS + 1):
            trained.train(iteration, skip=iteration == SKIPPED)
            sent.append(pair.protect(iteration).replicated_bytes)
            assert pair.replica(iteration) == trained.bytes(), iteration
        read_bytes = (2 + 2 if kind == "bf16" else 4) * sum(SIZES)  # gradients, and weights that go by themselves
        later = [one for at, one in enumerate(sent[1:], 2) if at != SKIPPED]
        assert all(read_bytes < one < read_bytes + 2000 for one in later), sent
        assert sent[0] >= 3 * 4 * sum(SIZES)


if __name__ == "__main__":
    main(sys.argv[1])
