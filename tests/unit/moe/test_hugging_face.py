"""Folders of Hugging Face that cannot be converted are refused in one line with names, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_of_folders import CONFIGS, config_of, folder_of
from megatron_flags import parser
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from megatron.pretrain.old_flags import refuse_old_flags
from moe_ckpt.commands.convert_hf import from_hugging_face
from moe_ckpt.commands.main import commands
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import NAME as SUMS
from moe_ckpt.dense.integrity import seal
from moe_ckpt.hugging_face.arguments import resolved
from moe_ckpt.hugging_face.config import Config
from moe_ckpt.hugging_face.families import read_model, written_config
from moe_ckpt.hugging_face.folder import read_config, read_weight_map, safetensors, sharding
from moe_ckpt.hugging_face.importing import flags
from moe_ckpt.hugging_face.saved import places
from moe_ckpt.hugging_face.weights import GroupedHeads, Rows, Vocabulary

WEIGHTS = "model.safetensors"


def convert(*arguments: object) -> None:
    """What `moe-ckpt convert` does, which raises what it is told."""
    commands(["convert", *map(str, arguments)], standalone_mode=False)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_arguments(release: Path, **changes: Any) -> None:
    """Gives a checkpoint other recorded arguments of Megatron."""
    common = torch.load(release / "common.pt", weights_only=False)
    vars(common["args"]).update(changes)
    torch.save(common, release / "common.pt")
    (release / SUMS).unlink()
    seal(release)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def half(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def lacks_a_shard(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / WEIGHTS), "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


NORM, QUERY = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a torn config": (lambda folder: (folder / "config.json").write_text('{"model'), "config.json cannot be read"),
    "another family": (
        lambda folder: change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"]),
        "is of LlamaForCausalLM: only mixtral, qwen3_moe, deepseek_v2, deepseek_v3, glm4_moe, gpt_oss can be converted",
    ),
    "Qwen3-Next": (
        lambda folder: change_config(folder, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"]),
        "is of Qwen3NextForCausalLM, which cannot be converted: one --apply-layernorm-1p makes Megatron keep all",
    ),
    "quantized": (lambda folder: change_config(folder, quantization_config={"bits": 4}), "quantized weights"),
    "another attention": (lambda folder: change_config(folder, sliding_window=4096), "sliding_window 4096 cannot"),
    "another activation": (lambda folder: change_config(folder, hidden_act="gelu"), "hidden_act 'gelu' cannot"),
    "no number": (lambda folder: change_config(folder, num_hidden_layers="two"), "num_hidden_layers is 'two'"),
    "pickles": (pickled, "pickled weights only (pytorch_model.bin)"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    "half a file": (half, "model.safetensors cannot be read"),
    "a missing shard": (lacks_a_shard, "lacks model-00002-of-00002.safetensors"),
    "a missing tensor": (
        lambda folder: change_weights(folder, lambda tensors: tensors.pop(NORM)),
        f"has no {NORM}; nothing was written",
    ),
    "an extra tensor": (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({"model.layers.2.eh": torch.ones(1)})),
        "has, and its config not, model.layers.2.eh",
    ),
    "another shape": (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({QUERY: torch.ones(8, 8)})),
        f"has another shape: {QUERY} (8, 8), not (16, 8)",
    ),
    "another dtype": (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({NORM: torch.ones(8, dtype=torch.int8)})),
        f"{NORM} is I8; only F32, BF16, F16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_with_names_and_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    folder, spoil = folder_of("mixtral", tmp_path / "folder"), BAD[case][0]
    spoil(folder)
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    with pytest.raises((UsageError, UnreadableCheckpoint)) as caught:
        convert("--from", "hf", folder, tmp_path / "made")
    assert BAD[case][1] in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "made").glob("*"))
    assert before == sorted((path.name, path.read_bytes()) for path in folder.iterdir())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("strange", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "endless"])
def test_a_file_that_is_no_regular_one_is_refused_at_once(
    name: str, strange: Callable[[Path], object], tmp_path: Path
) -> None:
    strange(tmp_path / name)
    read: Callable[[Path], object] = read_config if name == "config.json" else read_weight_map
    with pytest.raises(UnreadableCheckpoint, match=f"{name} cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in CONFIGS), ("deepseek_v3", {"num_nextn_predict_layers": 2})],
    ids=[*CONFIGS, "deepseek_v3 that predicts two further tokens"],
)
def test_a_folder_comes_back_byte_for_byte_also_through_a_template_and_other_sizes_of_files(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / "folder", **changes)
    (folder / "tokenizer_config.json").write_text("{}")
    convert("--from", "hf", folder, tmp_path / "in")
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()
    }
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    convert("--to", "hf", "--max-shard-size", "1KB", "--hf-model", folder, tmp_path / "in", tmp_path / "small")
    files = sorted((tmp_path / "small").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(folder / WEIGHTS)
    assert len(files) > 2 and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_in_one_tensor_are_taken_as_those_with_a_tensor_each(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "folder")
    alone = load_file(folder / WEIGHTS)
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    tensors = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in alone.items()}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        every = {name: [tensors.pop(f"{at}.{expert}.{name}.weight", None) for expert in range(4)] for name in names}
        gate, up, down = ([one for one in every[name] if one is not None] for name in names)
        if gate:
            tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(two) for two in zip(gate, up, strict=True)])
            tensors[f"{at}.down_proj"] = torch.stack(down)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    convert("--from", "hf", folder, tmp_path / "in")
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == alone.keys() and all(torch.equal(back[name], alone[name]) for name in alone)


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Stores linear layers as DeepSeek publishes them, in blocks of 4 x 3; what they stand for, in bf16."""
    stored = load_file(folder / WEIGHTS)
    meant = dict(stored)
    for name in [name for name in stored if "_proj.weight" in name]:
        rows, columns = stored[name].shape
        quantized = stored[name].float().to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 4), -(-columns // 3)) + 0.5
        wide = torch.stack([scales[at // 4] for at in range(rows)])
        wide = torch.stack([wide[:, at // 3] for at in range(columns)], dim=1)
        meant[name] = (quantized.float() * wide).to(torch.bfloat16)
        stored |= {name: quantized, f"{name}_scale_inv": scales}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 3]})
    return meant


def test_weights_published_in_fp8_become_what_they_stand_for_and_are_exported_as_that(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder", num_nextn_predict_layers=1)
    meant = in_fp8(folder)
    convert("--from", "hf", folder, tmp_path / "in")
    for number, template in enumerate(([], ["--hf-model", folder])):
        back = tmp_path / f"back{number}"
        convert("--to", "hf", *template, tmp_path / "in", back)
        assert "quantization_config" not in json.loads((back / "config.json").read_text())
        found = load_file(back / WEIGHTS)
        assert found.keys() == meant.keys() and all(torch.equal(found[name], meant[name]) for name in meant)


def test_a_weight_in_fp8_without_its_scales_is_refused(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder")
    in_fp8(folder)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UnreadableCheckpoint, match=f"has no {name}"):
        convert("--from", "hf", folder, tmp_path / "in")


@pytest.mark.parametrize("block", [[2, 3], [8, 3]])
def test_scales_of_other_blocks_than_the_config_says_are_refused(tmp_path: Path, block: list[int]) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder")
    in_fp8(folder)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(UnreadableCheckpoint, match=r"_scale_inv is .* blocks of .* as config.json says"):
        convert("--from", "hf", folder, tmp_path / "in")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"n_group": 8, "topk_group": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("mixtral", {"num_attention_heads": 0}),
        ("deepseek_v2", {"rope_scaling": "yarn"}),
        ("mixtral", {"model_type": []}),
    ],
)
def test_a_config_that_describes_no_model_is_one_line(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"config.json does not describe a model"):
        read_model(Config(config_of(family) | changes, "config.json"))


def test_experts_in_one_tensor_of_fp8_are_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder")
    in_fp8(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    fused = {name: torch.zeros(4, 8, 6).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(4, 2, 2)}
    change_weights(folder, lambda tensors: tensors.update(fused))
    with pytest.raises(UsageError, match=rf"{name} \(4, 8, 6\) is F8_E4M3 and no matrix: .* one by one, or in bf16"):
        convert("--from", "hf", folder, tmp_path / "in")


def test_an_export_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    capsys.readouterr()
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    said = capsys.readouterr().out
    assert "back holds a MixtralForCausalLM: " in said and " tensors in bfloat16, " in said
    assert said.strip().endswith("1 file; no tokenizer: give --hf-model a folder that has one")


def test_layers_that_predict_further_tokens_share_embedding_and_head_with_the_model(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder", num_nextn_predict_layers=1)
    whole = load_file(folder / WEIGHTS)
    second = [f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    change_weights(folder, lambda tensors: [tensors.pop(name) for name in second])
    convert("--from", "hf", folder, tmp_path / "in")
    saved = open_dense(tmp_path / "in")
    assert vars(saved.common["args"])["mtp_num_layers"] == 1
    assert {name.split(".")[2] for name in saved.tensors if name.startswith("mtp.layers.")} == {"0"}
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == whole.keys() and all(torch.equal(back[name], whole[name]) for name in whole)


def test_a_layer_ahead_with_an_embedding_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3", tmp_path / "folder", num_nextn_predict_layers=1)
    name = "model.layers.2.embed_tokens.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name] + 1}))
    with pytest.raises(UsageError, match=f"{name} differs from model.embed_tokens.weight, but Megatron shares one"):
        convert("--from", "hf", folder, tmp_path / "in")
    assert not list((tmp_path / "in").glob("release"))


LITE = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": None, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
}  # fmt: skip
"""What DeepSeek-V2-Lite publishes of attention and router, with small sizes."""


def test_deepseek_v2_lite_has_one_projection_of_queries_and_comes_back_also_without_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("deepseek_v2", tmp_path / "folder", **LITE)
    convert("--from", "hf", folder, tmp_path / "in")
    said = capsys.readouterr().out
    assert "--q-lora-rank None" not in said
    assert "under Megatron-Core 0.17 or 0.18: without --q-lora-rank 0.19 has a second norm" in said
    names = {name for name in open_dense(tmp_path / "in").tensors if "linear_q" in name}
    assert {name.rpartition(".self_attention.")[2] for name in names} == {"linear_q_proj.weight"}
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    change_arguments(tmp_path / "in" / "release", max_position_embeddings=64)
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    assert "leaves mscale_all_dim of YaRN out of attention" in capsys.readouterr().out
    found, expected = (load_file(at / WEIGHTS) for at in (tmp_path / "back", folder))
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["q_lora_rank"] is None and config["rope_scaling"] == LITE["rope_scaling"]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_an_epsilon_that_transformers_does_not_norm_latents_with_is_refused_both_ways(family: str) -> None:
    config = config_of(family, rms_norm_eps=1e-5)
    with pytest.raises(UsageError, match="rms_norm_eps 1e-05 cannot be converted"):
        read_model(Config(config, family))
    arguments = read_model(Config(config_of(family), family)).arguments | {"max_position_embeddings": 64}
    with pytest.raises(UsageError, match="rms_norm_eps 1e-05 cannot be converted"):
        written_config(arguments | {"norm_epsilon": 1e-5}, 30, "bfloat16")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_sigmoid_of_a_single_expert_is_not_divided_by_itself(family: str) -> None:
    """It would be 1 for all tokens; Megatron divides where there are several."""
    for topk, normed in ((1, False), (2, True)):
        config = config_of(family, num_experts_per_tok=topk, norm_topk_prob=normed)
        arguments = read_model(Config(config, family)).arguments | {"max_position_embeddings": 64}
        assert written_config(arguments, 30, "bfloat16")["norm_topk_prob"] is normed
        with pytest.raises(UsageError, match=f"norm_topk_prob {not normed} cannot be converted"):
            read_model(Config(config | {"norm_topk_prob": not normed}, family))


def test_tokens_that_the_template_has_not_are_no_padding(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    change_arguments(tmp_path / "in" / "release", vocab_size=31)
    with pytest.raises(UsageError, match=r"has rows of 31 tokens, of which .* has 30: set its vocab_size"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_imported_model_keeps_rows_for_all_tokens_of_its_config_whatever_its_tokenizer_has(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path / "folder", vocab_size=300)
    argv = from_hugging_face(folder, tmp_path / "in")[1]["flags"]
    assert parser().parse_args(argv).padded_vocab_size == 384
    assert vars(open_dense(tmp_path / "in").common["args"])["padded_vocab_size"] == 384


def test_rows_that_training_has_left_out_are_named_with_the_way_out(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    change_config(folder, vocab_size=40)
    command = ("--to", "hf", "--hf-model", folder, tmp_path / "in", tmp_path / "back")
    with pytest.raises(UsageError, match=r"rows of 30 tokens, fewer than the vocab_size 40 of .* --padded-vocab-size"):
        convert(*command)
    change_config(folder, vocab_size=30)
    convert(*command)


@pytest.mark.parametrize(("multiple", "tensor_ranks", "is_refused"), [(10, 1, False), (4, 2, False), (5, 2, True)])
def test_rows_of_added_tokens_are_no_padding_where_only_the_tokenizer_counts_tokens(
    multiple: int, tensor_ranks: int, is_refused: bool, tmp_path: Path
) -> None:
    folder = folder_of("mixtral", tmp_path / "folder", vocab_size=40)
    convert("--from", "hf", folder, tmp_path / "in")
    change_config(folder, vocab_size=30 if is_refused else 33)
    sizes = {"make_vocab_size_divisible_by": multiple, "tensor_model_parallel_size": tensor_ranks}
    change_arguments(tmp_path / "in" / "release", vocab_size=None, padded_vocab_size=40, **sizes)
    command = ("--to", "hf", "--hf-model", folder, tmp_path / "in", tmp_path / "back")
    if not is_refused:
        convert(*command)
        return
    with pytest.raises(UsageError, match=r"has rows of 40 tokens, of which .* has 30: set its vocab_size"):
        convert(*command)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("of_bridge", [True, False])
def test_a_checkpoint_of_a_loop_that_records_no_arguments_is_refused_with_what_exports_it(
    of_bridge: bool, tmp_path: Path
) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    release = tmp_path / "in" / "release"
    common = torch.load(release / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, release / "common.pt")
    if of_bridge:
        (release / "run_config.yaml").write_text("model: {}")
    (release / SUMS).unlink()
    seal(release)
    said = "export_ckpt of its AutoBridge" if of_bridge else "under 'args'"
    with pytest.raises(UsageError, match=f"has no arguments of Megatron-LM.*{said}"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "back")


def test_a_single_file_with_a_number_keeps_its_index(tmp_path: Path) -> None:
    folder, name = folder_of("mixtral", tmp_path / "folder"), "model-00001-of-00001.safetensors"
    (folder / WEIGHTS).rename(folder / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / name), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert("--from", "hf", folder, tmp_path / "in")
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text()) == index


def test_positions_of_latent_attention_that_no_flag_gives_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    more = {"rope_scaling": LITE["rope_scaling"] | {"original_max_position_embeddings": 2048}}
    folder = folder_of("deepseek_v2", tmp_path / "folder", **LITE | more)
    with pytest.raises(UsageError, match="original_max_position_embeddings 2048 cannot be converted"):
        convert("--from", "hf", folder, tmp_path / "in")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_flags_of_every_family_are_those_of_a_job(family: str) -> None:
    rope = {"rope_scaling": LITE["rope_scaling"]} if "deepseek" in family else {}
    arguments = read_model(Config(config_of(family, **rope), family)).arguments
    argv = flags(arguments)
    refuse_old_flags(argv)
    parser().parse_args(argv)


def test_gpt_oss_becomes_flags_of_megatron_and_comes_back_without_its_config(tmp_path: Path) -> None:
    folder = folder_of("gpt_oss", tmp_path / "folder")
    said, found = from_hugging_face(folder, tmp_path / "in")
    argv = found["flags"]
    assert shlex.split(said.partition("train on with ")[2]) == ["--load", str(tmp_path / "in"), *argv]
    given = dict(pairwise(argv))
    assert given["--softmax-type"] == "learnable" and given["--position-embedding-type"] == "yarn"
    assert given["--window-size"] == "(15,0)" and given["--window-attn-skip-freq"] == "[1,0]"
    assert given["--glu-linear-offset"] == "1.0" and given["--activation-func-clamp-value"] == "7.0"
    assert "--quick-geglu" in argv and not {"--swiglu", "--disable-bias-linear"} & set(argv)
    saved = open_dense(tmp_path / "in").tensors
    assert saved["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (2, 3, 12, 8)
    assert saved["decoder.layers.mlp.experts.experts.linear_fc1.bias"].shape == (2, 3, 12)
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    # As a job records it that says it in the other way.
    change_arguments(tmp_path / "in" / "release", max_position_embeddings=64, window_attn_skip_freq=2)
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    found, expected = (load_file(at / WEIGHTS) for at in (tmp_path / "back", folder))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: config.get(name) for name in CONFIGS["gpt_oss"]} == CONFIGS["gpt_oss"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights (mxfp4) cannot be converted"),
        ({"swiglu_limit": 10.0}, "swiglu_limit 10.0 cannot be converted, only 7.0 can"),
        ({"layer_types": ["full_attention"]}, "layer_types has to give each layer"),
        ({"sliding_window": 0}, "sliding_window is 0, which must be 1 or more"),
        ({"rope_scaling": None}, "has no rope_scaling"),
    ],
)
def test_a_gpt_oss_that_megatron_does_not_compute_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read_model(Config(config_of("gpt_oss", **changes), "gpt_oss"))


def test_an_export_of_gated_delta_nets_is_refused_with_its_reason() -> None:
    arguments = read_model(Config(config_of("qwen3_moe"), "qwen3_moe")).arguments
    with pytest.raises(UsageError, match="gated delta nets cannot be converted: one --apply-layernorm-1p"):
        written_config(arguments | {"experimental_attention_variant": "gated_delta_net"}, 30, "bfloat16")


def test_what_a_family_does_not_compute_is_refused_by_name() -> None:
    arguments = read_model(Config(config_of("mixtral"), "mixtral")).arguments | {"max_position_embeddings": 64}
    for changes in (
        {"window_size": (127, 0)},
        {"softmax_type": "off-by-one"},
        {"activation_func_clamp_value": 7.0},
        {"layernorm_zero_centered_gamma": True},
        {"use_rope_scaling": True},
        {"rotary_interleaved": True},
        {"no_rope_freq": [1, 0]},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": "quantile_balancing"},
    ):
        with pytest.raises(UsageError, match=f"{next(iter(changes))} is "):
            written_config(arguments | changes, 30, "bfloat16")
    for balancing in ("none", "seq_aux_loss", ["seq_aux_loss", "global_aux_loss"]):
        assert written_config(arguments | {"moe_router_load_balancing_type": balancing}, 30, "bfloat16")


def places_with(folder: Path, extra: str, like: str) -> None:
    """Where the tensors of a model go, of which a checkpoint has one more, a copy of another."""
    convert("--from", "hf", folder, folder.parent / "in")
    checkpoint = open_dense(folder.parent / "in")
    checkpoint.tensors[extra] = checkpoint.tensors[like]
    places(checkpoint, read_model(read_config(folder)).weights())


def test_a_bias_of_routers_that_no_family_has_is_refused_by_name(tmp_path: Path) -> None:
    bias = "decoder.layers.mlp.router.qb_beta"
    with pytest.raises(UsageError, match=f"has, and no such model has, {bias}"):
        places_with(folder_of("mixtral", tmp_path / "folder"), bias, "decoder.layers.mlp.router.weight")


@pytest.mark.parametrize(("step", "dense"), [(2, [1]), (3, [1])])
def test_experts_in_every_so_many_layers_are_those_of_a_list(step: int, dense: list[int], tmp_path: Path) -> None:
    folder = folder_of("qwen3_moe", tmp_path / "folder", mlp_only_layers=dense)
    convert("--from", "hf", folder, tmp_path / "in")
    changes = {"moe_layer_freq": step, "max_position_embeddings": 64}
    change_arguments(tmp_path / "in" / "release", **changes)
    convert("--to", "hf", tmp_path / "in", tmp_path / "like")
    (tmp_path / "in" / "hugging_face").rename(tmp_path / "aside")
    convert("--to", "hf", tmp_path / "in", tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["mlp_only_layers"] == dense
    assert (tmp_path / "like" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}),
        ({"beta_fast": 16, "beta_slow": 2, "truncate": False}, {}),
        ({"mscale": 0.8, "mscale_all_dim": 0.4, "beta_fast": 64, "beta_slow": 1, "truncate": True}, {}),
    ],
)
def test_yarn_outside_of_latent_attention_becomes_flags_and_comes_back_without_the_config(
    family: str, more: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    rope = YARN | more
    folder = folder_of(family, tmp_path / "folder", rope_parameters=rope | {"rope_theta": 5000.0})
    argv = from_hugging_face(folder, tmp_path / "in")[1]["flags"]
    given = dict(pairwise(argv))
    assert given["--position-embedding-type"] == "yarn" and given["--rotary-base"] == "5000"
    assert given["--rotary-scaling-factor"] == "4.0" and given["--yarn-original-max-position-embeddings"] == "32"
    assert ("--no-yarn-correction-range-round-to-int" in argv) is (more.get("truncate") is False)
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    change_arguments(tmp_path / "in" / "release", max_position_embeddings=128)
    convert("--to", "hf", tmp_path / "in", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["rope_scaling"] == rope | expected and config["rope_theta"] == 5000.0
    found, wanted = (load_file(at / WEIGHTS) for at in (tmp_path / "back", folder))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize(
    ("family", "rope", "said"),
    [
        (
            "mixtral",
            YARN | {"attention_factor": 2.0},
            "attention_factor 2.0 cannot be converted: Megatron computes 1.13",
        ),
        ("qwen3_moe", {"type": "yarn", "factor": 4.0}, "rope_scaling has no original_max_position_embeddings"),
        (
            "deepseek_v3",
            LITE["rope_scaling"] | {"attention_factor": 2.0},
            "attention_factor 2.0 cannot be converted: Megatron computes 1 of",
        ),
        ("deepseek_v3", LITE["rope_scaling"] | {"mscale": 0}, "mscale 0 with mscale_all_dim 0.707 cannot be"),
        ("glm4_moe", YARN, "of type 'yarn' of 0.5 of each head cannot be converted"),
        ("mixtral", {"type": "linear", "factor": 4.0}, "of type 'linear' cannot be converted"),
    ],
)
def test_rotary_embeddings_that_megatron_does_not_compute_are_refused_by_name(
    family: str, rope: dict[str, Any], said: str
) -> None:
    config = config_of(family, rope_scaling=rope, rope_parameters=None)
    with pytest.raises(UsageError, match=re.escape(said)):
        read_model(Config(config, family))


def test_an_export_refuses_a_scale_of_yarn_that_transformers_would_ignore() -> None:
    arguments = read_model(Config(config_of("mixtral", rope_scaling=YARN), "mixtral")).arguments
    with pytest.raises(UsageError, match=r"--mscale 0\.7 with --mscale-all-dim 0\.0 cannot be converted"):
        written_config(arguments | {"max_position_embeddings": 64, "mscale": 0.7}, 30, "bfloat16")


@pytest.mark.parametrize("scales", [{"mscale": 0.7, "mscale_all_dim": 0.0}, {"mscale": 0.0, "mscale_all_dim": 0.7}])
def test_scales_of_latent_attention_that_transformers_would_ignore_are_those_it_takes_or_refused(
    scales: dict[str, float],
) -> None:
    rope = LITE["rope_scaling"]
    arguments = read_model(Config(config_of("deepseek_v3", rope_scaling=rope), "")).arguments
    with pytest.raises(UsageError, match="mscale"):
        written_config(arguments | scales | {"max_position_embeddings": 64}, 30, "bfloat16")
    if scales["mscale"]:
        found = read_model(Config(config_of("deepseek_v3", rope_scaling=rope | scales), "")).arguments
        assert (found["mscale"], found["mscale_all_dim"]) == (1, 0)


def test_a_second_norm_before_the_queries_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v2", tmp_path / "folder", first_k_dense_replace=0, **LITE)
    norm = "decoder.layers.self_attention.linear_q_proj.layer_norm_weight"
    with pytest.raises(UsageError, match=f"{norm}, a second norm before the queries, as Megatron-Core 0.19 has"):
        places_with(folder, norm, "decoder.layers.input_layernorm.weight")


def test_a_checkpoint_of_another_model_than_the_template_is_refused_with_the_arguments_that_differ(
    tmp_path: Path,
) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    change_config(folder, num_key_value_heads=4, num_experts_per_tok=1)
    with pytest.raises(UsageError, match="num_query_groups is 2, not 4; moe_router_topk is 2, not 1"):
        convert("--to", "hf", "--hf-model", folder, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_arguments_mean_what_the_megatron_that_recorded_them_made_of_them() -> None:
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 1}
    assert resolved(shape | {"group_query_attention": False})["num_query_groups"] == 8
    assert resolved(shape | {"group_query_attention": True})["num_query_groups"] == 1
    assert resolved(shape | {"apply_layernorm_1p": True})["layernorm_zero_centered_gamma"]


def test_a_checkpoint_that_no_family_computes_is_refused_with_the_argument_that_differs(tmp_path: Path) -> None:
    convert("--from", "hf", folder_of("mixtral", tmp_path / "folder"), tmp_path / "in")
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    change_arguments(tmp_path / "in" / "release", normalization="LayerNorm", max_position_embeddings=64)
    with pytest.raises(UsageError, match="normalization is LayerNorm, not RMSNorm"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_half_way_leaves_no_folder_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    to = ("--to", "hf", "--max-shard-size", "2KB", tmp_path / "in", tmp_path / "out")
    with monkeypatch.context() as patched:
        from moe_ckpt.hugging_face import exporting

        write, calls = exporting.write_shard, []

        def full_disk(path: Path, tensors: dict[str, torch.Tensor]) -> None:
            calls.append(path)
            if len(calls) == 3:
                raise OSError(28, "No space left on device", str(path))
            write(path, tensors)

        patched.setattr(exporting, "write_shard", full_disk)
        with pytest.raises(MoECheckpointError, match="cannot be written: No space left on device"):
            convert(*to)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    convert(*to)
    with pytest.raises(UsageError, match="exists already"):
        convert(*to)


def test_a_target_that_is_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        convert("--to", "hf", tmp_path / "none", tmp_path)


def test_a_checkpoint_with_a_changed_byte_is_not_exported(tmp_path: Path) -> None:
    convert("--from", "hf", folder_of("mixtral", tmp_path / "folder"), tmp_path / "in")
    shard = next((tmp_path / "in" / "release").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UnreadableCheckpoint, match=r"__0_0\.distcp"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_saved_again_while_it_is_exported_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ckpt.hugging_face import exporting

    convert("--from", "hf", folder_of("mixtral", tmp_path / "folder"), tmp_path / "in")
    release, other = tmp_path / "in" / "release", shutil.copytree(tmp_path / "in" / "release", tmp_path / "other")
    damaged = exporting.damaged

    def late(*arguments: Any) -> Any:
        found = damaged(*arguments)
        shutil.rmtree(release)
        other.rename(release)
        return found

    monkeypatch.setattr(exporting, "damaged", late)
    with pytest.raises(UnreadableCheckpoint, match="was saved again while it was read"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_an_export_that_loses_a_file_meanwhile_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ckpt.hugging_face import exporting

    convert("--from", "hf", folder_of("mixtral", tmp_path / "folder"), tmp_path / "in")
    monkeypatch.setattr(exporting, "write_shard", lambda path, tensors: None)
    with pytest.raises(UnreadableCheckpoint, match=r"was changed while it was written \(model.safetensors\)"):
        convert("--to", "hf", tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_all_files_of_an_export_have_the_same_permissions(tmp_path: Path) -> None:
    convert("--from", "hf", folder_of("mixtral", tmp_path / "folder"), tmp_path / "in")
    convert("--to", "hf", "--max-shard-size", "2KB", tmp_path / "in", tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_a_folder_that_changes_while_it_is_imported_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ckpt.hugging_face import importing

    folder, write = folder_of("mixtral", tmp_path / "folder"), importing.write_atomically

    def late(*arguments: Any) -> None:
        change_weights(folder, lambda tensors: tensors[NORM].add_(1))
        write(*arguments)

    monkeypatch.setattr(importing, "write_atomically", late)
    with pytest.raises(UnreadableCheckpoint, match="folder was saved again while it was read"):
        convert("--from", "hf", folder, tmp_path / "in")
    assert not list((tmp_path / "in").iterdir())


def test_weights_are_imported_into_a_folder_within_their_own(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    (folder / "megatron").mkdir()
    convert("--from", "hf", folder, folder / "megatron" / "in")
    convert("--to", "hf", folder / "megatron" / "in", tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_an_import_keeps_no_tokenizer_of_an_earlier_one(tmp_path: Path) -> None:
    folder, kept = folder_of("mixtral", tmp_path / "folder"), tmp_path / "in" / "hugging_face"
    kept.mkdir(parents=True)
    (kept / "merges.txt").touch()
    (folder / "tokenizer.json").write_text("{}")
    convert("--from", "hf", folder, tmp_path / "in")
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "tokenizer.json"]


def test_files_of_others_in_the_folder_that_an_import_replaces_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    folder = folder_of("mixtral", tmp_path / "in" / "hugging_face")
    with pytest.raises(UsageError, match=rf"hugging_face/{WEIGHTS} would be lost"):
        convert("--from", "hf", folder, tmp_path / "in")
    assert (folder / WEIGHTS).exists()


def test_what_an_import_keeps_of_the_tokenizer_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, synced, sync = folder_of("mixtral", tmp_path / "folder"), set[str](), os.fsync
    (folder / "tokenizer.json").write_text("{}")

    def fsync(descriptor: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    convert("--from", "hf", folder, tmp_path / "in")
    assert {path.name for path in (tmp_path / "in" / "hugging_face").iterdir()} <= synced


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path / "folder")
    convert("--from", "hf", folder, tmp_path / "in")
    before = open_dense(tmp_path / "in").directory.stat().st_mtime_ns
    with pytest.raises(UsageError, match="has checkpoints of its own"):
        convert("--from", "hf", folder, tmp_path / "in")
    assert open_dense(tmp_path / "in").directory.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("a b", "give one of --to dense, --to hf and --from hf"),
        ("--to hf --from hf a b", "give one of --to dense, --to hf and --from hf"),
        ("--to dense --max-shard-size 2GB a b", "--hf-model and --max-shard-size are for --to hf"),
        ("--to hf --max-shard-size 2x / b", "2x"),
        ("--to hf a b -- --flag", "a is converted without a job: leave out the flags after --, --flag"),
    ],
)
def test_wrong_usage_is_said(arguments: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        convert(*arguments.split())


def test_queries_keys_and_values_of_a_group_of_heads_stand_together_in_megatron() -> None:
    heads, groups, size, hidden = 4, 2, 3, 5
    q, k, v = (torch.arange(n * size * hidden).view(n * size, hidden) + 1000 * n for n in (heads, groups, groups))
    form, shapes = GroupedHeads(groups), [tuple(part.shape) for part in (q, k, v)]
    joined = form.join([q, k, v])
    one = torch.cat([q[: 2 * size], k[:size], v[:size]])
    assert torch.equal(joined[: 4 * size], one) and form.fits(tuple(joined.shape), shapes)
    assert all(torch.equal(a, b) for a, b in zip(form.split(joined, shapes), (q, k, v), strict=True))


def test_gate_and_gated_follow_each_other_and_rows_that_pad_a_vocabulary_are_cut_off() -> None:
    both = torch.arange(12).view(6, 2)
    gate, up = Rows().split(both, [(3, 2), (3, 2)])
    assert torch.equal(Rows().join([gate, up]), both) and torch.equal(gate, both[:3])
    assert not Rows().fits((7, 2), [(3, 2), (3, 2)])
    assert torch.equal(Vocabulary().split(both, [(5, 2)])[0], both[:5])
    assert Vocabulary().fits((6, 2), [(5, 2)]) and not Vocabulary().fits((4, 2), [(5, 2)])


def test_files_are_filled_in_order_and_one_alone_has_no_number() -> None:
    assert sharding([("a", 3), ("b", 3)], 6) == {"a": WEIGHTS, "b": WEIGHTS}
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert sharding([("a", 9), ("b", 3), ("c", 3)], 6) == {"a": first, "b": second, "c": second}


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        safetensors()
