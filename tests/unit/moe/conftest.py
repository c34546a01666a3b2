"""Real checkpoints for the tests, written by Megatron-Core in one process."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.pretrain.testing import cpu_device


@dataclass
class Content:
    """What a checkpoint holds: tensors and objects by their names in the files, and the part common to all ranks."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Content:
        return deepcopy(self)


Save = Callable[..., Path]
WRITES_COMMON = not hasattr(serialization, "_legacy_common_state_exists")
"""Whether the installed core writes a `common.pt`, as releases before 0.19 do."""


@pytest.fixture(scope="module")
def single_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def save(single_process_group: None) -> Save:
    """Saves a Content: `pieces` per tensor along the first axis, files written by `thread_count` writers."""
    return save_content


@pytest.fixture
def save_newer(single_process_group: None) -> Save:
    """As `save`, the way core 0.19 and newer do it, whichever is installed: without a `common.pt`."""

    def saved(content: Content, directory: Path) -> Path:
        if not WRITES_COMMON:
            return save_content(content, directory)
        content = content.copy()
        content.objects["common_state"] = content.common
        save_content(content, directory)
        (directory / "common.pt").unlink()
        return directory

    return saved


@pytest.fixture
def common_apart() -> None:
    """For tests about the `common.pt` that the installed core writes."""
    if not WRITES_COMMON:
        pytest.skip("this megatron-core keeps the common state among the shards and writes no common.pt")


def save_content(content: Content, directory: Path, pieces: int = 1, thread_count: int = 2) -> Path:
    directory.mkdir(parents=True)
    state: dict[str, Any] = deepcopy(content.common)
    for name, tensor in content.tensors.items():
        count = pieces if tensor.ndim and tensor.shape[0] % pieces == 0 else 1
        for at, piece in enumerate(tensor.chunk(count) if tensor.ndim else (tensor,)):
            offsets = ((0, at, count),) if tensor.ndim else ()
            state[f"{name}#{at}"] = ShardedTensor.from_rank_offsets(name, piece.clone(), *offsets, replica_id=0)
    for name, value in content.objects.items():
        state[f"object {name}"] = ShardedObject(name, value, (1,), (0,), replica_id=0)
    with cpu_device.installed():
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=thread_count)
        dist_checkpointing.save(state, str(directory), strategy, content_metadata={"sharding": "any"})
    return directory


@pytest.fixture
def new_content() -> type[Content]:
    """The class Content, which tests cannot import from here."""
    return Content


@pytest.fixture
def content() -> Content:
    """A small state with every component, named as Megatron-Core names them."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    parameters = ("embedding.word_embeddings.weight", "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    tensors = {name: random(8, 6, dtype=torch.bfloat16) for name in parameters}
    for state in ("fp32_param", "exp_avg", "exp_avg_sq"):
        tensors |= {f"optimizer.state.{state}.{name}": random(8, 6) for name in parameters}
    tensors["decoder.layers.mlp.router.weight"] = random(4, 6)
    tensors["decoder.layers.mlp.router.expert_bias"] = random(2, 4)
    rng = {
        "random_rng_state": (3, (1, 2, 3), None),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "torch_rng_state": generator.get_state(),
        "rng_tracker_states": {"model-parallel-rng": generator.get_state()},
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "step": 12, "is_expert_parallel": False}]
    common = {
        "args": Namespace(consumed_train_samples=96, consumed_valid_samples=0, params_dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
        "iteration": 12,
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "grad_scaler": {"scale": torch.tensor([65536.0]), "growth_tracker": 4, "hysteresis_tracker": 2},
            "param_state_sharding_type": "fully_reshardable",
        },
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 96, "lr_decay_style": "cosine"},
        "num_floating_point_operations_so_far": 123456789,
    }
    extra = {"decoder.layers.self_attention.linear_qkv._extra_state": torch.arange(4, dtype=torch.uint8)}
    return Content(tensors, {"rng_state": [rng], **extra}, common)
