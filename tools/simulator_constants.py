#!/usr/bin/env python3
"""Read constants of the simulator from the files that measured or fitted them.

    python tools/simulator_constants.py      renews moe_ckpt/simulator/presets/constants.json

After `benchmarks/recovery.py --write`, `python -m reproduce cross_validation --docs`, and runs on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "moe_ckpt" / "simulator" / "presets" / "constants.json"
RECOVERIES = ROOT / "benchmarks" / "results" / "recovery.json"
GPU_RUNS = ROOT / "benchmarks" / "results" / "gpu" / "h100.jsonl"
FITS = ROOT / "docs" / "results" / "cross-validation.json"
MODES = {"cold": "new processes", "standby": "standbys", "in-place": "in place"}
RESTART = ("restart", "import", "build")
"""The parts of a timeline that make up a restart; the simulator has its own term for the rendezvous."""


def comebacks(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """What share of a restart with new processes each way to come back takes, by medians."""
    seconds = {
        mode: median(sum(one["parts"].get(part, 0.0) for part in RESTART) for found in rounds for one in found[kind])
        for mode, kind in MODES.items()
    }
    return {mode: round(taken / seconds["cold"], 3) for mode, taken in seconds.items()}


def contention(figures: list[dict[str, Any]], last: int = 6) -> float:
    """By how much iterations became longer on a GPU, in copies of what a snapshot has: of the models the most.

    Args:
        figures: what `scripts/gpu_check.py` keeps.
        last: iterations of each job that count, after those that warm up.
    """
    runs = [one for one in figures if one.get("figure") == "model: every iteration, auto"]
    slowed = [fmean(run["between_s"][-last:]) - fmean(run["plain_between_s"][-last:]) for run in runs]
    copied = [run["snapshot_bytes"] / run["link_per_s"] for run in runs]
    return round(max(extra_s / copy_s for extra_s, copy_s in zip(slowed, copied, strict=True)), 2)


def render() -> str:
    """The file."""
    on_gpu = [json.loads(line) for line in GPU_RUNS.read_text(encoding="utf-8").splitlines()]
    read = {path: json.loads(path.read_text(encoding="utf-8")) for path in (RECOVERIES, FITS)}
    found = {
        "measured": {
            "source": str(RECOVERIES.relative_to(ROOT)),
            "comeback": comebacks(read[RECOVERIES]["rounds"]),
            "gpu_source": str(GPU_RUNS.relative_to(ROOT)),
            "contention": contention(on_gpu),
        },
        "fitted": {"source": str(FITS.relative_to(ROOT))} | read[FITS]["adopted"],
    }
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    PRESET.write_text(render(), encoding="utf-8")
    print(f"{PRESET.relative_to(ROOT)} renewed")
