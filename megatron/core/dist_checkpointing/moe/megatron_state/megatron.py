"""The training state that a rank owns, as views into live storage.

Enumerated are, each tensor once: what every inner optimizer steps (compute weights, master weights, moments, step
counts), parameters that no optimizer was given (frozen ones), and buffers of routers. Checked against Megatron-Core
0.19.2: `DistributedOptimizer`, `Float16OptimizerWithFloat16Params` and `FP32Optimizer`, alone or chained, over torch's
Adam, and the first over Transformer Engine's `FusedAdam`, which keeps masters and moments in dtypes of its own, and
over Adams of torch on the host (`HybridDeviceOptimizer`); the second also over Muon, alone or in core's layer-wise
optimizer. The views stay valid while training continues, until `load_state_dict` of an optimizer replaces its moments
and step counts; then the state has to be enumerated again. `partitions.py` judges what this file finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..types import Coordinates, OperatorId, Part, Topology
from .module_tree import ModuleTree, layers_ahead, ties_embeddings, trees_of
from .operators import (
    WORD_EMBEDDINGS,
    ChunkPlace,
    GlobalName,
    Shard,
    ShardSpread,
    StateTensor,
    holders,
    is_constant,
    is_partitioned,
    locate,
)
from .optimizer_state import (
    MASTER_OF_FUSED,
    SteppedTensor,
    holds_masters,
    members_by_layer,
    optimizer_members,
    scale_of,
    unsupported_optimizers,
    unsupported_settings,
)
from .quantization import (
    is_in_blocks,
    is_quantized,
    keeps_weights_in_blocks,
    pieces_in_blocks,
    quantization_tensors,
    raw,
    raw_fields,
)
from .restore import (
    LiveRestorer,
    any_rank,
    gather_compute_weights,
    level_step_counts,
    recast_compute_weights,
    recast_quantized_weights,
    settle_gathers,
)


def read_topology(ranks_per_node: int) -> Topology:
    """The layout of the running job.

    Raises:
        UsageError: Its ranks are not in Megatron's default order.
    """
    across = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    topology = Topology(
        world_size=torch.distributed.get_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        ranks_per_node=ranks_per_node,
        instances=1 if across is None else across.size(),
    )
    expected = topology.coordinates(torch.distributed.get_rank())
    live = Coordinates(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        edp=parallel_state.get_expert_data_parallel_rank(),
        node=expected.node,
    )
    if live != expected:
        raise UsageError(f"ranks are laid out as {live}, not as {expected}: keep Megatron's order tp-cp-ep-dp-pp")
    return topology


@torch.no_grad()
def state_tensors(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology
) -> tuple[StateTensor, ...]:
    """Every tensor of training state that this rank owns, each once, sorted by operator and key.

    With the distributed optimizer that is the rank's shard of every parameter: the compute weights as a view into the
    parameter buffer, the master weights, both moments and the step count. With fp32 parameters the shard is master and
    compute weights at once: one tensor. Where the optimizer keeps masters in less than 32 bits, rounded or as the
    remainders of bf16 weights, compute weights are part of the master weights: neither follows from the other. Without
    the distributed optimizer it is every parameter as a whole. Router buffers are state on every rank, whether
    Megatron's own checkpoints have them or not.

    Trainer state (iteration, schedules, random states, loss scaler) is not among them.

    Args:
        chunks: The model chunks as they are trained, wrapped in DistributedDataParallel.
        optimizer: What core's `get_megatron_optimizer` gave for them; its state must exist.
        topology: The layout of the job.

    Raises:
        UsageError: The state of this model or optimizer cannot be protected, with the reason.
    """
    model = _Model(chunks, topology)
    _refuse_unsupported(model, optimizer)
    found = [*_optimizer_tensors(model, optimizer), *_frozen_tensors(model), *_buffer_tensors(model)]
    found += _scale_tensors(model, optimizer)
    return tuple(sorted(found, key=lambda tensor: (tensor.operator, tensor.key)))


def operators_of_parameters(
    chunks: Sequence[torch.nn.Module], topology: Topology
) -> Mapping[torch.nn.Parameter, OperatorId]:
    """The operator of each parameter of this rank.

    Args:
        chunks: The model chunks of this rank.
        topology: The rank layout.

    Raises:
        UsageError: A parameter belongs to none.
    """
    return {parameter: of.operator for parameter, of in names_of_parameters(chunks, topology).items()}


def names_of_parameters(
    chunks: Sequence[torch.nn.Module], topology: Topology
) -> Mapping[torch.nn.Parameter, GlobalName]:
    """What each parameter of this rank is in the whole model.

    Args:
        chunks: The model chunks of this rank.
        topology: The rank layout.

    Raises:
        UsageError: One belongs to no operator.
    """
    return _Model(chunks, topology).names


def unchanging_operators(chunks: Sequence[torch.nn.Module], topology: Topology) -> frozenset[OperatorId]:
    """Operators of which this rank has a part, and nothing that training changes: no trained parameter, no buffer.

    Args:
        chunks: The model chunks of this rank.
        topology: The rank layout.
    """
    model = _Model(chunks, topology)
    frozen = {tensor.operator for tensor in _frozen_tensors(model)}
    trained = model.trained
    changing = {of.operator for parameter, of in model.names.items() if parameter in trained}
    return frozenset(frozen - changing - {tensor.operator for tensor in _buffer_tensors(model)})


def stepped_parameters(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology
) -> tuple[SteppedTensor, ...]:
    """What this rank's inner optimizers step, each with what it is the master weights of; in the optimizers' order.

    Args:
        chunks: The model chunks of this rank.
        optimizer: The optimizer, whose members step parameters or shards of them.
        topology: The rank layout.
    """
    model = _Model(chunks, topology)
    return tuple(
        SteppedTensor(
            model.shard(owned.parameter, owned.start, owned.end),
            owned.main,
            owned.parameter.main_grad.dtype if holds_masters(member) else owned.main.dtype,
        )
        for member in optimizer_members(optimizer)
        for owned in _owned(member)
    )


def live_restorer(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology) -> LiveRestorer:
    """What restores this rank's state; its copies of other ranks' compute weights are poisoned and gathered too.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Its optimizer.
        topology: The rank layout.
    """

    operator_of = operators_of_parameters(chunks, topology)
    quantized = [parameter for parameter in operator_of if is_quantized(parameter)]
    in_blocks = [parameter for parameter in operator_of if is_in_blocks(parameter)]
    config = unwrap_model(list(chunks))[0].config

    def finish(recast: bool) -> None:
        level_step_counts(state_tensors(chunks, optimizer, topology))
        # Some may have restored weights that others have not, and to cast those of eight bits takes all.
        if keeps_weights_in_blocks(config) or (any_rank(recast) if config.fp8_param else recast):
            recast_compute_weights(chunks, optimizer)
        else:
            gather_compute_weights(chunks, optimizer)

    return LiveRestorer(
        lambda: state_tensors(chunks, optimizer, topology),
        finish,
        gather=lambda: gather_compute_weights(chunks, optimizer),
        settle=lambda: settle_gathers(chunks),
        derived=[
            *(raw(parameter) for parameter in operator_of if not is_in_blocks(parameter)),
            *(piece for parameter in in_blocks for _, piece in pieces_in_blocks(parameter)),
            *(parameter._transpose for parameter in quantized if parameter._transpose is not None),
            *quantization_tensors(chunks).values(),
        ],
        recast=lambda operators: recast_quantized_weights(
            optimizer,
            # In blocks all are cast: of frozen ones the masters are restored too, and core gathers whole buckets.
            {*in_blocks, *(parameter for parameter in quantized if operator_of[parameter] in operators)},
        ),
    )


class _Model:
    """The model chunks of this rank, with the global names of their tensors and who else has them."""

    def __init__(self, chunks: Sequence[torch.nn.Module], topology: Topology) -> None:
        self.wrapped, self.chunks = list(chunks), unwrap_model(list(chunks))
        self.topology, self.rank = topology, torch.distributed.get_rank()
        self._here = topology.coordinates(self.rank)
        self._trees: dict[Any, ModuleTree] = dict(zip(self.chunks, trees_of(chunks), strict=False))  # none for a GPT
        self.names: dict[torch.nn.Parameter, GlobalName] = {
            parameter: self.locate(name, chunk) for chunk in self.chunks for name, parameter in chunk.named_parameters()
        }

    @property
    def trained(self) -> set[torch.nn.Parameter]:
        """Parameters with a place in the buffers of gradients."""
        buffers = [buffer for chunk in self.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return {parameter for buffer in buffers for parameter in buffer.params}

    def locate(self, name: str, chunk: Any) -> GlobalName:
        """What a chunk's parameter or buffer of this name is in the whole model. Raises UsageError."""
        if (tree := self._trees.get(chunk)) is not None:
            return tree.locate(name, self._here.ep * (tree.stages.experts // self.topology.ep))
        return locate(name, self._place(chunk))

    def _place(self, chunk: Any) -> ChunkPlace:
        """Where a chunk sits; its layers know their own numbers, whatever the pipeline layout."""
        layers, experts = chunk.decoder.layers, chunk.config.num_moe_experts or 0
        return ChunkPlace(
            first_layer=layers[0].layer_number - 1 if len(layers) else 0,
            num_layers=chunk.config.num_layers,
            first_expert=self._here.ep * (experts // self.topology.ep),
            tied=ties_embeddings(chunk),
            layers_ahead=layers_ahead(chunk.config),
            copies_embedding=bool(getattr(chunk, "mtp_process", False)) and not chunk.pre_process,
        )

    def shard(self, parameter: torch.nn.Parameter, start: int, end: int) -> Shard:
        """Elements `start` to `end` of a parameter."""
        of, here, topology = self.names[parameter], self._here, self.topology
        rank, size = (here.etp, topology.expert_tp) if of.operator.is_expert else (here.tp, topology.tp)
        # Transformer Engine's experts lack the attribute; of an expert only the bias of the second layer is whole.
        partitioned = (
            not of.name.endswith("linear_fc2.bias") if of.operator.is_expert else is_partitioned(parameter, of)
        )
        return Shard(of, start, end, parameter.numel(), *((rank, size) if partitioned else (0, 1)))

    def holders(self, shard: Shard, *, sharded: bool) -> tuple[int, ...]:
        """Ranks with the same values as this one."""
        tied = copies_embeddings(self.chunks[0]) and shard.of.name.endswith(WORD_EMBEDDINGS)
        return holders(
            self.topology, self.rank, ShardSpread(shard.of.operator.is_expert, shard.tp_size > 1, sharded, tied)
        )


def copies_embeddings(model: Any) -> bool:
    """Whether the last of several pipeline stages has a copy of the word embeddings, for its output or for layers that
    predict further tokens."""
    return ties_embeddings(model) or bool(layers_ahead(model.config))


@dataclass(frozen=True)
class _Owned:
    """What this rank's optimizer steps of a parameter: elements `start` to `end`; the inner optimizer knows `main`."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: torch.Tensor
    state: Mapping[str, Any]


def _refuse_unsupported(model: _Model, optimizer: MegatronOptimizer) -> None:
    config = model.chunks[0].config
    settings = unsupported_settings(config, model.wrapped[0].ddp_config)
    for reason in (*settings, *unsupported_optimizers(optimizer, config)):
        raise UsageError(f"training state cannot be protected with {reason}: use --moe-ckpt-strategy none")


def _owned(member: MegatronOptimizer) -> Iterator[_Owned]:
    """What one optimizer steps. Its own groups pair parameters and masters whatever the order of dtypes in them."""
    if isinstance(member, DistributedOptimizer):
        mains = member.shard_float16_groups if holds_masters(member) else member.shard_fp32_from_float16_groups
        pairs = _paired(member.model_float16_groups, mains)
        pairs += _paired(member.model_fp32_groups, member.shard_fp32_groups)
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        pairs = _paired(member.float16_groups, member.fp32_from_float16_groups)
        pairs += _paired(member.fp32_from_fp32_groups, member.fp32_from_fp32_groups)
    else:
        groups = [group["params"] for group in member.optimizer.param_groups]
        pairs = _paired(groups, groups)
    for parameter, main in pairs:
        start, end = 0, parameter.numel()
        if isinstance(member, DistributedOptimizer):
            own = member._get_model_param_range_map(parameter)["param"]
            start, end = own.start, own.end
        yield _Owned(parameter, start, end, main, member.optimizer.state.get(main, {}))


def _paired(models: list[list[Any]], mains: list[list[Any]]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    return [
        pair
        for model_group, main_group in zip(models, mains, strict=True)
        for pair in zip(model_group, main_group, strict=True)
    ]


def _optimizer_tensors(model: _Model, optimizer: MegatronOptimizer) -> Iterator[StateTensor]:
    for member, by_layer in members_by_layer(optimizer):
        for owned in () if member.is_stub_optimizer else _owned(member):
            shard = model.shard(owned.parameter, owned.start, owned.end)
            if not owned.state:
                raise UsageError(
                    f"the optimizer has no state for {shard.of.name} yet: enumerate the training state after the"
                    " optimizer has allocated its moments, at the latest after the first step"
                )
            ranks = model.holders(shard, sharded=by_layer or isinstance(member, DistributedOptimizer))
            yield from _weights(member, owned, shard, ranks)
            for field, value in owned.state.items():
                if field == MASTER_OF_FUSED:
                    continue
                if not isinstance(value, torch.Tensor):
                    raise UsageError(f"the optimizer keeps {field} of {shard.of.name} as {value!r}, not as a tensor")
                scale = scale_of(member.optimizer, owned.main, field)
                for name, tensor in raw_fields(field, value, scale):
                    yield StateTensor(shard, name, Part.MOMENTS, tensor, ranks)


def _weights(member: MegatronOptimizer, owned: _Owned, shard: Shard, ranks: tuple[int, ...]) -> Iterator[StateTensor]:
    """Compute and master weights, wherever the latter are kept; of weights in blocks the latter alone."""
    if is_in_blocks(owned.parameter):
        # Frozen operators need their weights, which can be cast again from nothing but these.
        yield StateTensor(shard, "master", Part.MASTER, owned.main.detach().view(-1), ranks, in_forward=True)
        return
    weights = raw(owned.parameter)[owned.start : owned.end]
    kept = owned.state.get(MASTER_OF_FUSED)
    if kept is not None:
        # Only the cast of fp32 masters can be made again: of others the weights were cast before they were rounded.
        recasts = kept.dtype is torch.float32 and not is_quantized(kept)
        part = Part.COMPUTE if recasts else Part.MASTER
        yield StateTensor(shard, "compute", part, weights, ranks, in_forward=True)
        for name, tensor in raw_fields("master", kept, scale_of(member.optimizer, owned.main, MASTER_OF_FUSED)):
            yield StateTensor(shard, name, Part.MASTER, tensor, ranks)
        return
    master = owned.main.detach().view(-1)
    # fp32 parameters are their own master weights: one tensor, one record.
    is_master = master.data_ptr() == weights.data_ptr()
    # With weights of MXFP8 core may cast these too when the next iteration begins: until then they are old.
    is_old = bool(getattr(member.config, "reuse_grad_buf_for_mxfp8_param_ag", False))
    if not is_master:
        part = Part.NOTHING if is_old else Part.COMPUTE
        yield StateTensor(shard, "compute", part, weights, ranks, in_forward=not is_old)
    yield StateTensor(shard, "master", Part.MASTER, master, ranks, in_forward=is_master or is_old)


def _scale_tensors(model: _Model, optimizer: MegatronOptimizer) -> Iterator[StateTensor]:
    """Scales of eight-bit weights: one for the whole weight, so also on ranks that own no part of it."""
    # As `_weights`: where masters are kept in few bits, what was cast from them before cannot be made again.
    masters = [member.config.main_params_dtype for member in optimizer_members(optimizer) if holds_masters(member)]
    part = Part.MASTER if any(dtype is not torch.float32 for dtype in masters) else Part.COMPUTE
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        if is_quantized(parameter):
            shard = model.shard(parameter, 0, parameter.numel())
            (_, (field, scale)) = raw_fields("compute", parameter)
            yield StateTensor(shard, field, part, scale, model.holders(shard, sharded=False), in_forward=True)


def _frozen_tensors(model: _Model) -> Iterator[StateTensor]:
    """Parameters that were never given to the optimizer: whole on each data-parallel rank."""
    trained = model.trained
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            if parameter not in trained:
                if is_in_blocks(parameter):
                    raise UsageError(
                        f"{model.names[parameter].name} is not trained, and is kept as {type(parameter).__name__}: it"
                        " has no master weights that it could be cast from; leave out --fp8-param-gather"
                    )
                shard = model.shard(parameter, 0, parameter.numel())
                ranks = model.holders(shard, sharded=False)
                yield StateTensor(shard, "master", Part.MASTER, raw(parameter), ranks, in_forward=True)


def tables(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Buffers of the training state that a constructor fills and no checkpoint has; what routers count is none."""
    return [
        buffer
        for chunk in chunks
        for path, module in chunk.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and not (path.endswith("router") or is_constant(f"{path}.{name}"))
    ]


def _buffer_tensors(model: _Model) -> Iterator[StateTensor]:
    for chunk in model.chunks:
        for module in chunk.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                # Float16Module cast the bias; the first forward pass would move it to new storage to undo that.
                module._maintain_float32_expert_bias()
        for name, buffer in chunk.named_buffers():
            if is_constant(name):
                continue
            of, numel = model.locate(name, chunk), buffer.numel()
            # Expert biases are updated from counts of the whole batch; what else a router counts may differ per rank.
            shared = name.endswith(".router.expert_bias")
            shard = Shard(of, 0, numel, numel, own_of=None if shared else model.rank)
            ranks = model.holders(shard, sharded=False) if shared else (model.rank,)
            yield StateTensor(shard, "buffer", Part.MASTER, buffer.detach().view(-1), ranks, in_forward=True)
