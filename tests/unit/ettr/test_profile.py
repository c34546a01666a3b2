"""`moe-ckpt profile`: what it measures, what it writes, and that it never hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from click.testing import CliRunner, Result

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape, Topology
from megatron.pretrain import layer_timing
from moe_ckpt.commands.profile import profile, report
from moe_ckpt.commands.profiling import layers
from moe_ckpt.commands.profiling.layers import LayerSettings, model_flags, patterns_of
from moe_ckpt.commands.profiling.links import affine_law, collective_seconds, storage_bytes_per_s
from moe_ckpt.simulator.clusters import load_cluster
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.cost import iteration_cost
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.profiles import load_profile

TINY = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 128,
    "ffn_hidden_size": 128,
    "num_experts": 4,
    "moe_shared_expert_intermediate_size": 96,
    "gated_linear_unit": True,
}
SHAPE = ModelShape(**TINY)  # type: ignore[arg-type]


def run(folder: Path, *arguments: str) -> Result:
    (folder / "tiny.json").write_text(json.dumps(TINY))
    given = ["--out", str(folder / "machine.json"), "--model", str(folder / "tiny.json"), "--megabytes", "2"]
    return CliRunner().invoke(profile, [*given, "--seq-length", "32", "--timeout", "250", *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    result = run(folder, "--inter-node-gbps", "3", "--json")
    assert result.exit_code == 0, result.exception
    (folder / "printed.json").write_text(result.output)
    return folder / "machine.json"


def test_a_profile_is_a_cluster_and_gives_costs(measured: Path) -> None:
    found = load_profile(measured)
    assert load_cluster(measured) == found.cluster
    assert found.cluster.inter_node_bytes_per_s == 3e9
    job = TrainingJob(SHAPE, Topology(4, pp=2, ep=2), FP32, 8, 4, 64)
    assert iteration_cost(job, found.cluster, found.utilisation).iteration_s > 0


def test_a_profile_says_with_what_it_was_measured(measured: Path) -> None:
    values = load_profile(measured).measured
    assert values["model"] == "tiny"
    assert len(values["all_gather_s"]) == 4
    assert {"torch", "threads", "layer"} <= values.keys()


def test_layers_are_timed_in_jobs_of_one_and_two_of_them_for_each_size_of_a_microbatch(measured: Path) -> None:
    rows = load_profile(measured).measured["layers"]
    assert [(row["layers"], row["micro_batch_size"]) for row in rows] == [
        ([1], 1), ([1], 2), ([1, 1], 1), ([1, 1], 2)
    ]  # fmt: skip
    for row in rows:
        shape = ModelShape(**TINY | {"num_layers": len(row["layers"])})  # type: ignore[arg-type]
        assert row["parameters"] == shape.total_parameters
        assert row["memory_bytes"] > 4 * row["parameters"]


def test_a_job_of_these_layers_is_predicted_by_what_they_took(measured: Path) -> None:
    found = load_profile(measured)
    assert found.layers is not None
    assert found.layers.moe is not None
    job = TrainingJob(SHAPE, Topology(2, ranks_per_node=2), FP32, 4, 2, 32)
    cost = found.setting(job, THIS_PROJECT).cost
    assert cost.stage_s == pytest.approx((4 * found.layers.moe.seconds(1) + found.layers.ends.seconds(1),))
    assert cost.update_s == found.layers.step.seconds(SHAPE.total_parameters)
    constants = found.setting(job, THIS_PROJECT).constants
    assert constants.detect_s + constants.launch_s(2) + constants.meet_s(2) == pytest.approx(found.layers.restart_s)
    assert 1 < found.layers.restart_s < 100


def test_nothing_but_the_profile_is_left_behind(measured: Path) -> None:
    assert {path.name for path in measured.parent.iterdir()} == {"machine.json", "printed.json", "tiny.json"}


def test_json_prints_what_was_written(measured: Path) -> None:
    assert (measured.parent / "printed.json").read_text() == measured.read_text()


def test_a_person_reads_the_same_figures(measured: Path) -> None:
    found = load_profile(measured)
    figures = {fact.name: fact.value for fact in report(found, measured).facts}
    assert figures["Saved by a frozen layer"] == found.frozen_saves
    assert figures["Storage per second"] == found.cluster.storage_bytes_per_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is no profile"),
        ({"version": 1}, "version 1"),
        ({"utilisation": {}}, "utilisation must have the fields gemm_share"),
        ({"frozen_saves": 1.5}, "frozen_saves is 1.5"),
        ({"frozen_saves": "much"}, "frozen_saves is 'much'"),
        ({"measured": None}, "must be objects"),
        ({"cluster": {}}, "missing"),
        ({"layers": {"moe": 1}}, "layers must be null or have the fields"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(
    measured: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(json.loads(measured.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        load_profile(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "absent/machine.json"), "--out absent/machine.json cannot be written"),
        (("--storage", "/proc"), "/proc cannot be written"),
        (("--model", "Mixtral-9x7B"), "did you mean Mixtral-8x7B"),
        (("--out", "/proc"), "--out /proc cannot be written"),
        (("--tp", "3"), "--ranks 2 is not a multiple of --tp 3"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    error = run(tmp_path, *arguments).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_a_rate_that_is_none_is_refused_with_its_flag(tmp_path: Path) -> None:
    result = run(tmp_path, "--inter-node-gbps", "nan")
    assert result.exit_code == 2
    assert "--inter-node-gbps" in result.output
    assert "nan" in result.output


SLOW_S = 0.5
SLOWED = f"""
import sys, time
import megatron.pretrain.core_import
from megatron.pretrain import layer_timing
from megatron.pretrain.initialize import use_cpu
use_cpu()
from megatron.core.transformer.moe.moe_layer import MoELayer
forward = MoELayer.forward
def slowly(*arguments, **named):
    time.sleep({SLOW_S})
    return forward(*arguments, **named)
