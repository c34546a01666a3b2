"""What stock Megatron-LM does when it saves and loads a `torch_dist` checkpoint, with core's own calls, inside workers.

Written after its behaviour, on core's functions only: nothing of the driver's checkpoint code takes part in
saving, and nothing of its loading in loading.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Any
from unittest import mock

import numpy
import torch

FLOATING_POINT_OPERATIONS = 123_456_789
_NOT_IN_STOCK = "device keep_last metrics_jsonl load_optim load_rng save_optim save_rng moe_ckpt_inject_fault".split()


@contextlib.contextmanager
def saving_as_stock(*, newer: bool = False) -> Iterator[None]:
    """Write checkpoints as stock Megatron-LM does.

    `newer`: as releases on core 0.17 and later do it: what was `common.pt` lies among the shards, and the random states
    are those of one data-parallel rank even with expert parallelism.
    """
    from megatron.pretrain.checkpoint.save import Saver

    def save(self: Saver) -> None:
        state = self._state
        _save(state, Path(state.config.checkpoint.save), newer=newer)
        self.saved_iteration = state.progress.iteration

    with mock.patch.object(Saver, "save", save):
        yield


@contextlib.contextmanager
def loading_as_stock(read_arguments: Mapping[str, tuple[type, ...]]) -> Iterator[None]:
    """Load as stock Megatron-LM does, refusing what it would trip over.

    `read_arguments`: the attributes of `args` that must be there, and of which types they may be.
    """
    from megatron.pretrain.checkpoint import load

    def load_checkpoint(state: Any) -> bool:
        _load(state, read_arguments)
        return True

    with mock.patch.object(load, "load_checkpoint", load_checkpoint):
        yield


@contextlib.contextmanager
def saved_right_after_loading() -> Iterator[None]:
    """End the job after loading, with a checkpoint of what was loaded."""
    from megatron.pretrain.checkpoint import load
    from megatron.pretrain.checkpoint.save import Saver

    original = load.load_checkpoint

    def load_and_save(state: Any) -> bool:
        assert original(state)
        saver = Saver(state)
        saver.save()
        saver.wait()
        raise SystemExit(int(saver.saved_iteration is None))

    with mock.patch.object(load, "load_checkpoint", load_and_save):
        yield


def _save(state: Any, root: Path, *, newer: bool) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    iteration = state.progress.iteration
    folder = root / f"iter_{iteration:07d}"
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if state.config.checkpoint.dist_ckpt_optim_fully_reshardable:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    else:
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    content = _state_dict(state, metadata | {"dp_cp_group": group}, per_data_rank=not newer) | {
        "args": _arguments(state),
        "iteration": iteration,
        "num_floating_point_operations_so_far": FLOATING_POINT_OPERATIONS,
        "rerun_state_machine": _rerun_state(iteration),
    }
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group, False)
    if newer:
        _save_with_common_among_shards(content | {"content_metadata": metadata}, folder, strategy)
    else:
        dist_checkpointing.save(
            content,
            str(folder),
            strategy,
            preprocess_common_before_consistancy_check=_without_ranks,
            content_metadata=metadata,
        )
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()


def _save_with_common_among_shards(content: dict[str, Any], folder: Path, strategy: Any) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    rank = torch.distributed.get_rank()
    sharded, common = save_preprocess(content, True, _without_ranks)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    strategy.save(sharded, folder)
    if rank == 0:
        (folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def _load(state: Any, read_arguments: Mapping[str, tuple[type, ...]]) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    root = Path(state.config.checkpoint.load)
    iteration = int((root / "latest_checkpointed_iteration.txt").read_text().strip())
    folder = str(root / f"iter_{iteration:07d}")
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    common = dist_checkpointing.load_common_state_dict(folder)
    _check_common(common, iteration, read_arguments)

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) | {"dp_cp_group": group}
    wanted = _state_dict(state, metadata, is_loading=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(folder), group)
    loaded, missing, unexpected = dist_checkpointing.load(wanted, folder, strategy, strict=StrictHandling.RETURN_ALL)
    assert (missing, unexpected) == (set(), set())
    _apply(state, loaded)


def _check_common(common: dict[str, Any], iteration: int, read_arguments: Mapping[str, tuple[type, ...]]) -> None:
    assert type(common["args"]) is argparse.Namespace
    arguments = vars(common["args"])
    wrong = {
        name: arguments.get(name, "missing")
        for name, kinds in read_arguments.items()
        if name not in arguments or type(arguments[name]) not in kinds
    }
    assert wrong == {}
    assert common["checkpoint_version"] == 3.0
    assert common["iteration"] == iteration
    # Stock counts on from what is recorded here and takes 0 if nothing is.
    assert "num_floating_point_operations_so_far" not in common


@torch.no_grad()
def _apply(state: Any, loaded: dict[str, Any]) -> None:
    from megatron.core import parallel_state, tensor_parallel

    if len(state.chunks) == 1:
        state.chunks[0].load_state_dict(loaded["model"], strict=True)
    else:
        for index, chunk in enumerate(state.chunks):
            chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    each_its_own = state.config.training.data_parallel_random_init
    random_states = loaded["rng_state"][parallel_state.get_data_parallel_rank() if each_its_own else 0]
    random.setstate(random_states["random_rng_state"])
    numpy.random.set_state(random_states["np_rng_state"])
    torch.set_rng_state(random_states["torch_rng_state"])
    torch.cuda.set_rng_state(random_states["cuda_rng_state"])
    assert random_states["rng_tracker_states"]
    tensor_parallel.get_cuda_rng_tracker().set_states(random_states["rng_tracker_states"])
    state.progress.iteration = loaded["iteration"]
    state.progress.consumed_train_samples = loaded["args"].consumed_train_samples
    state.progress.consumed_valid_samples = loaded["args"].consumed_valid_samples


def _state_dict(
    state: Any, metadata: dict[str, Any], *, is_loading: bool = False, per_data_rank: bool = True
) -> dict[str, Any]:
    """What saving and loading have in common, under stock's keys."""
    from megatron.core.utils import unwrap_model

    content: dict[str, Any] = {"checkpoint_version": 3.0}
    chunks = unwrap_model(state.chunks)
    for index, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{index}"
        content[key] = chunk.sharded_state_dict(metadata=metadata)
    content["optimizer"] = state.optimizer.sharded_state_dict(content, is_loading=is_loading, metadata=metadata)
    content["opt_param_scheduler"] = state.scheduler.state_dict()
    content["rng_state"] = _random_states(state.config, per_data_rank)
    return content


