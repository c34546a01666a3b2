"""What the stock loop keeps in globals and in the model's configuration, where `train` is entered a second time.

`docs/internals/decisions/039-survivors-in-the-stock-loop.md` lists all of them, with those that stay as they are.
"""

from __future__ import annotations

from typing import Any

from megatron.core import rerun_state_machine as rerun
from megatron.core.utils import get_model_config

_SET_BY_TRAIN = (
    *("grad_scale_func", "timers", "no_sync_func", "grad_sync_func", "param_sync_func"),
    "finalize_model_grads_func",
)


class KeptGlobals:
    """As they are when the model is built, and `train` was not called yet.

    Args:
        loop: The module that has the loop.
        chunks: Of the model of this rank.
    """

    def __init__(self, loop: Any, chunks: Any) -> None:
        self._loop, self._chunks, self._config = loop, chunks, get_model_config(chunks[0])
        self._before = {name: getattr(self._config, name) for name in _SET_BY_TRAIN if hasattr(self._config, name)}

    def as_before_training(self) -> None:
        """Let `train` begin as it does in a process that was just built."""
        for name, value in self._before.items():
            setattr(self._config, name, value)
        for chunk in self._chunks:
            if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()
        for timer in self._loop.get_timers()._timers.values():
            timer.reset()  # one that runs cannot be started
        self._renew_rerun_machine()

    def _renew_rerun_machine(self) -> None:
        """It may be in the middle of an iteration, and has statistics of iterations that are run again."""
        args, old = self._loop.get_args(), rerun.get_rerun_state_machine()
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(
            state_save_func=old.state_save_func,
            state_restore_func=old.state_restore_func,
            mode=rerun.RerunMode(args.rerun_mode),
            error_injector=old.error_injector,
            result_rejected_tracker_filename=old.result_rejected_tracker_filename,
        )
