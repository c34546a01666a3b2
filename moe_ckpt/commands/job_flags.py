"""The flags of a training job, as `moe-ckpt plan`, `simulate run` and `advise` take them, and its machines."""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, add_flags, flag_name, from_namespace
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import replica_count
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES
from megatron.core.dist_checkpointing.moe.strategies.memory_report import MemoryLimit
from megatron.core.dist_checkpointing.moe.types import PRECISIONS, ModelShape, Topology
from moe_ckpt.report import Report, show

from ..hugging_face.arguments import ffn_width
from ..simulator.clusters import cluster as preset_cluster
from ..simulator.clusters import load_cluster, presets
from ..simulator.constants import COMEBACKS, THIS_PROJECT
from ..simulator.cost import MEGATRON_UTILISATION, iteration_cost
from ..simulator.flags import systems_of
from ..simulator.inputs import Cluster, GradientOverlap, TokenDispatch, TrainingJob
from ..simulator.systems import SYSTEMS
from ..simulator.systems.links import SystemSetting
from .from_job import measured
from .model_file import load_model, require_experts, require_size
from .values import Duration, Rate

LARGEST = 1_000_000
"""More ranks than any cluster has; what is planned for is listed rank by rank."""

LAYOUT = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
"""Megatron's names for parallel sizes, by the short ones that people say."""

SHARED = {
    "Model and layout": ("model", "precision", *LAYOUT, "vpp", "world_size", "ranks_per_node"),
    "Batch and cluster": (
        *("global_batch_size", "micro_batch_size", "seq_length", "overlaps", "once_per_node", "nodes_per_token"),
        *("overlap_grad_reduce", "overlap_param_gather"),
        *("cluster_name", "job_file", "iteration_time_s", "comeback", "restart_s", "host_gbps", "peer_gbps"),
    ),
    "Output": ("rows", "as_json"),
}
"""Parameters that all of these commands have, by the heading under which `--help` shows them."""


UNPAID = ("replicate", "budget_local", "budget_remote", "pec_scope", "pec_adaptive")
"""Settings that change the bytes of a job, and not what a plan says that training pays for them."""


@dataclass(frozen=True)
class JobFlags:
    """What the flags of a job say.

    setting: the job on its cluster. config: the `--moe-ckpt-*` flags. frozen_experts: `--freeze-experts`. unused: flags
    of the job that change nothing here. not_modelled: flags that plans leave out.
    """

    setting: SystemSetting
    config: MoECheckpointConfig
    frozen_experts: bool = False
    unused: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.setting.job.shape

    @property
    def topology(self) -> Topology:
        """The layout of ranks."""
        return self.setting.job.topology

    @property
    def limit_bytes(self) -> int | None:
        """`--moe-ckpt-memory-limit` on a node of the cluster."""
        if self.config.memory_limit is None:
            return None
        return MemoryLimit.parse(self.config.memory_limit).of_node(self.setting.cluster.host_memory_bytes)

    @property
    def model_note(self) -> tuple[str, ...]:
        """What its preset, or its `config.json`, leaves out of the model, and which flags Megatron lacks."""
        note = (f"{self.shape.name}: {self.shape.note}",) if self.shape.note else ()
        layers, stages = self.shape.num_layers, self.topology.pp * self.topology.vpp
        if layers % stages == 0 or not {*_UNEVEN}.isdisjoint(self.not_modelled):
            return note
        return (
            *note,
            f"Megatron takes {layers} layers on {stages} pipeline stages only with {_UNEVEN[-1]} or the like.",
        )

    def left_out(self, *taken: str) -> tuple[str, ...]:
        """Sentences that list the flags of the job that have no effect. taken: settings of `config` that have one; of
        a plan, which has none to name, all of them do, and `--freeze-experts`, but for some on what training pays."""
        frozen = ("--freeze-experts",) * self.frozen_experts
        given = {
            field.name: flag_name(field, MoECheckpointConfig.PREFIX)
            for field in fields(self.config)
            if field.name not in taken and getattr(self.config, field.name) != field.default
        }
        unpaid = () if taken else (*frozen, *(flag for name, flag in given.items() if name in UNPAID))
        said = {
            "Not modelled, so memory and time may differ": (*self.not_modelled, *(frozen if taken else ())),
            "Not in what checkpoints add, nor in ETTR": unpaid,
            "Change nothing here": (*self.unused, *(given.values() if taken else ())),
        }
        return tuple(f"{what}: {', '.join(flags)}." for what, flags in said.items() if flags)


