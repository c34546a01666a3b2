"""What tests of eight-bit training do inside workers: digest live state, and break what a restore must not lose."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from engine_hooks import tensors_of
from stock_trainer import Trainer, after_training, instead_of_training


def state_of(state: Any) -> dict[str, torch.Tensor]:
    """All that training in eight bits continues from, by name: payloads, scales, histories, weights and transposes."""
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import pieces_in_blocks, quantization_tensors

    found = {one.key: one.tensor for one in tensors_of(state)} | dict(quantization_tensors(state.chunks))
    for index, chunk in enumerate(state.chunks):
        for name, weights in chunk.named_parameters():
            for field in ("_data", "_transpose", "_scale_inv"):
                if getattr(weights, field, None) is not None:
                    found[f"{index}.{name}{field}"] = getattr(weights, field)
            found |= {
                f"{index}.{name}{field}": _without_padding(weights, field, piece)
                for field, piece in pieces_in_blocks(weights)
            }
    for number, group in enumerate(state.optimizer.param_groups):
        found[f"steps of group {number}"] = torch.tensor([group.get("step", 0)])
    return found


def _without_padding(weights: Any, field: str, piece: torch.Tensor) -> torch.Tensor:
    """What Transformer Engine never sets of blockwise scales by columns is left out."""
    if not hasattr(weights, "_is_2D_scaled") or not field.endswith("scale_inv"):
        return piece
    width = weights.shape[0] if "columnwise" in field else weights.shape[1]
    return piece[:, : -(-width // 128)].contiguous()


@contextlib.contextmanager
def digested(folder: str) -> Iterator[None]:
    """When training has ended, each rank writes down digests of its state."""

    def trained(state: Any) -> None:
        _gather(state)  # with overlap the next forward pass would do it
        digests = {
            name: xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in state_of(state).items()
        }
        (Path(folder) / f"state-{torch.distributed.get_rank()}.json").write_text(json.dumps(digests))

    with after_training(trained):
        yield


def _gather(state: Any) -> None:
    """Make weights those of the newest step, as core does before it saves them."""
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights
    from megatron.training import training

    args = training.get_args()
    if not args.reuse_grad_buf_for_mxfp8_param_ag:
        gather_compute_weights(state.chunks)
    elif args.overlap_param_gather:
        training.force_param_sync(state.chunks, state.optimizer)


@contextlib.contextmanager
def restored_without(field: str, name: str = "") -> Iterator[None]:
    """Records of this field are restored as ones; with a name, only those that have it in their key."""
    from megatron.core.dist_checkpointing.moe.megatron_state import restore

    write = restore.write_record

    def written(key: str, data: memoryview, tensor: torch.Tensor, upload: restore.Upload | None = None) -> None:
        write(key, data, tensor, upload)
        if key.endswith(f"/{field}") and name in key:
            tensor.fill_(1)

    with mock.patch.object(restore, "write_record", written):
        yield


@contextlib.contextmanager
def recast_without(what: str) -> Iterator[None]:
    """Before the second iteration of a replay one frozen weight in blocks is not cast again, or has another scale."""
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import pieces_in_blocks
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
    from megatron.core.distributed import param_and_grad_buffer as buffers

    cast, refresh, refreshes, changed = buffers.copy_tensor_to_quantized_param, LiveRestorer.refresh, [], []

    def dropped(parameter: Any, source: torch.Tensor) -> None:
        drops = len(refreshes) == 2 and not parameter.requires_grad and not changed
        if drops:
            changed.append(parameter)
        if not drops or what == "scale":
            cast(parameter, source)
        if drops and what == "scale":  # a power of two
            dict(pieces_in_blocks(parameter))["_rowwise_scale_inv"][0, 0] += 1

    def refreshed(self: LiveRestorer) -> None:
        refreshes.append(self)
        with mock.patch.object(buffers, "copy_tensor_to_quantized_param", dropped):
            refresh(self)

    with mock.patch.object(LiveRestorer, "refresh", refreshed):
        yield


@contextlib.contextmanager
def scales_changed(change: str) -> Iterator[None]:
    """What modules keep for delayed scaling comes back wrong: without the newest row, with the columns of two experts
    exchanged, or from the first snapshot of a window only."""
    from megatron.core.dist_checkpointing.moe.megatron_state import trainer_state

    restored: list[bool] = []

    def unpack(tensors: dict[str, torch.Tensor], data: memoryview) -> None:
        if change == "first snapshot" and restored:
            return
        restored.append(True)
        original(tensors, data)
        for name, tensor in tensors.items():
            if change == "amax row" and name.endswith("amax_history"):
                tensor[0].zero_()
            if change == "experts" and "experts" in name and tensor.shape[-1] % 6 == 0:
                tensor.copy_(torch.cat([tensor[..., 3:6], tensor[..., :3], tensor[..., 6:]], -1))

    original = trainer_state.unpack
    with mock.patch.object(trainer_state, "unpack", unpack):
        yield


@contextlib.contextmanager
def not_compared() -> Iterator[None]:
    """A replay does not look at the scales that it made."""
    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState

    with mock.patch.object(LiveTrainerState, "difference", return_value=""):
        yield


LEFT_OUT = {
    "compute": "compute weights of ",
    "compute_scale": "_scale_inv",
    "master": "master weights of ",
    "scaling_fwd.scale": "scaling_fwd.scale of ",
    "scaling_bwd.amax_history": "scaling_bwd.amax_history of ",
}
"""Fields of the state, and what names one that is missing."""


@contextlib.contextmanager
def examined(folder: str) -> Iterator[None]:
    """Instead of training to the end: a few iterations, and a look at the state that they leave."""
    with instead_of_training(_facts, folder):
        yield


def _facts(trainer: Trainer) -> dict[str, Any]:
    from megatron.pretrain.testing.te_on_cpu.kernels import gemm

    values: list[int] = []
    product = gemm.values_of

    def counted(tensor: Any, by_columns: bool) -> torch.Tensor:
        found = product(tensor, by_columns)
        if hasattr(tensor, "_scale_inv"):
            values.append(found.unique().numel())
        return found

    with mock.patch.object(gemm, "values_of", counted):
        for _ in range(3):
            trainer.iterate()
    quantized = [one for chunk in trainer.chunks for one in chunk.parameters() if hasattr(one, "_scale_inv")]
    return {
        "weights": sorted({type(one).__name__ for one in quantized}),
        "values": values,
        "products": len(values),
        "missing": {name: _missing(trainer, name) for name in ("nothing", *LEFT_OUT)},
        "bytes": _bytes_per_parameter(trainer),
        "restored": {name: _differences_once_restored(trainer, name) for name in ("EVERYTHING", "MASTER_AND_MOMENTS")},
    }


def _differences_once_restored(state: Any, part: str, *, gathered: bool = True) -> list[str]:
    """What is other than before when all was poisoned and this part of all operators came back, in this process."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import live_restorer, read_topology
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import packed, quantization_tensors, unpack
    from megatron.core.dist_checkpointing.moe.types import Part

    if gathered:
        _gather(state)
    before = {name: tensor.detach().clone() for name, tensor in state_of(state).items()}
    scales, tensors = quantization_tensors(state.chunks), tensors_of(state)
    kept = packed(scales)() if scales else None
    copies = {one.key: memoryview(one.tensor.clone().view(torch.uint8).numpy().tobytes()) for one in tensors}
    restorer = live_restorer(state.chunks, state.optimizer, read_topology(8))
    restorer.poison()
    assert all(bool(torch.isnan(tensor).all()) for tensor in scales.values())
    restorer.restore(copies.__getitem__, {Part[part]: {one.operator for one in tensors}})
    if kept is not None:
        unpack(scales, kept)
    restorer.complete()
    return [
        name
        for name, tensor in state_of(state).items()
        if not torch.equal(before[name].view(torch.uint8), tensor.detach().contiguous().view(torch.uint8))
    ]


