"""A node with too little memory for its checkpoints is told before the model is built."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.types import ModelShape, Topology
from megatron.pretrain import early_memory
from megatron.pretrain.early_memory import check_memory, planned_bytes

SHAPE = ModelShape("m", 4, 64, 4, 512, 256, 8, 2, 128)
TOPOLOGY = Topology(4, pp=2, ep=2, ranks_per_node=4)


def config(folder: Path, **settings: object) -> MoECheckpointConfig:
    return MoECheckpointConfig(**{"strategy": "full", "memory_dir": str(folder), "replicas": 0} | settings)  # type: ignore[arg-type]


def has(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        early_memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_blocks=1)
    )


def warned(folder: Path, caplog: pytest.LogCaptureFixture, **settings: object) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_memory(config(folder, **settings), SHAPE, TOPOLOGY, is_half=True, node="node-0")
    return caplog.text


def test_planned_are_three_full_states_of_all_ranks_of_the_node() -> None:
    state = sum(SHAPE.parameters.values()) * 12
    planned = planned_bytes(MoECheckpointConfig(strategy="full", replicas=0), SHAPE, TOPOLOGY, is_half=True)
    assert 3 * state <= planned <= 3 * state * 1.5  # by the rank that needs most
    more = planned_bytes(MoECheckpointConfig(strategy="full", replicas=1), SHAPE, TOPOLOGY, is_half=True)
    assert more > planned


def test_too_little_is_said_in_one_line_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planned_bytes(config(tmp_path), SHAPE, TOPOLOGY, is_half=True)
    has(planned + 4096, monkeypatch)
    assert not warned(tmp_path, caplog)
    has(planned // 2, monkeypatch)
    said = warned(tmp_path, caplog)
    assert f"GB of the memory of node-0, but {tmp_path} has" in said
    assert "enlarge the tmpfs (mount -o remount,size=...), or keep fewer replicas; what does not fit will be" in said
    assert "the job will end" in warned(tmp_path, caplog, strict=True)
    assert not warned(tmp_path, caplog, strategy="none")


def test_what_an_earlier_attempt_left_counts_as_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planned_bytes(config(tmp_path), SHAPE, TOPOLOGY, is_half=True)
    segment = tmp_path / "node-0" / "job" / "slot-000" / "segment-000.bin"
    segment.parent.mkdir(parents=True)
    with segment.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, planned)
    has(8192, monkeypatch)
    assert not warned(tmp_path, caplog)
    segment.unlink()
    assert warned(tmp_path, caplog)
