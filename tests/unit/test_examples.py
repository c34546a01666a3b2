"""The examples for clusters, which no machine here can run, and the small ones: is what they start what they say?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.types import ModelShape, Topology
from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.derived import Environment, moe_layer_pattern
from megatron.pretrain.config.validate import resolve
from megatron.pretrain.model import build_transformer_config
from megatron.pretrain.tokenizer import build_tokenizer
from moe_ckpt.commands.main import main
from moe_ckpt.simulator.models import preset
from reproduce.jobs import azure_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = {
    "gpt-125m-8e": "GPT-125M-8E",
    "gpt-350m-16e": "GPT-350M-16E",
    "gpt-moe": "GPT-MoE",
    "moe-llava": "MoE-LLaVa",
    "qwen-moe": "QWen-MoE",
    "deepseek-moe": "DeepSeek-MoE",
}
REDUCED = (*MODELS, "finetune")
SETTINGS = {"DATA": "/data/my corpus", "SAVE": "/shared/my checkpoints"}
CALLED = '#!/bin/bash\nprintf "%s\\0" "$@" >"$CALLS/$$"\n'


@dataclass(frozen=True)
class Job:
    """A job as an example starts it: nodes and ranks of each, and the driver's configuration, with defaults."""

    nodes: int
    ranks_per_node: int
    config: PretrainConfig

    @property
    def topology(self) -> Topology:
        layout = self.config.parallel
        return Topology(
            self.nodes * self.ranks_per_node,
            tp=layout.tensor_model_parallel_size,
            pp=layout.pipeline_model_parallel_size,
            ep=layout.expert_model_parallel_size,
        )


def calls_of(script: Path, stand_in: str, folder: Path, **environment: str) -> list[list[str]]:
    """The arguments of each call that the script makes of a program: `sbatch` or the interpreter."""
    program, calls = folder / f"bin of {stand_in}" / stand_in, folder / f"calls of {stand_in}"
    program.parent.mkdir()
    calls.mkdir()
    program.write_text(CALLED)
    program.chmod(0o755)
    # Folders with spaces in their names are the least that a script has to bear.
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHON": str(program), "CALLS": str(calls)}
    subprocess.run([script], env=os.environ | variables | environment, check=True, timeout=60, capture_output=True)
    return [call.read_text().split("\0")[:-1] for call in calls.iterdir()]


def launched(example: str, folder: Path) -> Job:
    """What `train.sh` starts with torchrun on each node."""
    (argv,) = calls_of(EXAMPLES / example / "train.sh", "python", folder, **SETTINGS, HEAD="first-node")
    nodes, ranks = int(argv[argv.index("--nnodes") + 1]), int(argv[argv.index("--nproc-per-node") + 1])
    return Job(nodes, ranks, judged(argv, Environment(nodes * ranks, cuda=True, transformer_engine=True)))


def reduced(example: str, folder: Path) -> list[PretrainConfig]:
    """The jobs that `reduced.sh` starts, without what Megatron-LM alone has to be told."""
    calls = calls_of(EXAMPLES / example / "reduced.sh", "python", folder, CORPUS="/data/my corpus", LOOP="own")
    launches = [call for call in calls if "megatron.pretrain.launch" in call]
    return [judged(argv, Environment(ranks_of(argv), cuda=False, transformer_engine=False)) for argv in launches]


def ranks_of(argv: list[str]) -> int:
    return int(argv[argv.index("--nnodes") + 1]) * int(argv[argv.index("--nproc-per-node") + 1])


