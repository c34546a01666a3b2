"""One of two replicas of a model is killed: how long the other waits for its next step, here and with torchft.

Here the lost rank comes back from its replica before anybody continues, and every bit is that of an undisturbed run.
torchft's other group continues alone, with half of the batch, and gives its state to the lost one once that is back.
Both train a model of as many parameters on two processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import ROOT, STEADY, Benchmark, row, rule, spread, start, under_faults, where
from peers import WHEELS, missing_peers

BENCHMARK = Benchmark("replica_loss", 5, "replica-loss.md")
PEERS_FOLDER = ROOT / ".data" / "peers"
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 8"
    f" --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --bf16 {STEADY}"
)
PARAMETERS = 3_500_000
KILLED, AFTER, WAIT_S = 12, 12, 90.0
"""The step at which it happens, how many follow, and how long any of them may take to come."""
OURS = {"here, new processes": "0", "here, a standby": "1"}
LIGHTHOUSES = {"as its README starts it": (10_000, 5_000), "quick": (1_000, 1_000)}
"""torchft's milliseconds until a group counts as lost for a quorum, and without a heartbeat."""

LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
kept = LighthouseServer("127.0.0.1:0", 1, *map(int, sys.argv[1:]))
print(kept.address(), flush=True)
sys.stdin.read()
"""


def main() -> int:
    """Exit code 0: which is better depends on what a user wants."""
    return BENCHMARK.run(__doc__, measured, page)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """Rounds of all, in turns; quick: one of ours and one lighthouse."""
    missing = missing_peers(PEERS_FOLDER, ("torchft",))
    own, theirs = (dict(list(kinds.items())[-1 if quick else 0 :]) for kinds in (OURS, LIGHTHOUSES))
    if missing:
        theirs.clear()
    rounds = []
    for index in range(turns):
        here = {name: ours(standbys) for name, standbys in own.items()}
        rounds.append(here | {f"torchft, {name}": of_torchft(*limits) for name, limits in theirs.items()})
        print(f"round {index + 1} of {turns}", flush=True)
    return {"missing": missing, "model": MODEL, "parameters": PARAMETERS, "rounds": rounds}


def ours(standbys: str) -> dict[str, float]:
    """Seconds of a job with a replica and so many standbys."""
    layout = {
        "NPROC": "2", "PP": "1", "EP": "1", "STANDBYS": standbys, "READY_STANDBYS": standbys, "SLOTS": "{folder}",
        "MOE_CKPT_SCRIPT": str(ROOT / "tests" / "process" / "standby_job.py"),
    }  # fmt: skip
    flags = f"{MODEL} --train-iters {KILLED + AFTER} --moe-ckpt-strategy full --moe-ckpt-replicas 1"
    lines = under_faults(flags, layout, [f"1@{KILLED}:step"])
    (found,) = (line["recovery"] for line in lines if "recovery" in line)
    ends = [line["at_s"] for line in lines if "iteration" in line]
    next_s = next(at for at in ends if at > found["begun_s"]) - found["begun_s"]
    return {"step_s": _usual(ends), "next_s": next_s, "both_s": next_s}


def of_torchft(lost_ms: int, heartbeat_ms: int) -> dict[str, float]:
    """Seconds of two groups and a lighthouse with these limits; the lost group is started again at once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="moe-ckpt-benchmark-") as folder:
        environment = os.environ | {"PYTHONPATH": str(PEERS_FOLDER), "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        command = [sys.executable, "-c", LIGHTHOUSE, str(lost_ms), "100", str(heartbeat_ms)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as lighthouse:
            assert lighthouse.stdout is not None
            address = lighthouse.stdout.readline().strip()
            files = [Path(folder) / name for name in ("first", "second")]
            script = str(Path(__file__).with_name("torchft_group.py"))

            def started(file: Path) -> subprocess.Popen[bytes]:
                words = [file.name, address, str(file), str(PARAMETERS)]
                with file.with_suffix(".log").open("ab") as said:
                    command = [sys.executable, "-W", "ignore", script, *words]
                    return subprocess.Popen(command, env=environment, stdout=said, stderr=said)

            groups = [started(file) for file in files]
            try:
                _awaited(files[0], lambda line: line["groups"] == 2, KILLED)
                killed_s = time.monotonic()
                groups[1].kill()
                groups[1].wait()
                groups[1] = started(files[1])
                alone = _awaited(files[0], lambda line: line["groups"] == 1 and line["at_s"] > killed_s)
                both = _awaited(files[0], lambda line: line["groups"] == 2 and line["at_s"] > alone["at_s"])
                ends = [line["at_s"] for line in _lines(files[0]) if line["at_s"] < killed_s and line["groups"] == 2]
            finally:
                for one in (*groups, lighthouse):
                    one.kill()
                    one.wait()
    return {"step_s": _usual(ends), "next_s": alone["at_s"] - killed_s, "both_s": both["at_s"] - killed_s}


def _lines(file: Path) -> list[dict[str, Any]]:
    """What a group has written, but for a line that it is writing."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _awaited(file: Path, is_it: Callable[[dict[str, Any]], bool], times: int = 1) -> dict[str, Any]:
    """The line that is the so many-th of its kind."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if len(found := list(filter(is_it, _lines(file)))) >= times:
            return found[times - 1]
        time.sleep(0.02)
    said = file.with_suffix(".log").read_text(errors="replace")[-3000:]
    raise SystemExit(f"{said}\ntorchft's other group did not come to its next step within {WAIT_S:.0f} s")


def _usual(ends: list[float]) -> float:
    return statistics.median(second - first for first, second in pairwise(ends))


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    kinds, rounds = list(result["rounds"][0]), result["rounds"]
    rows = {
        "a step before, s": "step_s",
        "until the other's next step, s": "next_s",
        "until both train again, s": "both_s",
    }
    table = [
        row(what, *(spread([one[kind][key] for one in rounds], 2) for kind in kinds)) for what, key in rows.items()
    ]
    beyond = (spread([one[kind]["next_s"] - one[kind]["step_s"] for one in rounds], 2) for kind in kinds)
    table.insert(2, row("of it beyond a step, s", *beyond))
    missing = [f"Not measured: {name}, {why}." for name, why in result["missing"].items()]
    return [
        *BENCHMARK.head("One of two replicas is killed"),
        f"Measured {where(result)}; n = {len(rounds)}. Here: `full` with a replica, two data-parallel ranks, from"
        f" detection: the launcher looks every 0.1 s. {WHEELS['torchft']}: two groups of one rank"
        f" that train {result['parameters'] / 1e6:.1f} million parameters, as many, from the kill; the lost one starts"
        " as a new process, with its imports; its lighthouse as its README starts it (a group joins for 10 s,"
        " heartbeats may be missed for 5 s), and with 1 s for both.",
        "",
        row("", *kinds),
        rule(1 + len(kinds)),
        *table,
        "",
        *missing,
        "Here nobody trains on before both do, and losses are those of an undisturbed run to the bit. torchft's other"
        " group trains on with half of the batch, and the steps of the lost one are gone.",
    ]


if __name__ == "__main__":
    start(main)
