"""The places where the stock training loop is taken hold of: functions that `megatron.training.training` looks up by
name whenever it calls them, and the one of core with which its checkpoints are saved.

The loop has no callbacks. So while a protected `pretrain` runs, these names of that module stand for wrappers, and for
the originals again afterwards; no source is changed. Names may change from release to release. They are checked
before any of them is replaced: that each is there, comes from where core defines it, and takes the parameters that
the hooks read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron.core.datasets import utils

from ..core_versions.training import replaced
from ..errors import UsageError

TRAINING = "megatron.training.training"
"""The module that has the loop."""


@dataclass(frozen=True)
class Seam:
    """A function that the loop calls, and what the hook around it relies on.

    Attributes:
        name: In the namespace of the loop's module.
        parameters: Those that the hook reads.
        home: The module that defines it.
    """

    name: str
    parameters: tuple[str, ...] = ()
    home: str = TRAINING


_OBJECTS = "model", "optimizer", "opt_param_scheduler"
_CHECKPOINTED = *_OBJECTS, "checkpointing_context"
_DATA = "forward_step_func", "train_data_iterator", "valid_data_iterator"
_SAVES = "iteration", "model", "optimizer", "non_persistent_ckpt", "release"
_REDUCTIONS = "logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"

_SEAMS_0_19 = (
    Seam("setup_model_and_optimizer"),
    Seam("load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"), "megatron.training.checkpointing"),
    Seam("build_train_valid_test_data_iterators"),
    Seam("train", (*_DATA, "process_non_loss_data_func", "non_loss_data_func", "config", *_CHECKPOINTED)),
    Seam("train_step", ("data_iterator", "forward_backward_func", *_OBJECTS)),
    Seam("training_log", ("iteration", "report_memory_flag", "is_first_iteration")),
    Seam("post_training_step_callbacks", ("num_floating_point_operations_since_last_log_event",)),
    Seam("checkpoint_and_decide_exit", ("iteration", "num_floating_point_operations_so_far")),
    Seam("save_checkpoint_and_time", ("iteration", "non_persistent_ckpt")),
    Seam("save_checkpoint", _SAVES, "megatron.training.checkpointing"),
    Seam("enable_forward_pre_hook", ("model_chunks",)),
    Seam("check_param_hashes_across_dp_replicas", (), "megatron.core.utils"),
    Seam("save_grads", (), "megatron.training.checkpointing"),
    Seam("save_dgrads", (), "megatron.training.dgrad_logging"),
    Seam("_run_gpu_sniff_test"),
    Seam("update_pg_timeout", ("timeout",), "megatron.core.parallel_state"),
    *(Seam(name, (), "megatron.training.utils.common_utils") for name in _REDUCTIONS),
)
_SEAMS_0_17 = tuple(
    replace(seam, home="megatron.training.utils") if seam.name in _REDUCTIONS else seam
    for seam in _SEAMS_0_19
    if seam.name != "_run_gpu_sniff_test"
)

SEAMS: Mapping[str, tuple[Seam, ...]] = {"0.17": _SEAMS_0_17, "0.18": _SEAMS_0_19, "0.19": _SEAMS_0_19}
"""By release of Megatron-Core. Checked with 0.17.0, 0.17.1, 0.18.0, 0.18.2, 0.19.0 and 0.19.2."""


SAVING = "megatron.core.dist_checkpointing"
"""The module in which the loop's `save_checkpoint` and `load_checkpoint` look up core's `save` and `load`."""

_SAVED = "checkpoint_dir", "async_sharded_save", "async_strategy", "content_metadata"

_LOADED = "checkpoint_dir", "sharded_strategy", "strict"

SAVING_SEAMS: tuple[Seam, ...] = (
    Seam("save", _SAVED, f"{SAVING}.serialization"),
    Seam("load", _LOADED, f"{SAVING}.serialization"),
)
"""Of that module, in all these releases."""


def release_of(version: str) -> str:
    """`0.19` of `0.19.2`."""
    return ".".join(version.split(".")[:2])


def is_known(version: str) -> bool:
    """Whether the loop of this version of Megatron-Core was read, and tested with."""
    return release_of(version) in SEAMS


def seams_of(version: str) -> tuple[Seam, ...]:
    """Those of this version, or of the newest one that is known."""
    return SEAMS.get(release_of(version), SEAMS[max(SEAMS)])


class Call:
    """A call of a seam's function, on its way there.

    function: the original. arguments, options: as they were given.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._function, self._arguments, self._options = function, arguments, options

    def go_on(self) -> Any:
        """What the original returns."""
        return self._function(*self._arguments, **self._options)

    def instead(self, first: Any) -> Call:
        """This call with another first argument, which was given by its place or by its name."""
        if self._arguments:
            return Call(self._function, (first, *self._arguments[1:]), self._options)
        name = next(iter(inspect.signature(self._function).parameters))
        return Call(self._function, (), {**self._options, name: first})

    def replacing(self, **values: Any) -> Call:
        """This call with other values for these parameters, however they were given."""
        return Call(self._function, (), {**self._values, **values})

    def __getitem__(self, parameter: str) -> Any:
        """What was given for a parameter, by whatever way, or its default."""
        return self._values[parameter]

    def given(self, *parameters: str) -> dict[str, Any]:
        """What was given for those of these parameters that the function has."""
        return {name: self._values[name] for name in parameters if name in self._values}

    def given_otherwise(self, **options: Any) -> Any:
        """What the original returns for these arguments."""
        return self._function(**options)

    def everything(self) -> dict[str, Any]:
        """What was given for each parameter, or its default."""
        return dict(self._values)

    @property
    def first(self) -> Any:
        """What was given for the first parameter."""
        return next(iter(self._values.values()))

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        bound = inspect.signature(self._function).bind(*self._arguments, **self._options)
        bound.apply_defaults()
        return bound.arguments


