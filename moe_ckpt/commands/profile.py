"""`moe-ckpt profile`: measure the machine at hand, as input of `moe-ckpt simulate` and `advise`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy import checks
from megatron.core.dist_checkpointing.moe.storage.atomic import write_atomically
from moe_ckpt.report import Fact, Report, show

from ..simulator.profiles import Profile, as_data
from .model_file import load_model
from .plan.options import number
from .profiling.machine import ProfileSettings, measured_profile

HELP = """Measure this machine and write a profile, which `moe-ckpt simulate run --profile FILE` takes for a cluster.

\b
    $ moe-ckpt profile --out machine.json
    $ moe-ckpt profile --model DeepSeek-MoE --tokens 8192 --storage /mnt/checkpoints --out a100.json

Measured, with torch, in about a minute: one layer of the model, forward and backward, when all of it trains and when
it is frozen; a large matrix product; a step of Adam; copies from the GPU to host memory (without a GPU: within host
memory); a write to storage with fsync; and all-gathers of different sizes between processes (NCCL where there are
enough GPUs, else gloo over loopback), which give a latency and a rate. The layer is plain torch of the model's shapes.
Threads are those of OMP_NUM_THREADS: give it what a rank of your job has.
"""


@click.command(help=HELP)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The profile to write.")
@click.option("--model", default="GPT-125M-8E", show_default=True, metavar="NAME|FILE", help="Whose layer to measure.")
@number("--tokens", default=1024, show_default=True, help="Tokens of a microbatch on one rank.")
@number("--seq-length", default=1024, show_default=True, help="Tokens of a sequence.")
@number("--ranks", default=2, minimum=2, maximum=64, show_default=True, help="Processes of a collective.")
@number("--megabytes", default=64, maximum=65536, show_default=True, help="Size of copies, writes and collectives.")
@click.option(
    "--storage", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Where to write; by default beside --out."
)
@click.option(
    "--inter-node-gbps",
    type=float,
    metavar="GB/S",
    help="Of one GPU to other nodes, which one machine cannot measure. By default as within the node.",
)
@number("--timeout", default=120, maximum=3600, show_default=True, help="Seconds for each measurement that can hang.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def profile(
    out: Path, model: str, storage: Path | None, inter_node_gbps: float | None, as_json: bool, **given: int
) -> None:
    shape = load_model(model)
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}")
    if inter_node_gbps is not None:
        checks.positive("--inter-node-gbps", inter_node_gbps)
    settings = ProfileSettings(
        tokens=given["tokens"],
        seq_length=given["seq_length"],
        ranks=given["ranks"],
        size=given["megabytes"] * 10**6,
        storage=out.parent if storage is None else storage,
        timeout_s=given["timeout"],
        inter_node_bytes_per_s=None if inter_node_gbps is None else inter_node_gbps * 1e9,
    )
    found = measured_profile(shape, settings)
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
    cluster, utilisation = found.cluster, found.utilisation
    width, peak = next(iter(cluster.peak_flops.items()))
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
        ),
    )
