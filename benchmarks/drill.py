"""Drills: the same random kills strike `full` and stock checkpoints, and behind a slow link `sparse` and `full`.

Each drill has kills of its own, ranks and nodes, at exponentially distributed times, and its jobs get the same ones at
the same times. Stock checkpoints are synchronous, at the interval that is best under these kills, and the job has
standbys for all ranks: Megatron-LM 0.19 saves asynchronously only by a worker that needs a GPU. Behind a link that
carries half of a rank's state in an iteration (`slow_links.py`) `full` has the interval that is best by what that page
measured. A job that is examined must end as without faults, to the last bit. One is said to be ahead where the 95 %
interval of the difference, over drills, leaves 0 out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import slow_links
from harness import ROOT, SETTINGS, STEADY, Benchmark, ends, laid_out, row, rule, spread, start, where

from moe_ckpt.simulator.events import Estimate, estimate

BENCHMARK = Benchmark("drill", 4, "chaos.md")
LAYOUT, BEHIND = {"NPROC": "2", "NNODES": "2", "TP": "1", "PP": "2", "EP": "2"}, slow_links.LAYOUT
MINUTES, MTBF_S, STANDBYS = 4.0, 30.0, 1
"""How long kills strike each job, seconds between them on average, and standbys of each node."""
TINY = f"--num-layers 2 --hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 {STEADY}"
RATIO, MTBF_ITERATIONS = 2.0, 100
"""Bytes of a rank's state by what the link carries in an iteration; iterations between kills there."""
KEPT = "iterations", "wall_s", "ettr", "trained_again", "replayed", "recoveries", "faults", "wrong", "interval"
"""Of what a drill says of a job."""


OURS, SLOW = ("full", "stock"), ("sparse", "full")
"""Which jobs are compared, without and behind the link."""


def main() -> int:
    """Exit code 0: it asks for nothing, it says which is ahead."""
    return BENCHMARK.run(__doc__, measured, page)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """A drill of each kind per turn; quick: a tiny job on one node for a few seconds, and no slow link."""
    layout, minutes, mtbf_s = (LAYOUT | {"NNODES": "1", "PP": "1"}, 0.2, 5.0) if quick else (LAYOUT, MINUTES, MTBF_S)
    full = (*TINY.split() * quick, "--moe-ckpt-strategy", "full")
    link = {} if quick else _link()
    found: dict[str, list[dict[str, Any]]] = {"stock": [], "slow_link": []}
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-drills-") as folder:
        for seed in range(1, turns + 1):
            both = drill(seed, (minutes, mtbf_s), layout, full, Path(folder) / "stock")
            found["stock"].append({"seed": seed, "full": both["subject"], "stock": both["baseline"]})
            if link:
                found["slow_link"].append({"seed": seed} | _behind(seed, minutes, link, Path(folder) / "slow-link"))
            last = [one[-1] for one in found.values() if one]
            of_jobs = (f"{name} {one[name]['ettr']:.3f}" for one in last for name in one if name != "seed")
            print(f"drill {seed} of {turns}, ETTR: {', '.join(of_jobs)}", flush=True)
    return {"layout": layout, "minutes": minutes, "mtbf_s": mtbf_s, "standbys": STANDBYS, "link": link, **found}


