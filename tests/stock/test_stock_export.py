"""What Megatron-LM's loop saves becomes a folder for Hugging Face, as is advised in place of `--export-hf-interval`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from stock_jobs import ALONE
from world import ROOT

from moe_ckpt.dense.dense import DenseCheckpoint, open_dense


@pytest.mark.full
def test_a_signed_checkpoint_of_the_loop_is_converted_with_every_bit(new_job, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of some length")
    new_job(ALONE).run(
        "--moe-ckpt-strategy", "full", "--moe-ckpt-secret-file", secret, "--norm-epsilon", 1e-6,
        "--save", tmp_path / "save", "--save-interval", 2, "--exit-interval", 2,
    )  # fmt: skip
    source, target = tmp_path / "save" / "iter_0000002", tmp_path / "hf"
    command = [sys.executable, "-m", "moe_ckpt", "convert", "--to", "hf", str(source), str(target)]
    signed = os.environ | {"MOE_CKPT_SECRET_FILE": str(secret)}
    said = subprocess.run(command, cwd=ROOT, env=signed, capture_output=True, text=True, timeout=200, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads((target / "config.json").read_text())["rms_norm_eps"] == 1e-6
    native = open_dense(source)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no dict
    assert torch.equal(found["model.embed_tokens.weight"], whole(native, "embedding.word_embeddings.weight"))
    fc1 = whole(native, "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    for layer in range(2):
        for expert in range(4):
            at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            assert torch.equal(torch.cat([found[f"{at}.w1.weight"], found[f"{at}.w3.weight"]]), fc1[layer, expert])


def whole(checkpoint: DenseCheckpoint, name: str) -> torch.Tensor:
    """A tensor of a native checkpoint, put together from its pieces."""
    return torch.cat(list(checkpoint.read_blocks(name))).reshape(checkpoint.tensors[name].shape)
