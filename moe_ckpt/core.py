"""`moe_ckpt.core`: another name for `megatron.core.dist_checkpointing.moe`, and the same modules.

    from moe_ckpt.core import MoECheckpointManager, stock

Python finds it beside any Megatron: also where a source tree on PYTHONPATH, or an image, has a `megatron.core` of its
own, which hides packages of other distributions below it. No hook has to run when Python starts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING

import moe_ckpt_finder  # noqa: F401

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.moe import LoopState as LoopState
    from megatron.core.dist_checkpointing.moe import Milestone as Milestone
    from megatron.core.dist_checkpointing.moe import MoECheckpointConfig as MoECheckpointConfig
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager as MoECheckpointManager
    from megatron.core.dist_checkpointing.moe import PreviousWindow as PreviousWindow
    from megatron.core.dist_checkpointing.moe import ProcessInfo as ProcessInfo
    from megatron.core.dist_checkpointing.moe import ProtectionReport as ProtectionReport
    from megatron.core.dist_checkpointing.moe import StepJournal as StepJournal
    from megatron.core.dist_checkpointing.moe import Timestamps as Timestamps
    from megatron.core.dist_checkpointing.moe import WaitReport as WaitReport
    from megatron.core.dist_checkpointing.moe import errors as errors
    from megatron.core.dist_checkpointing.moe import is_lost_peer as is_lost_peer
    from megatron.core.dist_checkpointing.moe import set_for_parking as set_for_parking
    from megatron.core.dist_checkpointing.moe import stock as stock
    from megatron.core.dist_checkpointing.moe import wait_for_rank as wait_for_rank

ENGINE = "megatron.core.dist_checkpointing.moe"


class _SameModules(MetaPathFinder, Loader):
    """Gives `moe_ckpt.core.NAME` the module of the engine with that name, so that no class is there twice."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(ENGINE + spec.name.removeprefix(__name__))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _SameModules())
sys.modules[__name__] = import_module(ENGINE)
