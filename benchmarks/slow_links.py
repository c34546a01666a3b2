"""`sparse` against `full` on links of several speeds: what each costs an iteration, and what a fault costs.

Two processes train one GPT-MoE in Megatron-LM's loop. The copy thread sleeps after each chunk, so that the link out of
a rank's training memory carries so many bytes per second. Jobs without checkpoints, with `full` and with `sparse` run
right after each other, in another order in each round; the latter two lose a process. From these costs follows the ETTR
for each time between failures, with the best interval of `full` and the window that `sparse` chooses. One is said to be
ahead where the 95 % interval of the difference, over rounds, leaves 0 out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from harness import ROOT, SETTINGS, STEADY, UNTIED, Benchmark, ends, row, rule, spread, start, under_faults, where
from localized_recovery import recoveries

from moe_ckpt.simulator.events import Estimate, estimate

BENCHMARK = Benchmark("slow_links", 4, "slow-links.md")
AGAIN = BENCHMARK.data.with_name("slow_links_again.json")
"""Kept by hand: what `BENCHMARK` measured on another day."""
LAYOUT = {"NPROC": "2", "TP": "1", "PP": "1", "EP": "2"}
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Bytes of a rank's whole state by what its link carries in an iteration."""
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --moe-ffn-hidden-size 512 --num-experts 8 --bf16"
    f" --seq-length 64 --micro-batch-size 2 --global-batch-size 8 {UNTIED} {STEADY}"
)
TINY = (
    "--num-layers 2 --hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --bf16"
    f" {UNTIED} {STEADY}"
)
INTERVAL, WARM = 4, 5
"""Iterations between snapshots of `full`; iterations after a start that are not counted."""
ITERATIONS, FAULTS = 40, ("1@22:forward-backward", "0@23:step")
"""Rounds take the faults in turn, one in each job."""
MTBFS = (100, 1_000, 10_000)
"""In iterations: with iterations of 10 s 17 minutes, 2.8 hours and 28 hours."""
USABLE_AFTER = 1
"""Iterations from a snapshot to the first that it can be loaded after (decision 110)."""
MOST_INTERVAL = 1000
QUEUE_S = 0.02
"""How late the copy thread may come, as behind Python's lock, without its link having stood still."""


def main() -> int:
    """Exit code 0: it asks for nothing, it says which is better where."""
    return BENCHMARK.run(__doc__, measured, page)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """All rounds of all links; quick: a tiny model, one link, and no fault."""
    model, iterations, faults = (TINY, 14, ((),)) if quick else (MODEL, ITERATIONS, [(fault,) for fault in FAULTS])
    flags = f"{model} --train-iters {iterations}"
    nbytes, base_s = unlimited(model, iterations)
    found: dict[str, list[dict[str, Any]]] = {}
    for ratio in RATIOS[1:2] if quick else RATIOS:
        rate = nbytes / (ratio * base_s)
        cases = {
            "none": flags,
            "full": f"{flags} --moe-ckpt-strategy full --moe-ckpt-interval {INTERVAL}",
            "sparse": f"{flags} --moe-ckpt-strategy sparse --moe-ckpt-recovery global",
        }
        rounds = []
        for index in range(turns):
            killed = faults[index % len(faults)]
            order = list(cases)[:: 1 if index % 2 else -1]
            lines = {name: job(cases[name], rate, () if name == "none" else killed) for name in order}
            rounds.append({name: summary(lines[name]) for name in cases})
            print(f"ratio {ratio:g}: round {index + 1} of {turns}", flush=True)
        found[f"{ratio:g}"] = rounds
    links = {"model": model, "bytes": nbytes, "iteration_s": base_s, "interval": INTERVAL, "links": found}
    return links | {"gains": gained(links)}


