"""Which experts a checkpoint holds, and how Megatron-LM comes to generate the state of these alone.

Megatron-LM's `generate_state_dict` asks each model chunk, and then the optimizer, for its `sharded_state_dict`. In the
block of `generating` these calls leave out what stays in older checkpoints, so that nothing of it is copied from the
device or written. The optimizer names its state after the shards of all weights: it gets them whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.utils import unwrap_model
from moe_ckpt.dense.chain import MANIFEST, PARTIAL_BACKEND_VERSION, Chain, encode, read_chain
from moe_ckpt.dense.partial_saves import PartialSaves, after_loading

from ...dense_saves.directory import CheckpointDirectory
from ...dense_saves.writing import on_rank_zero
from ...errors import UnreadableCheckpoint
from ...megatron_state.module_tree import layers_of_routers
from ...megatron_state.popularity import TokenCounter
from ...storage.system import write_atomically
from .lineage import ExpertLineage
from .shards import built, entries, selected

log = logging.getLogger(__name__)

Generate = Callable[..., dict[str, Any]]


class ExpertSaves:
    """Chooses the experts of each checkpoint of a job, and adds the manifest that says where the others are.

    Args:
        args: Of Megatron-LM, with `ExpertSaveFlags` among them.
        chunks: The model chunks of this rank, as the loop has them.
        loaded: The folder of the checkpoint that training continues from; None if from none.
    """

    def __init__(self, args: Any, chunks: Sequence[torch.nn.Module], loaded: Path | None) -> None:
        self._args = args
        self._chunks = chunks
        self._lineage = ExpertLineage(on_rank_zero(lambda: _continued(args, loaded)))
        by_load = args.save_experts_selection == "load-aware"
        self._counter = TokenCounter(chunks, iteration=lambda: args.curr_iteration) if by_load else None
        self._chains: dict[int, Chain] = {}

    def close(self) -> None:
        """Count tokens no longer."""
        if self._counter is not None:
            self._counter.close()

    @contextlib.contextmanager
    def generating(self, optimizer: Any, directory: CheckpointDirectory, iteration: int) -> Iterator[None]:
        """A block in which the state that is generated is what a checkpoint holds. A collective.

        Args:
            optimizer: The optimizer of this rank, or None.
            directory: The folder of all checkpoints.
            iteration: The iteration that is saved.
        """
        chunks = unwrap_model(list(self._chunks))
        whole: dict[str, Any] = {}
        parts: list[dict[str, Any]] = [{} for _ in chunks]
        kept: list[dict[str, Any]] = [{} for _ in chunks]

        def of_chunk(index: int, generate: Generate, *given: Any, **options: Any) -> dict[str, Any]:
            generated = whole[f"model{index}"] = generate(*given, **options)
            parts[index] = built(generated)
            if index == len(chunks) - 1:  # the first ones may have no experts on any rank
                chain = self._chains[iteration] = self._next_chain(parts, directory, iteration)
                for one, of_one in zip(kept, parts, strict=True):
                    one.update(selected(of_one, chain))
            return kept[index]

        def of_optimizer(generate: Generate, _: Any, *given: Any, **options: Any) -> dict[str, Any]:
            return selected(built(generate(whole, *given, **options)), self._chains[iteration])

        with contextlib.ExitStack() as stack:
            for index, chunk in enumerate(chunks):
                stack.enter_context(_generating(chunk, functools.partial(of_chunk, index)))
            if optimizer is not None:
                stack.enter_context(_generating(optimizer, of_optimizer))
            yield

    def complete(self, staging: Path, iteration: int) -> None:
        """Add to a checkpoint that is about to be published which experts it holds; on rank 0.

        Args:
            staging: The folder, before it gets its name.
            iteration: The iteration that is saved.

        Raises:
            OSError: It cannot be written.
        """
        chain = self._chains[iteration]
        write_atomically(staging / MANIFEST, encode(chain))
        if not chain.is_complete:
            # Releases before 0.19 refuse it then; from 0.19 on core does not find the experts under stock's names.
            marker = json.dumps(dataclasses.asdict(CheckpointingConfig("torch_dist", PARTIAL_BACKEND_VERSION)))
            write_atomically(staging / CONFIG_FNAME, marker.encode())

    def published(self, iteration: int) -> None:
        """The checkpoint of `iteration` is there."""
        self._lineage.saved(self._chains.pop(iteration))

    def _next_chain(self, generated: list[dict[str, Any]], directory: CheckpointDirectory, iteration: int) -> Chain:
        """What the checkpoint of `iteration` will hold, the same on every rank; a collective over all ranks."""
        counted = self._counter.take()() if self._counter is not None else None
        experts = live_experts(generated, self._chunks, counted)
        self._lineage.count(iteration, experts.tokens)
        args = self._args
        saves = PartialSaves(
            experts.stages,
            experts.num_experts,
            experts.stacked_layers,
            args.expert_model_parallel_size,
            content_of(args),
            args.save_experts,
            args.save_experts_selection,
            args.save_experts_scope,
        )
        chain: Chain = on_rank_zero(lambda: _decided(saves, directory, self._lineage, iteration))
        return chain


@contextlib.contextmanager
def _generating(owner: Any, changed: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """A block in which `owner.sharded_state_dict` is `changed`, which gets the original first."""
    original = owner.sharded_state_dict
    owner.sharded_state_dict = lambda *given, **options: changed(original, *given, **options)
    try:
        yield
    finally:
        del owner.sharded_state_dict


@dataclasses.dataclass(frozen=True)
class _ModelExperts:
    """What the model has.

    stages: MoE layers by pipeline stage. stacked_layers: length of the axis that counts layers in the tensors of
    experts, None where each layer has tensors of its own. tokens: that all ranks counted, by layer and expert.
    """

    stages: tuple[tuple[int, ...], ...]
    num_experts: int
    stacked_layers: int | None
    tokens: Mapping[int, tuple[int, ...]]


def live_experts(
    generated: list[dict[str, Any]], chunks: Sequence[torch.nn.Module], counted: Mapping[int, Sequence[int]] | None
) -> _ModelExperts:
    """What the model of all ranks has; a collective on tables of the model, so that none gets what each rank has.

    Args:
        generated: The sharded state dicts of all chunks of this rank, without factories.
        chunks: The model chunks of this rank.
        counted: Tokens by layer and expert; None on all ranks where they are not counted.
    """
    shapes = {
        (shard.global_shape[entry.axes - 1], shard.global_shape[0] if entry.axes == 2 else 0)
        for entry, shard in entries(generated)
    }
    # Core names experts of layers that predict further tokens apart: every checkpoint holds all of them.
    of_routers = layers_of_routers(chunks).items()
    layers = sorted({layer for router, layer in of_routers if not getattr(router, "is_mtp_layer", False)})
    most, least = [0, 0], [_ANY, _ANY]
    if shapes:
        most, least = ([*map(of, zip(*shapes, strict=True))] for of in (max, min))
    bounds = [1 + max(layers, default=-1), *most, *(-one for one in least)]
    num_layers, *found = _reduced(bounds, dist.ReduceOp.MAX)
    ((num_experts, stacked_layers),) = {(found[0], found[1]), (-found[2], -found[3])}
    stage = 1 + parallel_state.get_pipeline_model_parallel_rank()
    of_layers = _reduced([stage * (layer in layers) for layer in range(num_layers)], dist.ReduceOp.MAX)
    stages = tuple(
        tuple(layer for layer, found in enumerate(of_layers) if found == 1 + stage)
        for stage in range(parallel_state.get_pipeline_model_parallel_world_size())
    )
    tokens: dict[int, tuple[int, ...]] = {}
    if counted is not None:
        none = [0] * num_experts
        rows = [one for layer in range(num_layers) for one in counted.get(layer, none)]
        everywhere = _reduced(rows, dist.ReduceOp.SUM)
        of_layer = (tuple(everywhere[at : at + num_experts]) for at in range(0, len(everywhere), num_experts))
        tokens = {layer: row for layer, row in enumerate(of_layer) if of_layers[layer]}
    return _ModelExperts(stages, num_experts, stacked_layers or None, tokens)


_ANY = 1 << 62
"""The shape of experts on ranks that have none."""


def _reduced(numbers: Sequence[int], op: Any) -> list[int]:
    """Of all ranks."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(tensor, op=op)
    reduced: list[int] = tensor.tolist()
    return reduced


