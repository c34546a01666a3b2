"""`moe-ckpt profile`: what it measures, what it writes, and that it never hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape, Topology
from moe_ckpt.commands.profile import profile, report
from moe_ckpt.commands.profiling.layer import Layer, layer_flops
from moe_ckpt.commands.profiling.links import affine_law, collective_seconds, storage_bytes_per_s
from moe_ckpt.simulator.clusters import load_cluster
from moe_ckpt.simulator.cost import iteration_cost
from moe_ckpt.simulator.inputs import TrainingJob
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
    return CliRunner().invoke(profile, [*given, "--tokens", "64", "--timeout", "250", *arguments])


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
    assert values["layer_tokens"] == 64
    assert len(values["all_gather_s"]) == 4
    assert {"torch", "threads", "layer"} <= values.keys()


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
        ({"version": 2}, "version 2"),
        ({"utilisation": {}}, "utilisation must have the fields gemm_share"),
        ({"frozen_saves": 1.5}, "frozen_saves is 1.5"),
        ({"frozen_saves": "much"}, "frozen_saves is 'much'"),
        ({"measured": None}, "must be objects"),
        ({"cluster": {}}, "missing"),
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
        (("--out", "absent/machine.json"), "there is no directory absent"),
        (("--storage", "/proc"), "/proc cannot be written"),
        (("--inter-node-gbps", "nan"), "--inter-node-gbps is nan"),
        (("--model", "Mixtral-9x7B"), "did you mean Mixtral-8x7B"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    error = run(tmp_path, *arguments).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert "\n" not in str(error)


def counted(frozen: bool) -> int:
    layer = Layer(SHAPE, 0)
    layer.freeze(frozen)
    with FlopCounterMode(display=False) as counter:
        layer.step(64, 2)
    return counter.get_total_flops()


def test_the_measured_layer_multiplies_as_often_as_the_model_of_costs_says() -> None:
    assert counted(frozen=False) == pytest.approx(layer_flops(SHAPE, 0, 2) * 128, rel=0.03)


def test_a_frozen_layer_does_two_thirds_of_the_work() -> None:
    assert counted(frozen=True) == pytest.approx(counted(frozen=False) * 2 / 3, rel=0.02)


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
