"""Kernels of eight bits for the CPU: casts, scales, products, gathers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.pretrain.testing.cpu_device.collectives import one_dtype_at_a_time
from megatron.pretrain.testing.te_on_cpu.kernels import blockwise, casts, four_bits, gemm, norms, numbers, scales

E4M3, E5M2 = 7, 8
FORMATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Float8Quantizer:
    """Delayed scaling, as kernels see it."""

    scale: torch.Tensor = dataclasses.field(default_factory=lambda: torch.tensor([4.0]))
    amax: torch.Tensor = dataclasses.field(default_factory=lambda: torch.tensor([0.0]))
    dtype: int = E4M3


@dataclasses.dataclass
class Float8CurrentScalingQuantizer:
    """Current scaling, as kernels see it."""

    dtype: int = E4M3
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    with_amax_reduction: bool = False


def eight_bit(*shape: int, dtype: int = E4M3) -> Any:
    """A Float8 tensor without values."""
    return SimpleNamespace(
        _data=torch.zeros(shape, dtype=torch.uint8),
        _transpose=torch.zeros(shape[-1], *shape[:-1], dtype=torch.uint8),
        _scale_inv=torch.ones(1),
        _fp8_dtype=dtype,
        _transpose_invalid=True,
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_takes_the_nearest_number_of_the_format(dtype: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FORMATS[dtype]).float()
    codes = codes[torch.isfinite(codes)].unique()
    values = torch.cat([drawn(3000) * 10.0**power for power in range(-4, 3)])
    found = numbers.to_eight_bits(values, dtype).view(FORMATS[dtype]).float()
    nearest = (values.clamp(codes.min(), codes.max())[:, None] - codes).abs().min(1).values
    torch.testing.assert_close((values.clamp(codes.min(), codes.max()) - found).abs(), nearest, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_what_is_too_large_becomes_the_largest_number_and_nan_stays(dtype: int, largest: float) -> None:
    given = torch.tensor([1e9, -1e9, float("inf"), float("-inf"), float("nan"), 0.0])
    found = numbers.to_eight_bits(given, dtype).view(FORMATS[dtype]).float()
    assert found[:4].tolist() == [largest, -largest, largest, -largest]
    assert found[4].isnan()
    assert found[5] == 0


def test_delayed_scaling_takes_the_scale_that_it_finds_and_notes_the_largest_value() -> None:
    quantizer, source, into = Float8Quantizer(amax=torch.tensor([0.5])), drawn(4, 6), eight_bit(4, 6)
    casts.quantize(source, quantizer, into)
    assert quantizer.amax.item() == source.abs().max().item()
    assert quantizer.scale.item() == 1 / vars(into)["_scale_inv"].item() == 4
    torch.testing.assert_close(casts.dequantize(into, torch.float32), source, rtol=1 / 16, atol=1e-2)
    assert torch.equal(vars(into)["_transpose"], vars(into)["_data"].t())
    assert not vars(into)["_transpose_invalid"]
    casts.quantize(source / 2, quantizer, into)
    assert quantizer.amax.item() == source.abs().max().item()


def test_nothing_is_cast_where_the_flag_says_so() -> None:
    into = eight_bit(2, 2)
    casts.quantize(drawn(2, 2), Float8Quantizer(), into, torch.ones(1))
    assert not vars(into)["_data"].any()


def test_current_scaling_makes_the_largest_value_the_largest_of_the_format() -> None:
    source, into = drawn(4, 6), eight_bit(4, 6)
    casts.quantize(source, Float8CurrentScalingQuantizer(), into)
    values = vars(into)["_data"].view(torch.float8_e4m3fn).float()
    assert values.abs().max() == 448
    casts.quantize(source, Float8CurrentScalingQuantizer(force_pow_2_scales=True), into)
    mantissa, _ = torch.frexp(vars(into)["_scale_inv"])
    assert mantissa.item() == 0.5
    assert casts.dequantize(into, 4).abs().max() > source.abs().max() / 2


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
def test_a_tensor_without_a_finite_largest_value_has_the_scale_one(amax: float) -> None:
    assert numbers.scale_for(torch.tensor([amax]), 448.0, False, 0.0).item() == 1


def test_a_tiny_tensor_has_a_finite_scale() -> None:
    assert torch.isfinite(numbers.scale_for(torch.tensor([2e-38]), 448.0, False, 0.0)).all()


def test_quantizers_of_other_kinds_are_refused_by_name() -> None:
    other = type("HybridQuantizer", (), {})()
    with pytest.raises(NotImplementedError, match=r"HybridQuantizer .* --fp8-recipe delayed, tensorwise, mxfp8 or bl"):
        casts.quantize(drawn(2, 2), other, eight_bit(2, 2))


@dataclasses.dataclass
class MXFP8Quantizer:
    """32 numbers share a power of two, as kernels see it."""

    dtype: int = E4M3


def in_blocks(rows: int, width: int) -> Any:
    """An MXFP8 tensor without values."""
    return SimpleNamespace(
        _rowwise_data=torch.zeros(rows, width, dtype=torch.uint8),
        _rowwise_scale_inv=torch.full((128, 4), 9, dtype=torch.uint8),
        _columnwise_data=torch.zeros(rows, width, dtype=torch.uint8),
        _columnwise_scale_inv=torch.full((4, 128), 9, dtype=torch.uint8),
        _fp8_dtype=E4M3,
    )


def test_mxfp8_casts_rows_and_columns_from_the_values_each_block_with_the_least_power_of_two_that_fits() -> None:
    source, into = drawn(64, 96) * torch.logspace(-4, 4, 96), in_blocks(64, 96)
    casts.quantize(source, MXFP8Quantizer(), into)
    by_rows, by_columns = casts.values_of(into, by_columns=False), casts.values_of(into, by_columns=True)
    scales = torch.pow(2.0, vars(into)["_rowwise_scale_inv"][:64, :3].float() - 127)
    largest = source.abs().view(64, 3, 32).amax(2)
    assert bool((scales * 448 >= largest).all())
    assert bool((scales / 2 * 448 < largest).all())
    of_columns = source.abs().view(2, 32, 96).amax(1).repeat_interleave(32, 0)
    for found, of_block in ((by_rows, largest.repeat_interleave(32, 1)), (by_columns, of_columns)):
        assert bool(((found - source).abs() <= torch.maximum(source.abs() / 16, of_block * 2**-10)).all())
    assert not torch.equal(by_rows, by_columns)
    assert torch.equal(casts.values_of(into), by_rows)
    assert not vars(into)["_rowwise_scale_inv"][:, 3].any()


@dataclasses.dataclass
class Float8BlockQuantizer:
    """128 numbers, or 128 times 128, share a scale, as kernels see it."""

    block_scaling_dim: int
    dtype: int = E4M3
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0


def in_long_blocks(rows: int, width: int, *, in_squares: bool) -> Any:
    """A blockwise tensor without values, with scales as Transformer Engine pads them."""
    down, across = -(-rows // 128), -(-width // 128)
    sizes = ((down, 4), (across, 4)) if in_squares else ((across, -(-rows // 4) * 4), (down, -(-width // 4) * 4))
    return SimpleNamespace(
        _rowwise_data=torch.zeros(rows, width, dtype=torch.uint8),
        _rowwise_scale_inv=torch.full(sizes[0], 9.0),
        _columnwise_data=torch.zeros(width, rows, dtype=torch.uint8),
        _columnwise_scale_inv=torch.full(sizes[1], 9.0),
        _fp8_dtype=E4M3,
        _is_2D_scaled=in_squares,
    )


@pytest.mark.parametrize("in_squares", [False, True])
def test_blockwise_scales_are_the_largest_powers_of_two_with_which_each_block_fits(in_squares: bool) -> None:
    source, into = drawn(150, 200) * torch.logspace(-4, 4, 200), in_long_blocks(150, 200, in_squares=in_squares)
    casts.quantize(source, Float8BlockQuantizer(1 + in_squares), into)
    by_rows, by_columns = casts.values_of(into, by_columns=False), casts.values_of(into, by_columns=True)
    assert torch.equal(by_rows, by_columns) is in_squares
    assert torch.equal(casts.values_of(into), by_rows)
    scales = vars(into)["_rowwise_scale_inv"] if in_squares else vars(into)["_rowwise_scale_inv"].t()
    high = 128 if in_squares else 1
    for row in range(0, 150, 64):
        for column in (0, 128):
            first = row // high * high
            largest = source[first : first + high, column : column + 128].abs().max()
            scale = scales[row // high, column // 128]
            assert scale * 448 >= largest > scale / 2 * 448
            block = slice(row, row + 1), slice(column, column + 128)
            near = torch.maximum(source[block].abs() / 16, scale * 2**-10)
            assert bool(((by_rows[block] - source[block]).abs() <= near).all())
    assert not scales[-(-150 // high) :].any(), "beyond the blocks"


def test_blockwise_weights_cast_shard_by_shard_are_those_that_are_cast_whole() -> None:
    source, whole = drawn(150, 200) * torch.logspace(-2, 2, 200), in_long_blocks(150, 200, in_squares=True)
    casts.quantize(source, Float8BlockQuantizer(2), whole)
    shards = [(source.view(-1)[start:end], start) for start, end in ((0, 9999), (9999, 30000))]
    amax, scale, written = torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4)
    for shard, start in shards:  # what ranks find, reduced to the largest
        found = torch.zeros(2, 4)
        blockwise.fp8_block_scaling_compute_partial_amax(shard, found, 150, 200, start, 128)
        amax = torch.maximum(amax, found)
    scales.multi_tensor_compute_scale_and_scale_inv(0, torch.zeros(1), [[amax], [scale], [written]], 448.0, True, 0.0)
    bytes_of = torch.zeros(30000, dtype=torch.uint8)
    for shard, start in shards:
        piece = bytes_of[start : start + shard.numel()]
        blockwise.fp8_block_scaling_partial_cast(shard, piece, scale, 150, 200, start, 128, E4M3)
    assert torch.equal(bytes_of.view(150, 200), vars(whole)["_rowwise_data"])
    assert torch.equal(written[:, :2], vars(whole)["_rowwise_scale_inv"][:, :2])


def product(a: Any, b: Any, layout: str) -> torch.Tensor:
    transposed = [side == "T" for side in layout]
    out, *_ = gemm.generic_gemm(
        a, transposed[0], b, transposed[1], None, None, 4, None, 6, False, None, False, None, 0, False, False
    )
    return out


def test_products_read_mxfp8_along_what_is_summed_over() -> None:
    weight, tokens = in_blocks(32, 64), drawn(32, 32)
    casts.quantize(drawn(32, 64, seed=1), MXFP8Quantizer(), weight)
    forward, backward = product(weight, drawn(32, 64, seed=2), "TN"), product(weight, tokens, "NN")
    torch.testing.assert_close(forward, drawn(32, 64, seed=2) @ casts.values_of(weight, by_columns=False).t())
    torch.testing.assert_close(backward, tokens @ casts.values_of(weight, by_columns=True))
    vars(weight)["_columnwise_data"] = None
    with pytest.raises(NotImplementedError, match="not kept"):
        product(weight, tokens, "NN")


def test_zeros_and_no_rows_are_cast_to_zeros() -> None:
    for source in (torch.zeros(32, 32), torch.zeros(0, 32)):
        into = in_blocks(*source.shape)
        casts.quantize(source, MXFP8Quantizer(), into)
        assert torch.equal(casts.values_of(into), source)


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_scales_follow_what_all_ranks_found_and_histories_move_on(algorithm: str) -> None:
    history = torch.tensor([[0.1, 9.0], [8.0, 2.0], [4.0, 0.0]])
    scale = torch.tensor([5.0, 6.0])
    scales.fused_amax_and_scale_update_after_reduction(torch.tensor([2.0, 0.0]), [history], [scale], algorithm, E4M3, 1)
    # Rows move up by one, the newest ends at the bottom, and the first is free for the next iteration.
    assert history.tolist() == [[0.0, 0.0], [4.0, 0.0], [2.0, 0.0]]
    expected = [448 / 2 / 2, 6.0] if algorithm == "most_recent" else [448 / 8 / 2, 448 / 2 / 2]
    assert scale.tolist() == expected


def test_products_are_those_of_the_values_that_eight_bits_stand_for() -> None:
    weight, x = eight_bit(4, 16), eight_bit(2, 3, 16)
    casts.quantize(drawn(4, 16), Float8Quantizer(), weight)
    casts.quantize(drawn(2, 3, 16, seed=1), Float8Quantizer(), x)
    common = (None, None, 4, None, 6, False, None, False, None, 0, False, False)
    out, *_ = gemm.generic_gemm(weight, True, x, False, *common)
    expected = casts.values_of(x) @ casts.values_of(weight).t()
    torch.testing.assert_close(out, expected)
    vars(weight)["_data"] = vars(x)["_data"] = None  # what only the transpose is left of
    again, *_ = gemm.generic_gemm(weight, True, x, False, *common)
    assert torch.equal(again, out)


def test_a_norm_writes_eight_bits_from_what_it_computed() -> None:
    x, weight = drawn(4, 16), torch.ones(16)
    wide, _, _ = norms.rmsnorm_fwd(x, weight, 1e-5, None, None, torch.float32, 0, False)
    quantizer, into = Float8Quantizer(), eight_bit(4, 16)
    norms.rmsnorm_fwd(x, weight, 1e-5, into, quantizer, torch.bfloat16, 0, False)
    assert torch.equal(vars(into)["_data"], numbers.to_eight_bits(wide * 4, E4M3))
    assert quantizer.amax.item() == wide.abs().max().item()


def test_rows_of_zeros_come_between_those_of_experts_and_go_again() -> None:
    given, rows, padded = drawn(5, 3), [2, 0, 3], [4, 0, 8]
    wide, back = torch.full((12, 3), 7.0), torch.empty(5, 3)
    scales.fused_multi_row_padding(given, wide, rows, padded)
    assert not wide[2:4].any()
    assert not wide[7:].any()
    scales.fused_multi_row_unpadding(wide, back, padded, rows)
    assert torch.equal(back, given)


@pytest.fixture
def alone() -> Any:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(manager: Any, *, wait: bool) -> list[torch.Tensor]:
    """Three tensors of two dtypes after a coalesced gather over one rank, which changes nothing."""
    tensors = [torch.arange(16, dtype=torch.uint8), torch.arange(16).bfloat16() * 1.5, torch.arange(8).byte() + 100]
    with manager(dist.group.WORLD, async_ops=wait) as coalesced:
        for tensor in tensors:
            dist.all_gather_into_tensor(tensor, tensor.clone(), async_op=wait)
    if wait:
        coalesced.wait()
    return tensors


@pytest.mark.parametrize("wait", [False, True])
def test_gathers_of_several_dtypes_arrive_as_they_were_sent(wait: bool, alone: Any) -> None:
    expected = [torch.arange(16, dtype=torch.uint8), torch.arange(16).bfloat16() * 1.5, torch.arange(8).byte() + 100]
    found = gathered(one_dtype_at_a_time(_coalescing_manager), wait=wait)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    unguarded = gathered(_coalescing_manager, wait=wait)
    assert not all(torch.equal(one, other) for one, other in zip(unguarded, expected, strict=True)), (
        "gloo gathers several dtypes at once by now: the guard can go"
    )


@dataclasses.dataclass
class NVFP4Quantizer:
    """16 numbers share a scale, as kernels see it."""

    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    with_amax_reduction: bool = False


def in_four_bits(rows: int, width: int) -> Any:
    """An NVFP4 tensor without values."""
    return SimpleNamespace(
        _rowwise_data=torch.zeros(rows, width // 2, dtype=torch.uint8),
        _rowwise_scale_inv=torch.full((128, 4), 9, dtype=torch.uint8),
        _amax_rowwise=torch.zeros(1),
        _columnwise_data=torch.zeros(width, rows // 2, dtype=torch.uint8),
        _columnwise_scale_inv=torch.full((128, 4), 9, dtype=torch.uint8),
        _amax_columnwise=torch.zeros(1),
        _fp4_dtype=10,
    )


@pytest.mark.parametrize("in_squares", [False, True])
def test_nvfp4_takes_the_nearest_of_its_numbers(in_squares: bool) -> None:
    source, into = drawn(32, 48), in_four_bits(32, 48)
    casts.quantize(source, NVFP4Quantizer(with_2d_quantization=in_squares), into)
    by_rows, by_columns = casts.values_of(into, by_columns=False), casts.values_of(into, by_columns=True)
    # Half of the widest step, which is a third of the largest number, and what the scale is rounded by.
    for found in (by_rows, by_columns):
        assert (found - source).abs().max() <= source.abs().max() / 6 * 1.1
        assert (found - source).abs().mean() < 0.1
    assert torch.equal(by_rows, by_columns) is in_squares


def test_weights_cast_shard_by_shard_are_those_that_are_cast_whole() -> None:
    source, whole, parts = drawn(32, 48), in_four_bits(32, 48), in_four_bits(32, 48)
    casts.quantize(source, NVFP4Quantizer(with_2d_quantization=True), whole)
    amax, largest, scale, shared = torch.zeros(2, 3), torch.zeros(1), torch.zeros(2, 3), torch.zeros(1)
    shards = [(source.view(-1)[start:end], start) for start, end in ((0, 500), (500, 1536))]
    for shard, start in shards:  # what ranks find, reduced to the largest
        found, one = torch.zeros(2, 3), torch.zeros(1)
        four_bits.nvfp4_multi_tensor_compute_partial_amax([shard], [found], [one], [32], [48], [start], 16)
        amax, largest = torch.maximum(amax, found), torch.maximum(largest, one)
    four_bits.nvfp4_compute_global_scale(largest, shared)
    kept = vars(parts)
    of_weights = [[kept["_rowwise_scale_inv"]], [kept["_amax_rowwise"]]]
    four_bits.nvfp4_multi_tensor_fused_scale([amax], [largest], [scale], *of_weights, [2], [3], [128], 16)
    for shard, start in shards:
        bytes_of_shard = kept["_rowwise_data"].view(-1)[start // 2 : (start + shard.numel()) // 2]
        given = ([shard], [bytes_of_shard], [scale], [shared], [32], [48], [start], 16)
        four_bits.nvfp4_multi_tensor_2d_partial_cast(*given)
    names = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    four_bits.nvfp4_2d_multi_tensor_transpose(*([kept[name]] for name in names), [32], [48])
    kept["_amax_columnwise"].copy_(kept["_amax_rowwise"])
    for name, expected in vars(whole).items():
        assert name == "_fp4_dtype" or torch.equal(kept[name], expected), name


def test_gradients_are_rounded_by_chance_to_a_neighbor_and_on_the_average_to_themselves() -> None:
    source = torch.full((64, 64), 2.5)
    source[:, 0] = 6.0
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        into = in_four_bits(64, 64)
        casts.quantize(source, NVFP4Quantizer(stochastic_rounding=True), into)
        found.append(casts.values_of(into, by_columns=False))
    assert not torch.equal(*found)
    assert abs(found[0][:, 1:16].mean() - 2.5) < 0.05
