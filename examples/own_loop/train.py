"""A loop of one's own over Megatron-Core: a small GPT with experts learns to count; how to start it is in README.md."""

import os

import torch

if not torch.cuda.is_available():
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before anything of Megatron-Core: this example also runs where there is no GPU

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

ITERATIONS, SAMPLES, TOKENS, VOCABULARY = 12, 8, 32, 64

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_token_dispatcher_type="alltoall",
    moe_aux_loss_coeff=1e-2, expert_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
)  # fmt: skip
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
layers = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
model = GPTModel(config, layers, VOCABULARY, TOKENS, first, last, position_embedding_type="rope").cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, min_lr=0.0, use_distributed_optimizer=True), [model])
scheduler = OptimizerParamScheduler(
    optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=16, lr_decay_steps=96, lr_decay_style="cosine",
    start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
)  # fmt: skip
config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss


def samples_of(iteration):
    """This rank's samples of an iteration; each counts in steps of its own."""
    for step in range(parallel_state.get_data_parallel_rank(), SAMPLES, parallel_state.get_data_parallel_world_size()):
        yield (iteration + step * torch.arange(TOKENS + 1, device="cuda")).view(1, -1) % VOCABULARY


def forward_step(samples, model):
    sample = next(samples)
    output = model(sample[:, :-1], None, None, labels=sample[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def passes(iteration, **schedule):
    microbatches = SAMPLES // parallel_state.get_data_parallel_world_size()
    shape = {"num_microbatches": microbatches, "seq_length": TOKENS, "micro_batch_size": 1, "forward_only": False}
    work = {"forward_step_func": forward_step, "data_iterator": samples_of(iteration), "model": [model]}
    return get_forward_backward_func()(**work, **shape, **schedule)


def train_step(iteration):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = passes(iteration)
    _, norm, _ = optimizer.step()
    scheduler.step(increment=SAMPLES)
    rank, loss = torch.distributed.get_rank(), float(sum(each["loss"] for each in losses))
    print(f"rank {rank} iteration {iteration}: loss {loss.hex()} norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    for iteration in range(1, ITERATIONS + 1):
        train_step(iteration)
    torch.distributed.destroy_process_group()