def content_of(args: Any) -> str:
    """What is saved of the state, and the layout that the rotation of experts follows; compared between iterations."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    state = "no optimizer"
    if not args.no_save_optim:
        state = "distributed optimizer" if args.use_distributed_optimizer else "replicated optimizer"
    kinds = {"PP": "pipeline_model", "VPP": "virtual_pipeline_model", "TP": "tensor_model"}
    kinds |= {"EP": "expert_model", "ETP": "expert_tensor"}
    sizes = (f"{kind} {getattr(args, f'{name}_parallel_size') or 1}" for kind, name in kinds.items())
    return ", ".join((precision, state, *sizes))


def _continued(args: Any, loaded: Path | None) -> Chain | None:
    """The chain that saving continues with, if `--save` is the directory loaded from and all that it holds was
    loaded."""
    in_part = args.finetune or (args.no_load_optim and not args.no_save_optim)
    if loaded is None or in_part or loaded.parent.resolve() != Path(args.save).resolve():
        return None
    chain = read_chain(loaded)
    return None if chain is None or chain.content != content_of(args) else after_loading(chain)


def _decided(saves: PartialSaves, directory: CheckpointDirectory, lineage: ExpertLineage, iteration: int) -> Chain:
    mark, previous = secrets.token_hex(8), lineage.chain
    obstacle = None if previous is None else _obstacle(directory, previous, iteration)
    if obstacle:
        log.warning("the checkpoint of iteration %d is written with all experts: %s", iteration, obstacle)
    if previous is None or obstacle or not saves.continues(previous):
        return saves.complete(iteration, mark)
    return saves.following(previous, iteration, mark, lineage.counted)


def _obstacle(directory: CheckpointDirectory, previous: Chain, iteration: int) -> str | None:
    """Why `iteration` cannot leave experts to the iterations of `previous`."""
    if iteration <= previous.iteration:
        return f"it would replace iteration {previous.iteration}, which holds some of them"
    for needed, mark in sorted(previous.marks.items()):
        try:
            found = read_chain(directory.folder(needed))
        except UnreadableCheckpoint as error:
            return str(error)
        if found is None or found.marks.get(needed) != mark:
            return f"{directory.folder(needed)}, which holds some of them, is missing or was replaced"
    return None
