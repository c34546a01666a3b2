"""The page of `snapshot.py`: what its data says, in tables."""

from __future__ import annotations

import statistics
from typing import Any

from harness import spread
from peers import NVRX, OURS

LEAST_BANDWIDTH_RATIO = 0.60
MOST_GROWTH_BYTES = 4 << 20
"""Of resident memory over all iterations of the memory part, beyond what training without snapshots grows by."""


def bandwidth_ratio(result: dict[str, Any], which: str = "alone") -> float:
    """Capture over memcpy, the median of all pairs."""
    return statistics.median(_pair_ratios(result["bandwidth"][which]))


def growth_bytes(result: dict[str, Any]) -> float:
    """The most that the memory of a rank grew with a strategy, beyond what training grew by itself."""
    grown = {name: found["growth_bytes"] for name, found in result["memory"].items()}
    return max(grown[name] for name in OURS) - max(0.0, grown["none"])


def _pair_ratios(rows: dict[str, list[float]]) -> list[float]:
    return [ours / plain for ours, plain in zip(rows["capture_gb_per_s"], rows["memcpy_gb_per_s"], strict=True)]


def per_checkpoint(result: dict[str, Any], name: str, key: str) -> list[float]:
    """By how much `key` of the contestant's turns exceeds that of the turns without checkpoints, by round."""
    found, turns = result["checkpoints"], result["checkpoints"]["rows"]
    pairs = zip(turns[name], turns["none"], strict=True)
    return [(with_[key] - without[key]) / found["checkpoints_per_turn"] for with_, without in pairs]


def costs(result: dict[str, Any], name: str) -> dict[str, list[float]]:
    """What a checkpoint costs, by round: longer turns, waiting of the training thread, processor time of all ranks."""
    return {
        "overhead": per_checkpoint(result, name, "turn_s"),
        "stall": [row["stall_s"] for row in result["checkpoints"]["rows"][name]],
        "processor time": per_checkpoint(result, name, "cpu_s"),
    }


def report(result: dict[str, Any]) -> list[str]:
    """The page: tables with medians and, in brackets, quartiles."""
    return [*_head(result), *_copies(result), *_memory(result), *_costs(result), *_ratios(result), *_ahead(result)]


def _head(result: dict[str, Any]) -> list[str]:
    about, state = result["machine"], result["state"]
    busy = max(about["load_before"], about["load_after"]) > 2 * about["cores"] + 2
    warning = "**Other work kept the machine busy during this run: differences in elapsed time are mostly noise; stall,"
    warning += " processor time and bytes can be trusted more.**"
    return [
        "# Snapshots beside training",
        "",
        "Made by `benchmarks/snapshot.py --write`; the data, with every single measurement, is in"
        " `benchmarks/results/snapshot.json`. Medians, and in brackets quartiles.",
        "",
        f"{state['ranks']} processes on {about['cores']} cores ({about['cpu']}, {about['memory_gb']:.0f} GB), torch"
        f" {about['torch']}, Megatron-Core {about['megatron_core']}; one-minute load {about['load_before']:.1f} before"
        f" and {about['load_after']:.1f} after, of which about 2 is the benchmark. Training"
        f" state {state['total_bytes'] / 1e9:.2f} GB over all ranks: master weights {state['master_bytes'] / 1e9:.2f},"
        f" moments {state['moments_bytes'] / 1e9:.2f}, compute weights {state['compute_bytes'] / 1e9:.2f}. Each"
        " process has one thread, so what runs beside training takes its time from training: nothing is hidden here.",
        "",
        *([warning, ""] if busy else []),
    ]


def _copies(result: dict[str, Any]) -> list[str]:
    found = result["bandwidth"]
    tunables = found["glibc_tunables"] or "not set"
    lines = [
        "## Copies alone",
        "",
        f"{found['bytes'] / 1e9:.2f} GB of live state in {found['tensors']} tensors per rank, through `LiveCapturer`"
        " and `ThreadEngine` into a segment of the memory tier, against `numpy.copyto` of one array of that size;"
        f" pairs. `GLIBC_TUNABLES`, as the launch script sets it: {tunables}.",
        "",
        "| | memcpy, GB/s | capture, GB/s | capture / memcpy |",
        "|---|---|---|---|",
    ]
    for which in ("alone", "all ranks at once"):
        rows = found[which]
        columns = (rows["memcpy_gb_per_s"], rows["capture_gb_per_s"], _pair_ratios(rows))
        lines.append(f"| {which} | " + " | ".join(spread(column, 2) for column in columns) + " |")
    verdict = "met" if bandwidth_ratio(result) >= LEAST_BANDWIDTH_RATIO else "NOT met"
    return [*lines, "", f"Asked for: at least {LEAST_BANDWIDTH_RATIO:.2f} alone: {verdict}.", ""]


