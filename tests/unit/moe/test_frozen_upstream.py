"""What frozen execution and the guard of a step rely on in Megatron-Core is what was read when they were written.

Where this fails, read what has changed, see whether `replay/patches.py`, `replay/gradient_flow.py`,
`local_recovery/step_guard.py` and `local_recovery/gradients.py` still hold, run
`tests/process/test_frozen_execution.py` and `tests/process/test_parking.py`, and only then take over the new digest.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from operator import attrgetter

import pytest

READ = {
    "optimizer.optimizer": {
        "ChainedOptimizer.step": "7f8c72f2d721",
        "ChainedOptimizer.prepare_grads": "423ada69590e",
        "ChainedOptimizer.step_with_ready_grads": "04df4b6dc3f1",
        "MegatronOptimizer.get_parameters": "acad4ca319a7",
        "MixedPrecisionOptimizer.prepare_grads": "458b98bd6613",
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "0cb7a5fb6d0d",
        "MixedPrecisionOptimizer.step_with_ready_grads": "f337fd56940a",
        "Float16OptimizerWithFloat16Params": "340125cdca69",
        "FP32Optimizer.prepare_grads": "b021619ca90c",
        "FP32Optimizer.step_with_ready_grads": "90ac3825f593",
    },
    "optimizer.distrib_optimizer": {
        "DistributedOptimizer._build_model_and_main_param_groups": "1b9f0ec06718",
        "DistributedOptimizer._collect_main_grad_data_for_unscaling": "6ced08817246",
        "DistributedOptimizer._get_model_and_main_params_data_float16": "a62b5221c27b",
        "DistributedOptimizer._copy_model_grads_to_main_grads": "ffcdecd38d14",
        "DistributedOptimizer._copy_main_params_to_model_params": "b92274c3f2e1",
        "DistributedOptimizer.step_with_ready_grads": "4883dadbf822",
    },
    "optimizer.clip_grads": {
        "clip_grad_by_total_norm_fp32": "8edb9da53650",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel": "f5d5b254272e",
    },
    "distributed.param_and_grad_buffer": {
        "_ParamAndGradBucketGroup": "1e751a925a09",
    },
    "distributed.finalize_model_grads": {
        "finalize_model_grads": "8e8e2bb919cc",
        "_allreduce_non_tensor_model_parallel_grads": "591de3cbdd75",
        "_allreduce_embedding_grad": "15b06e1ecb03",
    },
    "pipeline_parallel.schedules": {
        "backward_step": "6ac4aa596b1b",
        "custom_backward": "134012de6fb7",
        "deallocate_output_tensor": "13903f30b90c",
    },
    "tensor_parallel.layers": {
        "LinearWithFrozenWeight": "c57a6e02b2de",
        "linear_with_frozen_weight": "466ca2325cc8",
        "ColumnParallelLinear._forward_impl": "6042a461a2e6",
        "RowParallelLinear._forward_impl": "6042a461a2e6",
    },
    "tensor_parallel.random": {
        "CheckpointFunction": "c3a2dcbe8e21",
    },
    "transformer.moe.moe_utils": {
        "RouterGatingLinearFunction": "a34180b771b4",
        "router_gating_linear": "0f5202718b1c",
    },
    "transformer.moe.router": {
        "Router.gating": "642d0c2eb9ba",
        "TopKRouter.routing": "b13f6a7393c2",
        "TopKRouter._apply_expert_bias": "f82dbc793f06",
        "TopKRouter._apply_global_aux_loss": "8a2efd4cc0ce",
    },
    "transformer.transformer_block": {
        "TransformerBlock.forward": "f72b6c393aa4",
        "TransformerBlock._checkpointed_forward": "60ffb595d0d1",
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in READ.items() for name in names])
def test_upstream_is_what_was_read(module: str, name: str) -> None:
    source = inspect.getsource(attrgetter(name)(importlib.import_module(f"megatron.core.{module}")))
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == READ[module][name]
