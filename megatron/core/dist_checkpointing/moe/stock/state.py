"""What the stock loop counts, beside what model, optimizer and scheduler hold: progress in samples and iterations."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..ports import Json

_COUNTS = "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"
_OPERATIONS = "num_floating_point_operations_so_far"
_EVALUATED = "evaluated_iteration"
_FLAGS = "flags"
_COMMAND = "command"


class StockCounts:
    """The `LoopState` of the stock loop: the counts in its `args`, as they stand after the newest whole iteration.

    The loop adds to some of them only a while after the optimizer's step. What is to come until then is added here, so
    that a state that is put aside in between is whole.

    Args:
        args: Of Megatron-LM, which the loop reads them from when it starts.
        loop: The module that has the loop.
        flags: Those that shape an iteration, as they were given: the loop changes some in `args` while it trains.

    Attributes:
        evaluated: The newest iteration behind which the evaluation lies, if one was due.
        recorded_flags: Of the start that made what was restored last, those that shape an iteration; None before.
    """

    def __init__(self, args: Any, loop: Any, flags: dict[str, Json]) -> None:
        self._args, self._loop = args, loop
        self._operations: int | float = getattr(args, _OPERATIONS, 0)
        self._samples_to_come = 0
        self._flags = flags
        self._command: dict[str, Json] = {"flags": [*sys.argv[1:]], "folder": os.getcwd()}  # for `moe-ckpt convert`
        self.evaluated = int(getattr(args, "iteration", 0))
        self.recorded_flags: dict[str, Any] | None = None

    @property
    def operations(self) -> int | float:
        """Floating-point operations up to the newest whole iteration."""
        return self._operations

    @property
    def validated(self) -> int:
        """Samples that evaluations have read."""
        return int(self._args.consumed_valid_samples)

    def stepped(self, samples: int) -> None:
        """The step of an iteration was made; the loop has yet to add its samples."""
        self._samples_to_come = samples
        self._operations += self._loop.num_floating_point_operations(self._args, samples)

    def counted(self, operations: float | None = None) -> None:
        """The loop has added them; operations: what it has counted up to now, where that is known."""
        self._samples_to_come = 0
        if operations is not None:
            self._operations = operations

    def evaluate_from(self, iteration: int, validated: int) -> None:
        """Evaluations are done up to that of an iteration.

        Args:
            iteration: The iteration that was evaluated last.
            validated: The samples that all evaluations have read.
        """
        self.evaluated, self._args.consumed_valid_samples = iteration, validated

    def state_dict(self) -> dict[str, Json]:
        """As `LoopState.state_dict`."""
        counts: dict[str, Json] = {name: getattr(self._args, name, 0) for name in _COUNTS}
        counts["consumed_train_samples"] = self._args.consumed_train_samples + self._samples_to_come
        # As text: there are soon more of them than 64 bits take.
        counts |= {_OPERATIONS: repr(self._operations), _EVALUATED: self.evaluated}
        return counts | {_FLAGS: self._flags, _COMMAND: self._command}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """As `LoopState.load_state_dict`: let the loop start, or continue, from these counts."""
        for name in _COUNTS:
            setattr(self._args, name, values[name])
        self._args.iteration = values["iteration"]
        self._operations = _number(values[_OPERATIONS])
        setattr(self._args, _OPERATIONS, self._operations)
        self._samples_to_come = 0
        self.evaluated, self.recorded_flags = values[_EVALUATED], values[_FLAGS]
        self._loop.update_num_microbatches(self._args.consumed_train_samples, consistency_check=False)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
