"""What frozen execution and the guard of a step rely on in Megatron-Core is what was read, in each release.

Where this fails, read what has changed, see whether `replay/patches.py`, `replay/execution.py`
and `local_recovery/step_guard.py` still hold, run
`tests/process/test_frozen_execution.py` and `tests/process/test_parking.py`, and only then take over the new digest. Of
Muon, combined passes, MXFP8 and offloading also `test_stock_muon.py`, `test_overlapped_experts.py`, `test_mxfp8.py` and
`test_offloaded_activations.py`.
A row has one digest for each release of `upstream.RELEASES`.
"""

from __future__ import annotations

import pytest
from upstream import digest_of, read_in_installed

READ = {
    "optimizer.optimizer": {
        "ChainedOptimizer.step": "7f8c72f2d721 75c16d153784 c2b301e02ec2",
        "ChainedOptimizer.prepare_grads": "423ada69590e = =",
        "ChainedOptimizer.step_with_ready_grads": "04df4b6dc3f1 a45e2d893360 =",
        "MegatronOptimizer.get_parameters": "acad4ca319a7 = =",
        "MixedPrecisionOptimizer.prepare_grads": "458b98bd6613 = =",
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "0cb7a5fb6d0d = =",
        "MixedPrecisionOptimizer.step_with_ready_grads": "f337fd56940a = 34fc101b433f",
        "Float16OptimizerWithFloat16Params": "340125cdca69 = cd618b0e6d07",
        "FP32Optimizer.prepare_grads": "b021619ca90c = =",
        "FP32Optimizer.step_with_ready_grads": "90ac3825f593 = =",
    },
    "optimizer.distrib_optimizer": {
        "DistributedOptimizer._build_model_and_main_param_groups": ("784788437ec2 891e288eda54 3fce9be2b6d1"),
        "DistributedOptimizer._collect_main_grad_data_for_unscaling": "6ced08817246 = =",
        "DistributedOptimizer._get_model_and_main_params_data_float16": "a62b5221c27b = =",
        "DistributedOptimizer._copy_model_grads_to_main_grads": "ffcdecd38d14 b14b52f057fb =",
        "DistributedOptimizer._copy_main_params_to_model_params": "00e6fe16e575 80e4f4d1fa99 =",
        "DistributedOptimizer._copy_main_params_to_param_buffer": "2acce8232678 19dcad922e51 c7b8e49b5285",
        "DistributedOptimizer.step_with_ready_grads": "4883dadbf822 2350cce9dd88 =",
        "DistributedOptimizer._get_fp8_params_and_shard_fp32_from_fp8": "40cc7378261a 9dca3c58949f f4cd16ac9716",
        "DistributedOptimizer.start_param_sync_for_bucket_group_subset": "gone 15960c4e9c55 =",
    },
    "optimizer.layer_wise_optimizer": {
        "LayerWiseDistributedOptimizer.step": "21457f01e760 75c16d153784 c2b301e02ec2",
        "LayerWiseDistributedOptimizer.step_with_ready_grads": "04df4b6dc3f1 0520cb352a3f =",
        "LayerWiseDistributedOptimizer.get_grad_norm": "492327dacd55 = 10b1f48a2f74",
        "LayerWiseDistributedOptimizer.has_grad_norm_group": "gone = eb409852451c",
        "LayerWiseDistributedOptimizer.allgather_params": "8a8f3d3d914a 27509e9be89d 1e318a95ce03",
        "LayerWiseDistributedOptimizer.start_param_sync_for_bucket_group_subset": "gone d17dc4129ed8 =",
    },
    "optimizer.muon": {
        "TensorParallelMuon": "b46f702741a2 gone =",
    },
    "optimizer.emerging_optimizers": {
        "TensorParallelMuon": "gone 80574860a22c 3c74f99ff75d",
    },
    "fp8_utils": {
        "quantize_param_shard": "c09ed55bb81c = =",
        "post_all_gather_processing": "f2bf9abc11cc = 8252919d497c",
    },
    "models.common.model_chunk_schedule_plan": {
        "TransformerLayerSchedulePlan.run": "6cd10e147f2f bab933c6c16c 6a09cc81f2fa",
        "TransformerModelChunkSchedulePlan.run": "66912b577401 6dedbd15e96a 75d8dae9c820",
    },
    "pipeline_parallel.combined_1f1b": {
        "combined_forward_backward_step": "fc58e7c5bc28 0960241d1211 c88509af0f94",
    },
    "pipeline_parallel.utils": {
        "ScheduleNode": "c8cb912f9252 3b5ce3e8d183 7a62dc8735f1",
    },
    "pipeline_parallel.fine_grained_activation_offload": {
        "PipelineOffloadManager": "59c7f974944a 0d7735bfdd23 1346a99ac849",
        "ChunkOffloadHandler": "9ea72e9cca6a 8e65682eb926 e9e877b80d95",
        "print_offload_summary_table": "4eaf7e818f5b = =",
    },
    "optimizer.clip_grads": {
        "clip_grad_by_total_norm_fp32": "90a7d6c8eb50 cf07b488fb76 =",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel": "6288aa5a3735 fc1074dee2ce 9330e58298a3",
    },
    "distributed.param_and_grad_buffer": {
        "_ParamAndGradBucketGroup": "542cdd9cf301 32dcdc0f0470 f68c669b1ed4",
    },
    "distributed.finalize_model_grads": {
        "finalize_model_grads": "8e8e2bb919cc 1ea6af88d1ec 36d18a1e1730",
        "_allreduce_non_tensor_model_parallel_grads": "591de3cbdd75 = =",
        "_allreduce_embedding_grad": "15b06e1ecb03 = =",
    },
    "pipeline_parallel.schedules": {
        "backward_step": "435628e2479e = =",
        "custom_backward": "134012de6fb7 = =",
        "deallocate_output_tensor": "ec45aab59f27 = =",
    },
    "tensor_parallel.layers": {
        "LinearWithFrozenWeight": "c57a6e02b2de = e6f48ab01ffa",
        "linear_with_frozen_weight": "aff75146310e = 49372bcbd385",
        "ColumnParallelLinear._forward_impl": "6042a461a2e6 = =",
        "RowParallelLinear._forward_impl": "6042a461a2e6 = =",
    },
    "tensor_parallel.random": {
        "CheckpointFunction": "17827ea9250b = =",
    },
    "full_cuda_graph": {
        "FullCudaGraphWrapper.__call__": "ee0208618121 993bf26cde20 5544118e3e0d",
    },
    "transformer.cuda_graphs": {
        "is_graph_capturing": "adf55c50038b = =",
        "CudaGraphManager.__call__": "7f13b3627dc5 b4b960f6dc0c 93b3b643c4c0",
        "TECudaGraphHelper.create_cudagraphs": "954798b3ed92 = =",
    },
    "transformer.module": {
        "GraphableMegatronModule._should_call_te_cudagraph": "d912708cb1b6 = =",
        "GraphableMegatronModule.__call__": "1794990ea948 = =",
    },
    "transformer.moe.moe_utils": {
        "RouterGatingLinearFunction": "a34180b771b4 = =",
        "router_gating_linear": "0f5202718b1c = =",
    },
    "transformer.moe.paged_stash": {
        "PagedStashRunner": "gone 1d27250bbaf9 =",
    },
    "transformer.moe.router": {
        "Router.gating": "642d0c2eb9ba = =",
        "TopKRouter.routing": "b13f6a7393c2 = e93abc48c2d9",
        "TopKRouter._apply_expert_bias": "f82dbc793f06 = =",
        "TopKRouter._apply_global_aux_loss": "8a2efd4cc0ce d0754632a4ab =",
    },
    "transformer.transformer_block": {
        "TransformerBlock.forward": "c1899653f7f3 e20defb813f6 =",
        "TransformerBlock._checkpointed_forward": "ccf2cfdf4669 gone =",
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in READ.items() for name in names])
def test_upstream_is_what_was_read(module: str, name: str) -> None:
    if name == "TensorParallelMuon":  # a class only where its package is there
        pytest.importorskip("emerging_optimizers")
    assert digest_of(module, name) == read_in_installed(READ[module][name])
