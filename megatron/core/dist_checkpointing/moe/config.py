"""Frozen dataclasses as the one source of flags, defaults and help, and the configuration of the subsystem."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """How one dataclass field appears on the command line."""

    help: str
    name: str | None = None
    choices: Sequence[Any] | None = None
    metavar: str | None = None
    repeatable: bool = False
    minimum: float | None = None


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
    repeatable: bool = False,
    minimum: float | None = None,
) -> Any:
    """Declare a dataclass field that is also a command line flag.

    A field that is True by default gets `--no-FIELD`. A tuple field takes several values after one flag.

    Args:
        default: Of the field, and of the flag.
        help: What `--help` says.
        name: Overrides the flag's spelling.
        choices: The values that are allowed; None: all of the field's type.
        metavar: What stands for the value in `--help`.
        repeatable: Whether a tuple field takes one value per occurrence of the flag.
        minimum: The least number that is allowed, judged by `out_of_range`.
    """
    about = Flag(help, name, tuple(choices) if choices else None, metavar, repeatable, minimum)
    return dataclasses.field(default=default, metadata={"flag": about})


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    title: str,
    prefix: str = "",
    choices: Mapping[str, Sequence[Any]] = types.MappingProxyType({}),
) -> None:
    """Add one argument group with a flag for each `flag` field of a dataclass.

    Args:
        parser: Gets the group.
        config: The dataclass.
        title: Of the group.
        prefix: Of each flag, behind its dashes.
        choices: Of fields, by name, that this module cannot know.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        about: Flag | None = field.metadata.get("flag")
        if about is not None:
            about = dataclasses.replace(about, choices=choices.get(field.name, about.choices))
            options = _argument_options(field, about, hints[field.name])
            group.add_argument(flag_name(field, prefix), dest=_destination(field.name, prefix), **options)