def unlimited(model: str = MODEL, iterations: int = ITERATIONS) -> tuple[int, float]:
    """Bytes of a rank's state, and seconds of an iteration without checkpoints."""
    flags = f"{model} --train-iters {iterations}"
    lines = job(f"{flags} --moe-ckpt-strategy full --moe-ckpt-interval {iterations}", math.inf, ())
    # The second job: the first one of a machine is slower.
    return lines[-1]["checkpoint_memory"]["dense_bytes"], statistics.median(times(job(flags, math.inf, ())))


def job(flags: str, rate: float, faults: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a job whose link is that fast, in bytes per second."""
    own = {"MOE_CKPT_SCRIPT": __file__, SETTINGS: json.dumps({"bytes_per_s": rate})}
    return under_faults(flags, LAYOUT | own, faults)


def times(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line["iteration_time_s"] for line in _trained(lines)]


def _trained(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Iterations after those that warm up, of each start as many as whole intervals have, so that each is with the cost
    of one snapshot."""
    starts: list[list[Mapping[str, Any]]] = [[]]
    for line in lines:
        if "recovery" in line:
            starts.append([])
        elif "iteration" in line and not line.get("replayed"):
            starts[-1].append(line)
    warm = [start[WARM:] for start in starts]
    return [line for start in warm for line in start[: len(start) // INTERVAL * INTERVAL]]


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of an iteration, the mean, as a snapshot is not in each; the window that a fault found, or the last one;
    what each fault cost."""
    before = itertools.takewhile(lambda line: "recovery" not in line, lines)
    windows = [line["checkpoint_memory"]["window"] for line in before if line.get("snapshot_bytes")]
    return {
        "iteration_s": statistics.mean(times(lines)),
        "window": windows[-1] if windows else 0,
        "faults": recoveries(lines, "global"),
    }


def costs(rounds: Sequence[dict[str, Any]], name: str, interval: int = 1) -> list[float]:
    """Of each round: what a snapshot of `full`, or an iteration with `sparse`, costs, in iterations of training."""
    return [interval * (found[name]["iteration_s"] / found["none"]["iteration_s"] - 1) for found in rounds]


def lost(rounds: Sequence[dict[str, Any]], name: str, key: str) -> list[float]:
    """Of each fault, in iterations of training without checkpoints."""
    return [fault[key] / found["none"]["iteration_s"] for found in rounds for fault in found[name]["faults"]]


def charged(one: Mapping[str, Any], interval: int) -> tuple[float, float]:
    """What a snapshot of `full`, and an iteration with `sparse`, is charged with in a round, in iterations of training.
    Against `full`: no less than that of `sparse` where this copies all of the state, as the least of costs near 0 is
    mostly noise."""
    snapshot, overhead = max(0.0, *costs([one], "full", interval)), max(0.0, *costs([one], "sparse"))
    return max(snapshot, overhead) if one["sparse"]["window"] == 1 else snapshot, overhead


def best_full(snapshot: float, restart: float, mtbf: float, cold: float = 0.0) -> tuple[float, int]:
    """The highest ETTR of `full` and its interval, all in iterations. A fault loses half of the interval, and what was
    trained until the newest snapshot could be used: at any interval half of an iteration is the one that is cut off.
    cold: as of `cold_start`."""
    lost_each = (restart + cold + n / 2 + USABLE_AFTER for n in range(1, MOST_INTERVAL + 1))
    return max((ettr(snapshot / n, each, mtbf), n) for n, each in enumerate(lost_each, start=1))


def cold_start(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
    """Extra time of the iterations that a fault makes run again, in iterations of training: the mean over all faults
    with any. The first iterations of a process are slow, however many follow."""
    found = [
        fault["again_s"] / one["none"]["iteration_s"] - fault["again"]
        for one in rounds
        for fault in one[name]["faults"]
        if fault["again"]
    ]
    return statistics.mean(found) if found else 0.0


def again_on_average(one: Mapping[str, Any], cold: float) -> float:
    """What `sparse` loses in a fault, in iterations of training, over all phases of a window; those of a round's faults
    are few. It runs again the window, and what came after: 1 to W iterations, as a window can be used an iteration
    after its end. Half of an iteration is the one that is cut off. cold: as of `cold_start`."""
    found = one["sparse"]
    # At least W - 1 iterations were run again.
    window = min([found["window"], *(fault["again"] + 1 for fault in found["faults"])])
    return 1.5 * window + cold


def ettr(overhead: float, lost_each: float, mtbf: float) -> float:
    """Of training's time, where each iteration takes so much more and each fault costs so much. mtbf: from a recovery
    to the next fault, in iterations, as the simulator has it."""
    return 1 / (1 + lost_each / mtbf) / (1 + max(0.0, overhead))


def gains(rounds: Sequence[dict[str, Any]], interval: int, restart: float, mtbf: float) -> list[float]:
    """Of each round: ETTR of `sparse` less that of `full` with its best interval, by the costs of this round.

    Args:
        rounds: of one link.
        interval: iterations between the snapshots of `full` whose cost was measured.
        restart: of both alike, in iterations.
        mtbf: in iterations.
    """
    found = []
    for one in rounds:
        snapshot, overhead = charged(one, interval)
        sparse = ettr(overhead, restart + again_on_average(one, cold_start(rounds, "sparse")), mtbf)
        found.append(sparse - best_full(snapshot, restart, mtbf, cold_start(rounds, "full"))[0])
    return found


def gained(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By ratio and time between failures: `gains` over the rounds, with the median of their restarts. What
    `python -m reproduce break_even` draws beside what it predicts."""
    found = {}
    for ratio, rounds in result["links"].items():
        base = statistics.median(restarts(rounds))
        each = {str(mtbf): estimate(gains(rounds, result["interval"], base, mtbf)) for mtbf in MTBFS}
        found[ratio] = {mtbf: dataclasses.asdict(gain) for mtbf, gain in each.items()}
    return found


def restarts(rounds: Sequence[dict[str, Any]]) -> list[float]:
    """Of all faults, in iterations."""
    return lost(rounds, "full", "restart_s") + lost(rounds, "sparse", "restart_s") or [0.0]


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles. Gains are by the rules of this version, also of what was measured before."""
    result["gains"] = gained(result)
    set_s = result["iteration_s"]
    found_s = statistics.median(one["none"]["iteration_s"] for rounds in result["links"].values() for one in rounds)
    lines = [
        *BENCHMARK.head("`sparse` and `full` on slow links"),
        f"2 processes {where(result)}. A rank's state has {result['bytes'] / 1e6:.1f} MB. Ratio: bytes of the state by"
        f" what the link carries in an iteration, which took {set_s:.3f} s when links were set; in the rounds it took"
        f" {found_s:.3f} s, so that ratios were {set_s / found_s:.2f} times as large. Replicas"
        " and storage are off, faults are lost processes, and all stages roll back.",
        "",
        "Cost of a snapshot of `full`, and of an iteration with `sparse`, in iterations; what a fault costs, in"
        " iterations, without the restart, which both have alike. Two phases are measured, all are counted: of `full`"
        f" half of its interval, and {USABLE_AFTER} until a snapshot can be used; of `sparse` (3 W - 1) / 2 iterations,"
        " and half of the one that is cut off. On top comes the cold start, of both as measured: the extra time of"
        " repeated iterations, the mean over all faults. A window that has grown behind a fault counts as no longer"
        " than what was run again allows.",
        "",
        row(
            *("ratio", "window", "snapshot of `full`", "iteration with `sparse`", "a fault, `sparse`"),
            *("cold start, `sparse`, `full`", "restart"),
        ),
        rule(7, 1),
    ]  # fmt: skip
    table = [row("ratio", *(f"MTBF {mtbf:,}: `sparse`" + " / `full` (interval)" for mtbf in MTBFS)), rule(4, 1)]
    for ratio, rounds in result["links"].items():
        cold, cold_full = (cold_start(rounds, name) for name in ("sparse", "full"))
        again, restart = [again_on_average(one, cold) for one in rounds], restarts(rounds)
        measured_each = costs(rounds, "full", result["interval"]), costs(rounds, "sparse"), again
        window = ends(one["sparse"]["window"] for one in rounds)
        cells = [*(spread(each, 2) for each in measured_each), f"{cold:.2f}, {cold_full:.2f}", spread(restart, 2)]
        lines.append(row(ratio, window, *cells))
        both = zip(*(charged(one, result["interval"]) for one in rounds), strict=True)
        snapshot, overhead, base = (statistics.median(each) for each in (*both, restart))
        cells = []
        for mtbf in MTBFS:
            sparse = ettr(overhead, base + statistics.median(again), mtbf)
            full, interval = best_full(snapshot, base, mtbf, cold_full)
            cells.append(f"{sparse:.3f} / {full:.3f} ({interval})")
        table.append(row(ratio, *cells))
    lines += ["", "ETTR from these medians, time between failures in iterations:", "", *table, ""]
    count = len(next(iter(result["links"].values())))
    lines += [
        f"`sparse` less `full`, each of {count} rounds by its own costs and the median restart, mean and half"
        " of its 95 % interval. A cost below zero, which is noise, counts as none. A snapshot of `full` is charged,"
        " against it, with no less than an iteration with `sparse` where that had a window of 1: all of the state. The"
        " interval of `full` is the best for its costs, while `sparse` snapshots in each iteration:",
        "",
    ]
    lines += _apart(result["gains"])
    if "commit" in result["machine"] and AGAIN.exists():
        again = json.loads(AGAIN.read_text())
        lines += ["", f"## Again, {where(again)}", "", "By the same rules:", "", *_apart(gained(again))]
    return lines


def _apart(gains: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The gains of a run, and who is ahead beyond the interval."""
    lines = [row("ratio", *(f"MTBF {mtbf:,}" for mtbf in MTBFS)), rule(4, 1)]
    ahead: dict[int, dict[str, list[str]]] = {mtbf: {"`sparse`": [], "`full`": [], "neither": []} for mtbf in MTBFS}
    for ratio, by_mtbf in gains.items():
        found = {mtbf: Estimate(**by_mtbf[str(mtbf)]) for mtbf in MTBFS}
        lines.append(row(ratio, *(f"{gain:+.3f}" for gain in found.values())))
        for mtbf, gain in found.items():
            which = ("`sparse`" if gain.mean > 0 else "`full`") if gain.is_beyond() else "neither"
            ahead[mtbf][which].append(ratio)
    lines.append("")
    for mtbf, of in ahead.items():
        told = "; ".join(f"{name} at {', '.join(ratios) or 'no ratio'}" for name, ratios in of.items())
        lines.append(f"A fault every {mtbf:,} iterations, beyond the interval ahead: {told}.  ")
    return lines


def _behind_a_slow_link() -> int:
    """A rank of a job: copies of a chunk take what the link makes them take, so the job measures that link."""
    import numpy as np

    sys.path.insert(0, str(ROOT))
    import pretrain_gpt_moe
    from megatron.core.dist_checkpointing.moe.snapshot import copy_engines

    rate = json.loads(os.environ[SETTINGS])["bytes_per_s"]

    class SlowLink:
        """numpy, whose copies are slow: a link with a queue, which carries its rate though who fills it comes late."""

        free_s = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def copyto(self, target: np.ndarray, source: np.ndarray) -> None:
            begun_s = time.perf_counter()
            np.copyto(target, source)
            self.free_s = max(self.free_s, begun_s - QUEUE_S) + source.nbytes / rate
            time.sleep(max(0.0, self.free_s - time.perf_counter()))

    vars(copy_engines)["np"] = SlowLink()
    return pretrain_gpt_moe.main(sys.argv[1:])


if __name__ == "__main__":
    if SETTINGS in os.environ:
        sys.exit(_behind_a_slow_link())
    start(main)