def judged(argv: list[str], environment: Environment) -> PretrainConfig:
    """The flags behind the training script, by the driver's own parser and checks."""
    script = next(at for at, part in enumerate(argv) if part.endswith(".py"))
    assert Path(argv[script]).is_file()
    return resolve(parse_config(argv[script + 1 :]), environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spaced = tmp_path / "with spaces"
    spaced.mkdir()
    return spaced


@pytest.mark.parametrize("example", MODELS)
def test_the_full_size_model_has_the_shape_of_the_paper_s(example: str, folder: Path) -> None:
    config = launched(example, folder).config
    expected, found = preset(MODELS[example]), shape_of(config)
    # The driver has no flag for the gate of a shared expert, hidden_size parameters a layer.
    expected = replace(expected, moe_shared_expert_gate=False)
    for field in fields(ModelShape):
        if field.name not in ("name", "note"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.total_parameters == expected.total_parameters


@pytest.mark.parametrize("script", ["examples/gpt-moe/train.sh", "scripts/train_cpu.sh"])
def test_a_script_keeps_to_the_loop_whose_flags_it_has(script: str, folder: Path) -> None:
    is_example = script.startswith("examples")
    for given in ("", "stock", "own"):
        said = told_by(script, given, folder)
        loop = given or ("own" if is_example else "stock")
        assert said.startswith(f"{loop} ")
        assert ("--keep-last" in said) == (is_example and loop == "own")
        assert ("--transformer-impl local" in said) == (not is_example and loop == "stock")


def told_by(script: str, loop: str, folder: Path) -> str:
    """The loop and the arguments that a script starts the interpreter with."""
    program = folder / f"python {loop}"
    program.write_text('#!/bin/bash\necho "$LOOP" "$@"\n')
    program.chmod(0o755)
    given = SETTINGS | {"HEAD": "first-node", "PYTHON": str(program), "CORPUS": "/data/corpus"}
    environment = {name: value for name, value in os.environ.items() if name != "LOOP"} | given
    if loop:
        environment["LOOP"] = loop
    return subprocess.run(
        [ROOT / script], env=environment, check=True, timeout=60, capture_output=True, text=True
    ).stdout


def shape_of(config: PretrainConfig) -> ModelShape:
    """The model of these flags; a vocabulary counts as many ids as the tokenizer has."""
    model, moe, data = config.model, config.moe, config.data
    pattern = moe_layer_pattern(moe.moe_layer_freq)
    assert model.num_layers is not None
    assert model.hidden_size is not None
    assert model.num_attention_heads is not None
    assert model.ffn_hidden_size is not None
    assert moe.num_experts is not None
    return ModelShape(
        name="flags",
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        vocab_size=build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size).vocab_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_experts=moe.num_experts,
        moe_router_topk=moe.moe_router_topk,
        moe_ffn_hidden_size=moe.moe_ffn_hidden_size,
        moe_layer_freq=tuple(pattern) if isinstance(pattern, list) else pattern,
        moe_shared_expert_intermediate_size=moe.moe_shared_expert_intermediate_size or 0,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        gated_linear_unit=model.swiglu,
        max_position_embeddings=(model.max_position_embeddings or 0)
        * (model.position_embedding_type == "learned_absolute"),
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
    )


@pytest.mark.parametrize("example", ["gpt-moe", "moe-llava", "qwen-moe", "deepseek-moe"])
def test_the_full_size_job_has_layout_and_batch_of_moevement_5_1(example: str, folder: Path) -> None:
    job, paper = launched(example, folder), azure_job(MODELS[example])
    expected = paper.topology
    if example == "qwen-moe":
        expected = replace(expected, ep=4)  # of 60 experts 8 ranks cannot have equal parts
    if example == "deepseek-moe":
        expected = Topology(112, pp=14, ep=8)  # 28 layers do not divide by 12 stages
    assert job.topology == expected
    training = job.config.training
    assert training.global_batch_size == paper.global_batch
    assert training.seq_length == paper.seq_length
    assert training.micro_batch_size is not None
    assert training.global_batch_size == paper.microbatches * job.topology.dp * training.micro_batch_size


def test_the_full_size_job_of_gpt_350m_16e_has_the_layout_of_case_3(folder: Path) -> None:
    topology = launched("gpt-350m-16e", folder).topology
    assert (topology.world_size, topology.dp, topology.tp, topology.pp, topology.ep) == (16, 16, 1, 1, 8)


@pytest.mark.parametrize("example", MODELS)
def test_megatron_core_takes_the_full_size_model(example: str, folder: Path) -> None:
    config = launched(example, folder).config
    # Without Transformer Engine on this machine core refuses its fused kernels, whatever the model.
    without = replace(config, model=replace(config.model, transformer_impl="local"))
    assert build_transformer_config(without).num_moe_experts == config.moe.num_experts


@pytest.mark.parametrize("example", MODELS)
def test_slurm_gets_the_same_job_and_one_node_more_as_a_spare(example: str, folder: Path) -> None:
    job = launched(example, folder)
    (argv,) = calls_of(EXAMPLES / example / "train.sh", "sbatch", folder, **SETTINGS)
    script = argv.index("scripts/slurm/train.sbatch")
    assert (ROOT / argv[script]).is_file()
    assert f"--nodes={job.nodes + 1}" in argv[:script]
    assert tuple(argv[script + 1 :]) == job.config.argv


@pytest.mark.parametrize("example", REDUCED)
def test_what_runs_here_is_trained_without_protection_and_then_killed_with_it(example: str, folder: Path) -> None:
    configs = reduced(example, folder)
    killed = [config for config in configs if config.moe_checkpoint.inject_fault]
    assert killed
    for config in configs:
        assert build_transformer_config(config).num_moe_experts
        assert (config.moe_checkpoint.strategy != "none") == (config in killed)
        # A default folder would be shared with whatever else this user runs.
        assert (config.moe_checkpoint.memory_dir is not None) == (config in killed)


@pytest.mark.parametrize("example", REDUCED)
def test_an_example_has_all_its_files(example: str) -> None:
    scripts = ["reduced.sh", "train.sh"] if example in MODELS else ["reduced.sh"]
    assert all(os.access(EXAMPLES / example / script, os.X_OK) for script in scripts)
    assert (EXAMPLES / example / "expected.txt").is_file()
    readme = (EXAMPLES / example / "README.md").read_text()
    assert all(f"{example}/{script}" in readme for script in scripts)


@pytest.mark.parametrize("example", MODELS)
def test_the_page_of_a_model_quotes_what_the_planner_says(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quotes = list(quoted((EXAMPLES / example / "README.md").read_text()))
    assert quotes
    for command, expected in quotes:
        assert MODELS[example] in command
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        said = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert ended.value.code == 0
        assert said.startswith(expected), command


def quoted(page: str) -> Iterator[tuple[list[str], str]]:
    """Each `$ moe-ckpt ...` in an indented block of a page, with the lines that follow it."""
    blocks = "".join(line[4:] if line.startswith("    ") else "\0" for line in page.splitlines(keepends=True))
    for block in filter(None, blocks.split("\0")):
        if block.startswith("$ moe-ckpt "):
            command, _, output = block.replace("\\\n", " ").partition("\n")
            yield command[2:].split(), output.rstrip()


def test_examples_compare_iterations_and_pass_over_what_else_a_run_writes_down(tmp_path: Path) -> None:
    step = {"iteration": 1, "lm_loss": 2.0, "grad_norm": 1.0, "replayed": False}
    lines = [{"began": {"world_size": 2}}, step, {"recovery": {"total_s": 1.0}}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.log").write_text("")
    program = f"import compare, pathlib; print(compare.read(pathlib.Path({str(tmp_path / 'run')!r})).steps)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=EXAMPLES / "common", capture_output=True, text=True, check=True
    )
    assert found.stdout == "((1, 2.0, 1.0, False),)\n"
