"""Values of few bits are stored as they lie in memory, each scale as a record of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.quantization import is_quantized, is_scale, raw_fields


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
