#!/usr/bin/env python3
"""Read constants of the simulator from the files that measured or fitted them.

    python tools/simulator_constants.py      renews moe_ckpt/simulator/presets/constants.json

After `benchmarks/recovery.py --write` and after `python -m reproduce cross_validation --docs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "moe_ckpt" / "simulator" / "presets" / "constants.json"
RECOVERIES = ROOT / "benchmarks" / "results" / "recovery.json"
FITS = ROOT / "docs" / "results" / "cross-validation.json"
MODES = {"cold": "new processes", "standby": "standbys", "in-place": "in place"}
RESTART = ("restart", "import", "rendezvous", "build")
"""The parts of a timeline that make up a restart."""


def comebacks(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """What share of a restart with new processes each way to come back takes, by medians."""
    seconds = {
        mode: median(sum(one["parts"].get(part, 0.0) for part in RESTART) for found in rounds for one in found[kind])
        for mode, kind in MODES.items()
    }
    return {mode: round(taken / seconds["cold"], 3) for mode, taken in seconds.items()}


def render() -> str:
    """The file."""
    read = {path: json.loads(path.read_text(encoding="utf-8")) for path in (RECOVERIES, FITS)}
    found = {
        "measured": {
            "source": str(RECOVERIES.relative_to(ROOT)),
            "comeback": comebacks(read[RECOVERIES]["rounds"]),
        },
        "fitted": {"source": str(FITS.relative_to(ROOT))} | read[FITS]["adopted"],
    }
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    PRESET.write_text(render(), encoding="utf-8")
    print(f"{PRESET.relative_to(ROOT)} renewed")