Hook = Callable[[Call], Any]
"""Called in place of a seam's function; returns what that returns, which it gets by continuing with the call."""


@contextlib.contextmanager
def installed(
    loop: Any,
    hooks: Mapping[str, Hook],
    version: str,
    seams: tuple[Seam, ...] | None = None,
    *,
    is_on: Callable[[str], bool] = lambda name: True,
) -> Iterator[None]:
    """Call hooks around the functions of a module in this block.

    Args:
        loop: The module.
        hooks: By the names of seams.
        version: Of Megatron-Core.
        seams: Of the module; by default those of the loop of this version.
        is_on: Whether the hook of this name is to be called now, and not the original alone.

    Raises:
        UsageError: The loop is not as it was when the hooks were written, or somebody else wrapped a function first.
            Nothing is changed then.
    """
    seams = seams_of(version) if seams is None else seams
    check(loop, seams, version)
    originals = {seam.name: getattr(loop, seam.name) for seam in seams}
    wrappers = {name: _wrapper(original, hooks[name], partial(is_on, name)) for name, original in originals.items()}
    for name, wrapper in wrappers.items():
        setattr(loop, name, wrapper)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            # Who wrapped ours meanwhile keeps the wrapper, which from here on does nothing but call the original.
            wrapper.is_on = lambda: False
            if getattr(loop, name) is wrapper:
                setattr(loop, name, originals[name])


def check(loop: Any, seams: tuple[Seam, ...], version: str) -> None:
    """Look at the functions that are going to be wrapped.

    Args:
        loop: The module of the loop.
        seams: The functions, with the parameters that they need.
        version: The version of Megatron-Core, for the error.

    Raises:
        UsageError: Names the first function that is not as it should be.
    """
    for seam in seams:
        function = getattr(loop, seam.name, None)
        place = f"{loop.__name__}.{seam.name}"
        if function is None:
            raise UsageError(
                f"Megatron-Core {version} has no {place}, around which training is protected: {_WHAT_TO_DO}"
            )
        if not _is_original(function, seam):
            by = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
            raise UsageError(
                f"{place} was replaced by {by} before training is protected: call the protected `pretrain` first, and"
                " wrap that function later, or do without one of the two"
            )
        missing = [name for name in seam.parameters if name not in inspect.signature(function).parameters]
        if missing:
            raise UsageError(f"{place} of Megatron-Core {version} takes no {', '.join(missing)}: {_WHAT_TO_DO}")


_WHAT_TO_DO = f"use a release that is supported ({', '.join(SEAMS)}), or call `pretrain` unprotected"


def _is_original(function: Any, seam: Seam) -> bool:
    return (
        isinstance(function, FunctionType)
        and not hasattr(function, "__wrapped__")
        and function.__globals__["__name__"] == seam.home
    )


def _wrapper(original: Callable[..., Any], hook: Hook, is_on: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if wrapper.is_on():  # type: ignore[attr-defined]
            return hook(Call(original, arguments, options))
        return original(*arguments, **options)

    wrapper.is_on = is_on  # type: ignore[attr-defined]
    return wrapper


# What the wheels of Megatron-Core lack that its training loop wants.


@contextlib.contextmanager
def shipped_helpers() -> Iterator[None]:
    """Take the compiled helpers of datasets as they are, in this block, where they cannot be compiled.

    The loop runs `make` for them, but no wheel has the Makefile: the first rank would end there. The wheel has what
    would be made. Nothing changes where the sources are complete.
    """
    complete = (Path(utils.__file__).parent / "Makefile").exists()
    if complete or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(utils, compile_helpers=lambda: None):
        yield
