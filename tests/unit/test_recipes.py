"""The examples of models that people train: flags that parse, layouts that fit and do not idle, plans that succeed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from megatron_flags import judged, model_of

from moe_ckpt.commands.main import commands
from moe_ckpt.simulator.models import preset

from .test_examples import EXAMPLES, Job, calls_of, flags_in, quoted, ranks_of, reduced

ON_DRIVER = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "mixtral-8x22b": "Mixtral-8x22B"}
ON_SCRIPT = {"deepseek-v3": 128, "deepseek-v3-lite": 2}
MOST_BUBBLES = 0.1


def bubbles(pp: int, virtual: int, microbatches: int) -> float:
    """Share of an iteration in which a stage of an interleaved 1F1B schedule waits for others."""
    return (pp - 1) / (virtual * microbatches + pp - 1)


def launched(example: str, folder: Path, nodes: int) -> Job:
    given = {"DATA": "/data/my corpus", "SAVE": "/shared/my checkpoints", "TOKENIZER": "/models/my tokenizer"}
    given |= {"HEAD": "first-node", "NODES": str(nodes)}
    script = EXAMPLES / example / "train.sh"
    (argv,) = calls_of(script, "python", folder, **given)
    assert int(argv[argv.index("--nnodes") + 1]) == nodes
    queues = hardware_queues(script, folder, given)
    return Job(nodes, flags_in(argv), judged(flags_in(argv), ranks_of(argv), CUDA_DEVICE_MAX_CONNECTIONS=queues))


def hardware_queues(script: Path, folder: Path, given: dict[str, str]) -> str:
    """How many a rank has, which Megatron-LM judges with tensor parallelism."""
    program = folder / "tells its queues"
    program.write_text('#!/bin/bash\nprintf "%s" "${CUDA_DEVICE_MAX_CONNECTIONS:-8}"\n')
    program.chmod(0o755)
    environment = os.environ | given | {"MOE_CKPT_PYTHON": str(program)}
    return subprocess.run([script], env=environment, check=True, timeout=60, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("example", "nodes"), [("qwen3-30b-a3b", 2), ("qwen3-30b-a3b", 16), ("mixtral-8x22b", 16)])
def test_megatron_lm_and_the_driver_take_the_flags_and_the_layout_does_not_idle(
    example: str, nodes: int, tmp_path: Path
) -> None:
    job = launched(example, tmp_path, nodes)
    args, shape = job.args, preset(ON_DRIVER[example])
    found = model_of(args)
    assert (found.num_layers, found.hidden_size, found.num_moe_experts) == (
        *(shape.num_layers, shape.hidden_size),
        shape.num_experts,
    )
    assert (found.moe_router_topk, found.num_query_groups) == (shape.moe_router_topk, shape.num_query_groups)
    assert found.moe_ffn_hidden_size == (shape.moe_ffn_hidden_size or shape.ffn_hidden_size)
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", "/models/my tokenizer")
    microbatches, rest = divmod(args.global_batch_size, job.topology.dp)
    assert rest == 0
    virtual = args.virtual_pipeline_model_parallel_size or 1
    assert bubbles(job.topology.pp, virtual, microbatches) <= MOST_BUBBLES
    assert (args.moe_ckpt_strategy, args.moe_ckpt_interval) == ("full", "auto")


def flags_of(example: str) -> dict[str, str]:
    lines = (EXAMPLES / example / "model.flags").read_text().splitlines()
    found = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    assert len({name for name, _, _ in found}) == len(found), "a flag is given twice"
    return {name: value for name, _, value in found}


def virtual_stages(flags: dict[str, str], pp: int) -> int:
    """Of a layout as Megatron-LM writes it: stages between bars, `(...)*N` repeats what is in it."""
    layout = flags.get("--pipeline-model-parallel-layout", "")
    if not layout:
        return 1
    head, _, rest = layout.partition("(")
    inner, _, tail = rest.partition(")*")
    times = int("".join(ch for ch in tail if ch.isdigit()))
    stages = (head + inner * times + tail.lstrip("0123456789")).split("|")
    assert sum(stage.count("t") for stage in stages) == int(flags["--num-layers"])
    return len(stages) // pp if len(stages) % pp == 0 else 0


@pytest.mark.parametrize("example", ON_SCRIPT)
def test_flags_of_a_deepseek_are_a_model_that_the_planner_takes_on_its_nodes(example: str) -> None:
    flags = flags_of(example)
    pp, ranks = int(flags.get("--pipeline-model-parallel-size", "1")), 8 * ON_SCRIPT[example]
    job = [word for flag, value in flags.items() for word in (flag, value) if word]
    asked = ["--world-size", str(ranks), "--vocab-size", "129280", "--cluster", "h100-dgx"]
    said = CliRunner().invoke(
        commands, ["plan", *job, *asked, "--moe-ckpt-persist-dir", "d", "--json"], catch_exceptions=False
    )
    assert said.exit_code == 0
    plan = json.loads(said.output)
    assert plan["window"] == 1 and not plan["does_not_fit"]
    assert plan["memory_of_a_node_bytes"] < 1e12
    if example == "deepseek-v3":
        assert plan["parameters"] == preset("DeepSeek-V3-671B").total_parameters
    virtual = virtual_stages(flags, pp)
    microbatches, rest = divmod(int(flags["--global-batch-size"]), ranks // pp)
    assert virtual > 0 and rest == 0
    assert bubbles(pp, virtual, microbatches) <= MOST_BUBBLES


@pytest.mark.parametrize("example", ON_SCRIPT)
def test_what_a_node_starts_has_each_flag_and_its_value_as_a_word(example: str, tmp_path: Path) -> None:
    given = {"DATA": "/data/my corpus", "SAVE": "/shared/my checkpoints", "TOKENIZER": "deepseek-ai/DeepSeek-V3"}
    nodes = str(ON_SCRIPT[example])
    (argv,) = calls_of(EXAMPLES / example / "train.sh", "python", tmp_path, **given, HEAD="first-node", NODES=nodes)
    for name, value in flags_of(example).items():
        at = argv.index(name)
        assert not value or argv[at + 1] == value
    assert argv[argv.index("--data-path") + 1] == given["DATA"]
    assert argv[argv.index("--nnodes") + 1] == nodes
    assert Path(next(word for word in argv if word.endswith("pretrain_gpt_moe.py"))).is_file()


@pytest.mark.parametrize("example", [*ON_DRIVER, *ON_SCRIPT])
def test_what_differs_from_the_stock_recipe_is_four_flags_of_protection(example: str) -> None:
    folder = EXAMPLES / example
    text = (folder / ("train.sh" if example in ON_DRIVER else "model.flags")).read_text()
    assert text.count("--moe-ckpt-") == 4
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("example", ON_DRIVER)
def test_the_reduced_variant_is_trained_twice_and_killed_once(example: str, tmp_path: Path) -> None:
    jobs = reduced(example, tmp_path)
    assert sorted(args.moe_ckpt_strategy for args in jobs) == ["full", "none"]
    (killed,) = [args for args in jobs if args.moe_ckpt_inject_fault]
    assert killed.moe_ckpt_strategy == "full" and killed.moe_ckpt_memory_dir is not None
    assert all(model_of(args).num_moe_experts for args in jobs)


@pytest.mark.parametrize("example", ON_DRIVER)
def test_the_page_of_a_recipe_quotes_what_the_planner_says(example: str) -> None:
    quotes = list(quoted((EXAMPLES / example / "README.md").read_text()))
    assert quotes
    for words, expected in quotes:
        said = CliRunner().invoke(commands, words[1:], catch_exceptions=False).output
        assert "\n".join(line.rstrip() for line in said.splitlines()).startswith(expected)
