"""What tests of the live state do inside workers: enumerate it, spoil it, restore it, and write down the facts.

Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from stock_trainer import Trainer, instead_of_training

NAN = float("nan")
GARBAGE = 77
BEFORE_SNAPSHOT = 2
AFTER_SNAPSHOT = 2


@contextlib.contextmanager
def examined(folder: str, frozen: str = "") -> Iterator[None]:
    """Instead of training to the end: a few iterations, and the examination of the state in between.

    frozen: parameters whose name contains this are not trained.
    """
    import pretrain_gpt_moe

    build_model = pretrain_gpt_moe.model_provider

    @functools.wraps(build_model)
    def build(*arguments: Any, **options: Any) -> torch.nn.Module:
        chunk = build_model(*arguments, **options)
        for name, parameter in chunk.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)
        return chunk

    with instead_of_training(examine, folder), mock.patch.object(pretrain_gpt_moe, "model_provider", build):
        yield


def examine(state: Trainer) -> dict[str, Any]:
    """What is found in a state that trains a few iterations meanwhile."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights
    from megatron.core.utils import unwrap_model

    chunks, optimizer, topology = state.chunks, state.optimizer, read_topology(8)
    fresh = state_tensors(chunks, optimizer, topology)
    for _ in range(BEFORE_SNAPSHOT):
        state.iterate()

    tensors = state_tensors(chunks, optimizer, topology)
    facts = {
        "tensors": [_described(tensor) for tensor in tensors],
        "views_from_before_training_are_live": _same_views(fresh, tensors),
        "verdicts": _verdicts(state, tensors),
        "refusals": _refusals(state, topology),
        "vocab": unwrap_model(chunks[0]).vocab_size,
    }
    # What a rank owns is current as soon as the step has ended; the rest of the compute weights may be on its way.
    copies = [tensor.tensor.clone() for tensor in tensors]
    gather_compute_weights(chunks)
    reference = _complete_state(state)
    for _ in range(AFTER_SNAPSHOT):
        state.iterate()
    return facts | _restorations(state, tensors, copies, reference)


def _described(tensor: Any) -> dict[str, Any]:
    operator, shard = tensor.operator, tensor.shard
    values = tensor.tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "key": tensor.key,
        "operator": [operator.layer, operator.kind.value, operator.expert],
        "name": shard.of.name,
        "field": tensor.field,
        "part": tensor.part.name,
        "in_forward": tensor.in_forward,
        "range": [shard.start, shard.end],
        "numel": shard.numel,
        "tp": [shard.tp_rank, shard.tp_size],
        "elements": tensor.tensor.numel(),
        "nbytes": tensor.nbytes,
        "dtype": str(tensor.tensor.dtype),
        "holders": list(tensor.holders),
        "hash": hashlib.sha256(values).hexdigest(),
    }


def _same_views(before: Sequence[Any], after: Sequence[Any]) -> bool:
    def places(tensors: Sequence[Any]) -> list[tuple[str, int, str]]:
        return [(tensor.key, tensor.tensor.data_ptr(), str(tensor.tensor.dtype)) for tensor in tensors]

    return places(before) == places(after)


def kind(tensor: Any) -> str:
    """What is left out at a time: a field of the optimizer's, or a buffer by its name."""
    return tensor.shard.of.name.rpartition(".")[2] if tensor.field == "buffer" else tensor.field


