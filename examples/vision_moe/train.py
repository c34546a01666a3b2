"""An image classifier in stages with experts, as SwinV2-MoE is, learns to tell patterns apart, and is protected.

Its modules are Megatron-Core's vision encoder, transformer block and MoE layers, and some of torch.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

if not torch.cuda.is_available():
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before anything of Megatron-Core: this example also runs where there is no GPU

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, MoECheckpointManager, set_for_parking
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

PIXELS, PATCH, CLASSES = 16, 4, 10
PATCHES = (PIXELS // PATCH) ** 2


@dataclass(frozen=True)
class Amounts:
    """How much is trained: images of an iteration, on all ranks, and of a microbatch; experts of a layer."""

    iterations: int = 12
    images: int = 8
    micro_batch: int = 1
    experts: int = 4
    seed: int = 1


type Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Images [b, 3, 16, 16] and their labels [b]."""


class StagedVisionMoE(MegatronModule):
    """Images [b, 3, 16, 16] to logits [b, 10].

    Two layers on 4 x 4 patches, the second one with experts; then each 2 x 2 patches are merged, as Swin does between
    stages, and a layer with experts of twice the width follows. Patches attend to all others, not in windows.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        wide = replace(config, hidden_size=2 * config.hidden_size, ffn_hidden_size=None, num_layers=1, kv_channels=None)
        self.patches = CLIPViTModel(
            config, _layers(None, config.num_moe_experts), WrappedTorchNorm, WrappedTorchNorm,
            add_class_token=False, class_token_len=0, patch_dim=PATCH, img_h=PIXELS, img_w=PIXELS,
        )  # fmt: skip
        self.merge = torch.nn.Linear(4 * config.hidden_size, wide.hidden_size, bias=False)
        self.stage = TransformerBlock(wide, _layers(config.num_moe_experts), post_layer_norm=True)
        self.classify = torch.nn.Linear(wide.hidden_size, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches, side = self.patches(images), PIXELS // PATCH
        squares = patches.view(len(images), side // 2, 2, side // 2, 2, -1).permute(1, 3, 0, 2, 4, 5)
        merged = self.merge(squares.reshape(side * side // 4, len(images), -1))
        logits: torch.Tensor = self.classify(self.stage(merged, None).mean(dim=0))
        return logits

    def set_input_tensor(self, input_tensor: torch.Tensor) -> None:
        """There is no pipeline stage before this one."""


def _layers(*experts: int | None) -> TransformerBlockSubmodules:
    """A layer for each entry, which says how many experts it has, in which patches attend to all others."""
    specs = [get_gpt_layer_local_spec(num_experts=number, moe_grouped_gemm=False) for number in experts]
    for spec in specs:
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return TransformerBlockSubmodules(specs, WrappedTorchNorm)


def stripes(iteration: int, recipe: Amounts) -> Batches:
    """This rank's images of an iteration: stripes of as many directions as there are classes."""
    grid = torch.arange(PIXELS, dtype=torch.float32)
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for image in range(first, recipe.images, step):
        label = (iteration + 3 * image) % CLASSES
        stripes = torch.sin(label * grid[:, None] + image * grid[None, :])
        yield stripes.expand(1, 3, PIXELS, PIXELS).cuda(), torch.tensor([label]).cuda()


def forward_step(images, model):
    image, label = next(images)
    loss = torch.nn.functional.cross_entropy(model(image), label)
    return loss, lambda value: (value, {"loss": value.detach()})


def train_step(model, optimizer, scheduler, manager, iteration, recipe, batches):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    own = recipe.images // parallel_state.get_data_parallel_world_size()
    shape = {"num_microbatches": own // recipe.micro_batch, "micro_batch_size": recipe.micro_batch}
    with manager.forward_backward():
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches(iteration, recipe), model=[model], **shape,
            seq_length=PATCHES, forward_only=False, pg_collection=manager.process_groups,
            p2p_communicator=manager.communicator,
        )  # fmt: skip
    _, norm, _ = optimizer.step()
    scheduler.step(increment=recipe.images)
    rank, loss = torch.distributed.get_rank(), float(sum(each["loss"] for each in losses))
    print(f"rank {rank} iteration {iteration}: loss {loss.hex()} norm {float(norm).hex()}", flush=True)
    return loss


def train(
    argv: list[str],
    recipe: Amounts = Amounts(),
    batches: Callable[[int, Amounts], Batches] = stripes,
    changed: Callable[[torch.nn.Module], None] = lambda model: None,
) -> torch.nn.Module:
    """The model after its last iteration. changed: gets it before the first one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        set_for_parking("nccl")
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)  # layers of torch draw their weights from here, on all ranks alike
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=recipe.experts, add_bias_linear=False,
        moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=1e-2, expert_model_parallel_size=2,
    )  # fmt: skip
    model = StagedVisionMoE(config).cuda()
    changed(model)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, min_lr=0.0, use_distributed_optimizer=True), [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2 * recipe.images, start_wd=0.1, end_wd=0.1,
        lr_decay_steps=recipe.iterations * recipe.images, lr_decay_style="cosine", wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    sizes = {"train_iters": recipe.iterations, "global_batch_size": recipe.images}
    sizes |= {"micro_batch_size": recipe.micro_batch, "seq_length": PATCHES}
    manager = MoECheckpointManager(model, optimizer, scheduler, MoECheckpointConfig.from_argv(argv), **sizes)
    with manager.run():
        manager.resume()
        for iteration in manager.iterations():
            manager.after_step(train_step(model, optimizer, scheduler, manager, iteration, recipe, batches))
    return model


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    train(sys.argv[1:])
    torch.distributed.destroy_process_group()
