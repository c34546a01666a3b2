"""What every worker of a world has imported before it exists: the zygote imports this once and workers are forked."""

import gc
import os

from megatron.pretrain.testing import te_on_cpu

if os.environ["WORLD_WITH_TRANSFORMER_ENGINE"]:
    te_on_cpu.load()  # before Megatron-Core, which looks for it once

import torch._dynamo  # noqa: F401  # as any optimizer does when it is made

import pretrain_gpt_moe  # noqa: F401
from megatron.core.dist_checkpointing.moe import stock  # noqa: F401  # as the loop does for a job
from megatron.core.dist_checkpointing.moe.extensions import EXTENSIONS, load
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES
from megatron.pretrain import warm_up
from megatron.pretrain.testing import cpu_device

# Megatron-Core asks for its device while it is imported; the driver installs the mapping again for each job.
with cpu_device.installed():
    pass
warm_up.warm_up_flags(["--tokenizer-type", "NullTokenizer"])  # as small runs have it
_ = [*STRATEGIES.values(), *map(load, EXTENSIONS)]  # which a job imports when it asks for them

# What was imported stays: a collection in a worker need not look at it, and so does not copy the pages it shares.
gc.collect()
gc.freeze()
