"""The loop of `train.py`, protected at every iteration: `diff train.py protected.py` shows what was added."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before anything of Megatron-Core: this example also runs where there is no GPU

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, MoECheckpointManager
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

ITERATIONS, SAMPLES, TOKENS, VOCABULARY, STAGES, EXPERT_GROUPS = 12, 8, 32, 64, 2, 2


def build() -> tuple[Any, Any, Any]:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, expert_model_parallel_size=EXPERT_GROUPS
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2,
        moe_aux_loss_coeff=1e-2, moe_token_dispatcher_type="alltoall", pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32, expert_model_parallel_size=EXPERT_GROUPS, add_bias_linear=False,
        attention_dropout=0.1,
    )  # fmt: skip
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    model = GPTModel(config, spec, VOCABULARY, TOKENS, pre_process=first, post_process=last)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model.cuda())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, min_lr=0.0, use_distributed_optimizer=True), [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2 * SAMPLES, lr_decay_steps=12 * SAMPLES,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return model, optimizer, scheduler


def forward_step(samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    numbers = next(samples).cuda()
    positions = torch.arange(TOKENS, device=numbers.device).expand(1, -1)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=numbers.device).triu(1)
    output = model(numbers[:, :-1], positions, mask, labels=numbers[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def samples_of(iteration: int) -> Iterator[torch.Tensor]:
    """This rank's samples of an iteration: each number is the sum of the two before it."""
    ranks = parallel_state.get_data_parallel_world_size()
    for at in range(parallel_state.get_data_parallel_rank(), SAMPLES, ranks):
        numbers = [iteration % VOCABULARY, at]
        while len(numbers) <= TOKENS:
            numbers.append((numbers[-1] + numbers[-2]) % VOCABULARY)
        yield torch.tensor([numbers])


def passes(iteration: int, model: Any, **schedule: Any) -> float:
    """Forward and backward passes; the mean loss of this rank's samples, 0 off the last stage."""
    microbatches = SAMPLES // parallel_state.get_data_parallel_world_size()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=samples_of(iteration), model=[model], forward_only=False,
        num_microbatches=microbatches, seq_length=TOKENS, micro_batch_size=1, **schedule,
    )  # fmt: skip
    return sum(float(part["loss"]) for part in losses) / microbatches


def train_step(iteration: int, model: Any, optimizer: Any, scheduler: Any, manager: MoECheckpointManager) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    with manager.forward_backward():
        loss = passes(iteration, model, p2p_communicator=manager.communicator, pg_collection=manager.process_groups)
    _, norm, _ = optimizer.step()
    scheduler.step(increment=SAMPLES)
    print(f"rank {os.environ['RANK']} iteration {iteration}: loss {loss.hex()} norm {float(norm).hex()}", flush=True)


def main() -> None:
    model, optimizer, scheduler = build()
    config = MoECheckpointConfig.from_argv(sys.argv[1:])  # such as --moe-ckpt-strategy sparse
    sizes = {"global_batch_size": SAMPLES, "micro_batch_size": 1, "seq_length": TOKENS}
    manager = MoECheckpointManager(model, optimizer, scheduler, config, train_iters=ITERATIONS, **sizes)
    with manager.run():
        manager.resume()
        for iteration in manager.iterations():
            train_step(iteration, model, optimizer, scheduler, manager)
            manager.after_step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
