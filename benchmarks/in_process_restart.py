"""Recovery in place, and NVRx's in-process restart: from the kill of a rank to the next iteration, side by side.

The same training on as many ranks, one of which is killed in the same iteration, in turns. Ours protects each iteration
with `sparse` and has one standby. NVRx 0.6.0 (`inprocess.Wrapper`) has one process in reserve and calls the function
that trains again in all processes; the state comes from the newest dense checkpoint. Gloo does not end a wait when
another thread destroys its groups, so NVRx's own `Abort` leaves ranks waiting here: it is run once as it is, for as
long as --patience says, and then with closed connections as a further `Abort`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, machine, spread
from peers import NVRX, install_nvrx
from standbys import MODEL, WINDOW

BENCHMARK = Benchmark("in_process_restart", "in-process-restart.md")
NVRX_FOLDER = ROOT / ".data" / "nvrx"
RANKS, VICTIM, STRIKES_AT, ITERATIONS, SAVED_EVERY = 4, 2, 11, 16, 4
LAYOUT = {"NPROC": str(RANKS), "PP": "2", "EP": "2", "TP": "1"}
OURS, WITH_HANG_UP, AS_IT_IS = "in place", "NVRx, connections closed", "NVRx as it is"
LIMIT_S = 180.0
JOB = str(ROOT / "benchmarks" / "restart_job.py")


def main() -> int:
    """Measure; exit code 1 unless ours was back first, by the median."""
    parser = BENCHMARK.parser(__doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=5, help="of one job of each kind (default: 5)")
    parser.add_argument("--patience", type=float, default=60, help="seconds that NVRx as it is gets (default: 60)")
    arguments = parser.parse_args()
    result = BENCHMARK.result(
        arguments, lambda: measured(1 if arguments.quick else arguments.rounds, arguments.patience)
    )
    BENCHMARK.show(arguments, result, page(result))
    ours, peers = ([one["next_s"] for one in result["rounds"][kind]] for kind in (OURS, WITH_HANG_UP))
    return 0 if statistics.median(ours) < statistics.median(peers) else 1


def measured(rounds: int, patience_s: float) -> dict[str, Any]:
    """All rounds, and NVRx as it is once."""
    if why := install_nvrx(NVRX_FOLDER):
        raise SystemExit(f"{NVRX} cannot be installed: {why}")
    result: dict[str, Any] = {"machine": machine(), "model": MODEL, "patience_s": patience_s, "rounds": {}}
    result[AS_IT_IS] = struck(AS_IT_IS, patience_s)
    for index in range(rounds):
        for kind in (OURS, WITH_HANG_UP)[:: 1 if index % 2 else -1]:
            result["rounds"].setdefault(kind, []).append(struck(kind, LIMIT_S))
        print(f"round {index + 1} of {rounds}", flush=True)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def struck(kind: str, limit_s: float) -> dict[str, Any]:
    """One job, until it ends, or until `limit_s` after the kill: what came when, and whose processes were kept."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="restart-benchmark-") as name:
        folder = Path(name)
        flags = [*MODEL.split(), "--train-iters", str(ITERATIONS), "--log-interval", "1000"]
        environment = os.environ | LAYOUT | {"PROGRESS": name, "TMPDIR": name, "PYTHON": sys.executable}
        environment |= {"VICTIM": str(VICTIM), "STRIKES_AT": str(STRIKES_AT), "OMP_NUM_THREADS": "1"}
        if kind == OURS:
            flags += ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", str(WINDOW), "--moe-ckpt-memory-dir", name]
            jobs = [_ours(flags, environment, folder)]
            store = None
        else:
            flags += ["--save", str(folder / "dense"), "--load", str(folder / "dense")]
            flags += ["--save-interval", str(SAVED_EVERY)]
            environment |= {"NVRX": str(NVRX_FOLDER), "HANG_UP": str(int(kind == WITH_HANG_UP))}
            jobs, store = _nvrx(flags, environment, folder)
        try:
            before = _pids_before(folder, jobs)
            _wait(folder, jobs, limit_s)
        finally:
            for job in jobs:
                job.kill()
                job.wait()
            del store
        found = _found(folder, before)
        if kind != AS_IT_IS and "caught_up_s" not in found:
            said = (folder / "said").read_text()[-5000:]
            raise SystemExit(f"{kind}: the struck iteration did not end within {limit_s:.0f} s after the kill\n{said}")
        return found


def _ours(flags: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    own = {"STANDBYS": "1", "SCRIPT": JOB, "MAX_RESTARTS": "3"}
    with (folder / "said").open("wb") as said:
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags]
        return subprocess.Popen(command, env={**environment, **own}, stdout=said, stderr=said)


