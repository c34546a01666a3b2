"""The table: which attributes of torch and Megatron-Core are replaced, by what, and why."""

from __future__ import annotations

import functools

from megatron.pretrain.testing.cpu_device import collectives, tensors
from megatron.pretrain.testing.cpu_device.attention import latent_attention
from megatron.pretrain.testing.cpu_device.patch import ABSENT, Patch, always, eager, just
from megatron.pretrain.testing.cpu_device.random_numbers import DeviceGenerators, TorchWithoutHostRng, call_at_once
from megatron.pretrain.testing.cpu_device.streams import CpuEvent, CpuStream, no_stream_context

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like"),
)

_COMPILER = (
    Patch("torch", "compile", eager, "fusions would need a C++ compiler and minutes, and the compiler seconds to load"),
)

_DEVICE = (
    Patch("torch.cuda", "is_available", always(False), "no CUDA path is taken, on a machine with a GPU too"),
    Patch("torch.cuda", "current_device", always(tensors.CPU), "is passed on as `device=` everywhere"),
    Patch("torch.cuda", "synchronize", always(None), "timers, p2p and checkpoints wait for the device"),
)

_STREAMS = (
    Patch("torch.cuda", "Stream", just(CpuStream), "dispatcher, shared experts and DDP make side streams"),
    Patch("torch.cuda", "Event", just(CpuEvent), "overlap and timing code records events"),
    Patch("torch.cuda", "stream", no_stream_context, "side streams are entered as contexts"),
    Patch("torch.cuda", "current_stream", always(CpuStream()), "side streams wait for it"),
    Patch("torch.cuda", "default_stream", always(CpuStream()), "DDP's communication stream waits for it"),
    Patch("torch.cuda", "is_current_stream_capturing", always(False), "there are no CUDA graphs"),
    Patch("torch:Tensor", "record_stream", always(None), "memory is not reused before the program says so"),
    Patch("torch.cuda.nvtx", "range_push", always(0), "NVTX ranges raise without a CUDA build"),
    Patch("torch.cuda.nvtx", "range_pop", always(0), "NVTX ranges raise without a CUDA build"),
    Patch("torch.cuda", "reset_peak_memory_stats", always(None), "raises without CUDA, where other counters are 0"),
)

_RANDOM = (
    Patch("torch.cuda", "default_generators", just(DeviceGenerators()), "CPU kernels draw from this generator"),
    Patch("torch.cuda.random", "current_device", always(0), "imported by name: index of the device's generator"),
    Patch("torch.cuda.random", "device_count", always(1), "imported by name: number of generators to save and seed"),
    Patch("torch.cuda.random", "_lazy_init", always(None), "there is no CUDA context to make"),
    Patch("torch.cuda.random", "_lazy_call", call_at_once, "seeds and states are set now, not once CUDA is there"),
    Patch("megatron.core.tensor_parallel.random", "_lazy_call", call_at_once, "imported by name"),
    Patch(
        "megatron.core.tensor_parallel.random",
        "torch",
        just(TorchWithoutHostRng()),
        "`fork` warns when the host's random state moves, and here the device's is the same one",
    ),
)

_TENSORS = (
    *(Patch("torch", name, tensors.factory, '`device="cuda"` literals and pinned memory') for name in _FACTORIES),
    Patch("torch:Tensor", "to", tensors.to, '`device="cuda"` literals'),
    Patch("torch:Tensor", "cuda", tensors.cuda, "tensors are on the device already"),
    Patch("torch:Tensor", "pin_memory", tensors.pin_memory, "a copy: what is pinned is freed on the device after it"),
    Patch("torch:Tensor", "type", tensors.type_, "optimizers compare it with 'torch.cuda.FloatTensor' and the like"),
)

_MEGATRON = (
    Patch(
        "megatron.core.dist_checkpointing.mapping:ShardedTensor",
        "init_data",
        tensors.init_data,
        'its default is the function that makes tensors as it was when core was imported, and is given `device="cuda"`',
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: None if original is ABSENT else original,
        "an undefined name without Transformer Engine, asked for by the router",
        may_be_absent=True,
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        collectives.splits_as_integers,
        "leaves what is not on a GPU a tensor, and all-to-all takes integers as split sizes",
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        collectives.gather_uneven,
        "gloo gathers equal sizes only; expert tensor parallelism gathers as many tokens as each rank has",
    ),
    Patch(
        "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer",
        "allgather_params",
        lambda _: lambda optimizer: optimizer.broadcast_params(),
        "gloo gathers equal sizes only; core keeps this for comparison",
    ),
)

_GLOO = (
    Patch(
        "torch.distributed:ProcessGroupGloo",
        "__init__",
        collectives.one_thread,
        "the two threads of a group write the name of the last collective without a lock, and free the same memory "
        "twice where it is a long one, as that of the distributed optimizer's gather of parameters is",
    ),
)

PATCHES: tuple[Patch, ...] = (*_COMPILER, *_DEVICE, *_STREAMS, *_RANDOM, *_TENSORS, *_MEGATRON, *_GLOO)
"""Everything that `install()` replaces, in order: the compiler before Megatron-Core is imported for the first time."""

LOOP_PATCHES: tuple[Patch, ...] = (
    Patch("torch.cuda", "device_count", always(1), "groups and seeds are set up only where a device is counted"),
    Patch(
        "megatron.training.training",
        "initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "else it asks for CUDA first of all",
    ),
    Patch(
        "megatron.training.arguments",
        "get_device_arch_version",
        always(10),
        "imported by name: tensor parallelism asks for it, and up to 9 for CUDA_DEVICE_MAX_CONNECTIONS too",
        may_be_absent=True,
    ),
    Patch("torch.cuda", "get_device_capability", always((9, 0)), "grouped GEMM is accepted from 8 on"),
    Patch(
        "megatron.core.models.backends:LocalSpecProvider",
        "core_attention",
        latent_attention,
        "core's own attention computes with the head sizes of MLA, but takes no parameters for them",
    ),
)
"""Then what the training loop of Megatron-LM needs. The process group has to be there before it starts."""
