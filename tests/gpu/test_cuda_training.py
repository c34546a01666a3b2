"""The driver on one CUDA device; skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.pretrain.preprocess import PreprocessRequest, preprocess

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FLAGS = """
--device cuda --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-ffn-hidden-size 64
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear --swiglu --normalization RMSNorm --bf16
--position-embedding-type rope --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 6
--use-distributed-optimizer --split 100,0,0 --num-workers 0 --save-interval 3
""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    source = Path(os.__file__).with_name("argparse.py")
    request = PreprocessRequest(
        inputs=(str(source),),
        json_keys=("text",),
        output_prefix=str(prefix),
        tokenizer_type="ByteTokenizer",
        tokenizer_model=None,
        vocab_size=None,
        append_eod=True,
        workers=1,
    )
    (summary,) = preprocess(request, lambda _done, _total: None)
    return summary.prefix


def train(folder: Path, *flags: str) -> dict[int, float]:
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, str(ROOT / "pretrain_gpt_moe.py"), *FLAGS, *flags, "--metrics-jsonl", str(metrics)]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run(command, check=True, timeout=300, env=environment)
    records = map(json.loads, metrics.read_text().splitlines())
    return {record["iteration"]: record["lm_loss"] for record in records if "iteration" in record}


def test_training_on_cuda_resumes_where_it_was(tmp_path: Path, corpus: str) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    data = ("--data-path", corpus)
    before = train(straight, "--save", str(straight), *data)
    after = train(resumed, "--save", str(resumed), "--load", str(straight), "--ckpt-step", "3", *data)
    assert sorted(after) == [4, 5, 6]
    # Scatter kernels on CUDA add in any order, so equality of bits is not asked for here.
    assert after == pytest.approx({iteration: before[iteration] for iteration in after}, rel=1e-3)


def test_a_cuda_run_never_loads_the_cpu_device() -> None:
    script = (
        "import sys; sys.argv = ['x']; import pretrain_gpt_moe; from megatron.pretrain.config import parse_config;"
        "from megatron.pretrain.config.validate import resolve;"
        "from megatron.pretrain.initialize import Launch, initialize, probe_environment, shut_down;"
        f"config = resolve(parse_config({[*FLAGS, '--mock-data']!r}), probe_environment(1));"
        "initialize(config, Launch.from_environment()); shut_down();"
        "assert not [name for name in sys.modules if 'cpu_device' in name]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=ROOT)
