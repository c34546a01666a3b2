"""What has to be set for a GPU to give the same bits again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.contradictions import not_repeatable
from megatron.core.dist_checkpointing.moe.policy.determinism import DeviceSettings, obstacles
from megatron.core.dist_checkpointing.moe.runtime.peer_links import device_settings

ENVIRONMENT = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What `--deterministic-mode` of Megatron-LM sets where nothing is set."""
DETERMINISTIC = DeviceSettings("cuda", 8, ENVIRONMENT, True, True, True)
NOTHING_SET = DeviceSettings("cuda", 8, {}, transformer_engine=True)
SPARSE = MoECheckpointConfig(strategy="sparse")


def with_variable(name: str, value: str | None) -> DeviceSettings:
    environment = {other: said for other, said in ENVIRONMENT.items() if other != name}
    return replace(DETERMINISTIC, environment=environment | ({} if value is None else {name: value}))


def test_what_the_mode_sets_is_enough() -> None:
    assert not list(obstacles(DETERMINISTIC))


def test_a_cpu_needs_nothing() -> None:
    assert not list(obstacles(replace(NOTHING_SET, device="cpu")))


def test_an_elastic_job_that_repeats_iterations_needs_more_gpus_than_it_may_have_left() -> None:
    elastic = replace(SPARSE, elastic="1:2")
    (line,) = not_repeatable(elastic, DETERMINISTIC)
    assert "--moe-ckpt-elastic 1:2" in line and "--moe-ckpt-strategy full" in line
    assert not list(not_repeatable(elastic, replace(NOTHING_SET, device="cpu")))
    assert not list(not_repeatable(replace(elastic, replay_tolerance=1e-3), DETERMINISTIC))


def test_with_nothing_set_each_setting_has_a_line_of_its_own() -> None:
    lines = list(not_repeatable(SPARSE, NOTHING_SET))
    assert len(lines) == 5
    for line, setting in zip(
        lines,
        ("deterministic_mode", "torch", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"),
        strict=True,
    ):
        assert setting in line and "--moe-ckpt-strategy sparse" in line and "\n" not in line


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_ALGO", None, "NCCL_ALGO is not set: set it to Ring"),
        ("NCCL_ALGO", "Tree", "NCCL_ALGO is Tree: set it to Ring"),
        ("NCCL_ALGO", "Ring,Tree", "NCCL_ALGO is Ring,Tree"),
        ("NCCL_ALGO", "^NVLS", "NCCL_ALGO is ^NVLS: set it to Ring, CollnetDirect or CollnetChain, or several of them"),
        ("NCCL_ALGO", "^NVLS,Tree", "NCCL_ALGO is ^NVLS,Tree"),
        ("NCCL_ALGO", "", "NCCL_ALGO is "),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO is 1: set it to 0"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "CUBLAS_WORKSPACE_CONFIG is :0:0: set it to :4096:8 or :16:8"),
    ],
)
def test_a_variable_with_another_value_is_named_with_what_to_set(name: str, value: str | None, said: str) -> None:
    (line,) = obstacles(with_variable(name, value))
    assert line.startswith(said)


@pytest.mark.parametrize("value", ["Ring", "CollnetDirect, CollnetChain"])
def test_algorithms_of_nccl_that_add_up_in_one_order_are_accepted(value: str) -> None:
    assert not list(obstacles(with_variable("NCCL_ALGO", value)))


def test_what_the_job_does_not_use_need_not_be_set() -> None:
    alone = replace(DETERMINISTIC, ranks=1, transformer_engine=False, environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not list(obstacles(alone))


def test_a_fused_kernel_that_is_not_deterministic_is_named_with_its_flag() -> None:
    (line,) = obstacles(replace(DETERMINISTIC, fusions=("cross_entropy_loss_fusion",)))
    assert "--cross-entropy-loss-fusion" in line


@pytest.mark.parametrize(("backend", "known"), [("tilelang", "not"), ("cudnn", "not known to be")])
def test_fused_kernels_of_sparse_attention_are_refused_by_their_backend(backend: str, known: str) -> None:
    (line,) = obstacles(replace(DETERMINISTIC, dsa_kernel_backend=backend))
    assert line.startswith(f"dsa_kernel_backend is {backend}, whose kernels are {known} deterministic: ")
    assert line.endswith("--dsa-kernel-backend none")


def test_the_backend_of_sparse_attention_is_read_from_the_configuration_which_an_older_core_does_not_have() -> None:
    chosen = SimpleNamespace(dsa_kernel_backend="cudnn")
    assert device_settings(torch.nn.Linear(1, 1), chosen, ranks=1).dsa_kernel_backend == "cudnn"
    assert device_settings(torch.nn.Linear(1, 1), SimpleNamespace(), ranks=1).dsa_kernel_backend == "none"


@pytest.mark.parametrize(
    "config",
    [
        MoECheckpointConfig(),
        MoECheckpointConfig(strategy="full"),
        MoECheckpointConfig(strategy="pec"),
        MoECheckpointConfig(strategy="sparse", replay_tolerance=1e-3),
    ],
    ids=["none", "full", "pec", "sparse with a tolerance"],
)
def test_a_job_that_repeats_no_iteration_to_the_bit_needs_nothing(config: MoECheckpointConfig) -> None:
    assert not list(not_repeatable(config, NOTHING_SET))