MoELayer.forward = slowly
sys.exit(layer_timing.main(sys.argv[1:]))
"""


def test_what_is_timed_are_the_layers_of_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowed.py").write_text(SLOWED)
    monkeypatch.setattr(layers, "worker_script", lambda: str(tmp_path / "slowed.py"))
    monkeypatch.setattr(layers, "REPEATS", 1)
    settings = LayerSettings(1, 1, 1, 1, (1,), 32, "cpu", 250)
    calls: list[int] = []
    found = layers.timed(SHAPE, settings, lambda: calls.append(1))
    times = layers.layer_times(SHAPE, settings, found, host_rate=1e9)
    assert times.moe is not None
    # The other parts are timed apart and taken off, so what is left may fall a little short.
    assert 0.8 * SLOW_S < times.moe.seconds(1) < 2 * SLOW_S
    assert times.ends.seconds(1) < 0.8 * SLOW_S
    assert len(calls) == layers.count_of(SHAPE, settings)


def test_what_a_first_iteration_takes_longer_is_a_part_of_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    iterations_s = iter([7.0, 2.0])
    job = SimpleNamespace(iteration_s=lambda size: next(iterations_s))
    monkeypatch.setattr(layer_timing, "TimedJob", lambda pattern: job)
    monkeypatch.setattr(layer_timing, "_slowest", float)
    monkeypatch.setattr(layer_timing, "since_boot_s", lambda: 1000.0)
    settings = SimpleNamespace(micro_batch_sizes=(1, 2), patterns=((1,),))
    assert layer_timing.back_at_s(cast("Any", settings)) == 1005.0


PARSER = """
import json, sys
import megatron.pretrain.core_import
from megatron.pretrain.initialize import use_cpu
use_cpu()
from megatron.training.arguments import parse_args
print(json.dumps(vars(parse_args()), default=repr))
"""


def parsed(flags: list[str]) -> dict[str, Any]:
    """By Megatron-LM's parser, which looks at the device while it is imported: in a process of its own."""
    shown = subprocess.run([sys.executable, "-c", PARSER, *flags], capture_output=True, check=True, text=True)
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-30B-A3B", "GPT-125M-8E", "DeepSeek-MoE"])
def test_flags_of_the_timed_jobs_make_layers_of_the_models_shape(name: str) -> None:
    shape = preset(name)
    flags = [*model_flags(shape), "--num-layers", str(shape.num_layers), "--moe-layer-freq", "1"]
    args = parsed([*flags, "--micro-batch-size", "1"])
    for field in ("hidden_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "gated_linear_unit",
                  "moe_shared_expert_intermediate_size", "normalization", "qk_layernorm", "kv_channels"):  # fmt: skip
        ours, theirs = getattr(shape, field), args[{"gated_linear_unit": "swiglu"}.get(field, field)]
        assert theirs == ours or not ours, field


def test_a_model_with_dense_layers_has_one_of_each_kind_timed() -> None:
    assert patterns_of(SHAPE) == [[1], [1, 1]]
    assert patterns_of(ModelShape(**TINY | {"moe_layer_freq": (0, 1, 1, 1)})) == [[1], [1, 1], [1, 0]]  # type: ignore[arg-type]
    assert patterns_of(ModelShape(**TINY | {"num_experts": 0})) == [[0], [0, 0]]  # type: ignore[arg-type]


def test_a_straight_line_gives_back_its_latency_and_rate() -> None:
    law = affine_law({size: 3 * 2e-5 + 0.75 * size / 1e9 for size in (1000, 10**5, 10**7)}, ranks=4)
    assert law.latency_s == pytest.approx(2e-5)
    assert law.bytes_per_s == pytest.approx(1e9)


def test_a_latency_below_zero_is_noise() -> None:
    assert affine_law({1000: 1e-6, 2000: 1e-5}, ranks=2).latency_s == 0


@pytest.mark.parametrize("seconds", [{1000: 1.0}, {1000: 1.0, 2000: 0.5}])
def test_measurements_that_make_no_line_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(UsageError):
        affine_law(seconds, ranks=2)


def test_collectives_that_take_too_long_are_ended() -> None:
    with pytest.raises(MoECheckpointError, match=r"took longer than 0.01 s.*--timeout"):
        collective_seconds(2, [1000, 2000], 0.01)
    assert not [one for one in psutil.Process().children() if "collective_worker" in " ".join(one.cmdline())]


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(MoECheckpointError, match=r"collectives of 2 processes failed: ValueError"):
        collective_seconds(2, [], 250)


def test_a_write_to_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent cannot be written: No such file"):
        storage_bytes_per_s(tmp_path / "absent", 1000, 250)
