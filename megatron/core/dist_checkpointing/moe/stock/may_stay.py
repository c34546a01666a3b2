"""Jobs in the stock loop whose processes cannot outlive a fault of others: all start anew, from standbys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..in_place.kept_process import needs_fresh_process
from .seams import release_of

RELEASES = ("0.19",)
"""Of Megatron-Core, with which processes were seen to stay: what its loop keeps differs between releases."""

_HELD = "holds process groups of the lost connections"
_TWICE = "cannot be set up twice in a process"

_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("async_save", bool, f"its queue of checkpoints {_HELD}"),
    ("non_persistent_ckpt_type", lambda kind: kind == "local", f"its manager {_HELD}"),
    ("enable_ft_package", bool, "its monitor takes a rank that waits for a hung one"),
    ("log_straggler", bool, f"its detector {_TWICE}"),
    ("profile", bool, f"a profile {_TWICE}"),
    ("moe_routing_trace_path", bool, f"its tracer {_TWICE}"),
    ("run_workload_inspector_server", bool, f"its server {_TWICE}"),
    ("lazy_mpu_init", bool, "groups are then made by somebody else"),
)


def why_not(args: Any, version: str, *, is_started_by_script: bool = False) -> str | None:
    """Why processes of this job cannot stay, None where they can.

    args: of Megatron-LM. is_started_by_script: whether torch.distributed was started before `pretrain`, by nobody who
    could be asked to start it again.
    """
    if release_of(version) not in RELEASES:
        return f"Megatron-Core {version} was never tested with: known are {', '.join(RELEASES)}"
    if is_started_by_script:
        return (
            "torch.distributed was started before `pretrain`; give `stock.protected(pretrain, connect=...)` what"
            " starts it"
        )
    for name, applies, reason in _RULES:
        value = getattr(args, name, None)
        if value is not None and applies(value):
            shown = "" if value is True else f" {value}"
            return f"--{name.replace('_', '-')}{shown}: {reason}"
    return needs_fresh_process(args)
