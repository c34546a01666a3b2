"""Frozen dataclasses as the one source of flags, defaults and help, and the configuration of the subsystem."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
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


def _value_type(hint: Any) -> tuple[type[Any], bool]:
    """The scalar type behind `T`, `T | None` or `tuple[T, ...]`, and whether it takes several values."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


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
        """Whether this job goes on from what that one stored."""
        return self.take_over in (ANY_JOB, job)

    strategy: str = flag(
        "none",
        "what is snapshotted: nothing, everything (full), all but experts and K experts per layer (pec) or those that "
        "the links have time for (selective), or each operator once in a window of iterations (sparse)",
    )
    window: str = flag(
        "auto",
        "sparse: iterations in which each operator is snapshotted once; auto takes as few as copies have time for",
        metavar="auto|N",
    )
    ordering: str | None = flag(
        None,
        "sparse: which operators come last in a window, and are frozen for longest when it is replayed: experts with "
        "the most tokens (popularity), with the highest sum of gating probabilities over all tokens (soft-count), with "
        "the most tokens lately (time-decayed), or for their capacity; or the front of the model (default: popularity, "
        "without experts layer-order)",
        choices=("popularity", "soft-count", "time-decayed", "capacity-aware", "layer-order"),
    )
    ordering_decay: float = flag(
        0.9,
        "sparse with --moe-ckpt-ordering time-decayed: how much of the moving average of tokens stays from one "
        "iteration to the next, below 1",
        minimum=0,
    )
    ordering_capacities: tuple[float, ...] = flag(
        (),
        "sparse with --moe-ckpt-ordering capacity-aware: capacity of each expert of a layer, in any unit; experts are "
        "ordered by tokens over capacity",
        minimum=0,
    )
    reorder_threshold: float = flag(
        0.10, "sparse: by how much the share of tokens of an expert has to change to count as changed", minimum=0
    )
    reorder_fraction: float = flag(
        0.25, "sparse: share of the experts that must have changed before the next window has a new order", minimum=0
    )
    interval: int = flag(1, "iterations between snapshots; where the interval adapts, the first one", minimum=1)
    interval_policy: str = flag(
        "fixed",
        "keep the interval, or adapt it to measured costs: to at most 3%% overhead (checkfreq; and "
        "--moe-ckpt-persist-interval to what storage takes), or to the failures of --moe-ckpt-mtbf-s (young, daly)",
        choices=("fixed", "checkfreq", "young", "daly"),
    )
    mtbf_s: float | None = flag(None, "mean seconds between failures of the whole job, for young and daly", minimum=1)
    memory_dir: str | None = flag(
        None, "folder on a tmpfs for snapshots in host memory (default: /dev/shm/moe-ckpt-USER, made if missing)"
    )
    secret_file: str | None = flag(
        None,
        "file with a secret that only this job has, on every node, readable by you alone: snapshots are sealed with "
        "it, and those of others refused, at 0.4 to 2 GB/s per core in place of 5 to 13 (default: "
        "MOE_CKPT_SECRET_FILE; none: checksums without a key)",
        metavar="FILE",
    )
    memory_limit: str | None = flag(
        None,
        "most that checkpoints may take of the memory of each node, such as 200GiB or 70%%; what does not fit is given "
        "up step by step: boundary logs, the size of the window, the window, protection (default: what the folder has)",
        metavar="BYTES|PERCENT",
    )
    copy_rate: str = flag(
        "auto",
        "GB/s at most at which snapshots are copied to host memory, over a bus that training uses too; auto ends them "
        "within the passes, max copies as fast as it goes",
        metavar="auto|max|GB/S",
    )
    copy_placement: str = flag(
        "spread",
        "where copies to host memory and to peers go within the passes: evenly over them (spread), or first to when "
        "this rank's pipeline stage waits for another one, and beside computation what these waits have no time for "
        "(bubbles); needs pipeline stages and --moe-ckpt-copy-rate auto",
        choices=("spread", "bubbles"),
    )
    replicas: int | None = flag(
        None,
        "peers that keep a copy of each rank's snapshots in memory (default: 1 with several nodes, else 0)",
        minimum=0,
    )
    replicate: str = flag(
        "state",
        "full and selective: what peers are sent of each snapshot: its bytes (state), or gradients, with which they "
        "repeat the step of Adam on the CPU from their copy of the iteration before; needs --moe-ckpt-interval 1",
        choices=("state", "gradients"),
    )
    shard: str = flag(
        "none",
        "without the distributed optimizer, which data-parallel ranks store the state that all of them hold: each one "
        "all of it (none), or a part: of experts equal parts, and whole layers, placed evenly by themselves (equal) or "
        "where least is stored (adaptive)",
        choices=("none", "equal", "adaptive"),
    )
    persist_dir: str | None = flag(
        None, "folder, or URL that fsspec understands, for snapshots that survive the loss of all nodes"
    )
    persist_interval: int = flag(50, "iterations between snapshots that go on to --moe-ckpt-persist-dir", minimum=1)
    persist_keep: int = flag(2, "newest complete snapshots to keep in --moe-ckpt-persist-dir", minimum=1)
    persist_agent_s: float | None = flag(
        None,
        "seconds for which a small process beside each rank goes on with what its trainer was writing to "
        "--moe-ckpt-persist-dir when that has died; a restart waits for it (default: it is not written)",
        minimum=1,
    )
    take_over: str | None = flag(
        None,
        "id of the job whose snapshots in --moe-ckpt-persist-dir this one goes on from, and from which it takes that "
        "folder and --save also where it may still write there; any: go on from whichever job's, and take no folder",
        metavar="JOB|any",
    )
    reshard: str = flag(
        "exact",
        "what another parallel layout stored in --moe-ckpt-persist-dir is restored in this one where every bit of it "
        "has its place (exact), or also where training draws random numbers, as dropout does, which will be others "
        "(inexact)",
        choices=("exact", "inexact"),
    )
    elastic: str | None = flag(
        None,
        "full: fewest and most data-parallel replicas with which the job may go on, at the same global batch, when "
        "nodes are lost for good, and when nodes come back; its launcher needs the same in nodes (--nnodes MIN:MAX)",
        metavar="MIN:MAX",
    )
    pec_k_snapshot: int = flag(1, "pec: experts per MoE layer in each snapshot", minimum=1)
    pec_k_persist: int | None = flag(
        None, "pec: how many of these go on to persistent storage (default: all of them)", minimum=1
    )
    pec_selection: str = flag(
        "sequential",
        "pec: take experts in turn, or those with the most tokens since they were last saved",
        choices=("sequential", "load-aware"),
    )
    pec_scope: str = flag(
        "both",
        "pec: what snapshots leave out of experts that are not selected: their weights, of all precisions, while the "
        "moments of all experts are saved; the moments of the optimizer, while all weights are saved; or both",
        choices=("weights", "optimizer", "both"),
    )
    pec_adaptive: bool = flag(
        False,
        "pec: raise --moe-ckpt-pec-k-snapshot to as many experts as are copied within the passes of one iteration, "
        "persist --moe-ckpt-pec-k-persist of them (default then: 1), and as often as storage takes",
    )
    plt_threshold: float | None = flag(
        None,
        "pec: share of tokens that faults may cost in the whole training, such as 0.0375; raises K in time",
        minimum=0,
    )
    budget_local: str = flag(
        "auto",
        "selective: bytes of one snapshot on each rank, such as 500MB; auto takes what the bus to host memory carries "
        "in one iteration, as measured",
        metavar="auto|BYTES",
    )
    budget_remote: str = flag(
        "auto",
        "selective: bytes of one snapshot that each rank sends to each peer; auto takes what the network carries in "
        "one iteration, as measured",
        metavar="auto|BYTES",
    )
    capacity_boost: int = flag(
        10,
        "selective: by how many percent experts that lost tokens may exceed their capacity until they have made up for "
        "them; 0 leaves capacities alone. Without token dropping it has no effect",
        minimum=0,
    )
    replay_tolerance: float = flag(
        0.0,
        "sparse: by which share the loss of a replayed iteration may differ from the recorded one; 0 asks for the same "
        "bits, which GPUs give with --deterministic-mode only",
        minimum=0,
    )
    recovery: str = flag(
        "auto",
        "sparse with pipeline stages: after a fault, let only the stages roll back that lost their state (local), or "
        "all of them (global); auto is local where that is possible. local warns where it is not",
        choices=("auto", "local", "global"),
    )
    log_expert_tokens: bool = flag(
        False, "pec and selective: write the tokens routed to each expert to --metrics-jsonl, one iteration late"
    )
    interface: str | None = flag(
        None,
        "network interface, such as eth0, for all that ranks send each other over TCP beside training, and for gloo "
        "(default: that of GLOO_SOCKET_IFNAME, else of the host's name)",
    )
    transport: str = flag(
        "tcp",
        "how replicas, and what a recovery fetches, go from rank to rank: over TCP (tcp), or over process groups of "
        "training's backend, staged in memory of the device (process-group): on GPUs over NCCL",
        choices=("tcp", "process-group"),
    )
    timeout_s: float = flag(300.0, "seconds after which a wait for a peer, a copy or a write is given up", minimum=1)
    strict: bool = flag(
        False, "end training when a snapshot, a replica or a write fails, instead of going on with less protection"
    )
    inject_fault: tuple[str, ...] = flag(
        (),
        "kill a rank with SIGKILL at a point of training, once per job; for drills and tests. Repeatable",
        metavar="RANK@ITER[:PHASE]",
        repeatable=True,
    )