def _missing(state: Any, left_out: str) -> str:
    """What the check for completeness says without one tensor of this field."""
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_optimizer_state
    from megatron.core.dist_checkpointing.moe.megatron_state.partitions import IncompleteState, check_complete
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import quantization_tensors

    allocate_optimizer_state(state.optimizer)
    tensors, scales = list(tensors_of(state)), dict(quantization_tensors(state.chunks))
    experts = [one for one in tensors if one.operator.is_expert and one.field == left_out]
    if experts:
        tensors.remove(experts[0])
    for name in [name for name in scales if name.endswith(left_out)][:1]:
        del scales[name]
    try:
        check_complete(state.chunks, state.optimizer, tensors, scales)
    except IncompleteState as error:
        return str(error)
    return ""


def _bytes_per_parameter(state: Any) -> dict[str, float]:
    """Of the weights of experts, in a full state and in one of weights."""
    from megatron.core.dist_checkpointing.moe.types import Part

    experts = [one for one in tensors_of(state) if one.operator.is_expert]
    parameters = sum(one.tensor.numel() for one in experts if one.field == "master")
    parts = {"full": Part.MASTER_AND_MOMENTS, "weights": Part.COMPUTE}
    return {name: sum(one.nbytes for one in experts if one.serves(part)) / parameters for name, part in parts.items()}


