"""Weights go to Hugging Face and come back: transformers computes what Megatron computes, and no byte changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Cluster
from effort import cases
from logits_hooks import logits_written
from runs import Layout, differences, digest, flags
from world import World

from moe_ckpt.commands.convert_hf import from_hugging_face
from moe_ckpt.commands.main import commands

transformers = pytest.importorskip("transformers")

SHARED = "--norm-epsilon 1e-6 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 --train-iters 2"
GROUPED = "--group-query-attention --num-query-groups 2 --num-attention-heads 4"
FAMILIES = {
    "mixtral": f"{GROUPED} --untie-embeddings-and-output-weights --rotary-base 50000 --expert-tensor-parallel-size 1",
    "qwen3_moe": f"{GROUPED} --qk-layernorm --kv-channels 16 --moe-layer-freq [0,1] --ffn-hidden-size 48",
    "deepseek_v3": (
        "--transformer-impl transformer_engine --moe-grouped-gemm --untie-embeddings-and-output-weights "
        "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 12 --rotary-scaling-factor 4 "
        "--mscale 1.0 --mscale-all-dim 0.5 --moe-layer-freq [0,1] --ffn-hidden-size 48 --num-experts 8 "
        "--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 --moe-router-topk 4 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
    ),
}
FAMILIES["deepseek_v2"] = (
    "--transformer-impl transformer_engine --moe-grouped-gemm --untie-embeddings-and-output-weights "
    "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12 "
    "--rotary-scaling-factor 1 --moe-layer-freq [0,1] --ffn-hidden-size 48 --num-experts 8 "
    "--moe-shared-expert-intermediate-size 32 --moe-router-pre-softmax --moe-router-topk 3 "
    "--moe-router-topk-scaling-factor 1.5"
)
FAMILIES["glm4_moe"] = (
    f"{GROUPED} --qk-layernorm --kv-channels 16 --moe-layer-freq [0,1] --ffn-hidden-size 48 --num-experts 8 "
    "--untie-embeddings-and-output-weights --rotary-percent 0.5 --add-qkv-bias "
    "--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1 --moe-router-topk 4 --moe-router-topk-scaling-factor 2.5"
)
FAMILIES["gpt_oss"] = (
    f"{GROUPED} --untie-embeddings-and-output-weights --expert-tensor-parallel-size 1 --quick-geglu "
    "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable --window-size (15,0) "
    "--window-attn-skip-freq [1,0] --position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 16"
)
LAYOUTS = {
    "deepseek_v2": Layout(tp=1, pp=1, ep=2, ranks=2),
    "glm4_moe": Layout(tp=2, pp=1, ep=1, ranks=2),
    "gpt_oss": Layout(tp=2, pp=1, ep=2, ranks=2),
    "mixtral": Layout(tp=2, pp=1, ep=2, ranks=2),
    "qwen3_moe": Layout(tp=1, pp=2, ep=1, ranks=2),
    "deepseek_v3": Layout(tp=1, pp=1, ep=2, ranks=2),
}


def converted(*arguments: object) -> None:
    """What `moe-ckpt convert` does with these arguments, which raises what it is told."""
    commands(["convert", *map(str, arguments)], standalone_mode=False)


def imported(folder: Path, into: Path) -> list[str]:
    """The flags that `moe-ckpt convert --from hf` prints, with which a job begins from these weights."""
    found: list[str] = from_hugging_face(folder, into)[1]["flags"]
    return found


@dataclass(frozen=True)
class Trained:
    """A job of one family: where it saved, and what a job of one rank that loads it computes."""

    family: str
    saved: Path
    logits: Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=cases(FAMILIES, fast=("mixtral",)))
def trained(request: Any, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two iterations in bf16 under some layout: nothing is as it was initialized, experts' biases neither."""
    family = request.param
    worlds: World = request.getfixturevalue("engine_world" if "deepseek" in family else "world")
    saved = tmp_path_factory.mktemp(family) / "saved"
    own = (*SHARED.split(), *FAMILIES[family].split())
    argv = flags(corpus, LAYOUTS[family], *own, "--bf16", "--save", str(saved))
    outcome = worlds.run(argv, LAYOUTS[family].ranks)
    assert set(outcome.codes) == {0}, outcome.said

    def logits(load: Path, tokens: torch.Tensor, file: Path, printed: Sequence[str] = ()) -> torch.Tensor:
        one = Layout(tp=1, pp=1, ep=1, ranks=1)
        padding = ("--make-vocab-size-divisible-by", str(128 * LAYOUTS[family].tp))
        argv = flags(corpus, one, *own, *printed, *padding, "--load", str(load), "--finetune")
        outcome = worlds.run(argv, 1, [partial(logits_written, tokens, str(file))])
        assert set(outcome.codes) == {0}, outcome.said
        found: torch.Tensor = torch.load(file, weights_only=True)
        return found

    return Trained(family, saved, logits)


