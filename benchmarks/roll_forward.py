"""Replicas that follow gradients against sparse windows that are replayed: bytes, iterations, and a lost memory.

MOETION's peers roll their replicas forward by gradients of two bytes, MoEvement's ranks replay a window with frozen
operators. All train alike: four ranks in two stages, each with a replica on the other node, gradients reduced in bf16.
A rank is killed and its memory lost, so that its state comes from the replica; all processes start again. Jobs run in
turns, in another order in each round, and one that keeps no snapshots with them.
"""

from __future__ import annotations

import os
import runpy
import shutil
import statistics
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from harness import ROOT, STEADY, UNTIED, Benchmark, laid_out, row, rule, spread, start, under_faults, where
from localized_recovery import recoveries

from moe_ckpt.simulator.events import estimate

BENCHMARK = Benchmark("roll_forward", 4, "roll-forward.md")
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 16"
    f" --seq-length 128 --micro-batch-size 1 --global-batch-size 16 {UNTIED} {STEADY}"
)
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-experts 16 --seq-length 32 --micro-batch-size 1 --global-batch-size 8"
    f" {UNTIED} {STEADY}"
)
IN_BF16 = "--bf16 --grad-reduce-in-bf16"
REPLICAS, GRADIENTS = "--moe-ckpt-replicas 1", "--moe-ckpt-replicate gradients"
GLOBAL = " --moe-ckpt-recovery global"
NONE, FULL, FOLLOWED = "none", "full", "full, gradients"
WINDOWS = (6, 18)
"""On both sides of the bytes of gradients, the second close to them."""
KINDS = {
    NONE: "",
    FULL: f"--moe-ckpt-strategy full {REPLICAS}",
    FOLLOWED: f"--moe-ckpt-strategy full {REPLICAS} {GRADIENTS}",
    **{
        f"sparse, window {window}, {told}": f"--moe-ckpt-strategy sparse --moe-ckpt-window {window} {REPLICAS}{scope}"
        for window, told, scope in (
            (WINDOWS[0], "all stages", GLOBAL),
            (WINDOWS[1], "all stages", GLOBAL),
            (WINDOWS[1], "struck stage", ""),
        )
    },
}
LAYOUT = {"NNODES": "2", "NPROC": "2", "PP": "2", "EP": "2"}
FEWEST = LAYOUT | {"NPROC": "1", "PP": "1"}
FIRST, STRUCK, QUICK = 26, 44, (10, 16)
"""The first iteration that is measured, in which all windows are whole, and that before which the last one is: so many
that windows of each size are whole in between. In it a rank of the first round is killed, 3 later in each that follows:
elsewhere in a window."""
LOST, MEMORY = "MOE_CKPT_BENCHMARK_LOST", "MOE_CKPT_BENCHMARK_MEMORY"
"""Rank that loses its memory, and where that is."""


def main() -> int:
    """Exit code 0: what is better depends on how long an iteration takes."""
    return BENCHMARK.run(__doc__, measured, page)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """Of each job in each round its bytes, its iterations and its recovery; quick: a tiny model on two
    processes, one window."""
    kinds = [NONE, FOLLOWED, f"sparse, window {WINDOWS[0]}, all stages"] if quick else list(KINDS)
    model, layout, (first, struck) = (SMALL, FEWEST, QUICK) if quick else (MODEL, LAYOUT, (FIRST, STRUCK))
    rounds = []
    for index in range(turns):
        rounds.append(
            {
                kind: job(kind, f"{model} {IN_BF16}", layout, (first, struck), struck + 3 * index)
                for kind in kinds[:: 1 if index % 2 else -1]
            }
        )
        print(f"round {index + 1} of {turns}", flush=True)
    return {"model": model, "layout": layout, "rounds": rounds}