def job_command(help: str) -> Callable[[Callable[..., Report]], click.Command]:
    """Make a command of a function that takes JobFlags and its own options and returns a Report."""

    def decorate(function: Callable[..., Report]) -> click.Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            as_json, rows = given.pop("as_json"), given.pop("rows")
            shared = {name: given.pop(name) for names in SHARED.values() for name in names if name in given}
            report = function(read_flags(shared, click.get_current_context().args), **given)
            show(report, as_json, rows or None)

        for option in reversed(tuple(_shared())):
            command = option(command)
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        return click.command(cls=JobCommand, help=help, context_settings=settings)(command)

    return decorate


class JobCommand(click.Command):
    """Shows its own options first, then those that describe a job."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As `click.Command.format_options`, in groups."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SHARED)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                titles = (title for title, names in SHARED.items() if parameter.name in names)
                sections[next(titles, "Options")].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _WholeNumber(click.ParamType):  # type: ignore[type-arg]
    """A whole number in a range."""

    name = "integer"

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        number = int(text) if re.fullmatch("-?[0-9]{1,18}", text) else None
        if number is None or not self.minimum <= number <= self.maximum:
            self.fail(f"{text} must be a whole number from {self.minimum} to {self.maximum}", param, ctx)
        return number


def number(
    *names: str,
    default: int | None,
    help: str,
    minimum: int = 1,
    maximum: int = LARGEST,
    metavar: str = "N",
    show_default: bool = False,
) -> Callable[..., Any]:
    """A flag for a whole number.

    Args:
        *names: Names of the flag, as `click.option` takes them.
        default: Value without the flag; None: the flag may be missing.
        help: Text in `--help`.
        minimum: Smallest value that is accepted.
        maximum: Largest value that is accepted.
        metavar: Name of the value in `--help`.
        show_default: Whether `--help` shows the default.
    """
    kind = _WholeNumber(minimum, maximum)
    return click.option(*names, type=kind, default=default, metavar=metavar, show_default=show_default, help=help)


def _time(*names: str, help: str) -> Callable[..., Any]:
    return click.option(*names, type=Duration(), metavar="TIME", help=help)


def _rate(name: str, help: str) -> Callable[..., Any]:
    return click.option(name, type=Rate(), metavar="GB/S", help=help)


def _file(*names: str, help: str) -> Callable[..., Any]:
    return click.option(*names, type=click.Path(path_type=Path), metavar="FILE", help=help)


def _shared() -> Iterator[Callable[..., Any]]:
    yield click.option(
        "--model", metavar="NAME|FILE", help="A preset or a JSON file with its shape [default: from --num-layers etc.]."
    )
    yield click.option(
        "--precision", type=click.Choice(list(PRECISIONS)), default="fp16-fp32", show_default=True,
        help="Of weights, master weights and moments.",
    )  # fmt: skip
    for short, long in LAYOUT.items():
        about = "By default the tensor-parallel size." if short == "etp" else "Default 1."
        yield number(f"--{long}", f"--{short}", short, default=None if short == "etp" else 1, help=about)
    virtual = ("--num-virtual-stages-per-pipeline-rank", "--virtual-stages", "--vpp", "vpp")
    yield number(*virtual, default=1, help="Virtual stages per pipeline rank. Default 1.")
    yield number("--world-size", default=None, help="Ranks; by default the fewest that the degrees need.")
    yield number("--ranks-per-node", default=None, help="Ranks of a failure domain [default: GPUs of a node].")
    yield number("--global-batch-size", default=512, show_default=True, help="Samples of an iteration.")
    yield number("--micro-batch-size", default=1, show_default=True, help="Samples of a rank's microbatch.")
    yield number("--seq-length", default=2048, show_default=True, help="Tokens of a sample.")
    as_megatron = "As Megatron's flag of this name."
    yield click.option("--overlap-moe-expert-parallel-comm", "overlaps", is_flag=True, help=as_megatron)
    yield click.option("--moe-enable-deepep", "once_per_node", is_flag=True, help=as_megatron)
    for flag in ("--overlap-grad-reduce", "--overlap-param-gather"):
        yield click.option(flag, is_flag=True, help=as_megatron)
    yield number("--moe-router-group-topk", "nodes_per_token", default=None, help="Nodes that a token goes to at most.")
    yield click.option(
        "--cluster",
        "cluster_name",
        default="azure-nc96ads-a100",
        show_default=True,
        metavar="NAME|FILE",
        help=f"A preset ({', '.join(presets())}), or a JSON file with the same fields.",
    )
    yield _file(
        "--from",
        "job_file",
        help="--metrics-jsonl of a job that ran: its iteration time, rates and restarts count.",
    )
    yield _time(
        "--iteration-time",
        "iteration_time_s",
        help="Of training without checkpoints [default: estimated by a roofline].",
    )
    yield _rate("--host-gbps", help="What copies from a GPU to host memory reach [default: of the cluster].")
    yield _rate("--peer-gbps", help="What copies from a rank to other nodes reach [default: of the cluster].")
    yield click.option(
        "--restart-mode",
        "comeback",
        type=click.Choice(list(COMEBACKS)),
        default="cold",
        show_default=True,
        help="How processes come back: as new ones, from standbys, or in place.",
    )
    yield _time(
        "--restart",
        "restart_s",
        help="Until all run again: restart + import + rendezvous + build of a timeline [default: by ranks and mode].",
    )
    yield number("--rows", default=10, minimum=0, help="Rows of a table to print; 0 prints all.", show_default=True)
    yield click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON, all rows, plain numbers.")


def read_flags(given: dict[str, Any], others: list[str]) -> JobFlags:
    """The job that a command line describes.

    Raises UsageError for values that no job can have, for a batch that does not fit the layout, and for no such cluster
    or model; UnreadableCheckpoint for a `--from` that no job wrote.

    Args:
        given: Values of the shared options by parameter name, as click converted them; entries are removed.
        others: The other words of the command line, which are flags of the job.
    """
    parser = _job_parser()
    try:
        args, left = parser.parse_known_args(others)
    except argparse.ArgumentError as error:
        raise UsageError(str(error).replace("argument ", "", 1)) from None
    unused = dict.fromkeys(_unused(left, parser))
    if given["model"] is not None:
        unused |= dict.fromkeys(flag for flag in _OF_THE_PRESET if flag[2:].replace("-", "_") in args)
    not_modelled = tuple(flag for flag in unused if flag in _NOT_MODELLED)
    config = from_namespace(MoECheckpointConfig, args, MoECheckpointConfig.PREFIX)
    degrees = {name: given.pop(name) for name in (*LAYOUT, "vpp")}
    model, precision = given.pop("model"), PRECISIONS[given.pop("precision")].exact()
    shape = _shape(model, args, degrees["tp"])
    if "num_layers_per_virtual_pipeline_stage" in args:
        layers = args.num_layers_per_virtual_pipeline_stage
        degrees["vpp"] = _virtual_stages(layers, shape.num_layers, degrees["pp"])
    world = given.pop("world_size")
    if world is None:
        world = degrees["pp"] * math.lcm(
            degrees["tp"] * degrees["cp"], (degrees["etp"] or degrees["tp"]) * degrees["ep"]
        )
    cluster = _cluster(given.pop("cluster_name"))
    ranks_per_node = given.pop("ranks_per_node") or cluster.gpus_per_node
    # Several nodes of the cluster that fail together, or a part of one, have that much more or less memory.
    memory = cluster.host_memory_bytes * ranks_per_node // cluster.gpus_per_node
    cluster = replace(cluster, host_memory_bytes=memory)
    topology = Topology(world, **degrees, ranks_per_node=ranks_per_node)
    if shape.num_attention_heads % topology.tp:
        raise UsageError(f"--tp {topology.tp} does not divide the {shape.num_attention_heads} attention heads")
    frozen = "freeze_experts" in args
    if frozen and not shape.moe_layers:
        raise UsageError(f"--freeze-experts: model {shape.name} has no experts to freeze")
    batch, seq_length = _batch(given, topology), given.pop("seq_length")
    given["once_per_node"] |= getattr(args, "moe_token_dispatcher_type", "") == "flex"
    exchange = TokenDispatch(*(given.pop(name) for name in ("overlaps", "once_per_node", "nodes_per_token")))
    overlap = GradientOverlap(given.pop("overlap_grad_reduce"), given.pop("overlap_param_gather"))
    training = TrainingJob(shape, topology, precision, *batch, seq_length, exchange, overlap)
    changes_nothing = tuple(flag for flag in unused if flag not in _NOT_MODELLED)
    setting = _setting(training, cluster, replica_count(config.replicas, topology), **given)
    return JobFlags(setting, config, frozen, changes_nothing, not_modelled)


def _virtual_stages(layers: int, of_model: int, pp: int) -> int:
    """Virtual stages of a pipeline rank that have so many layers each."""
    if layers < 1 or of_model % (pp * layers):
        raise UsageError(
            f"--num-layers-per-virtual-pipeline-stage is {layers}, but {pp} x it must divide the {of_model} layers"
        )
    return of_model // (pp * layers)


def _batch(given: dict[str, Any], topology: Topology) -> tuple[int, int]:
    """Samples of an iteration, and microbatches of a pipeline."""
    batch, micro = given.pop("global_batch_size"), given.pop("micro_batch_size")
    if batch % (micro * topology.dp):
        raise UsageError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x"
            f" {topology.dp} data-parallel ranks = {micro * topology.dp}"
        )
    return batch, batch // (micro * topology.dp)


def _setting(
    training: TrainingJob,
    cluster: Cluster,
    replicas: int,
    job_file: Path | None,
    iteration_time_s: float | None,
    comeback: str,
    restart_s: float | None,
    host_gbps: float | None,
    peer_gbps: float | None,
) -> SystemSetting:
    """The job on its cluster; what is given counts before what a job measured, and that before what is estimated."""
    constants = replace(THIS_PROJECT, comeback=comeback, replicas=replicas)
    setting = SystemSetting(training, iteration_cost(training, cluster, MEGATRON_UTILISATION), cluster, constants)
    if job_file is not None:
        setting = measured(job_file).applied(setting)
    if iteration_time_s is not None:
        setting = replace(setting, cost=setting.cost.lasting(iteration_time_s))
    if restart_s is not None:
        setting = replace(setting, constants=replace(setting.constants, restart_s=restart_s))
    setting = _reached(setting, "host_link_bytes_per_s", "host_share", host_gbps)
    return _reached(setting, "inter_node_bytes_per_s", "network_share", peer_gbps)


def _reached(setting: SystemSetting, link: str, share: str, gbps: float | None) -> SystemSetting:
    """The same where copies reach this rate of a link."""
    if gbps is None:
        return setting
    rate = gbps * 1e9
    carries = max(rate, getattr(setting.cluster, link))
    return replace(
        setting,
        cluster=replace(setting.cluster, **{link: carries}),
        constants=replace(setting.constants, **{share: rate / carries}),
    )


def _cluster(name: str) -> Cluster:
    is_file = name.casefold() not in presets() and (Path(name).suffix or len(Path(name).parts) > 1)
    return load_cluster(Path(name)) if is_file else preset_cluster(name)


@functools.cache
def _job_parser() -> argparse.ArgumentParser:
    """Knows the flags of a model and of checkpoints."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    choices = {"strategy": ("none", *STRATEGIES)}
    add_flags(parser, MoECheckpointConfig, "checkpoints", MoECheckpointConfig.PREFIX, choices)
    for flag, kind in _MODEL_FLAGS.items():
        options = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(flag, default=argparse.SUPPRESS, **options)
    return parser


