"""The examples for clusters, which no machine here can run, and the small ones: is what they start what they say?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from megatron_flags import judged, model_of

from megatron.core.dist_checkpointing.moe.types import ModelShape, Topology
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
    """A job as an example starts it: its nodes, flags, and arguments, with defaults."""

    nodes: int
    flags: list[str]
    args: Namespace

    @property
    def topology(self) -> Topology:
        return Topology(
            self.args.world_size,
            tp=self.args.tensor_model_parallel_size,
            pp=self.args.pipeline_model_parallel_size,
            ep=self.args.expert_model_parallel_size,
        )


def calls_of(script: Path, stand_in: str, folder: Path, **environment: str) -> list[list[str]]:
    """The arguments of each call that the script makes of a program: `sbatch` or the interpreter."""
    program, calls = folder / f"bin of {stand_in}" / stand_in, folder / f"calls of {stand_in}"
    program.parent.mkdir()
    calls.mkdir()
    program.write_text(CALLED)
    program.chmod(0o755)
    # Folders with spaces in their names are the least that a script has to bear.
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "MOE_CKPT_PYTHON": str(program), "CALLS": str(calls)}
    subprocess.run([script], env=os.environ | variables | environment, check=True, timeout=60, capture_output=True)
    return [call.read_text().split("\0")[:-1] for call in calls.iterdir()]


def launched(example: str, folder: Path) -> Job:
    """What `train.sh` starts with torchrun on each node."""
    (argv,) = calls_of(EXAMPLES / example / "train.sh", "python", folder, **SETTINGS, HEAD="first-node")
    return Job(int(argv[argv.index("--nnodes") + 1]), flags_in(argv), judged(flags_in(argv), ranks_of(argv)))


def reduced(example: str, folder: Path) -> list[Namespace]:
    """The jobs that `reduced.sh` starts."""
    calls = calls_of(EXAMPLES / example / "reduced.sh", "python", folder, MOE_CKPT_CORPUS="/data/my corpus")
    launches = [call for call in calls if "megatron.pretrain.launch" in call]
    return [judged(flags_in(argv), ranks_of(argv)) for argv in launches]


def ranks_of(argv: list[str]) -> int:
    return int(argv[argv.index("--nnodes") + 1]) * int(argv[argv.index("--nproc-per-node") + 1])


def flags_in(argv: list[str]) -> list[str]:
    """Those behind the training script."""
    script = next(at for at, part in enumerate(argv) if part.endswith("pretrain_gpt_moe.py"))
    assert Path(argv[script]).is_file()
    return argv[script + 1 :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spaced = tmp_path / "with spaces"
    spaced.mkdir()
    return spaced


@pytest.mark.parametrize("example", MODELS)
def test_the_full_size_model_has_the_shape_of_the_paper_s(example: str, folder: Path) -> None:
    expected, found = spelled_out(preset(MODELS[example])), shape_of(launched(example, folder).args)
    for field in fields(ModelShape):
        if field.name not in ("name", "note"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.total_parameters == expected.total_parameters


def shape_of(args: Namespace) -> ModelShape:
    """The model of these arguments."""
    names = {field.name for field in fields(ModelShape)} & vars(args).keys()
    named = {name: getattr(args, name) for name in names if not name.endswith(("_rank", "_dim"))}  # of latent attention
    frequency = args.moe_layer_freq
    positions = args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0
    said_otherwise = {
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "gated_linear_unit": args.swiglu,
        "moe_layer_freq": tuple(frequency) if isinstance(frequency, list) else frequency,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size or 0,
        "max_position_embeddings": positions,
    }
    return ModelShape(name="flags", **named | said_otherwise)


def spelled_out(shape: ModelShape) -> ModelShape:
    """What goes without saying in a shape, as Megatron-LM says it. It has no flag for the gate of a shared expert."""
    return replace(
        shape,
        kv_channels=shape.kv_channels or shape.hidden_size // shape.num_attention_heads,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size or shape.ffn_hidden_size,
        add_qkv_bias=shape.add_qkv_bias or shape.add_bias_linear,
        moe_shared_expert_gate=False,
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
    assert job.args.global_batch_size == paper.global_batch
    assert job.args.seq_length == paper.seq_length
    assert job.args.global_batch_size == paper.microbatches * job.topology.dp * job.args.micro_batch_size


def test_the_full_size_job_of_gpt_350m_16e_has_the_layout_of_case_3(folder: Path) -> None:
    topology = launched("gpt-350m-16e", folder).topology
    assert (topology.world_size, topology.dp, topology.tp, topology.pp, topology.ep) == (16, 16, 1, 1, 8)


@pytest.mark.parametrize("example", MODELS)
def test_megatron_core_takes_the_full_size_model(example: str, folder: Path) -> None:
    args = launched(example, folder).args
    assert model_of(args).num_moe_experts == args.num_experts


@pytest.mark.parametrize("example", MODELS)
def test_slurm_gets_the_same_job_and_one_node_more_as_a_spare(example: str, folder: Path) -> None:
    job = launched(example, folder)
    (argv,) = calls_of(EXAMPLES / example / "train.sh", "sbatch", folder, **SETTINGS)
    script = argv.index("scripts/slurm/train.sbatch")
    assert (ROOT / argv[script]).is_file()
    assert f"--nodes={job.nodes + 1}" in argv[:script]
    assert argv[script + 1 :] == job.flags


@pytest.mark.parametrize(
    ("given", "restarts"),
    [({}, "20"), ({"MAX_RESTARTS": "3"}, "3"), ({"MAX_RESTARTS": "3", "MOE_CKPT_MAX_RESTARTS": "4"}, "4")],
)
def test_ranks_are_restarted_as_often_as_it_is_said_with_slurm_and_without(
    given: dict[str, str], restarts: str, folder: Path
) -> None:
    (folder / "sbatch").write_text("#!/bin/bash\necho $MOE_CKPT_MAX_RESTARTS\n")
    (folder / "sbatch").chmod(0o755)
    script, path = EXAMPLES / "gpt-moe" / "train.sh", {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment = os.environ | SETTINGS | given
    slurms = subprocess.run([script], env=environment | path, check=True, capture_output=True, text=True)
    (argv,) = calls_of(script, "python", folder, **SETTINGS, **given, HEAD="first-node")
    assert [slurms.stdout.strip(), argv[argv.index("--max-restarts") + 1]] == [restarts] * 2


@pytest.mark.parametrize("example", REDUCED)
def test_what_runs_here_is_trained_without_protection_and_then_killed_with_it(example: str, folder: Path) -> None:
    jobs = reduced(example, folder)
    killed = [args for args in jobs if args.moe_ckpt_inject_fault]
    assert killed
    for args in jobs:
        assert model_of(args).num_moe_experts
        assert (args.moe_ckpt_strategy != "none") == (args in killed)
        # A default folder would be shared with whatever else this user runs.
        assert (args.moe_ckpt_memory_dir is not None) == (args in killed)


def test_scripts_name_no_file_of_the_repository_that_the_wheel_lacks() -> None:
    scripts = [*EXAMPLES.rglob("*.sh"), *(ROOT / "scripts").rglob("*.sh")]
    named = {name for script in scripts for name in re.findall(r"\$root\"?/([\w.-]+)", script.read_text())}
    assert named == {"scripts", "examples", "tools", "pretrain_gpt_moe.py", ".venv", ".data", "build"}


def test_text_that_cannot_be_read_for_fine_tuning_ends_it_with_the_reason(folder: Path) -> None:
    failing = folder / "python"
    failing.write_text('#!/bin/bash\n[[ $1 != */preprocess_data.py ]] || { echo "no text"; exit 2; }\n')
    failing.chmod(0o755)
    ended = subprocess.run(
        [EXAMPLES / "finetune" / "reduced.sh"], capture_output=True, text=True,
        env=os.environ | {"MOE_CKPT_PYTHON": str(failing), "MOE_CKPT_CORPUS": "/data/corpus"},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, "no text\n")


@pytest.mark.parametrize("script", ["examples/gpt-moe/train.sh", "scripts/train_cpu.sh"])
def test_a_variable_that_once_chose_between_loops_changes_nothing(script: str, tmp_path: Path) -> None:
    settings = SETTINGS | {"HEAD": "first-node", "MOE_CKPT_CORPUS": "/data/corpus", "SAVE": "/shared/save"}
    calls = []
    for number, given in enumerate(({}, {"LOOP": "own"}, {"LOOP": "none of these"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        calls += calls_of(ROOT / script, "python", folder, **settings, **given)
    assert len(calls) == 3 and calls[0] == calls[1] == calls[2]


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