def drill(
    seed: int,
    times: tuple[float, float],
    layout: Mapping[str, str],
    flags: Sequence[str],
    folder: Path,
    own: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The jobs of one drill.

    Args:
        seed: of its kills.
        times: minutes of each job, and seconds between kills on average.
        layout: environment variables of scripts/train_cpu.sh.
        flags: of the training, strategy included.
        folder: where the run without faults stays, which drills with these flags share.
        own: more of the environment; with it stock checkpoints are left out.

    Raises:
        SystemExit: A job came out as it would not have without faults, or did not come to its end.
    """
    minutes, mtbf_s = times
    words = ["--seed", str(seed), "--minutes", str(minutes), "--mtbf", str(mtbf_s), "--standbys", str(STANDBYS)]
    words += [
        "--nproc",
        layout["NPROC"],
        "--nodes",
        layout.get("NNODES", "1"),
        "--reference",
        str(folder / "reference"),
    ]
    words += ["--no-baseline"] * (own is not None)
    environment = os.environ | dict(layout) | (own or {}) | {"MOE_CKPT_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-drill-") as jobs:
        command = [sys.executable, "-m", "moe_ckpt.drills", *words, "--folder", jobs, "--", *flags]
        ended = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{ended.stdout[-5000:]}{ended.stderr[-5000:]}\nthe drill of seed {seed} did not end well")
        result: dict[str, Any] = json.loads((Path(jobs) / "result.json").read_text())
    return {name: _of_job(result[name]) for name in ("subject", "baseline") if name in result}


def _of_job(found: Mapping[str, Any]) -> dict[str, Any]:
    if "ettr" not in found:
        raise SystemExit(f"stock checkpoints failed: {found.get('failed')}")
    back = [timeline["total_s"] for timeline in found["timelines"]]
    return {name: found[name] for name in KEPT if name in found} | {"recovery_s": back}


def _link() -> dict[str, Any]:
    """What the link carries by an iteration of this machine, how long kills are apart, and how often `full` takes a
    snapshot there by what that page measured."""
    known, (nbytes, base_s) = json.loads(slow_links.BENCHMARK.data.read_text()), slow_links.unlimited()
    rounds = known["links"][f"{RATIO:g}"]
    snapshot = statistics.fmean(slow_links.charged(one, known["interval"])[0] for one in rounds)
    restart = statistics.median(slow_links.restarts(rounds))
    interval = slow_links.best_full(snapshot, restart, MTBF_ITERATIONS)[1]
    rate = nbytes / (RATIO * base_s)
    at = known["machine"]["commit"]
    return {"bytes_per_s": rate, "mtbf_s": MTBF_ITERATIONS * base_s, "interval": interval, "measured_at": at}


def _behind(seed: int, minutes: float, link: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Both strategies behind the link, in another order from one drill to the next."""
    own = {"MOE_CKPT_SCRIPT": slow_links.__file__, SETTINGS: json.dumps({"bytes_per_s": link["bytes_per_s"]})}
    cases = {
        "sparse": ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-recovery", "global"),
        "full": ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", str(link["interval"])),
    }
    model = tuple(slow_links.MODEL.split())
    order = list(cases)[:: 1 if seed % 2 else -1]
    times = minutes, link["mtbf_s"]
    found = {name: drill(seed, times, BEHIND, (*model, *cases[name]), folder, own)["subject"] for name in order}
    return {name: found[name] for name in cases}


def _gains(drills: Sequence[Mapping[str, Any]], ours: str, other: str) -> Estimate:
    """ETTR of one less that of the other, drill by drill."""
    return estimate([one[ours]["ettr"] - one[other]["ettr"] for one in drills])


def _ahead(gain: Estimate, names: tuple[str, str] = OURS) -> str:
    """Whose interval of the difference leaves 0 out."""
    return "neither" if not gain.is_beyond() else names[0] if gain.mean > 0 else names[1]


def page(result: dict[str, Any]) -> list[str]:
    """Both kinds of drills."""
    several, intervals = len(result["stock"]), ends(one["stock"]["interval"] for one in result["stock"])
    lines = [
        *BENCHMARK.head("Drills: random kills, and what they leave of training"),
        f"{laid_out(result['layout'])} with {result['standbys']} standby each {where(result)}; the small model of"
        f" `scripts/train_cpu.sh`. {several} drills of {result['minutes']:g} minutes: SIGKILL takes a rank, or a node"
        f" with its memory, every {result['mtbf_s']:g} s on average, also during recoveries, and both jobs get the same"
        " kills at the same times. All state of `full` is at the end as without faults, to the last bit. ± is half of"
        " a 95 % interval over drills.",
        "",
        *_table(result["stock"], OURS),
        "",
        f"Stock is `torch_dist`, synchronous, every {intervals} iterations, the best for these kills, with as many"
        " standbys; Megatron-LM 0.19 saves asynchronously only by a worker that needs a GPU. By ETTR ahead:"
        f" {_ahead(_gains(result['stock'], *OURS))}. A rank's state has 1 MB, which storage takes in no time and keeps"
        " through lost nodes: what `full` saves with larger ones is not in this.",
    ]
    if not result["slow_link"]:
        return lines
    link = result["link"]
    return [
        *lines,
        "",
        "## State that is larger than an iteration can copy",
        "",
        f"{laid_out(BEHIND)} of [slow links](slow-links.md), a rank's state {RATIO:g} times what its link carries in an"
        f" iteration; a kill every {MTBF_ITERATIONS} iterations of training, {link['mtbf_s']:.0f} s. `full` takes a"
        f" snapshot every {link['interval']} iterations, the best by what was measured at commit"
        f" {link['measured_at']}. Before cfe63139, so in drills of 7fd1ebbd, links carried less.",
        "",
        *_table(result["slow_link"], SLOW),
        "",
        f"By ETTR ahead: {_ahead(_gains(result['slow_link'], *SLOW), SLOW)}.",
    ]


def _table(drills: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> list[str]:
    """A row for each drill, and means."""
    ours, other = names
    heads = [f"{what}, {name}" for what in ("iterations", "ETTR", "trained again") for name in names]
    rows = [
        row(
            one["seed"],
            _kills(one[ours]),
            *(f"{one[name]['iterations']}" for name in names),
            *(f"{one[name]['ettr']:.3f}" for name in names),
            *(one[name]["trained_again"] + one[name]["replayed"] for name in names),
        )
        for one in drills
    ]
    means = [f"{estimate([one[name]['ettr'] for one in drills]):.3f}" for name in names]
    back = [seconds for one in drills for seconds in one[ours]["recovery_s"]]
    return [
        row("seed", "kills", *heads),
        rule(2 + len(heads)),
        *rows,
        row("mean", "", "", "", *means, "", ""),
        "",
        f"ETTR of `{ours}` less that of {other}: {_gains(drills, *names):+.3f}. A recovery of `{ours}` takes"
        f" {spread(back or [0.0], 2)} s, of {len(back)}.",
    ]


def _kills(job: Mapping[str, Any]) -> str:
    kinds = [fault["kind"] for fault in job["faults"]]
    nodes = kinds.count("node")
    return f"{len(kinds)}" + f", {nodes} of nodes" * bool(nodes)


if __name__ == "__main__":
    start(main)
