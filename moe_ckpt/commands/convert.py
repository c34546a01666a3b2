"""`moe-ckpt convert`: an ordinary dense checkpoint from a job's storage or from a chain of partial ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from moe_ckpt.checkpoints.location import LocationKind
from moe_ckpt.checkpoints.recognition import recognize
from moe_ckpt.megatron_core import load_megatron_core
from moe_ckpt.report.progress import progress

from ..dense.names import new_iteration_folder
from .convert_hf import from_hugging_face, to_hugging_face
from .values import require_place

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.moe.ports import Listing, SnapshotId
    from moe_ckpt.checkpoints.persist_dir import PersistDir
    from moe_ckpt.checkpoints.windows import StoredState

HELP = """Turn SOURCE into another kind of checkpoint in OUT: a torch_dist one, or weights of Hugging Face.

With --to dense OUT is a --save folder that any Megatron loads. SOURCE is the storage of a job (its
--moe-ckpt-persist-dir), of which the newest state is taken, or a checkpoint that was saved with --save-experts: an
iteration, or the --save folder for its newest one.

A checkpoint with some of the experts is put together with the older iterations beside it that hold the others. That
takes memory for one piece of a tensor, and no job:

\b
    $ moe-ckpt convert --to dense run/checkpoints run/dense
    $ scripts/train_cpu.sh --load run/dense ...          # continues from there

No single snapshot of a sparse window in storage is a whole state, so the job is started once more, on the CPU and with
as many processes as it had ranks. They recover the state, replay the iterations of the window with the recorded flags
and the same data, save OUT/iter_NNNNNNN, and end; what they say goes to standard error. Flags after -- win over the
recorded ones, as when the data was moved:

\b
    $ moe-ckpt convert --to dense run/snapshots run/dense
    $ moe-ckpt convert --to dense run/snapshots run/dense -- --data-path /new/place/corpus

The parallel layout stays that of the job; the checkpoint can then be loaded under another one as any other. Snapshots
of a job on GPUs need no GPU: the random states of its devices are carried along unchanged. Its sparse windows do, as a
CPU does not repeat iterations of a GPU to the last bit: they are refused.

With --to hf SOURCE is a dense checkpoint of a supported model (docs/hugging_face.md; an iteration, or a --save folder),
of any parallel layout, and OUT a new folder that transformers loads: config.json, safetensors, tokenizer. With --from
hf it is the other way around: OUT/release is a checkpoint of the weights, which any layout loads. Numbers move and are
never changed, so there and back gives the same bytes. No job and no GPU is needed, and memory for one file of weights:

\b
    $ moe-ckpt convert --from hf mixtral/ run/start
    $ scripts/train_cpu.sh --load run/start ...          # with the flags that the first command printed
    $ moe-ckpt convert --to hf --hf-model mixtral/ run/checkpoints exported/

