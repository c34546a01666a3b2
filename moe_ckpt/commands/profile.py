"""`moe-ckpt profile`: measure the machine at hand, as input of `moe-ckpt simulate` and `advise`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically
from moe_ckpt.report import Fact, Report, Table, show, table
from moe_ckpt.report.progress import steps

from ..simulator.profiles import Profile, as_data
from .job_flags import number
from .model_file import load_model
from .outputs import check_output
from .profiling.layer import device
from .profiling.layers import LayerSettings, count_of, most_ranks
from .profiling.machine import LINKS, ProfileSettings, measured_profile
from .values import Rate

HELP = """Measure this machine and write a profile, which `simulate run` and `advise` take by `--profile FILE`.

\b
    $ moe-ckpt profile --out machine.json
    $ moe-ckpt profile --model DeepSeek-MoE --ranks 8 --ep 8 --micro-batch-size 1 --micro-batch-size 2 \\
          --seq-length 2048 --storage /mnt/checkpoints --out a100.json

Measured in about a minute: layers of Megatron-Core in small jobs with one and two layers per stage, on as many ranks at
once as you say, for each size of a microbatch: forward and backward, the same with frozen layers, reduction of
gradients, the optimizer's step, memory at peak, what copies to the host add (checksummed, as those of snapshots); and
how long it takes the launcher to bring a job back of which a rank was killed. Beside that a large matrix product, Adam,
copies from the GPU to host memory (without a GPU: within it), a write to storage with fsync, and all-gathers of
different sizes between processes (NCCL where there are enough GPUs, else gloo over loopback), which give a latency and
a rate. Without a GPU each rank has the threads of OMP_NUM_THREADS, by default 1.

Where a job has the same layers, --tp, --ep and --seq-length, its iterations are predicted from what they took here;
where also --ranks and --pp are the same, so are its gradients and its optimizer. Else they come from the rates. The
jobs need memory for two layers of the model with gradients and optimizer. Megatron-LM parses their flags and builds
them; --tensor-model-parallel-size, --micro-batch-size and the like are its flags.
"""


@click.command(help=HELP)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The profile to write.")
@click.option("--model", default="GPT-125M-8E", show_default=True, metavar="NAME|FILE", help="Whose layers to time.")
@number(
    "--ranks",
    default=2,
    minimum=2,
    maximum=64,
    show_default=True,
    help="Processes that compute at once; on GPUs one each.",
)
@number("--tensor-model-parallel-size", "--tp", "tp", default=1, help="Of the jobs that are timed. Default 1.")
@number("--pipeline-model-parallel-size", "--pp", "pp", default=1, help="Likewise.")
@number("--expert-model-parallel-size", "--ep", "ep", default=1, help="Likewise.")
@click.option(
    "--micro-batch-size",
    "sizes",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 2),
    show_default=True,
    metavar="N",
    help="Samples of a microbatch; repeat for a sweep.",
)
@number("--seq-length", default=1024, show_default=True, help="Tokens of a sample.")
@number("--megabytes", default=64, maximum=65536, show_default=True, help="Size of copies, writes and collectives.")
@click.option(
    "--storage", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Where to write; by default beside --out."
)
@click.option(
    "--inter-node-gbps",
    type=Rate(),
    metavar="GB/S",
    help="Of one GPU to other nodes, which one machine cannot measure. By default as within the node.",
)
@number("--timeout", default=300, maximum=3600, show_default=True, help="Seconds for each measurement that can hang.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def profile(
    out: Path,
    model: str,
    sizes: tuple[int, ...],
    storage: Path | None,
    inter_node_gbps: float | None,
    as_json: bool,
    **given: int,
) -> None:
    shape = load_model(model)
    check_output(out)
    layout = most_ranks(given["ranks"]), given["tp"], given["pp"], given["ep"]
    swept = tuple(sorted(set(sizes)))
    settings = ProfileSettings(
        layers=LayerSettings(*layout, swept, given["seq_length"], device(), given["timeout"]),
        ranks=given["ranks"],
        size=given["megabytes"] * 10**6,
        storage=out.parent if storage is None else storage,
        timeout_s=given["timeout"],
        inter_node_bytes_per_s=None if inter_node_gbps is None else inter_node_gbps * 1e9,
    )
    with steps("measuring", LINKS + count_of(shape, settings.layers)) as done:
        found = measured_profile(shape, settings, done)
    text = json.dumps(as_data(found), indent=2) + "\n"
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror or error}") from error
    if as_json:
        click.echo(text, nl=False)
    else:
        show(report(found, out), as_json=False)


def report(found: Profile, out: Path) -> Report:
    """What a person wants to see of a profile that was written to `out`."""
    cluster, utilisation, layers = found.cluster, found.utilisation, found.layers
    width, peak = next(iter(cluster.peak_flops.items()))
    timed = () if layers is None else (
        Fact("A killed job is back in", layers.restart_s, "seconds"),
        Fact("Added by a second of copies", layers.contention, "seconds"),
    )  # fmt: skip
    return Report(
        f"Profile {out}: {cluster.source}",
        (
            Fact("Ranks per node", cluster.gpus_per_node, "count"),
            Fact("Host memory", cluster.host_memory_bytes, "bytes"),
            Fact("Matrix product", f"{peak / 1e12:.3g} TFLOPS with {width} bytes per element"),
            Fact("Layer's share of it", utilisation.gemm_share, "share"),
            Fact("Saved by a frozen layer", found.frozen_saves, "share"),
            Fact("Copies to host per second", cluster.host_link_bytes_per_s, "bytes"),
            Fact("Storage per second", cluster.storage_bytes_per_s, "bytes"),
            Fact("Collectives per second", cluster.intra_node_bytes_per_s, "bytes"),
            Fact("Latency of a step", utilisation.latency_s, "seconds"),
            Fact("Adam per second", utilisation.optimizer_bytes_per_s, "bytes"),
            *timed,
        ),
        (_jobs(found),),
    )


def _jobs(found: Profile) -> Table:
    """The jobs whose layers were timed."""
    return table(
        "Megatron-Core's layers",
        "layers of a stage | with experts:count | samples:count | microbatch:seconds | optimizer step:seconds"
        " | memory at peak:bytes",
        (
            (
                len(row["layers"]),
                sum(row["layers"]),
                *(row[name] for name in ("micro_batch_size", "microbatch_s", "step_s", "memory_bytes")),
            )
            for row in found.measured.get("layers", ())
        ),
    )
