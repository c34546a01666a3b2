"""A recipe of Megatron-Bridge that predicts further tokens, or trains with Muon, protected by its YAML file alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from bridge_wheel import why_not
from world import HANG_TIMEOUT_S, RECOVERY_TIMEOUT_S, ROOT, node_memory, run_to_end

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

JOB = Path(__file__).with_name("bridge_recipe_job.py")
RECIPE = "qwen.qwen3_moe.qwen3_30b_a3b_pretrain_config"
LAST, KILLED = 8, 5
OVERRIDES = f"""
model: {{mtp_num_layers: 1}}
train: {{train_iters: {LAST}, global_batch_size: 8, micro_batch_size: 1}}
validation: {{eval_iters: 0}}
dist: {{distributed_backend: gloo, use_gloo_process_groups: true}}
logger: {{tensorboard_dir: null}}
optimizer: {{lr: 0.01, bf16: false, params_dtype: float32, use_precision_aware_optimizer: false}}
scheduler: {{lr_warmup_iters: 2}}
ddp: {{grad_reduce_in_fp32: true}}
checkpoint: {{save: null, load: null}}
"""
STAGES = "model: {mtp_num_layers: 1, pipeline_model_parallel_size: 2, expert_model_parallel_size: 1}"
MUON = """
model: {mtp_num_layers: null}
optimizer: {optimizer: dist_muon, lr: 0.01, bf16: true, params_dtype: bfloat16, use_precision_aware_optimizer: false}
ddp: {grad_reduce_in_fp32: true, use_distributed_optimizer: false, overlap_param_gather: false}
"""
"""In place of these sections: each data-parallel rank steps matrices of its own. Core takes it for weights of bf16.

Bridge overlaps the gather in optimizer and model or in neither, which is checked before what runs here. Overlapped it
gathers parts of unequal sizes, which gloo refuses.
"""
TORCHRUN = ["torch.distributed.run"]
STANDBYS = ["megatron.pretrain.standby.run", "--moe-ckpt-standbys", "1"]

CameOut = dict[tuple[str, str], tuple[str, ...]]
Processes = dict[str, list[str]]


@pytest.fixture
def memory() -> Iterator[Path]:
    with node_memory() as folder:
        yield folder


def run(
    folder: Path, launcher: list[str], moe_ckpt: dict[str, object], sections: str = "", **environment: str
) -> tuple[int, str]:
    """Run two ranks to their end under a launcher; its exit code, and what was said. sections: of other overrides."""
    records, overrides = folder / "records", folder / "overrides.yaml"
    records.mkdir()
    settings = yaml.safe_load(OVERRIDES) | (yaml.safe_load(sections) or {})
    if moe_ckpt:
        settings["checkpoint"]["moe_ckpt"] = moe_ckpt
    overrides.write_text(yaml.safe_dump(settings))
    launch = "--standalone --monitor-interval 0.1 --nproc-per-node 2 --max-restarts".split()
    restarts = "2" if "inject_fault" in moe_ckpt else "0"
    command = [sys.executable, "-m", *launcher, *launch, restarts, str(JOB), RECIPE, str(overrides), str(records)]
    path = os.pathsep.join(str(ROOT / name) for name in ("tools", "tests/process", "tests/stock", ""))
    # As the page says: else torch gives restarted ranks the addresses of dead ones.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | environment
    job = run_to_end(command, HANG_TIMEOUT_S + RECOVERY_TIMEOUT_S, stderr=subprocess.STDOUT, **environment)
    return job.returncode, job.stdout


def left(folder: Path) -> tuple[CameOut, Processes]:
    """How each iteration and the end came out on each rank, the same each time; and its processes in their order."""
    found: CameOut = {}
    processes: Processes = {}
    for file in sorted((folder / "records").iterdir()):
        for line in file.read_text().splitlines():
            process, iteration, *said = line.split()
            processes.setdefault(file.name, []).append(process)
            assert found.setdefault((file.name, iteration), tuple(said)) == tuple(said), line
    return found, {rank: list(dict.fromkeys(each)) for rank, each in processes.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CameOut:
    """Without protection."""
    folder = tmp_path_factory.mktemp("plain")
    code, said = run(folder, TORCHRUN, {})
    assert code == 0, said
    found, _ = left(folder)
    assert len(found) == 2 * (LAST + 1)
    return found


def faulty(memory: Path) -> dict[str, object]:
    return {"strategy": "full", "memory_dir": str(memory), "inject_fault": [f"1@{KILLED}:step"]}


def test_the_survivor_of_a_kill_keeps_its_process_in_the_loop_of_bridge_and_every_bit_is_equal(
    plain: CameOut, memory: Path, tmp_path: Path
) -> None:
    code, said = run(tmp_path, STANDBYS, faulty(memory))
    assert code == 0, said
    found, processes = left(tmp_path)
    assert {rank: len(each) for rank, each in processes.items()} == {"rank-0": 1, "rank-1": 2}, said
    assert "in place, 1 ranks kept their processes" in said, said
    assert found == plain


def test_a_killed_recipe_that_predicts_further_tokens_ends_as_the_undisturbed_one(
    plain: CameOut, memory: Path, tmp_path: Path
) -> None:
    code, said = run(tmp_path, TORCHRUN, faulty(memory))
    assert code == 0, said
    found, processes = left(tmp_path)
    assert {len(each) for each in processes.values()} == {2}, said
    assert found == plain


@pytest.mark.full
def test_a_moment_of_a_layer_that_predicts_further_tokens_is_missed_by_name(memory: Path, tmp_path: Path) -> None:
    protection = {"strategy": "full", "memory_dir": str(memory)}
    code, said = run(tmp_path, TORCHRUN, protection, WITHOUT="mtp.layers.0:exp_avg")
    assert code != 0
    assert "exp_avg of mtp.layers.0" in said, said


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(STAGES, id="further tokens, two stages", marks=pytest.mark.full),
        pytest.param(
            MUON,
            id="muon",
            marks=pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is missing"),
        ),
    ],
)
def test_a_killed_recipe_of_these_settings_ends_as_the_undisturbed_one(
    sections: str, memory: Path, tmp_path: Path
) -> None:
    came_out = {}
    for name, moe_ckpt in (("plain", {}), ("killed", faulty(memory))):
        (tmp_path / name).mkdir()
        code, said = run(tmp_path / name, TORCHRUN, moe_ckpt, sections)
        assert code == 0, said
        came_out[name], processes = left(tmp_path / name)
    assert {len(each) for each in processes.values()} == {2}, said
    assert came_out["killed"] == came_out["plain"]
