"""Clusters by name and from files, and that the wheel brings their figures along."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.simulator.clusters import cluster, load_cluster, presets

ROOT = Path(__file__).parents[3]
FILE = {
    "gpus_per_node": 4,
    "peak_flops": {"2": 1e14},
    "host_link_bytes_per_s": 2e10,
    "intra_node_bytes_per_s": 1e11,
    "inter_node_bytes_per_s": 1e10,
    "storage_bytes_per_s": 1e9,
    "host_memory_bytes": 512e9,
}


def written(folder: Path, values: Any) -> Path:
    path = folder / "ours.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_the_cluster_of_the_evaluation_has_its_published_figures() -> None:
    azure = cluster("azure-nc96ads-a100")
    assert azure.flops(2) == 312e12
    assert azure.inter_node_bytes_per_s * azure.gpus_per_node == 80e9 / 8
    assert azure.intra_node_bytes_per_s * 2 == 600e9
    assert azure.storage_bytes_per_s == 40e9 / 8
    assert azure.host_memory_bytes == 880_000_000_000


@pytest.mark.parametrize("name", ["azure-nc96ads-a100", "h100-private", "h100-dgx", "h200-dgx", "a800", "this-cpu"])
def test_each_preset_says_where_its_figures_stand(name: str) -> None:
    assert cluster(name.upper()) is presets()[name]
    assert len(cluster(name).source) > 40


def test_a_name_that_is_not_known_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"did you mean h100-dgx\?.*azure-nc96ads-a100"):
        cluster("h100-dgxx")


def test_a_device_without_narrow_types_computes_in_wider_ones() -> None:
    assert cluster("azure-nc96ads-a100").flops(1) == 312e12
    assert cluster("h100-private").flops(1) == 1979e12
    assert cluster("this-cpu").flops(2) == cluster("this-cpu").flops(4)


def test_a_file_describes_a_cluster_with_the_name_of_the_file(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, FILE))
    assert (found.name, found.gpus_per_node, found.host_memory_bytes) == ("ours", 4, 512_000_000_000)
    assert found.flops(2) == 1e14


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in FILE.items() if name != key}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FILE | {"storage_bytes_per_sec": 1}, "did you mean storage_bytes_per_s"),
        (without("host_memory_bytes"), "host_memory_bytes is missing"),
        (FILE | {"storage_bytes_per_s": "fast"}, "storage_bytes_per_s is 'fast', but must be a number"),
        (FILE | {"storage_bytes_per_s": 0}, "storage_bytes_per_s is 0"),
        (FILE | {"gpus_per_node": 1.5}, "gpus_per_node is 1.5, but must be a whole number"),
        (FILE | {"gpus_per_node": True}, "must be a number"),
        (FILE | {"peak_flops": {"3": 1e12}}, "bytes per element"),
        (FILE | {"peak_flops": {}}, "bytes per element"),
        (json.dumps(FILE).replace("1000000000.0", "NaN"), "must be a number"),
        (FILE | {"storage_bytes_per_s": 10**400}, "must be a number"),
        ([FILE], "must have a JSON object, but has a list"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_with_what_is_wrong(tmp_path: Path, values: Any, message: str) -> None:
    path = written(tmp_path, values)
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(path)
    assert "ours" in str(caught.value)


def test_a_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_cluster(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot be read"):
        load_cluster(tmp_path)


def test_a_cluster_is_a_value_that_nobody_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster("a800").gpus_per_node = 4  # type: ignore[misc]


def test_the_built_package_has_every_data_file_of_the_tree(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    packages, built = ("megatron", "moe_ckpt"), tmp_path / "lib"
    files = (path for package in packages for end in ("*.json", "*.csv") for path in (ROOT / package).rglob(end))
    data = {path.relative_to(ROOT) for path in files}
    assert Path("moe_ckpt/simulator/presets/clusters.json") in data
    assert {path for path in data if not (built / path).is_file()} == set()
