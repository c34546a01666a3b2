"""Lets Transformer Engine's own Python train on the CPU, with stand-ins for its kernels.

Transformer Engine is two things: Python (modules, `FusedAdam`, `Float8Tensor`, recipes), which the wheel
`transformer-engine` holds by itself, and compiled code, which needs a GPU, behind the module
`transformer_engine_torch`. Here the first is the real one, unchanged, and the second is made of torch's operators
(`kernels`). With it Megatron-Core takes the way that it takes on GPUs: grouped experts, fused norms and linear layers,
`FusedAdam`. What the kernels compute is meant as on a GPU; the last bits differ, as sums are taken in another order.

    wheel      where the wheel's Python lies, apart from site-packages: a process that does not ask never sees it
    absent     in place of what Transformer Engine imports and training never uses
    module     `transformer_engine_torch`: enumerations, kernels, and a line for each kernel that is missing here
    kernels    norms, matrix products, optimizers, casts to eight bits

What it asks of a CUDA device is in `cpu_device`. `load()` comes before Megatron-Core is imported, which looks for
Transformer Engine then and never again; the driver calls it where the flags are `--device cpu --transformer-impl
transformer_engine`.
"""

from megatron.pretrain.testing.te_on_cpu.loading import is_loaded, load
from megatron.pretrain.testing.te_on_cpu.wheel import MissingWheel, find

__all__ = ["MissingWheel", "find", "is_loaded", "load"]