def job(kind: str, model: str, layout: dict[str, str], span: tuple[int, int], struck: int) -> dict[str, Any]:
    """A job that is struck once, in this iteration, if it is protected. span: the first iteration that is measured, and
    that after the last one."""
    faults = () if kind == NONE else (f"1@{struck}:step",)
    own = {"MOE_CKPT_SCRIPT": __file__, LOST: "1", MEMORY: "{folder}"}
    lines = under_faults(f"{model} --train-iters {struck + 4} {KINDS[kind]}", layout | own, faults)
    undisturbed = takewhile(lambda line: "recovery" not in line, lines)
    trained = (line for line in undisturbed if not line.get("replayed"))  # replays are told before their recovery is
    before = [line for line in trained if span[0] <= line.get("iteration", 0) < span[1]]
    if len(before) != span[1] - span[0]:
        raise SystemExit(f"{len(before)} iterations were measured, not {span[1] - span[0]}")
    found: dict[str, Any] = {"iteration_s": statistics.median(line["iteration_time_s"] for line in before)}
    if kind == NONE:
        return found
    (recovery,) = recoveries(lines, "local" if kind.endswith("struck stage") else "global")
    (parts,) = (line["recovery"]["parts"] for line in lines if "recovery" in line)
    return found | {
        "sent": statistics.fmean(line["replicated_bytes"] for line in before),
        "again": recovery["again"],
        "again_s": recovery["again_s"],
        "back_s": recovery["back_s"] - parts.get("import", 0.0),
    }


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    rounds: Sequence[dict[str, Any]] = result["rounds"]
    kinds = [kind for kind in KINDS if kind in rounds[0] and kind != NONE]
    plain = [one[NONE]["iteration_s"] for one in rounds]
    sent = {kind: statistics.fmean(one[kind]["sent"] for one in rounds) for kind in kinds}
    lines = [
        *BENCHMARK.head("Gradients that are rolled forward, and windows that are replayed"),
        f"{laid_out(result['layout'])} {where(result)}; {len(rounds)} jobs of each kind. Gradients are reduced in bf16"
        " in all of them. Each rank has a replica on the other node. One is killed and its memory lost; all processes"
        f" start again, whose imports are left out. Without snapshots an iteration takes {spread(plain)} s.",
        "",
        row("", "sent per iteration, MB", "iteration / none", "run again", "run again, s", "until training is back, s"),
        rule(6),
    ]
    for kind in kinds:
        of = [one[kind] for one in rounds]
        ratios = [one[kind]["iteration_s"] / base for one, base in zip(rounds, plain, strict=True)]
        again = statistics.fmean(one["again"] for one in of)
        times = (spread([one[name] for one in of], 2) for name in ("again_s", "back_s"))
        lines.append(row(kind, f"{sent[kind] / 1e6:.2f}", spread(ratios), f"{again:.1f}", *times))

    def over(other: str, name: str) -> str:
        return spread([one[FOLLOWED][name] / one[other][name] for one in rounds], 2)

    lines.append("")
    for kind in (one for one in kinds if "window" in one):
        lines.append(
            f"Compared with {kind}, which sends {sent[kind] / sent[FOLLOWED]:.2f} times the bytes of gradients,"
            f" training is back in {over(kind, 'back_s')} of the time, and iterations take"
            f" {over(kind, 'iteration_s')} of the time."
        )
    if FULL in kinds:
        pairs = [(one[FOLLOWED], one[FULL]) for one in rounds]
        longer = estimate([100 * (ours["iteration_s"] / full["iteration_s"] - 1) for ours, full in pairs])
        later = estimate([ours["back_s"] - full["back_s"] for ours, full in pairs])
        lines.append(
            f"Gradients are {100 * sent[FOLLOWED] / sent[FULL]:.1f} % of the bytes of {FULL}. Training is back"
            f" {later:+.2f} s later, iterations take {longer:+.1f} % longer, mean and half of the 95 % interval: one"
            " that holds 0 shows no difference."
        )
    peers = "Peers repeat each step, on the same cores here, and need an optimizer whose steps they can repeat to the"
    return [*lines, f"{peers} bit; `sparse` needs neither."]


def lost() -> NoReturn:
    """What each rank runs: training, where the one that lost its memory begins without it."""
    if os.environ["RANK"] == os.environ[LOST] and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        slots = Path(os.environ[MEMORY]).rglob(f"slot-{int(os.environ['LOCAL_RANK']):03}")
        (slot,) = (one for one in slots if os.environ["MOE_CKPT_NODE"] in one.parts)
        shutil.rmtree(slot)
    sys.argv[0] = str(ROOT / "pretrain_gpt_moe.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    if LOST in os.environ:
        lost()
    start(main)
