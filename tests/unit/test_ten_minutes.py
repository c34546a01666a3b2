"""What the pages for a new user and their files say, without a job: settings that are read, flags that parse."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from megatron_flags import judged, model_of

from megatron.core.dist_checkpointing.moe import bridge
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.pretrain.standby.run import parse_options
from moe_ckpt.simulator.models import preset

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def fenced(page: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


def test_the_page_of_bridge_shows_settings_that_are_read_from_python_and_from_yaml() -> None:
    checkpoint = SimpleNamespace()
    (assignment,) = (
        node for node in ast.walk(ast.parse(fenced("docs/bridge.md", "python")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cfg.checkpoint.moe_ckpt"
    )  # fmt: skip
    of_yaml = yaml.safe_load(fenced("docs/bridge.md", "yaml"))["checkpoint"]["moe_ckpt"]
    for section in (ast.literal_eval(assignment.value), of_yaml):
        checkpoint.moe_ckpt = section
        settings = bridge._settings_of(checkpoint)
        assert (settings.strategy, settings.interval, settings.replicas) == ("full", "auto", 1)
    assert settings == MoECheckpointConfig(
        strategy="full", interval="auto", replicas=1, persist_dir="/shared/run-12/snapshots"
    )


def test_the_page_of_an_own_loop_shows_what_the_example_has() -> None:
    shown = [line.strip() for line in fenced("docs/your-loop.md", "python").splitlines()]
    has = [line.strip() for line in (EXAMPLES / "own_loop" / "protected.py").read_text().splitlines()]
    assert [line for line in shown if line not in has] == []


@pytest.fixture
def submitted(tmp_path: Path) -> dict[str, str]:
    """What the job file for a stock script hands to the scripts of Slurm: settings, and flags by line."""
    (tmp_path / "scripts" / "slurm").mkdir(parents=True)
    kept = " ".join(f"MOE_CKPT_{name}" for name in ("SPARES", "LEAD_S", "SCRIPT", "IMAGE"))
    (tmp_path / "scripts" / "slurm" / "job.sh").write_text(
        f'run_job() {{ for name in {kept}; do echo "$name=${{!name}}"; done; printf "%s\\n" flags "$@"; }}\n'
    )
    command = ["bash", str(EXAMPLES / "megatron_lm" / "train.sbatch"), "--train-iters", "7"]
    environment = {"PATH": "/usr/bin:/bin", "MOE_CKPT_ROOT": str(tmp_path)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    settings, _, flags = said.partition("flags\n")
    return {"flags": flags} | dict(line.split("=", 1) for line in settings.splitlines())


def test_megatron_lm_takes_the_flags_of_the_job_file_on_its_16_nodes(submitted: dict[str, str]) -> None:
    options = (EXAMPLES / "megatron_lm" / "train.sbatch").read_text()
    (nodes,), (gpus,) = (re.findall(rf"^#SBATCH --{one}=(\d+)$", options, re.M) for one in ("nodes", "gpus-per-node"))
    ranks = (int(nodes) - int(submitted["MOE_CKPT_SPARES"])) * int(gpus)
    assert ranks == 16 * 8
    args = judged([*submitted["flags"].splitlines(), "--device", "cuda"], ranks, CUDA_DEVICE_MAX_CONNECTIONS="1")
    found, shape = model_of(args), preset("Qwen3-30B-A3B")
    assert (found.num_layers, found.hidden_size, found.num_moe_experts, found.moe_router_topk) == (
        *(shape.num_layers, shape.hidden_size, shape.num_experts),
        shape.moe_router_topk,
    )
    assert (args.moe_ckpt_strategy, args.moe_ckpt_interval, args.moe_ckpt_replicas) == ("full", "auto", 1)
    assert args.train_iters == 7, "what follows the file wins"


def test_the_job_file_warns_ranks_as_early_as_slurm_warns_it(submitted: dict[str, str]) -> None:
    options = (EXAMPLES / "megatron_lm" / "train.sbatch").read_text()
    assert f"#SBATCH --signal=B:USR1@{submitted['MOE_CKPT_LEAD_S']}\n" in options
    assert (submitted["MOE_CKPT_IMAGE"], submitted["MOE_CKPT_SCRIPT"]) == (
        "/shared/megatron.sqsh",
        "/shared/Megatron-LM/pretrain_gpt.py",
    )


def test_the_variables_of_a_site_are_assignments_and_nothing_else() -> None:
    lines = (EXAMPLES / "megatron_lm" / "env.sh").read_text().splitlines()
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in lines
    assert [line for line in lines if not re.fullmatch(r"# .*|export [A-Z_]+=\w+", line)] == []


def test_a_train_job_asks_for_a_pod_more_than_nodes_and_gives_the_launcher_options_that_it_takes() -> None:
    runtime, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "trainjob.yaml").read_text())
    trainer, pods = job["spec"]["trainer"], runtime["spec"]["mlPolicy"]["numNodes"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    options = parse_options(trainer["args"])
    assert pods == trainer["numNodes"] == int(options.nnodes) + 1
    assert options.rdzv_endpoint == f"{job['metadata']['name']}-meet-0-0.{job['metadata']['name']}:29400"
    assert options.rdzv_id == job["metadata"]["name"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == int(options.nproc_per_node)
    settings = MoECheckpointConfig.from_argv(options.training_script_args)
    assert (settings.strategy, settings.interval, settings.replicas) == ("full", "auto", 1)
