"""Values of few bits are stored as they lie in memory, each scale as a record of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker
from megatron.core.dist_checkpointing.moe.megatron_state import trainer_state
from megatron.core.dist_checkpointing.moe.megatron_state.quantization import (
    is_quantized,
    is_scale,
    packed,
    raw_fields,
)
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan


class Scales:
    """Counts how often they are fetched, and waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched = self.waited = 0
        self.value = torch.ones(3)
        monkeypatch.setattr(trainer_state, "quantization_tensors", lambda chunks: {"0.scale": self.value})
        monkeypatch.setattr(trainer_state, "packed", self._packed)
        monkeypatch.setattr(trainer_state, "random_states", dict)

    def _packed(self, tensors: Any) -> Any:
        self.fetched += 1
        found = packed(tensors)

        def waiting() -> memoryview:
            self.waited += 1
            return found()

        return waiting


def test_scales_are_fetched_once_for_a_snapshot_and_for_what_is_noted_with_it_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scales = Scales(monkeypatch)
    optimizer: Any = SimpleNamespace(param_groups=[])
    trainer = trainer_state.LiveTrainerState(optimizer, None, trainer_state.NoLoopState(), [torch.nn.Module()])
    capturer = LiveCapturer((), trainer, ThreadEngine())
    layout = capturer.layout(SnapshotPlan(1, {}), trainer=True)
    moving: Any = SimpleNamespace(copy=lambda: None)
    parker = Parker(SimpleNamespace(capturer=capturer, trainer=trainer, moving=moving))  # type: ignore[arg-type]
    segment = memoryview(bytearray(layout.nbytes))
    scales.fetched = scales.waited = 0
    capturer.begin([(layout, SimpleNamespace(whole=lambda: segment))])  # type: ignore[list-item]
    parker.note(1)
    assert (scales.fetched, scales.waited) == (1, 0)
    scales.value.fill_(2.0)  # by the next passes
    capturer.end(5.0)
    assert scales.waited == 1
    expected = bytes(packed({"0.scale": torch.ones(3)})())
    assert bytes(segment[: len(expected)]) == expected
    parker.note(2)
    assert scales.fetched == 2, "an evaluation may have changed them since"


def test_a_tensor_without_a_scale_is_one_record() -> None:
    value = torch.arange(6.0).view(2, 3)
    ((field, view),) = raw_fields("exp_avg", value)
    assert field == "exp_avg"
    assert (view.data_ptr(), view.shape) == (value.data_ptr(), (6,))


def test_a_tensor_whose_scale_is_kept_elsewhere_is_two_records_into_live_storage() -> None:
    value, scale = torch.arange(6, dtype=torch.float16), torch.tensor([3.0])
    found = dict(raw_fields("master", value, scale))
    assert list(found) == ["master", "master_scale"]
    found["master_scale"].fill_(7)
    assert scale.item() == 7


def test_a_float8_tensor_is_its_bytes_and_its_inverse_scale() -> None:
    value = SimpleNamespace(_data=torch.arange(6, dtype=torch.uint8).view(2, 3), _scale_inv=torch.tensor([0.5]))
    assert is_quantized(value)
    found = dict(raw_fields("exp_avg", value))
    assert found["exp_avg"].dtype is torch.uint8
    found["exp_avg"].fill_(255)
    assert vars(value)["_data"].eq(255).all()
    assert found["exp_avg_scale"].data_ptr() == vars(value)["_scale_inv"].data_ptr()


def test_only_scales_are_scales() -> None:
    assert [is_scale(field) for field in ("exp_avg", "exp_avg_scale", "step", "compute_scale")] == [False, True] * 2
