"""`pretrain_gpt_moe.py` that leaves all experts as they are: what is not theirs is trained. Takes the same flags."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_module_registration_hook

sys.path.insert(0, str(Path(__file__).parents[2]))

from pretrain_gpt_moe import main


def freeze_experts(_layer: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    """Keep the experts of an MoE layer from being trained, as they become part of it.

    It has to be before Megatron-Core lays out gradients and the optimizer's state, which it does for what is trained.
    """
    if name == "experts" and part is not None:
        part.requires_grad_(False)


if __name__ == "__main__":
    register_module_module_registration_hook(freeze_experts)
    sys.exit(main(sys.argv[1:]))