def _kind(field: Any) -> type[Any]:
    return {"bool": bool, "str": str}.get(str(field.type), int)


_MODEL_FLAGS: dict[str, type[Any]] = {
    f"--{field.name.replace('_', '-')}": _kind(field)
    for field in fields(ModelShape)
    if field.name not in ("name", "note", "moe_layer_freq", "gated_linear_unit", "add_bias_linear")
} | {
    "--moe-layer-freq": str,
    "--swiglu": bool,
    "--quick-geglu": bool,
    "--disable-bias-linear": bool,
    "--group-query-attention": bool,
    "--position-embedding-type": str,
    "--make-vocab-size-divisible-by": int,
    "--freeze-experts": bool,
    "--num-layers-per-virtual-pipeline-stage": int,
    "--moe-token-dispatcher-type": str,
}

_UNEVEN = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout",
)
"""Flags that lay out layers which stages do not divide."""

_NOT_MODELLED = (
    *_UNEVEN,
    "--mtp-num-layers",
    "--num-distributed-optimizer-instances",
    "--optimizer",
    "--use-precision-aware-optimizer",
    "--main-params-dtype",
    "--main-grads-dtype",
    "--exp-avg-dtype",
    "--exp-avg-sq-dtype",
    "--fp8-format",
    "--fp8-param-gather",
    "--fp4-format",
    "--recompute-granularity",
)
"""Flags that change layers, where they lie, their bytes or their time, and count as if they were not given."""