@contextlib.contextmanager
def attention_emulated() -> Iterator[None]:
    """Attention casts to eight bits and back, which Transformer Engine does without a fused kernel if asked to."""
    with mock.patch.dict(os.environ, {"NVTE_UnfusedDPA_Emulate_FP8": "1"}):
        yield


@contextlib.contextmanager
def examined_in_blocks(folder: str) -> Iterator[None]:
    """Instead of training to the end: a few iterations, and a look at weights of MXFP8 and scales of attention."""
    with instead_of_training(_facts_in_blocks, folder):
        yield


def _facts_in_blocks(trainer: Trainer) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import quantization_tensors

    for _ in range(3):
        trainer.iterate()
    weights = [one for chunk in trainer.chunks for one in chunk.parameters() if hasattr(one, "_rowwise_scale_inv")]
    restored = _differences_once_restored(trainer, "MASTER_AND_MOMENTS")
    with _one_cast_dropped():
        dropped = _differences_once_restored(trainer, "MASTER_AND_MOMENTS", gathered=False)
    return {
        "weights": sorted({type(one).__name__ for one in weights}),
        "missing": {name: _missing(trainer, name) for name in ("nothing", "master", "scaling_fwd.amax_history")},
        "scales": [name for name, scale in quantization_tensors(trainer.chunks).items() if bool((scale != 1).any())],
        "fields": sorted({one.field for one in tensors_of(trainer) if one.operator.is_expert}),
        "restored": restored,
        "one cast dropped": dropped,
    }


@contextlib.contextmanager
def _one_cast_dropped() -> Iterator[None]:
    """Of the weights in blocks one stays as it is, on all ranks: the first."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer import distrib_optimizer as optimizers

    cast_whole, done = buffers.copy_tensor_to_quantized_param, []

    def whole(parameter: Any, source: torch.Tensor) -> None:
        done.append(parameter)
        if len(done) > 1:
            cast_whole(parameter, source)

    def shards(cast: Any, parameters: Any, masters: Any, starts: Any, *given: Any) -> None:
        cast(parameters[1:], masters[1:], starts[1:], *given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(buffers, "copy_tensor_to_quantized_param", whole))
        for name in ("quantize_nvfp4_param_shard", "quantize_param_shard"):
            dropping = functools.partial(shards, getattr(optimizers, name))
            stack.enter_context(mock.patch.object(optimizers, name, dropping))
        yield
