#!/usr/bin/env python3
"""Draw docs/features_by_loop.md: which feature works in which training loop, and which test shows it.

python tools/features_by_loop.py      renews the page from the table that flags are judged by
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features_by_loop.md"
sys.path.insert(0, str(ROOT))

from megatron.core.dist_checkpointing.moe import features  # noqa: E402

HEADING = """# Features by training loop

Made by `python tools/features_by_loop.py` from the table that flags are judged by,
`megatron/core/dist_checkpointing/moe/features.py`. **Works**: a test named below fails where the feature is cut.
**Untested**: accepted, and no test of that loop shows it. **Refused**: ends with exit code 2 before training.
**Absent**: the loop has no such flag.

"""

NOT_RECOMMENDED = {
    "`--moe-ckpt-strategy sparse` where `full` fits": "no gain of ETTR on throttled links; with a fault every 1,000"
    " iterations a loss where a state has 1, 2 and 8 times what a link carries in one ([four"
    " rounds](results/slow-links.md); in a second, busier run 1 and 8)",
    "`--moe-ckpt-strategy pec` where `full` fits": "a fifth of the bytes; less `full`, overhead of a checkpoint"
    " -20.2 ± 77.0 ms, stall +0.8 ± 2.6 ms ([eight rounds](results/snapshot.md))",
    "`--moe-ckpt-strategy selective` where `full` fits": "sends 62.5 % of the bytes of `full`; iterations take 1.036 ±"
    " 0.040 of those with `full` ([four rounds](results/moetion-fig10.md))",
    "`--moe-ckpt-replicate gradients` with `selective`": "sends 41.7 % of the bytes; iterations take 1.099 ±"
    " 0.165. With `full`: [what it sends and costs](results/roll-forward.md)",
    "`--moe-ckpt-copy-placement bubbles`": "41.7 % with both, as without; iterations take 1.044 ± 0.066",
    "`--moe-ckpt-capacity-boost`": "nothing: no run with it is kept. 0 switches it off",
}
"""What works, and is here as papers have it, by what was measured of it."""


def shown(cell: features.Cell) -> str:
    """What a cell says."""
    match cell:
        case features.Works():
            return "works"
        case features.Untested(note):
            return f"untested: {note}" if note else "untested"
        case features.Refused(reason):
            return f"**refused**: {reason}"
        case features.Absent(instead):
            return f"absent: {instead}"


def line(feature: features.Feature) -> str:
    """A row of the page."""
    return f"| {feature.name} | " + " | ".join(shown(feature.cell(loop)) for loop in features.Loop) + " |"


def tests() -> list[str]:
    """Each test that a cell names, with what it shows, once."""
    found: dict[str, list[str]] = {}
    for feature in features.FEATURES:
        for loop in features.Loop:
            cell = feature.cell(loop)
            if isinstance(cell, features.Works):
                found.setdefault(cell.test, []).append(f"{feature.name} ({loop.value})")
    return [f"- {', '.join(shows)}: `{test}`" for test, shows in found.items()]


def render() -> str:
    """The whole page."""
    head = "| | " + " | ".join(loop.value for loop in features.Loop) + " |\n|---|" + "---|" * len(features.Loop)
    table = "\n".join([head, *map(line, features.FEATURES)])
    sections = {
        "Not recommended": [
            "They work, and are here as papers have them. No benefit was measured:\n",
            "| flag | what was measured |\n|---|---|",
            *(f"| {flag} | {found} |" for flag, found in NOT_RECOMMENDED.items()),
        ],
        "Tests": tests(),
    }
    return HEADING + table + "\n" + "".join(f"\n## {name}\n\n" + "\n".join(of) + "\n" for name, of in sections.items())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