Exit codes: 0 written; 1 SOURCE is damaged or not whole, or the job failed; 2 wrong usage, such as an OUT that has that
iteration, or another checkpoint, already, or a model of another architecture; every byte of SOURCE of which there is a
checksum is compared with it before it is taken.
"""

LAUNCHER, DRIVER = "megatron.pretrain.launch", "megatron.pretrain.densify"

# What the recorded flags say of how the job was run and not of what it trained, with how many values each takes.
_DROPPED = {
    "--save": 1,
    "--save-interval": 1,
    "--save-experts": 1,
    "--save-experts-selection": 1,
    "--save-experts-scope": 1,
    "--save-retain-interval": 1,
    "--non-persistent-save-interval": 1,
    "--non-persistent-ckpt-type": 1,
    "--replication": 0,
    "--replication-jump": 1,
    "--logits-save-dir": 1,
    "--async-save": 0,
    "--ckpt-format": 1,
    "--load-main-params-from-ckpt": 0,
    "--load": 1,
    "--pretrained-checkpoint": 1,
    "--ckpt-step": 1,
    "--finetune": 0,
    "--no-load-optim": 0,
    "--no-load-rng": 0,
    "--no-save-optim": 0,
    "--no-save-rng": 0,
    "--exit-on-missing-checkpoint": 0,
    "--exit-interval": 1,
    "--exit-duration-in-mins": 1,
    "--exit-signal-handler": 0,
    "--log-progress": 0,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--metrics-jsonl": 1,
    "--metrics-textfile": 1,
    "--metrics-port": 1,
    "--moe-ckpt-interface": 1,
    "--moe-ckpt-memory-dir": 1,
    "--moe-ckpt-persist-dir": 1,
    "--moe-ckpt-take-over": 1,
    "--moe-ckpt-replicas": 1,
    "--moe-ckpt-replicate": 1,
    "--moe-ckpt-strict": 0,
    "--moe-ckpt-inject-fault": 1,
}


@click.command(help=HELP)
@click.option("--to", type=click.Choice(["dense", "hf"]), help="What to make of it.")
@click.option(
    "--from", "kind", type=click.Choice(["hf"]), help="What SOURCE is, where it is no checkpoint of Megatron."
)
@click.option(
    "--hf-model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="With --to hf: a folder with the config and tokenizer to carry along [default: what was converted --from hf].",
)
@click.option("--max-shard-size", metavar="BYTES", help="With --to hf: of a file, such as 2GB [default: 5GB].")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def convert(
    context: click.Context,
    to: str | None,
    kind: str | None,
    hf_model: Path | None,
    max_shard_size: str | None,
    as_json: bool,
    source: str,
    out: Path,
    flags: tuple[str, ...],
) -> None:
    """See `HELP`; the option above each parameter explains it."""
    if (to is None) == (kind is None):
        raise UsageError("give one of --to dense, --to hf and --from hf")
    if to != "hf" and (hf_model or max_shard_size):
        raise UsageError("--hf-model and --max-shard-size are for --to hf")
    if (to == "hf" or kind == "hf") and flags:
        raise UsageError(f"{source} is converted without a job: leave out the flags after --, {' '.join(flags)}")
    if to == "dense":
        said, facts = _to_dense(context, source, out, flags)
    elif to == "hf":
        if not out.exists():  # else that is said first
            require_place(Path(source))
        said, facts = to_hugging_face(Path(source), out, hf_model, max_shard_size)
    else:
        said, facts = from_hugging_face(Path(source), out)
    click.echo(json.dumps(facts) if as_json else said)


def _to_dense(context: click.Context, source: str, out: Path, flags: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    kind = recognize(source)
    if kind is LocationKind.STORAGE:
        target, iteration = _from_storage(context, source, out, flags)
    else:
        target, iteration = _from_chain(source, kind, out, flags)
    said = f"{target} holds the whole state after iteration {iteration}"
    return said, {"checkpoint": str(target), "iteration": iteration}


def _from_storage(context: click.Context, source: str, out: Path, flags: tuple[str, ...]) -> tuple[Path, int]:
    from moe_ckpt.checkpoints.persist_dir import open_persist_dir

    storage = open_persist_dir(source)
    window = newest(storage)
    target = new_iteration_folder(out, window.last)
    code = densified(window, storage, out, flags)
    if code:
        context.exit(code)
    if not target.exists():
        raise MoECheckpointError(f"{target} was not written; the lines above say why")
    return target, window.last


def _from_chain(source: str, kind: LocationKind, out: Path, flags: tuple[str, ...]) -> tuple[Path, int]:
    if kind not in (LocationKind.SAVES, LocationKind.ITERATION):
        raise UsageError(
            f"{source} is {kind.value}: give the --moe-ckpt-persist-dir of the job, or a checkpoint that"
            " was saved with --save-experts"
        )
    if flags:
        raise UsageError(f"{source} is converted without a job: leave out the flags after --, {' '.join(flags)}")
    load_megatron_core()
    from ..dense.export import export_merged

    try:
        target = export_merged(Path(source), out, partial(progress, "converting"))
    except OSError as error:
        raise MoECheckpointError(f"{error.filename or out} cannot be written: {error.strerror or error}") from error
    return target, int(target.name.rpartition("_")[2])


@dataclass(frozen=True)
class ConversionSource:
    """What is converted: snapshots of the iterations `first` to `last` of all ranks, and the job that made them.

    flags: of the driver, as they were given in `folder`.
    """

    snapshots: tuple[SnapshotId, ...] = field(repr=False)
    first: int
    last: int
    world_size: int
    flags: tuple[str, ...] = field(repr=False)
    folder: Path


def newest(persist_dir: PersistDir) -> ConversionSource:
    """The newest complete window in storage; a snapshot of everything is a window of one iteration.

    Raises UnreadableCheckpoint when there is none, UsageError when the one there does not say how its job was started.
    """
    # Brings numpy, which other commands start without.
    from moe_ckpt.checkpoints.windows import on_timeline, restorable, states, stored_snapshots, timelines

    place, snapshots = persist_dir.place, stored_snapshots(persist_dir.store)
    found = next(restorable(snapshots), None)
    if found is None:
        left = (state for line in timelines(snapshots) for state in states(on_timeline(line, snapshots)))
        problem = _why_none(next(left, None), persist_dir.store.snapshots())
        raise UnreadableCheckpoint(f"{place} has {problem}; is it a --moe-ckpt-persist-dir?")
    span, leading = found.state.span, found.state.leading
    command = leading.command
    if command is None:
        raise UsageError(f"{place}: the {leading.snapshot} does not say with which flags its job was started")
    members = tuple(stored.snapshot for stored in found.members)
    return ConversionSource(members, span[0], span[-1], leading.world_size, command.flags, Path(command.folder))


def _why_none(newest_state: StoredState | None, listed: Listing) -> str:
    """What storage has instead of a state that can be restored."""
    if newest_state is None:
        return f"nothing that is whole: {listed.torn[0].why}" if listed.torn else "no snapshots"
    if newest_state.first_lacking is None:
        return f"no complete state: older snapshots with what {newest_state} needs are missing or torn on some ranks"
    (iteration, rank), span = newest_state.first_lacking, newest_state.span
    return (
        f"no complete state: of iterations {span[0]} to {span[-1]} the snapshot of rank {rank} after"
        f" iteration {iteration} is missing or torn"
    )


def densified(source: ConversionSource, persist_dir: PersistDir, out: Path, flags: Sequence[str]) -> int:
    """Starts the job once more and lets it write the checkpoint.

    Args:
        source: what to convert, see `newest`.
        persist_dir: the storage that it is in; nothing there is changed.
        out: the --save folder of the new checkpoint.
        flags: given after the recorded ones, and so winning over them.

    Returns:
        The exit code with which the job ended.
    """
    script = importlib.util.find_spec(DRIVER)
    if script is None or script.origin is None:
        raise UsageError(f"{DRIVER} is missing: install this package with its training driver")
    shared = Path("/dev/shm")
    folder = source.folder if _is_folder(source.folder) else Path.cwd()
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-", dir=shared if shared.is_dir() else None) as memory,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-convert-") as view,
    ):
        own = ["--device", "cpu", "--save", str(out.absolute()), "--moe-ckpt-replicas", "0"]
        # Training ends where it was recovered, and saves there; it evaluates nothing.
        own += ["--save-interval", str(10**9), "--eval-iters", "0", "--ckpt-format", "torch_dist"]
        # No iteration but those of a replay is run, so random states of a GPU continue unchanged: nothing is inexact.
        own += ["--moe-ckpt-reshard", "inexact", "--moe-ckpt-take-over", "any"]
        # The snapshots of the source alone, so that nothing is tidied up in a storage that a job may still write to.
        alone = persist_dir.copied_to(Path(view), source.snapshots)
        own += ["--moe-ckpt-memory-dir", memory, "--moe-ckpt-persist-dir", alone]
        # Not from the folder of the job: a checkout of another version may lie there.
        command = [
            sys.executable,
            "-P",
            "-m",
            LAUNCHER,
            "--nproc-per-node",
            str(source.world_size),
            "--max-restarts",
            "0",
        ]
        command += [script.origin, *recorded(source.flags), *own, *flags]
        # Standard output is for what the command itself has to say.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, env=environment, stdout=2, check=False).returncode


def _is_folder(path: Path) -> bool:
    """Whether a folder is there that may be entered."""
    with suppress(OSError):
        return path.is_dir() and os.access(path, os.X_OK)
    return False


def recorded(flags: Sequence[str]) -> list[str]:
    """The flags of a job that say what it trains: without where it saved, what it logged and how it was to end."""
    kept, skip = [], 0
    # Where it is all of the model's arguments that are read from there.
    needed = ("--load", "--pretrained-checkpoint") if "--use-checkpoint-args" in flags else ()
    for flag in flags:
        if flag.startswith("--"):
            name, given, _ = flag.partition("=")
            drops = name in _DROPPED and name not in needed
            skip = _DROPPED[name] + 1 - bool(given) * _DROPPED[name] if drops else 0
        if skip:
            skip -= 1
        else:
            kept.append(flag)
    return kept
