"""What the driver asks of core and of CUDA on GPUs, as Megatron-LM does; judged without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.validate import Environment, resolve
from megatron.pretrain.initialize import QUEUES, device_queues
from megatron.pretrain.model import build_transformer_config
from megatron.pretrain.optimization import LossScale

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32"


def config(flags: str, device: str = "cuda") -> PretrainConfig:
    environment = Environment(world_size=4, cuda=True, transformer_engine="context" in flags)
    return resolve(parse_config(f"--device {device} {MODEL} {flags}".split()), environment)


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        (f"--swiglu --disable-bias-linear {EXPERTS}", True),
        ("--swiglu", True),
        ("", True),
        (f"--disable-bias-linear {EXPERTS}", False),
        ("--disable-bias-linear", False),
        ("--squared-relu", False),
    ],
)
def test_activations_are_fused_where_core_has_a_kernel(flags: str, fused: bool) -> None:
    assert build_transformer_config(config(flags)).bias_activation_fusion is fused
    assert not build_transformer_config(config(flags, "cpu")).bias_activation_fusion


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--pipeline-model-parallel-size 2", {}),
        ("--tensor-model-parallel-size 2", {QUEUES: "1"}),
        ("--context-parallel-size 2 --attention-dropout 0", {QUEUES: "1"}),
    ],
)
def test_kernels_run_in_the_order_of_their_launch_where_core_relies_on_it(flags: str, expected: dict[str, str]) -> None:
    settings = config(flags)
    assert device_queues(settings, {}) == expected
    assert device_queues(settings, {QUEUES: "8"}) == {}, "what the user has set stays"


class Optimizer:
    """Doubles its loss scale whenever it is asked for it, which makes the host wait."""

    def __init__(self) -> None:
        self.asked = 0

    def get_loss_scale(self) -> torch.Tensor:
        self.asked += 1
        return torch.tensor(2.0**self.asked)


@pytest.mark.parametrize(
    ("flags", "scales"),
    [("--bf16", [2, 2, 2]), ("", [2, 2, 2]), ("--fp16 --loss-scale 128", [2, 2, 2]), ("--fp16", [2, 4, 8])],
)
def test_the_device_is_asked_for_the_loss_scale_only_where_that_changes(flags: str, scales: list[int]) -> None:
    optimizer = Optimizer()
    scale = LossScale(config(flags), optimizer)  # type: ignore[arg-type]
    assert [scale.now() for _ in range(3)] == scales
    assert optimizer.asked == len(set(scales))


def test_queues_are_set_before_the_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from megatron.pretrain import initialize

    class Used(Exception):
        """The first call to the GPU."""

    def use(device: int) -> None:
        assert os.environ[QUEUES] == "1"
        raise Used

    monkeypatch.setenv(QUEUES, "")
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "set_device", use)
    with pytest.raises(Used):
        initialize.initialize(config("--tensor-model-parallel-size 2"), SimpleNamespace(local_rank=0))  # type: ignore[arg-type]
