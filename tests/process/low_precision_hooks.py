"""What tests of masters and moments of few bits do inside workers: examine live state, keep tokens from an expert."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_hooks import tensors_of
from operator_hooks import examine
from stock_trainer import Trainer, after_training, instead_of_training


@contextlib.contextmanager
def examined(folder: str) -> Iterator[None]:
    """Instead of training to the end: the examination of `operator_hooks`, and what of the weights masters tell."""

    def run(trainer: Trainer) -> dict[str, Any]:
        facts = examine(trainer)
        facts["dtypes"] = sorted({f"{one.field} {one.tensor.dtype}" for one in tensors_of(trainer)})
        return facts | {"not the cast": _share_that_is_not_the_cast_of_its_master(trainer)}

    with instead_of_training(run, folder):
        yield


def _share_that_is_not_the_cast_of_its_master(state: Any) -> float:
    different, total = 0, 0
    for inner in (member.optimizer for member in state.optimizer.chained_optimizers):
        for group in inner.param_groups:
            for weights in group["params"]:
                cast = inner.get_unscaled_state(weights, "master_param").to(weights.dtype)
                different += int((cast != weights).sum())
                total += weights.numel()
    return different / total


@contextlib.contextmanager
def without_tokens_for_one_expert() -> Iterator[None]:
    """Expert 1 of each layer is never chosen, and what it has is looked at when training has ended."""
    from megatron.core.transformer.moe.router import TopKRouter

    routing = TopKRouter.routing

    def routed(self: TopKRouter, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        hidden = torch.zeros(logits.shape[-1])
        hidden[1] = -1e4
        return routing(self, logits + hidden, *arguments, **options)

    def trained(state: Any) -> None:
        for chunk in state.chunks:
            for name, weights in chunk.named_parameters():
                assert bool(torch.isfinite(weights).all()), f"{name} is not finite"
        moments = [one for one in tensors_of(state) if one.operator.expert == 1 and one.field == "exp_avg"]
        assert moments and not any(bool(one.tensor.any()) for one in moments), "the expert has taken part"

    with mock.patch.object(TopKRouter, "routing", routed), after_training(trained):
        yield


@contextlib.contextmanager
def in_megatron_core_s_ways(folder: str) -> Iterator[None]:
    """Instead of training to the end: what Megatron-Core itself says when it allocates, saves and loads such state."""

    def run(trainer: Trainer) -> dict[str, str]:
        member = trainer.optimizer.chained_optimizers[0]
        inner, parameter = member.optimizer, next(iter(member.model_param_group_index_map))
        buckets = member.get_parameter_state_dp_reshardable()
        for pieces in (pieces for index in buckets if isinstance(index, int) for pieces in buckets[index].values()):
            for piece in (piece for bucket in pieces for piece in bucket):
                piece["padding"] = False  # as its sharded state dict has it of each parameter
        group, order = member.model_param_group_index_map[parameter]
        values = {"param": torch.zeros(inner.param_groups[group]["params"][order].numel())}
        facts = {
            "dp_reshardable": _raised(lambda: member.load_parameter_state_from_dp_reshardable(buckets)),
            "fully_reshardable": _raised(_loading(member, parameter, values)),
        }
        inner.state.clear()
        return facts | {"init_state_fn": _raised(lambda: member.init_state_fn(inner, member.config))}

    with instead_of_training(run, folder):
        yield


def _loading(member: Any, parameter: Any, values: Any) -> Callable[[], Any]:
    """What loading `fully_reshardable` does with a parameter: all that is saved so is in fp32."""
    return partial(methodcaller("_set_main_param_and_optimizer_states", parameter, values), member)


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


@contextlib.contextmanager
def scales_of_weights_compared(folder: str, *, leveled: bool = True) -> Iterator[None]:
    """After training: which eight-bit weights have another scale on another rank, and how far they are from theirs."""
    from megatron.core.dist_checkpointing.moe.megatron_state import optimizer_state

    def trained(state: Any) -> None:
        mine = {one.key: one.tensor.item() for one in tensors_of(state) if one.field == "compute_scale"}
        told: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, mine)
        if torch.distributed.get_rank() == 0:
            differ = [key for key in mine if len({of_rank[key] for of_rank in told}) > 1]
            facts = {"scales": len(mine), "differ": differ, "worst": _worst_error(state)}
            (Path(folder) / "facts.json").write_text(json.dumps(facts))

    level = contextlib.nullcontext() if leveled else mock.patch.object(optimizer_state, "level_scales")
    with level, after_training(trained):
        yield


def _worst_error(state: Any) -> float:
    """Of eight-bit weights that this rank steps, by how much the largest is off its master, of that.

    Delayed scaling cuts off what has grown beyond 448 steps of a scale that is one iteration old: so are masters here.
    """
    worst = 0.0
    for inner in (member.optimizer for member in state.optimizer.chained_optimizers):
        for weights in (one for group in inner.param_groups for one in group["params"] if hasattr(one, "_data")):
            master, cast = inner.get_unscaled_state(weights, "master_param"), weights.dequantize().float()
            at, largest = master.abs().argmax(), 448 * float(weights.get_metadata()["fp8_scale_inv"])
            worst = max(worst, float((cast[at] / master[at].clamp(-largest, largest) - 1).abs()))
    return worst


@contextlib.contextmanager
def scales_not_guarded() -> Iterator[None]:
    """`FusedAdam` scales its state as it does by itself."""
    from megatron.core.dist_checkpointing.moe.megatron_state import optimizer_state

    with mock.patch.object(optimizer_state, "guard_scales"):
        yield


@contextlib.contextmanager
def weights_recast_from_masters() -> Iterator[None]:
    """After each snapshot that a replay loads: weights of what it thawed become the cast of their masters."""
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer

    refresh = LiveRestorer.refresh

    def recast(self: LiveRestorer) -> None:
        masters = {one.shard: one for one in self._all() if one.field == "master" and one.key in self._fresh}
        scales = {one.shard: one.tensor for one in self._all() if one.field == "master_scale"}
        for one in self._all():
            if one.field == "compute" and one.shard in masters:
                one.tensor.copy_(masters[one.shard].tensor.float() * scales[one.shard])
        refresh(self)

    with mock.patch.object(LiveRestorer, "refresh", recast):
        yield


@contextlib.contextmanager
def a_scale_left_as_it_was(field: str) -> Iterator[None]:
    """Of this field the scales are restored as 1."""
    from megatron.core.dist_checkpointing.moe.megatron_state import restore

    write = restore.write_record

    def written(key: str, data: memoryview, tensor: torch.Tensor, upload: restore.Upload | None = None) -> None:
        write(key, data, tensor, upload)
        if key.endswith(f"/{field}_scale"):
            tensor.fill_(1)

    with mock.patch.object(restore, "write_record", written):
        yield