def _kinds(tensors: Sequence[Any]) -> list[str]:
    """The same on all ranks: what follows is collective."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, sorted({kind(tensor) for tensor in tensors}))
    return sorted(set().union(*everywhere))


def _verdicts(state: Any, tensors: Sequence[Any]) -> dict[str, str]:
    """What the completeness check says of states that are wrong; an empty string where it finds nothing."""
    chunks, optimizer = state.chunks, state.optimizer
    last = next(tensor for tensor in reversed(tensors) if tensor.field == "exp_avg")
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = members[-1].optimizer
    some = inner.param_groups[-1]["params"][-1]
    verdicts = {"as it is": verdict_on(state, tensors)}
    for left_out in _kinds(tensors):
        verdicts[f"without {left_out}"] = verdict_on(state, [one for one in tensors if kind(one) != left_out])
    for operator in sorted({tensor.operator for tensor in tensors}):
        rest = [one for one in tensors if one.operator != operator]
        verdicts[f"without {operator}"] = verdict_on(state, rest)
    verdicts["one tensor twice"] = verdict_on(state, [*tensors, last])
    verdicts["one element short"] = verdict_on(state, [one for one in tensors if one is not last] + [_cut(last)])
    verdicts["a copy instead of a view"] = verdict_on(state, [_copied(one) if one is last else one for one in tensors])
    with changed(inner.state[some], "new_moment", torch.zeros_like(some)):
        verdicts["a new kind of moment"] = verdict_on(state, tensors)
    with changed(vars(members[-1]), "averages", [torch.zeros(3)]):
        verdicts["averages in the optimizer"] = verdict_on(state, tensors)
    # As the fused Adams of Transformer Engine and Apex have them: beside what they keep from step to step.
    tables = {
        "dtype_to_range_map": {torch.float16: torch.ones(1)},
        "_skipped": torch.zeros(1),
        "lr_of_all": [torch.ones(2)],
    }
    with mock.patch.dict(vars(inner), tables):
        verdicts["tables of the inner optimizer"] = verdict_on(state, tensors)
    module = next(module for module in chunks[0].modules() if type(module).__name__ == "TopKRouter")
    with changed(module._buffers, "history", torch.zeros(3)):
        verdicts["a new buffer"] = verdict_on(state, tensors)
    with changed(module._parameters, "gain", torch.nn.Parameter(torch.zeros(3))):
        verdicts["a new parameter"] = verdict_on(state, tensors)
    return verdicts


def _refusals(state: Any, topology: Any) -> dict[str, str]:
    """What is said of a model or an optimizer that cannot be protected; an empty string where it is taken."""
    from megatron.core.dist_checkpointing.moe.errors import UsageError
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import state_tensors

    member = getattr(state.optimizer, "chained_optimizers", [state.optimizer])[0]
    inner = member.optimizer
    some = inner.param_groups[0]["params"][0]
    unknown_type = type("UnknownOptimizer", (type(member),), {})

    def refusal() -> str:
        try:
            state_tensors(state.chunks, state.optimizer, topology)
        except UsageError as error:
            return str(error)
        return ""

    refusals = {}
    known_type, member.__class__ = type(member), unknown_type
    refusals["UnknownOptimizer"] = refusal()
    member.__class__ = known_type
    with mock.patch.dict(inner.state, {some: {}}):
        refusals["no state"] = refusal()
    return refusals


def verdict_on(state: Any, tensors: Sequence[Any]) -> str:
    from megatron.core.dist_checkpointing.moe.megatron_state.partitions import IncompleteState, check_complete

    try:
        check_complete(state.chunks, state.optimizer, tensors)
    except IncompleteState as error:
        return str(error)
    return ""


def _cut(tensor: Any) -> Any:
    return mock.Mock(tensor=tensor.tensor[:-1], key=tensor.key)


def _copied(tensor: Any) -> Any:
    return mock.Mock(tensor=tensor.tensor.clone(), key=tensor.key)


@contextlib.contextmanager
def changed(mapping: Any, key: str, value: Any) -> Iterator[None]:
    mapping[key] = value
    try:
        yield
    finally:
        del mapping[key]


@torch.no_grad()
def poison(state: Any, tensors: Sequence[Any]) -> None:
    """Fill the training state, also what other ranks own of the compute weights, with values that no training makes."""
    for chunk in state.chunks:
        for parameter in chunk.parameters():
            parameter.fill_(NAN)
    for one in tensors:
        # Core compares all step counts with each other, which NaN would never pass.
        floating = one.tensor.is_floating_point() and one.field != "step"
        one.tensor.fill_(NAN if floating else GARBAGE)


@torch.no_grad()
def restore(tensors: Sequence[Any], copies: Sequence[torch.Tensor], chosen: Callable[[Any], bool]) -> None:
    """Copy the snapshots of the chosen tensors into the live state."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if chosen(tensor):
            tensor.tensor.copy_(copy)


def _restorations(state: Any, tensors: Sequence[Any], copies: Sequence[Any], reference: Any) -> dict[str, Any]:
    """Which parts of the complete state differ from the reference after several ways to restore it."""
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import (
        gather_compute_weights,
        recast_compute_weights,
        settle_gathers,
    )
    from megatron.core.dist_checkpointing.moe.types import Part

    differences = {"trained on": _differences(state, reference)}

    def restored(chosen: Callable[[Any], bool], finish: Callable[[], None]) -> list[str]:
        if state.chunks[0].ddp_config.overlap_param_gather:
            for chunk in state.chunks:
                chunk.start_param_sync()  # under way, as it may be when a failure is noticed
        settle_gathers(state.chunks)
        poison(state, tensors)
        restore(tensors, copies, chosen)
        finish()
        return _differences(state, reference)

    def gathered() -> None:
        gather_compute_weights(state.chunks)

    def recast() -> None:
        recast_compute_weights(state.chunks, state.optimizer)

    for left_out in _kinds(tensors):
        differences[f"without {left_out}"] = restored(lambda one, out=left_out: kind(one) != out, gathered)
    differences["not gathered"] = restored(lambda one: True, lambda: None)
    differences["nothing"] = restored(lambda one: False, gathered)
    differences["full parts, recast"] = restored(lambda one: one.serves(Part.MASTER_AND_MOMENTS), recast)
    differences["everything"] = restored(lambda one: True, gathered)
    return {"differences": differences}


def _complete_state(state: Any) -> dict[str, torch.Tensor]:
    """All tensors as Megatron's checkpoints have them, and those of modules and inner optimizers; copies.

    Without what belongs to the trainer (loss scale), and without the gaps between parameters that checkpoints fill.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach().clone()
        elif isinstance(value, LocalNonpersistentObject):
            collect(value.unwrap(), path)
        elif isinstance(value, ShardedBase):
            collect(value.data, f"{path}:{value.key}")
        elif isinstance(value, dict) and not _is_gap(value):
            for key, item in value.items():
                if key != "grad_scaler":
                    collect(item, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                collect(item, f"{path}/{index}")

    collect(state.sharded_state_dict(), "")
    for index, chunk in enumerate(state.chunks):
        collect(dict(chunk.named_parameters()), f"parameters {index}")
        collect(dict(chunk.named_buffers()), f"buffers {index}")
    for index, member in enumerate(getattr(state.optimizer, "chained_optimizers", [state.optimizer])):
        for number, kept in enumerate(member.optimizer.state.values()):
            collect(kept, f"inner optimizer {index}, parameter {number}")
    return found


def _is_gap(value: dict[str, Any]) -> bool:
    padding = value.get("padding")
    return padding is not None and bool(padding.unwrap())


def _differences(state: Any, reference: dict[str, torch.Tensor]) -> list[str]:
    now = _complete_state(state)
    return [
        path
        for path in {**now, **reference}
        if path not in now or path not in reference or not torch.equal(now[path], reference[path])
    ]