def test_transformers_computes_the_logits_of_megatron_from_what_was_exported_and_the_way_back_changes_no_byte(
    trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    converted("--to", "hf", "--max-shard-size", "20KB", trained.saved, folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == trained.family

    tokens = torch.randint(0, 250, (2, 32), generator=torch.Generator().manual_seed(5))
    expected = trained.logits(trained.saved, tokens, tmp_path / "logits")
    model = loaded(folder)
    found = computed(model, tokens)
    assert expected.std() > 0.1
    assert_near(found, expected)

    # What transformers writes is taken as well, with a vocabulary that Megatron has to pad.
    model.resize_token_embeddings(300)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    printed = {}
    for given in (folder, tmp_path / "theirs"):
        there, back = tmp_path / f"{given.name}-in-megatron", tmp_path / f"{given.name}-back"
        printed[given.name] = imported(given, there)
        converted("--to", "hf", there, back)
        assert {path.name for path in given.iterdir()} == {path.name for path in back.iterdir()}
        for path in given.iterdir():
            assert path.read_bytes() == (back / path.name).read_bytes(), path.name
        assert len(list(back.glob("*.safetensors"))) > 1
    same = trained.logits(tmp_path / "exported-in-megatron", tokens, tmp_path / "again", printed["exported"])
    assert torch.equal(same, expected)
    padded = trained.logits(tmp_path / "theirs-in-megatron", tokens, tmp_path / "padded", printed["theirs"])
    assert_near(padded[..., :300], computed(loaded(tmp_path / "theirs"), tokens))


@pytest.mark.ci
def test_a_killed_gpt_oss_trains_on_from_hugging_face_and_goes_back_as_the_undisturbed_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, vocab_size=257,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16},
    )  # fmt: skip
    given = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    given.save_pretrained(tmp_path / "given")
    printed = imported(tmp_path / "given", tmp_path / "start")
    job = (*printed, "--expert-tensor-parallel-size", "1", "--bf16", "--load", tmp_path / "start")
    faults = {"undisturbed": (), "killed": ("--moe-ckpt-inject-fault", "1@4:step")}
    exported = {name: tmp_path / f"{name}-exported" for name in faults}
    for name, fault in faults.items():
        saving = ("--moe-ckpt-strategy", "full", "--save", tmp_path / name)
        outcomes = cluster.run(LAYOUTS["gpt_oss"], *job, *fault, *saving, job=name)
        assert any("recovered iteration" in line for line in outcomes[-1].lines) == bool(fault)
        converted("--to", "hf", tmp_path / name, exported[name])
    assert not differences(*(digest(tmp_path / name, 6) for name in faults))
    back = {name: loaded(folder).state_dict() for name, folder in exported.items()}
    assert back["killed"].keys() == given.state_dict().keys()
    for name, tensor in given.state_dict().items():
        assert torch.equal(back["killed"][name], back["undisturbed"][name]), name
        assert not torch.equal(back["killed"][name], tensor.float()), f"{name} was not trained"


def loaded(folder: Path) -> Any:
    """The model that transformers makes of a folder."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model


def computed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Its logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Computed in fp32 from the same bf16 weights, sums in another order: far below one rounding of bf16 (2**-9)."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-19 * expected.abs().max().item())
