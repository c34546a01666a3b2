"""Snapshots beside training: bandwidth of the copies, and cost of a checkpoint against other checkpoints.

A GPT-MoE with about 0.4 GB of training state trains on two processes in Megatron-LM's loop. All contestants checkpoint
that one training at the same frequency, in turns of a few iterations and in another order in each round; so whatever
else the machine does hits all. Everything is written to a tmpfs. How the cost grows with the bytes is measured on
models of several depths.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from harness import ENDLESS, ROOT, Benchmark, fitted, needs_gb, row, rule, run_ranks, spread, start, where
from peers import FORKED, OURS, PEERS, WHEELS, missing_peers

from moe_ckpt.simulator.events import estimate

BENCHMARK = Benchmark("snapshot", 8, "snapshot.md")
PEERS_FOLDER, BESIDE_TORCH = ROOT / ".data" / "peers", ("NVRx", "DLRover", "LM-Resiliency")
LAYOUT = {"NPROC": "2", "TP": "1", "PP": "1", "EP": "2"}
COMMON = f"{ENDLESS} --bf16 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
"""Experts get equal numbers of tokens: for each new shape oneDNN compiles a kernel, which costs time and memory."""
SMALL = "--global-batch-size 4 --seq-length 64"
DEPTH, DEPTHS = 2, (1, 2, 4, 6)
"""Layers of the model of the tables, and of those on which the cost is measured by bytes."""
SWEPT = ("full", "full, replica, storage", "torch_dist async", "torch DCP async", "LM-Resiliency")
WITHOUT_REPLICA = ("torch_dist", "torch_dist async", "NVRx local", "NVRx local async", "torch DCP async")
COMPARED = {
    "full": (*WITHOUT_REPLICA, "DLRover"),
    "full, replica": ("LM-Resiliency, replica",),
    "full, replica, storage": (*WITHOUT_REPLICA, "LM-Resiliency, replica"),
}
"""Ours, and what each is set in relation to."""
LARGE = (
    "--hidden-size 512 --num-attention-heads 8 --moe-ffn-hidden-size 1024 --num-experts 8"
    " --seq-length 128 --micro-batch-size 2 --global-batch-size 4"
)
INTERVAL = 2
NEEDED_GB = 12.0
"""Of memory for the large model: all sessions, a checkpoint of a peer being written beside another, both processes."""
LEAST_BANDWIDTH_RATIO = 0.60


def main() -> int:
    """Exit code 1 if the copies are slower than allowed."""
    return BENCHMARK.run(__doc__, measured, report, lambda result: bandwidth_ratio(result) >= LEAST_BANDWIDTH_RATIO)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """The copies alone, the turns of all contestants, and those of some on models of several depths."""
    missing = missing_peers(PEERS_FOLDER, BESIDE_TORCH)
    peers = [name for name in PEERS if not (missing and name.startswith(tuple(missing)))]
    settings = {"copies": 6 if quick else 14, "interval": INTERVAL, "checkpoints_per_turn": 2}
    all_at_once = [*OURS, *(name for name in peers if name != "LM-Resiliency")]  # without a replica it is in the lines
    found = {"missing": missing} | run_job(all_at_once, settings, turns, quick)
    swept, settings["copies"] = [name for name in SWEPT if name in OURS or name in peers], 0
    if quick:
        swept = [name for name in swept if name == SWEPT[0] or name not in all_at_once]
    depths = DEPTHS[:2] if quick else DEPTHS
    return found | {"by_bytes": [run_job(swept, settings, max(1, turns // 2), quick, depth) for depth in depths]}


def run_job(
    contestants: list[str], settings: dict[str, Any], turns: int, quick: bool, depth: int = DEPTH
) -> dict[str, Any]:
    """What the ranks of one training measure of these contestants.

    Args:
        contestants: Names of ours and of peers.
        settings: Of the ranks.
        turns: Of each contestant.
        quick: Whether the model is tiny.
        depth: Its layers.
    """
    if not quick:
        needs_gb(NEEDED_GB)
    given = {**settings, "contestants": contestants, "rounds": turns, "peers": str(PEERS_FOLDER)}
    script = Path(__file__).with_name("snapshot_ranks.py")
    return run_ranks(script, given, LAYOUT, f"{COMMON} {SMALL if quick else LARGE} --num-layers {depth}")


def bandwidth_ratio(result: dict[str, Any]) -> float:
    """Capture over memcpy, the median of all pairs."""
    return statistics.median(_pair_ratios(result["bandwidth"]["alone"]))


def _pair_ratios(rows: dict[str, list[float]]) -> list[float]:
    return [ours / plain for ours, plain in zip(rows["capture_gb_per_s"], rows["memcpy_gb_per_s"], strict=True)]


def costs(result: dict[str, Any], name: str) -> dict[str, list[float]]:
    """What a checkpoint costs, by round: longer turns, waiting of the training thread, processor time of all ranks."""
    found = result["checkpoints"]
    pairs = list(zip(found["rows"][name], found["rows"]["none"], strict=True))

    def beyond(key: str) -> list[float]:
        return [(with_[key] - without[key]) / found["checkpoints_per_turn"] for with_, without in pairs]

    stalls = [with_["stall_s"] for with_, _ in pairs]
    return {"overhead": beyond("turn_s"), "stall": stalls, "processor time": beyond("cpu_s")}


def state_of(result: dict[str, Any]) -> str:
    """The training state, for people."""
    state = result["state"]
    return (
        f"Training state {state['total_bytes'] / 1e9:.2f} GB over {state['ranks']} processes: master weights"
        f" {state['master_bytes'] / 1e9:.2f}, moments {state['moments_bytes'] / 1e9:.2f}, compute weights"
        f" {state['compute_bytes'] / 1e9:.2f}. Each process has one thread, so what runs beside training takes its time"
        " from training: nothing is hidden here."
    )


def report(result: dict[str, Any]) -> list[str]:
    """The page: tables with medians and, in brackets, quartiles."""
    lines = [*BENCHMARK.head("Snapshots beside training"), f"Measured {where(result)}. {state_of(result)}", ""]
    return [*lines, *_copies(result), *_costs(result), *_ratios(result), *_by_bytes(result)]


def _copies(result: dict[str, Any]) -> list[str]:
    found = result["bandwidth"]
    lines = [
        "## Copies alone",
        "",
        f"{found['bytes'] / 1e9:.2f} GB of live state in {found['tensors']} tensors per rank, through `LiveCapturer`"
        " and `ThreadEngine` into a segment of the memory tier, against `numpy.copyto` of one array of that size;"
        f" pairs. `GLIBC_TUNABLES`, as the launch script sets it: {found['glibc_tunables'] or 'not set'}.",
        "",
        row("", "memcpy, GB/s", "capture, GB/s", "capture / memcpy"),
        rule(4, 4),
    ]
    for which in ("alone", "all ranks at once"):
        rows = found[which]
        columns = (rows["memcpy_gb_per_s"], rows["capture_gb_per_s"], _pair_ratios(rows))
        lines.append(row(which, *(spread(column, 2) for column in columns)))
    verdict = "met" if bandwidth_ratio(result) >= LEAST_BANDWIDTH_RATIO else "NOT met"
    return [*lines, "", f"Asked for: at least {LEAST_BANDWIDTH_RATIO:.2f} alone: {verdict}.", ""]


def _costs(result: dict[str, Any]) -> list[str]:
    found = result["checkpoints"]
    turns, iterations = found["rows"], found["interval"] * found["checkpoints_per_turn"]
    iteration_s = [turn["turn_s"] / iterations for turn in turns["none"]]
    lines = [
        "## Cost of a checkpoint",
        "",
        f"A checkpoint every {found['interval']} iterations of one training, {len(turns['none'])} rounds, in each a"
        f" turn of {iterations} iterations for each contestant and one without checkpoints; an iteration takes"
        f" {spread(iteration_s)} s. Overhead: how much longer a turn is than the one without in the same round, per"
        " checkpoint. Stall: what the training thread waits in calls of the checkpointer. Processor time: that of all"
        " ranks and of what they started, less that of the turn without. All write to the same tmpfs, which is"
        " faster than what `torch_dist` is meant for.",
        "",
        "Not the same for all: `torch_dist` and NVRx save compute weights, too, and files that can be loaded elsewhere;"
        " ours, DLRover, LM-Resiliency and torch DCP save master weights and moments, and the first three in memory."
        " Ours checks every byte with a keyed checksum. DLRover copies in the thread that trains, also from a GPU;"
        " LM-Resiliency does so on a CPU alone, where processes forked from it share pages with it until it writes to"
        " them. Only where the name says `replica` does another rank hold a copy, and only with `storage` do files of"
        " ours hold one. Asynchronous saves of `torch_dist` and NVRx fork a process each: Megatron-LM 0.19 makes none"
        " without the worker of `--use-persistent-ckpt-worker`, which needs a GPU; not measured."
        f" Peers: {', '.join(WHEELS[name].split()[0] for name in BESIDE_TORCH)}.",
        "",
        row("", "GB per checkpoint", "overhead, s", "stall, s", "processor time, s"),
        rule(5, 5),
    ]
    for name in _contestants(result):
        gigabytes = statistics.median(turn["bytes"] for turn in turns[name]) / 1e9
        lines.append(row(name, f"{gigabytes:.3f}", *map(spread, costs(result, name).values())))
    for name, reason in result["missing"].items():
        lines += ["", f"{WHEELS[name]} could not be installed and is left out: {reason}"]
    return [*lines, ""]


def _contestants(result: dict[str, Any]) -> list[str]:
    return [name for name in result["checkpoints"]["rows"] if name != "none"]


def _ratios(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Ours in relation to each peer",
        "",
        "Below 1 ours is cheaper. Quotients within each round; of the medians where a peer's overhead was not above"
        " zero in every round. Below 0 means that ours cost less than the noise of this machine. One is ahead where the"
        " 95 % interval of the difference within the rounds leaves 0 out.",
        "",
        row("", "overhead", "stall", "processor time"),
        rule(4, 4),
    ]
    verdicts: dict[str, list[str]] = {"ours": [], "neither": [], "the peer ahead": []}
    alike: list[bool] = []  # whether ours is ahead, where both write files, or neither does and replicas are as many
    forks = 0
    for ours, peers in COMPARED.items():
        for peer in (peer for peer in peers if peer in result["checkpoints"]["rows"]):
            mine, theirs = costs(result, ours), costs(result, peer)
            lines.append(row(f"{ours} / {peer}", *(_quotient(mine[key], theirs[key]) for key in mine)))
            for key in mine:
                less = estimate([other - own for own, other in zip(mine[key], theirs[key], strict=True)])
                which = "neither" if not less.is_beyond() else "ours" if less.mean > 0 else "the peer ahead"
                verdicts[which].append(f"{key} of {ours} / {peer}")
                same = ("storage" in ours) == ("torch" in peer) and (ours == "full, replica") == ("replica" in peer)
                alike += [which == "ours"] * same
                forks += which == "ours" and same and peer in FORKED
    told = [f"{which}: {'; '.join(found) or 'nowhere'}" for which, found in verdicts.items() if which != "ours"]
    count = sum(map(len, verdicts.values()))
    few, full = costs(result, "pec"), costs(result, "full")
    less = {key: estimate([1e3 * (one - all_) for one, all_ in zip(few[key], full[key], strict=True)]) for key in few}
    lines += ["", f"`pec` less `full`: overhead {less['overhead']:+.1f} ms, stall {less['stall']:+.1f} ms."]
    same = (
        f"{sum(alike)} of the {len(alike)} where both protect alike, {forks} of these against a fork per save, not"
        " corrected for their number"
    )
    return [*lines, "", f"Ours is ahead in {len(verdicts['ours'])} of {count}, {same}; {'; '.join(told)}."]


def _by_bytes(result: dict[str, Any]) -> list[str]:
    """Lines through what a checkpoint costs on models of several depths."""
    runs = result["by_bytes"]
    lines = [
        "",
        "## Cost by bytes",
        "",
        f"The same turns, {len(costs(runs[0], SWEPT[0])['stall'])} rounds, on models of"
        f" {', '.join(str(depth) for depth in DEPTHS[: len(runs)])} layers, with"
        f" {', '.join(f'{_gb_per_rank(run, SWEPT[0]):.2f}' for run in runs)} GB per process in a checkpoint of `full`."
        " More does not fit into this machine's memory next to all contestants. Least squares over all rounds:"
        " milliseconds per GB of a process, and what is left at 0 GB, with standard errors; what is within two of 0"
        " is not shown to be there.",
        "",
        row("", "stall, ms/GB", "stall at 0 GB, ms", "overhead, ms/GB", "overhead at 0 GB, ms"),
        rule(5),
    ]
    for name in (name for name in runs[0]["checkpoints"]["rows"] if name != "none"):
        cells = []
        for key in ("stall", "overhead"):
            points = [(_gb_per_rank(run, name), 1e3 * value) for run in runs for value in costs(run, name)[key]]
            line = fitted(points)
            cells += [f"{line.slope:.1f} ± {line.slope_error:.1f}", f"{line.at(0):.1f} ± {line.error_at(0):.1f}"]
        lines.append(row(name, *cells))
    return lines


def _gb_per_rank(result: dict[str, Any], name: str) -> float:
    turns = result["checkpoints"]["rows"][name]
    return statistics.median(turn["bytes"] for turn in turns) / result["state"]["ranks"] / 1e9


def _quotient(mine: list[float], theirs: list[float]) -> str:
    """Ours over theirs within the rounds; of medians where a peer cost nothing that shows in some."""
    if min(theirs) > 0:
        return spread([own / other for own, other in zip(mine, theirs, strict=True)], 2)
    other = statistics.median(theirs)
    return f"{statistics.median(mine) / other:.2f} of medians" if other > 0 else "lost in noise"


if __name__ == "__main__":
    start(main)