def _memory(result: dict[str, Any]) -> list[str]:
    rows = result["memory"]
    iterations = rows["none"]["iterations"]
    lines = [
        "## Resident memory",
        "",
        f"A small model, {iterations} iterations with a snapshot after each; resident bytes of a process without shared"
        " ones (its segments) and pages of files, the worse rank. Growth is the median of the last 20 less"
        " that of the first 20.",
        "",
        "| strategy | slope, bytes per iteration | growth, KiB | largest, MiB |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        slope, growth, largest = row["slope_bytes_per_iteration"], row["growth_bytes"] / 1024, row["largest_bytes"]
        lines.append(f"| {name} | {slope:.0f} | {growth:.0f} | {largest / 2**20:.0f} |")
    verdict = "met" if growth_bytes(result) <= MOST_GROWTH_BYTES else "NOT met"
    return [*lines, "", f"Allowed beyond training alone: {MOST_GROWTH_BYTES >> 10} KiB: {verdict}.", ""]


def _costs(result: dict[str, Any]) -> list[str]:
    found = result["checkpoints"]
    turns, iterations = found["rows"], found["interval"] * found["checkpoints_per_turn"]
    iteration_s = [row["turn_s"] / iterations for row in turns["none"]]
    lines = [
        "## Cost of a checkpoint",
        "",
        f"A checkpoint every {found['interval']} iterations of one training, {len(turns['none'])} rounds, in each a"
        f" turn of {iterations} iterations for each contestant and one without checkpoints; an iteration takes"
        f" {spread(iteration_s)} s. Overhead: how much longer a turn is than the one without in the same round, per"
        " checkpoint. Stall: what the training thread waits in calls of the checkpointer. Processor time: that of all"
        " ranks and of what they forked, less that of the turn without. All write to the same tmpfs, which is"
        " faster than what `torch_dist` is meant for; NVRx and ours make no replicas.",
        "",
        "| | GB per checkpoint | overhead, s | stall, s | processor time, s |",
        "|---|---|---|---|---|",
    ]
    for name, rows in turns.items():
        if name != "none":
            gigabytes = statistics.median(row["bytes"] for row in rows) / 1e9
            values = " | ".join(spread(column) for column in costs(result, name).values())
            lines.append(f"| {name} | {gigabytes:.3f} | {values} |")
    if result["nvrx_missing"]:
        lines += ["", f"{NVRX} could not be installed and is left out: {result['nvrx_missing']}"]
    return [*lines, ""]


def _ratios(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Ours in relation to each peer",
        "",
        "Below 1 ours is cheaper. Quotients within each round; of the medians where a peer's overhead was not above"
        " zero in every round. Below 0 means that ours cost less than the noise of this machine.",
        "",
        "| | overhead | stall | processor time | bytes |",
        "|---|---|---|---|---|",
    ]
    for ours in OURS:
        for peer in _peers(result):
            lines.append(f"| {ours} / {peer} | {' | '.join(_quotients(result, ours, peer))} |")
    return [*lines, ""]


def _quotients(result: dict[str, Any], ours: str, peer: str) -> list[str]:
    """Ours over theirs for each cost, within the rounds; of medians where a peer cost nothing that shows in some."""
    turns = result["checkpoints"]["rows"]
    mine, theirs = costs(result, ours), costs(result, peer)
    mine["bytes"], theirs["bytes"] = ([row["bytes"] for row in turns[name]] for name in (ours, peer))
    cells = []
    for key in mine:
        if min(theirs[key]) > 0:
            cells.append(spread([own / other for own, other in zip(mine[key], theirs[key], strict=True)], 2))
        else:
            other = statistics.median(theirs[key])
            cells.append(f"{statistics.median(mine[key]) / other:.2f} of medians" if other > 0 else "lost in noise")
    return cells


def _peers(result: dict[str, Any]) -> list[str]:
    return [name for name in result["checkpoints"]["rows"] if name not in ("none", *OURS)]


def _ahead(result: dict[str, Any]) -> list[str]:
    """Every median in which a peer is better."""
    found = []
    for peer in _peers(result):
        theirs = costs(result, peer)
        for ours in OURS:
            for what, values in costs(result, ours).items():
                own_s, other_s = statistics.median(values), statistics.median(theirs[what])
                if other_s < own_s:
                    found.append(f"- {peer} before {ours} in {what}: {other_s:.3f} s against {own_s:.3f} s.")
    return ["## Where a peer is ahead", "", *(found or ["By these medians, nowhere."])]