def from_namespace[Config](config: type[Config], namespace: argparse.Namespace, prefix: str = "") -> Config:
    """Build a dataclass from the values that its flags got on the command line.

    Args:
        config: The dataclass.
        namespace: What the parser gave.
        prefix: Of its flags, as of `add_flags`.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if "flag" in field.metadata:
            value = getattr(namespace, _destination(field.name, prefix))
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**values)


def out_of_range(config: Any, prefix: str = "") -> Iterator[str]:
    """A sentence for each number of a configuration that is below its flag's minimum, or not finite.

    Args:
        config: An instance of a dataclass with `flag` fields.
        prefix: Of its flags, as of `add_flags`.
    """
    for field in dataclasses.fields(config):
        about: Flag | None = field.metadata.get("flag")
        values = getattr(config, field.name)
        for value in values if isinstance(values, tuple) else (values,):
            if about is None or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                yield f"{flag_name(field, prefix)} {value} is not a finite number"
            if about.minimum is not None and value < about.minimum:
                yield f"{flag_name(field, prefix)} {value} must be at least {about.minimum}"


def flag_name(field: dataclasses.Field[Any], prefix: str = "") -> str:
    """The flag of a dataclass field as a user types it, such as `--no-mmap-bin-files`.

    Args:
        field: Declared by `flag`.
        prefix: As of `add_flags`.
    """
    about: Flag = field.metadata["flag"]
    if about.name:
        return about.name
    negation = "no-" if field.default is True else ""
    return f"--{negation}{prefix}{field.name.replace('_', '-')}"


def _destination(name: str, prefix: str) -> str:
    return f"{prefix.replace('-', '_')}{name}"


def _argument_options(field: dataclasses.Field[Any], about: Flag, hint: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"help": about.help, "default": field.default}
    kind, several = _value_type(hint)
    if kind is bool:
        options["action"] = "store_false" if field.default is True else "store_true"
        return options
    if field.default not in (None, ()):
        options["help"] += f" (default: {_shown(field.default)})"
    options |= {"type": kind, "metavar": about.metavar or (None if about.choices else kind.__name__.upper())}
    if about.choices:
        options["choices"] = about.choices
    if several:
        options |= {"action": "append"} if about.repeatable else {"nargs": "+"}
        options["default"] = list(options["default"])
    return options


def _value_type(hint: Any) -> tuple[Callable[[str], Any], bool]:
    """The scalar type behind `T`, `T | None`, `T | Literal[WORD]` or `tuple[T, ...]`; whether it takes several values.

    With words it is a function named after all that it takes, which argparse puts into its errors."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        words = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
        (hint,) = [part for part in parts if typing.get_origin(part) is not typing.Literal]
        if words:
            return _word_or(hint, words), False
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _word_or(kind: type[Any], words: Sequence[str]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return text if text in words else kind(text)

    parse.__name__ = "|".join([*words, kind.__name__])
    return parse


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


ANY_JOB = "any"


@dataclasses.dataclass(frozen=True)
class MoECheckpointConfig:
    """Settings of the checkpoint subsystem; the flags are these names behind `--moe-ckpt-`."""

    PREFIX: typing.ClassVar[str] = "moe-ckpt-"

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> MoECheckpointConfig:
        """What the `--moe-ckpt-*` flags among these arguments say; others are left to whoever knows them.

        For scripts with a parser of their own, `add_flags` and `from_namespace` do the same in two steps.
        """
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_flags(parser, cls, "checkpoints", prefix=cls.PREFIX)
        return from_namespace(cls, parser.parse_known_args(argv)[0], prefix=cls.PREFIX)

    def takes_over(self, job: str) -> bool:
        """Whether this job continues from what that one stored."""
        return self.take_over in (ANY_JOB, job)

    strategy: str = flag(
        "none",
        "what a snapshot holds. full: the complete state. sparse: each operator once in a window of iterations, exact "
        "by replay. pec: all non-expert state and K experts per layer, lossy. selective: all non-expert state and the "
        "experts that fit the link budgets, lossy",
    )
    window: str = flag(
        "auto",
        "sparse: iterations per window; each operator is copied in full once in it. auto: the smallest window whose "
        "copies fit the iteration",
        metavar="auto|N",
    )
    ordering: str | None = flag(
        None,
        "sparse: order in which operators are copied in full within a window; the last ones stay frozen longest in a "
        "replay. popularity: experts with the most tokens last; soft-count: with the highest sum of gate "
        "probabilities; time-decayed: with the most recent tokens; capacity-aware: by tokens over capacity; "
        "layer-order: the front of the model last (default: popularity, layer-order for a model without experts)",
        choices=("popularity", "soft-count", "time-decayed", "capacity-aware", "layer-order"),
    )
    ordering_decay: float = flag(
        0.9,
        "sparse with --moe-ckpt-ordering time-decayed: decay of the moving average of tokens per iteration, below 1",
        minimum=0,
    )
    ordering_capacities: tuple[float, ...] = flag(
        (),
        "sparse with --moe-ckpt-ordering capacity-aware: capacity of each expert of a layer, in any unit",
        minimum=0,
    )
    reorder_threshold: float = flag(
        0.10, "sparse: relative change of an expert's token share that counts as changed", minimum=0
    )
    reorder_fraction: float = flag(
        0.25, "sparse: share of changed experts that triggers a new order in the next window", minimum=0
    )
    interval: int | typing.Literal["auto"] = flag(
        1,
        "iterations between snapshots; the first interval where --moe-ckpt-interval-policy adapts it. auto: the "
        "smallest interval at which copies and replicas fit and cost less than 1%% of training, from measurements",
        metavar="auto|N",
        minimum=1,
    )
    interval_policy: str = flag(
        "fixed",
        "fixed; or adapt to measured costs: checkfreq keeps the overhead below 3%% (and sets "
        "--moe-ckpt-persist-interval to the storage bandwidth), young and daly minimize lost time for "
        "--moe-ckpt-mtbf-s",
        choices=("fixed", "checkfreq", "young", "daly"),
    )
    mtbf_s: float | None = flag(
        None, "mean time between failures of the whole job in seconds, for young and daly", minimum=1
    )
    memory_dir: str | None = flag(
        None, "tmpfs folder for snapshots in host memory (default: /dev/shm/moe-ckpt-USER, created if missing)"
    )
    secret_file: str | None = flag(
        None,
        "file with a secret of this job, on every node, readable by its owner alone. Snapshots are signed with it and "
        "unsigned ones refused; costs checksum throughput (about 1 GB/s per core instead of 10). Default: "
        "MOE_CKPT_SECRET_FILE; none: checksums without a key",
        metavar="FILE",
    )
    memory_limit: str | None = flag(
        None,
        "maximum memory for checkpoints per node, such as 200GiB or 70%%. What does not fit is dropped in this order: "
        "boundary logs, window size, the window, protection (default: free space of --moe-ckpt-memory-dir)",
        metavar="BYTES|PERCENT",
    )
    copy_rate: str = flag(
        "auto",
        "maximum rate of copies to host memory in GB/s. auto: as slow as the passes of an iteration allow; max: "
        "unthrottled",
        metavar="auto|max|GB/S",
    )
    copy_placement: str = flag(
        "spread",
        "when copies run within the passes. spread: to host memory evenly, to peers at once; bubbles: both first while "
        "this pipeline stage is idle, the rest during computation; bubbles needs pipeline stages and "
        "--moe-ckpt-copy-rate auto",
        choices=("spread", "bubbles"),
    )
    replicas: int | None = flag(
        None,
        "peers that keep a replica of each rank's snapshots in memory (default: 1 with several nodes, else 0)",
        minimum=0,
    )
    replicate: str = flag(
        "state",
        "full and selective: content of replicas. state: the bytes of the snapshot; gradients: gradients, from "
        "which peers repeat the Adam step; needs --moe-ckpt-interval 1",
        choices=("state", "gradients"),
    )
    shard: str = flag(
        "none",
        "without the distributed optimizer: how data-parallel ranks split the state they all hold. none: every rank "
        "stores all of it; equal: equal parts of experts, whole layers placed evenly; adaptive: whole layers placed "
        "where least is stored",
        choices=("none", "equal", "adaptive"),
    )
    persist_dir: str | None = flag(None, "folder or fsspec URL for snapshots that survive the loss of all nodes")
    persist_interval: int = flag(50, "iterations between snapshots written to --moe-ckpt-persist-dir", minimum=1)
    persist_keep: int = flag(2, "complete snapshots to keep in --moe-ckpt-persist-dir", minimum=1)
    persist_agent_s: float | None = flag(
        None,
        "seconds for which a small process per rank may finish writing to --moe-ckpt-persist-dir after its trainer "
        "died; a restart waits for it (default: off)",
        minimum=1,
    )
    take_over: str | None = flag(
        None,
        "id of the job to continue from in --moe-ckpt-persist-dir; takes over that folder and --save even if that job "
        "may still write there. any: continue from whichever job, without taking the folder over",
        metavar="JOB|any",
    )
    reshard: str = flag(
        "exact",
        "restore snapshots of another parallel layout. exact: only where every bit has "
        "its place; inexact: also where training draws random numbers (dropout), which then differ",
        choices=("exact", "inexact"),
    )
    elastic: str | None = flag(
        None,
        "minimum and maximum data-parallel replicas, MIN:MAX. The job shrinks when nodes are lost for good and "
        "grows when they return, at the same global batch; its launcher needs the same range in nodes (--nnodes "
        "MIN:MAX)",
        metavar="MIN:MAX",
    )
    pec_k_snapshot: int = flag(1, "pec: experts per MoE layer in each snapshot", minimum=1)
    pec_k_persist: int | None = flag(
        None, "pec: experts per MoE layer written to persistent storage (default: all of the snapshot)", minimum=1
    )
    pec_selection: str = flag(
        "sequential",
        "pec: select experts round-robin (sequential) or by tokens since they were last saved (load-aware)",
        choices=("sequential", "load-aware"),
    )
    pec_scope: str = flag(
        "both",
        "pec: state omitted for experts that are not selected: weights (of all precisions), optimizer (moments), or "
        "both",
        choices=("weights", "optimizer", "both"),
    )
    pec_adaptive: bool = flag(
        False,
        "pec: raise --moe-ckpt-pec-k-snapshot to as many as one iteration copies, and persist "
        "--moe-ckpt-pec-k-persist (default then: 1) as often as storage takes",
    )
    plt_threshold: float | None = flag(
        None,
        "pec: maximum share of tokens that faults may cost in the whole training, such as 0.0375; K is raised in time",
        minimum=0,
    )
    budget_local: str = flag(
        "auto",
        "selective: bytes per rank and snapshot, such as 500MB; auto: what the bus to host memory carries in one "
        "iteration",
        metavar="auto|BYTES",
    )
    budget_remote: str = flag(
        "auto",
        "selective: bytes sent to each peer per rank and snapshot; auto: what the network carries in one iteration",
        metavar="auto|BYTES",
    )
    capacity_boost: int = flag(
        10,
        "selective: percent by which experts that lost tokens may exceed their capacity until they caught up; 0: off. "
        "No effect without token dropping",
        minimum=0,
    )
    replay_tolerance: float = flag(
        0.0,
        "sparse: maximum relative difference of a replayed loss from the recorded one; 0: bit-exact, which GPUs give "
        "with --deterministic-mode only. Above 0, windows of another parallel layout are replayed in this one",
        minimum=0,
    )
    recovery: str = flag(
        "auto",
        "sparse with pipeline stages: which stages roll back after a fault. local: only stages with lost state, with a "
        "warning where that is not possible; global: all; auto: local where possible",
        choices=("auto", "local", "global"),
    )
    log_expert_tokens: bool = flag(
        False,
        "pec and selective, of pretrain_gpt_moe.py: write the tokens routed to each expert to --metrics-jsonl, one "
        "iteration late",
    )
    interface: str | None = flag(
        None,
        "network interface, such as eth0, for all that ranks send each other over TCP (pretrain_gpt_moe.py: also "
        "gloo); a list, such as eth0,eth1, is taken by local rank, from its start again where ranks are more "
        "(default: that of GLOO_SOCKET_IFNAME, else of the host's name)",
    )
    transport: str = flag(
        "tcp",
        "transport of replicas and of recovered state. tcp: TCP; process-group: process groups of training's backend, "
        "staged in device memory: NCCL on GPUs",
        choices=("tcp", "process-group"),
    )
    timeout_s: float = flag(300.0, "seconds after which a wait for a peer, a copy or a write fails", minimum=1)
    strict: bool = flag(
        False, "end training when a snapshot, a replica or a write fails, instead of continuing with less protection"
    )
    inject_fault: tuple[str, ...] = flag(
        (),
        "kill a rank with SIGKILL at a point of training, once per job; for drills and tests. Repeatable",
        metavar="RANK@ITER[:PHASE]",
        repeatable=True,
    )