_OF_THE_PRESET = (
    "--vocab-size",
    "--max-position-embeddings",
    "--position-embedding-type",
    "--make-vocab-size-divisible-by",
    "--swiglu",
    "--quick-geglu",
    "--disable-bias-linear",
    "--group-query-attention",
)
"""Flags of which `--model` says what they would."""


def _shape(model: str | None, args: argparse.Namespace, tp: int) -> ModelShape:
    """The model that was named, with what the job's flags say of it; without a name, the one of these flags."""
    given = {field.name: getattr(args, field.name) for field in fields(ModelShape) if field.name in args}
    sizes = {name: value for name, value in given.items() if type(value) is int}
    for name, value in sizes.items():
        require_size(f"--{name.replace('_', '-')}", name, value)
    if model is not None:
        given.pop("max_position_embeddings", None)  # a preset says whether they are learned
        given.pop("vocab_size", None)
    elif missing := [name for name in _NEEDED if name not in given]:
        raise UsageError(f"--{missing[0].replace('_', '-')} is missing: give it, or a model with --model NAME|FILE")
    if "moe_layer_freq" in given:
        given["moe_layer_freq"] = _layer_pattern(given["moe_layer_freq"])
    known = load_model(model) if model is not None else None
    layers, experts = (getattr(known, name, 0) for name in ("num_layers", "num_experts"))
    require_experts("flags", sizes.get("num_layers", layers), sizes.get("num_experts", experts))
    if known is not None:
        return replace(known, **given)
    # Megatron's own defaults, where a flag says the contrary.
    divisible = getattr(args, "make_vocab_size_divisible_by", 128) * tp
    if divisible < 1:
        raise UsageError(f"--make-vocab-size-divisible-by is {divisible // tp}, but must be at least 1")
    given |= {
        "vocab_size": -(-given["vocab_size"] // divisible) * divisible,
        "ffn_hidden_size": given.get("ffn_hidden_size", ffn_width(given["hidden_size"], swiglu="swiglu" in args)),
        "kv_lora_rank": given.get("kv_lora_rank", 32),
        "gated_linear_unit": "swiglu" in args or "quick_geglu" in args,
        "add_bias_linear": "disable_bias_linear" not in args,
        "normalization": given.get("normalization", "LayerNorm"),
        "num_query_groups": given.get("num_query_groups", 1) if "group_query_attention" in args else None,
    }
    if getattr(args, "position_embedding_type", "learned_absolute") != "learned_absolute":
        given["max_position_embeddings"] = 0
    return ModelShape("the job's flags", **given)


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


def _layer_pattern(text: str) -> int | tuple[int, ...]:
    """Megatron's `--moe-layer-freq`: a number, or lists of 0 and 1, added and multiplied, such as ([0]*3+[1]*1)*12."""
    if re.fullmatch("[0-9]{1,6}", text):
        return int(text)
    pattern: list[int] = []
    bare = text.replace(" ", "")
    whole = re.fullmatch(r"\((.*)\)(?:\*(\d{1,5}))?", bare)
    parts, times = (whole[1], int(whole[2] or 1)) if whole is not None else (bare, 1)
    for part in parts.split("+"):
        found = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?", part)
        if found is None:
            raise UsageError(
                f"invalid --moe-layer-freq {text} (expected a number or a pattern, such as ([0]*3+[1]*58))"
            )
        pattern += [int(digit) for digit in found[1].split(",")] * int(found[2] or 1)
    return tuple(pattern) * times


def _unused(left: list[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags among these words, which a job has for other things. Raises UsageError for what no job has."""
    if left and not left[0].startswith("-"):
        raise UsageError(f"{left[0]!r} is no flag: give the flags of the job; one command shows the whole plan")
    own = {name for option in click.get_current_context().command.params for name in option.opts}
    known = sorted(own | parser._option_string_actions.keys())
    for word in left:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag == "--seed":  # Megatron's, and not a mistyped --seeds
            continue
        likely = difflib.get_close_matches(flag, known, n=1, cutoff=0.9)
        if likely or flag.startswith("--moe-ckpt-"):
            hint = f"; did you mean {likely[0]}?" if likely else ""
            raise UsageError(f"no such flag: {flag}{hint}")
        yield flag


def system_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flag for `chosen_systems`."""
    return click.option(
        "--system", "systems", type=click.Choice([*SYSTEMS, *STRATEGIES]), multiple=True,
        help="A system, or a strategy's name; repeatable [default: all].",
    )(function)  # fmt: skip


def chosen_systems(words: tuple[str, ...]) -> tuple[str, ...]:
    """The systems that --system names, each once; all without one."""
    return tuple(dict.fromkeys(name for word in words for name in systems_of(word))) or tuple(SYSTEMS)


def checked_mtbf(setting: SystemSetting, mtbf_s: float) -> None:
    """Raises UsageError for a mean time between faults in which no job comes back once.

    Args:
        setting: The job on its cluster; gives the time that a restart takes.
        mtbf_s: Mean time between failures of the whole job, in seconds.
    """
    down_s = setting.constants.detect_s + setting.launch_s + setting.meet_s
    if mtbf_s <= down_s:
        raise UsageError(
            f"--mtbf {mtbf_s:g}s is not longer than a restart takes ({down_s:.3g} s with its detection): it would never"
            " train; say how long yours takes with --restart, or --restart-mode in-place"
        )
