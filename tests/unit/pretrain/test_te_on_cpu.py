"""Transformer Engine's Python on the CPU: kernels compute what torch does; what was not asked for is not loaded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.pretrain.device import wants_engine_on_cpu
from megatron.pretrain.testing import te_on_cpu
from megatron.pretrain.testing.cpu_device import engine
from megatron.pretrain.testing.te_on_cpu.kernels import adam, gemm, norms, optimizers
from megatron.pretrain.testing.te_on_cpu.module import compiled_module
from megatron.pretrain.testing.te_on_cpu.wheel import FOLDER

ROOT = Path(__file__).parents[3]
DTYPES = {4: torch.float32, 6: torch.bfloat16}
ON_ENGINE = "--device cpu --transformer-impl transformer_engine"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Kernels


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_their_gradients_are_those_of_torch(zero_centered: bool) -> None:
    x, weight, bias, dy = (
        drawn(*shape, seed=at).requires_grad_() for at, shape in enumerate([(6, 8), (8,), (8,), (6, 8)])
    )
    gain = weight + 1 if zero_centered else weight
    expected = torch.nn.functional.layer_norm(x, (8,), gain, bias, 1e-5)
    with torch.no_grad():
        y, mean, rsigma = norms.layernorm_fwd(x, weight, bias, 1e-5, None, None, torch.float32, 0, zero_centered)
        gradients = norms.layernorm_bwd(dy, x, mean, rsigma, weight, 0, zero_centered)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, weight, bias], dy))

    expected = torch.nn.functional.rms_norm(x, (8,), gain, 1e-5)
    with torch.no_grad():
        y, _, rsigma = norms.rmsnorm_fwd(x, weight, 1e-5, None, None, torch.float32, 0, zero_centered)
        gradients = norms.rmsnorm_bwd(dy, x, rsigma, weight, 0, zero_centered)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, weight], dy))


def multiplied(a: torch.Tensor, b: torch.Tensor, layout: str, **changes: Any) -> torch.Tensor:
    given = {"out": None, "bias": None, "grad": False, "accumulate": False, "dtype": 4} | changes
    out, bias_gradient, _, _ = gemm.generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", given["out"], None, given["dtype"], given["bias"], 6, False, None,
        given["grad"], None, 0, given["accumulate"], False,
    )  # fmt: skip
    return out if bias_gradient is None else bias_gradient


def test_products_are_those_of_a_linear_layer_and_of_its_backward_pass() -> None:
    x, weight, dy, bias = drawn(2, 5, 3), drawn(4, 3, seed=1), drawn(2, 5, 4, seed=2), drawn(4, seed=3)
    torch.testing.assert_close(multiplied(weight, x, "TN", bias=bias), torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(multiplied(weight, dy, "NN"), dy @ weight)
    of_weight = dy.reshape(-1, 4).t() @ x.reshape(-1, 3)
    torch.testing.assert_close(multiplied(x, dy, "NT"), of_weight)
    torch.testing.assert_close(multiplied(x, dy, "NT", bias=bias, grad=True), dy.reshape(-1, 4).sum(0))
    buffer = torch.ones(4, 3)
    assert multiplied(x, dy, "NT", out=buffer, accumulate=True) is buffer
    torch.testing.assert_close(buffer, of_weight + 1)


def test_a_product_is_rounded_once() -> None:
    x, weight = drawn(7, 64, dtype=torch.bfloat16), drawn(5, 64, seed=1, dtype=torch.bfloat16)
    exact = (x.double() @ weight.double().t()).float().to(torch.bfloat16)
    assert torch.equal(multiplied(weight, x, "TN", dtype=6), exact)


def test_grouped_products_leave_zeros_for_an_expert_without_tokens() -> None:
    x, weights, splits = drawn(6, 3), [drawn(4, 3, seed=at) for at in range(3)], [4, 0, 2]
    biases = [drawn(4, seed=9 + at) for at in range(3)]
    parts, out = torch.split(x, splits), torch.full((6, 4), 7.0)
    common = (4, splits, biases, 4, True, None, False, None, 0, False, False, 0)
    gemm.te_general_grouped_gemm(weights, True, parts, False, [out], *common)
    expected = [part @ weight.t() + bias for part, weight, bias in zip(parts, weights, biases, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected))

    gradients, of_biases = [torch.full((4, 3), 7.0) for _ in splits], [torch.full((4,), 7.0) for _ in splits]
    passed = (4, splits, of_biases, 4, False, None, True, None, 0, False, False, 0)
    gemm.te_general_grouped_gemm(parts, False, torch.split(out, splits), True, gradients, *passed)
    assert not gradients[1].any()
    assert not of_biases[1].any()
    torch.testing.assert_close(gradients[2], expected[2].t() @ parts[2])
    torch.testing.assert_close(of_biases[2], expected[2].sum(0))


@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam_steps_as_torch_s_does(mode: int, kind: type[torch.optim.Optimizer]) -> None:
    expected = torch.nn.Parameter(drawn(9))
    reference = kind([expected], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)  # type: ignore[call-arg]
    master, weights = drawn(9), drawn(9, dtype=torch.bfloat16)
    first, second = torch.zeros(9), torch.zeros(9)
    for step in (1, 2, 3):
        expected.grad = drawn(9, seed=step)
        reference.step()
        lists = [[expected.grad], [weights], [first], [second], [master]]
        adam.multi_tensor_adam(0, torch.zeros(1), lists, 0.1, 0.9, 0.95, 1e-8, step, mode, 1, 0.2)
        torch.testing.assert_close(master, expected.detach())
        assert torch.equal(weights, master.to(torch.bfloat16))


def test_scaling_notes_what_is_not_finite_and_a_norm_is_that_of_all_tensors_together() -> None:
    tensors, overflow = [drawn(3), drawn(4, seed=1)], torch.zeros(1, dtype=torch.int)
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    optimizers.multi_tensor_scale_tensor(0, overflow, [tensors, scaled], torch.tensor([0.5]))
    assert torch.equal(torch.cat(scaled), torch.cat(tensors) / 2)
    assert not overflow
    norm, each = optimizers.multi_tensor_l2norm(0, overflow, [tensors], True)
    torch.testing.assert_close(norm[0], torch.cat(tensors).norm())
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    optimizers.multi_tensor_scale(0, overflow, [[torch.tensor([1.0, float("inf")])], [torch.empty(2)]], 1.0)
    assert overflow


def test_a_kernel_that_is_missing_refuses_by_its_name_and_only_when_it_is_called() -> None:
    missing = compiled_module().fused_attn_fwd
    with pytest.raises(NotImplementedError, match=r"kernel fused_attn_fwd has no stand-in .*--device cuda"):
        missing()


def test_members_of_an_enumeration_that_nothing_computes_with_are_numbers_of_their_own() -> None:
    formats = compiled_module().NVTE_QKV_Format
    assert formats.NVTE_SBHD == formats.NVTE_SBHD != formats.NVTE_BSHD
    assert set(formats.__members__) == {"NVTE_SBHD", "NVTE_BSHD"}


# What it asks of the device


class Module:
    """As both kinds of `prepare_forward` are: a context in one release, a function in another."""

    @contextlib.contextmanager
    def as_context(self, tensor: Any) -> Any:
        yield engine.passes_for_cuda()

    def as_function(self, tensor: Any) -> Any:
        return engine.passes_for_cuda()


@pytest.mark.parametrize("kind", ["as_context", "as_function"])
def test_the_cpu_passes_for_cuda_only_where_a_module_makes_sure(kind: str) -> None:
    prepare = engine.prepared_on_cuda(getattr(Module, kind))
    prepared = prepare(Module(), None)
    if kind == "as_context":
        with prepared as inside:
            assert not engine.passes_for_cuda()
            prepared = inside
    assert prepared is True
    assert not engine.passes_for_cuda()


def test_other_threads_see_the_cpu_as_it_is() -> None:
    answers = []
    available = engine.is_available(lambda: False)
    watching = engine.run_on_cuda(lambda self: thread_of(lambda: answers.append(available())) or available())
    assert watching(None) is True
    assert answers == [False]


def thread_of(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=10)


# Loading


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (ON_ENGINE, True),
        ("--transformer-impl=transformer_engine --lr 1 --device=cpu", True),
        ("--device cuda --transformer-impl transformer_engine", False),
        ("--device cpu", False),
        ("--device cpu --transformer-impl local", False),
        (f"{ON_ENGINE} --transformer-impl local", False),
        ("--device", False),
    ],
)
def test_only_a_run_on_the_cpu_that_names_it_asks_for_it(flags: str, asked: bool) -> None:
    assert wants_engine_on_cpu(flags.split()) is asked


def test_it_is_not_loaded_behind_megatron_core_s_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "transformer_engine" / "pytorch" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "megatron.core.utils", SimpleNamespace())  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="was imported before"):
        te_on_cpu.load()
    assert not te_on_cpu.is_loaded()


def started(flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "pretrain_gpt_moe.py"), *flags.split()]
    variables = os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_without_the_wheel_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    ended = started(ON_ENGINE, **{FOLDER: str(tmp_path)})
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert str(tmp_path) in line
    assert "scripts/install_te_python.py" in line


LAUNCHED = (
    f"{ON_ENGINE} --moe-grouped-gemm --bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer"
    " --mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 2 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3"
)


def launched(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script.write_text("print('a worker has begun')")
    command = [sys.executable, "-W", "ignore", "-m", "megatron.pretrain.launch", "--nproc-per-node", "1", str(script)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [*command, *LAUNCHED.split()], env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_launcher_takes_flags_of_jobs_whose_workers_load_it(tmp_path: Path) -> None:
    ended = launched(tmp_path / "script.py")
    assert "a worker has begun" in ended.stdout, ended.stderr
    assert ended.returncode == 0


def test_the_launcher_says_how_to_get_the_wheel_before_it_starts_a_worker(tmp_path: Path) -> None:
    ended = launched(tmp_path / "script.py", **{FOLDER: str(tmp_path)})
    assert ended.returncode == 2
    assert "scripts/install_te_python.py" in ended.stderr
    assert not ended.stdout


BROKEN = {
    "transformer_engine": 'raise FileNotFoundError("Could not find\\n shared object file")',
    "apex": 'raise RuntimeError("no kernel image")',
}


@pytest.mark.parametrize("package", BROKEN)
def test_a_package_with_kernels_that_is_half_installed_is_named_in_one_line(package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(BROKEN[package])
    ended = started("--device cpu", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{package} is half installed: importing {package}")
    assert "Could not find shared object file" in line or "RuntimeError: no kernel image" in line


def test_a_package_that_cannot_be_imported_counts_as_not_installed(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text('raise ImportError("libcuda.so.1 is missing")')
    ended = started("--device cpu --num-layers 2", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert "invalid Megatron-LM arguments: " in ended.stderr
    assert "apex" not in ended.stderr
