"""What the stock loop leaves out while it runs iterations again.

Nothing is evaluated, logged or saved then, and of what the loop sets up in its first iteration, that waits which a
replay has taken out. Where only some stages of the pipeline replay, the others wait and answer no collective.
"""

from __future__ import annotations

from typing import Any

from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from .seams import Call

_LEFT_OUT = "do_valid", "log_params_norm"
"""What `args` asks for in each iteration, beside its logging: both have collectives over all ranks."""


class Quiet:
    """Sequence: `begin` before the first replayed iteration; `end` and `go_on` when all ranks stand at one iteration.

    loop: the module that has the loop. manager: of checkpoints.
    """

    def __init__(self, loop: Any, manager: Any) -> None:
        self._args, self._manager = loop.get_args(), manager
        self._asked: dict[str, bool] = {}
        self._mode: RerunMode | None = None
        self._put_off: Call | None = None

    def begin(self) -> None:
        """From here on iterations are run again."""
        for name in _LEFT_OUT:
            self._asked[name] = getattr(self._args, name, False)
            setattr(self._args, name, False)
        if self._manager.replays_alone:
            # Its verdict is a sum over all ranks. What it looks for would show in the loss, which is compared.
            machine = get_rerun_state_machine()
            self._mode = machine.get_mode()
            machine.set_mode(RerunMode.DISABLED)

    def end(self) -> None:
        """What `args` asks for is as it was; does nothing where nothing was replayed."""
        for name, asked in self._asked.items():
            setattr(self._args, name, asked)
        self._asked = {}
        if self._mode is not None:
            get_rerun_state_machine().set_mode(self._mode)
            self._mode = None

    def go_on(self) -> None:
        """Go on with the call that was put off, if any."""
        if self._put_off is not None:
            call, self._put_off = self._put_off, None
            call.go_on()
            _align_gathers(call["model_chunks"], self._args)

    def later(self, call: Call) -> None:
        """Put a call off until the replay has ended."""
        self._put_off = call

    def forget_losses(self) -> None:
        """What a replayed iteration adds to the auxiliary losses that are reported."""
        clear_aux_losses_tracker()


def _align_gathers(chunks: Any, args: Any) -> None:
    """As the loop does where it enables the hooks that gather parameters."""
    if args.overlap_param_gather and args.align_param_gather:
        from megatron.core.utils import get_model_config

        functions = [chunk.start_param_sync for chunk in chunks]
        get_model_config(chunks[0]).param_sync_func = functions[0] if len(functions) == 1 else functions