def _nvrx(
    flags: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[list[subprocess.Popen[bytes]], Any]:
    """All ranks and one in reserve, without a launcher, which would end all when one does; with its store."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    spare = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = spare.port
    del spare
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "NVRX_PORT": str(port)}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(RANKS + 1)}
    jobs = []
    for rank in range(RANKS + 1):
        seat = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
        with (folder / "said").open("ab") as said:
            command = [sys.executable, JOB, *_all_flags(flags, environment)]
            jobs.append(subprocess.Popen(command, env={**environment, **own, **seat}, stdout=said, stderr=said))
    return jobs, store


def _all_flags(flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """With those of scripts/train_cpu.sh, which says its command where `echo` is its Python."""
    settings = {**environment, "PYTHON": "echo", "SCRIPT": JOB}
    said = subprocess.run(
        [str(ROOT / "scripts" / "train_cpu.sh"), *flags], env=settings, check=True, capture_output=True, text=True
    ).stdout.split()
    return said[said.index(JOB) + 1 :]


def _pids_before(folder: Path, jobs: Sequence[subprocess.Popen[bytes]]) -> dict[str, str]:
    """Of the ranks that trained when the rank was killed."""
    _until(lambda: (folder / "killed").exists(), folder, jobs, LIMIT_S)
    return {path.name: path.read_text() for path in folder.glob("pid-*")}


def _wait(folder: Path, jobs: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until the struck iteration has ended, and the job, or the time is over."""
    _until(lambda: any(number >= STRIKES_AT + 1 for number, _ in _after_kill(folder)), folder, jobs, limit_s)


def _until(done: Callable[[], bool], folder: Path, jobs: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not done() and time.monotonic() < until:
        if all(job.poll() is not None for job in jobs):
            raise SystemExit(f"the job ended early:\n{(folder / 'said').read_text()[-5000:]}")
        time.sleep(0.1)


def _after_kill(folder: Path) -> list[tuple[int, float]]:
    """The iterations that ended after the kill, and how many seconds after it."""
    killed, path = float((folder / "killed").read_text()), folder / "iterations"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(number), float(at) - killed) for number, at in lines if float(at) > killed]


def _found(folder: Path, before: Mapping[str, str]) -> dict[str, Any]:
    ended = _after_kill(folder)
    after = {path.name: path.read_text() for path in folder.glob("pid-*")}
    found: dict[str, Any] = {"kept_processes": sum(before[name] == after[name] for name in before)}
    if ended:
        found |= {"next_s": ended[0][1], "next_iteration": ended[0][0]}
    caught_up = [seconds for number, seconds in ended if number >= STRIKES_AT]
    if caught_up:
        found["caught_up_s"] = caught_up[0]
    return found


def page(result: Mapping[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    about, kinds, as_is = result["machine"], (OURS, WITH_HANG_UP), result[AS_IT_IS]
    rounds = result["rounds"]
    lines = [
        "# Recovery in place, and NVRx's in-process restart",
        "",
        "Made by `benchmarks/in_process_restart.py --write`; every job is in"
        " `benchmarks/results/in_process_restart.json`. Medians, and in brackets quartiles.",
        "",
        f"{RANKS} processes (PP=2, EP=2) on {about['cores']} cores ({about['cpu']}), torch {about['torch']},"
        f" Megatron-Core {about['megatron_core']}, gloo; one-minute load {about['load_before']:.1f} before and"
        f" {about['load_after']:.1f} after, the jobs' own included. Rank {VICTIM} is killed in iteration {STRIKES_AT};"
        " one process with all imports done waits to take its place. Ours protects each iteration (`sparse`, window of"
        f" {WINDOW}); with NVRx the driver writes a dense checkpoint every {SAVED_EVERY} iterations to memory and loads"
        " the newest.",
        "",
        f"| | {' | '.join(kinds)} |",
        "|---|---|---|",
    ]
    for name, field in (
        ("kill to next iteration", "next_s"),
        ("kill to the end of the struck iteration", "caught_up_s"),
    ):
        cells = [spread([one[field] for one in rounds[kind]], 2) for kind in kinds]
        lines.append(f"| {name}, s | {' | '.join(cells)} |")
    cells = [str(STRIKES_AT - rounds[kind][0]["next_iteration"]) for kind in kinds]
    lines.append(f"| iterations trained again by all | {' | '.join(cells)} |")
    cells = [f"{min(one['kept_processes'] for one in rounds[kind])} of {RANKS - 1}" for kind in kinds]
    lines.append(f"| survivors that keep their process | {' | '.join(cells)} |")
    lines.append("| survivors that keep model, optimizer, data loader | all | none: the function is called again |")
    lines.append("| rank 0 may be lost | yes | no: its process is the store |")
    return [*lines, "", *_as_it_is(as_is, result["patience_s"])]


def _as_it_is(found: Mapping[str, Any], patience_s: float) -> Iterator[str]:
    if "next_s" in found:
        yield f"Without closed connections NVRx's next iteration ended {found['next_s']:.1f} s after the kill."
    else:
        yield (
            f"Without closed connections no iteration ended within {patience_s:.0f} s after the kill: a rank that is"
            " no neighbour of the lost one waits on in gloo, which destroying its process groups in another thread does"
            " not end, nor does it close connections"
            " (pytorch issue 130345). On GPUs NVRx aborts NCCL's communicators, and this does not arise."
        )


if __name__ == "__main__":
    sys.exit(main())