def _random_states(config: Any, per_data_rank: bool) -> Any:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [own]
    if config.training.data_parallel_random_init and parallel_state.get_data_parallel_world_size() > 1:
        states = [None] * parallel_state.get_data_parallel_world_size()
        torch.distributed.all_gather_object(states, own, group=parallel_state.get_data_parallel_group())
    pp, tp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    pp_size = parallel_state.get_pipeline_model_parallel_world_size()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    dp = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    dp_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if per_data_rank and parallel_state.get_expert_model_parallel_world_size() > 1:
        return ShardedObject("rng_state", states, (pp_size, tp_size, dp_size), (pp, tp, dp), replica_id=0)
    return ShardedObject("rng_state", states, (pp_size, tp_size), (pp, tp), replica_id=dp)


def _arguments(state: Any) -> argparse.Namespace:
    """The arguments as stock keeps them: its own names, among them objects that are neither numbers nor text."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope

    rank = torch.distributed.get_rank()
    shared = {name: value for name, value in vars(state.config.flat).items() if name not in _NOT_IN_STOCK}
    return argparse.Namespace(
        **shared
        | {
            "iteration": 0,
            "curr_iteration": state.progress.iteration,
            "consumed_train_samples": state.progress.consumed_train_samples,
            "consumed_valid_samples": state.progress.consumed_valid_samples,
            "rank": rank,
            "local_rank": rank,
            "attention_backend": AttnBackend.auto,
            "cuda_graph_scope": [CudaGraphScope.attn, CudaGraphScope.moe_router],
            "model_type": ModelType.encoder_or_decoder,
            "exit_signal": signal.SIGTERM,
            "params_dtype": torch.float32,
            "main_grads_dtype": torch.float32,
            "exp_avg_dtype": torch.bfloat16,
            "heterogeneous_layers_config_path": PosixPath("/somewhere/layers.json"),
            "no_load_optim": None,
            "no_load_rng": None,
            "num_floating_point_operations_so_far": 0,
            "spec": None,
            "rerun_mode": "validate_results",
        }
    )


def _rerun_state(iteration: int) -> dict[str, Any]:
    """The state of stock's search for faulty hardware in the middle of its work, when all of it is saved."""
    from megatron.core import rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.state = rerun_state_machine.RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.current_iteration = iteration
    content: dict[str, Any] = machine.state_dict(None, "torch_dist")
    assert content
    return content


def _without_ranks(common: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks."""
    common = copy.deepcopy(common)
    common["args"] = {name: value for name, value in vars(common["args"]).items() if name not in ("rank", "local_rank")}
    return common
