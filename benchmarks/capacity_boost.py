#!/usr/bin/env python3
"""What `selective` loses over several faults, with and without the capacity boost, and what the model makes of it.

    python benchmarks/capacity_boost.py [--fresh]

Writes benchmarks/results/capacity_boost.json and docs/results/capacity-boost.md after each run, and goes on where it
was stopped; `--fresh` begins anew.

From each seed the demo model is trained on two processes without faults, with faults and no boost, and with the same
faults and a boost: MOETION 6 lets experts that lost tokens exceed their capacity until they have made up for them. The
faults are SIGKILLs of training processes, and torchrun restarts the job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_jobs import ROOT, Size, train

DATA = ROOT / "benchmarks" / "results" / "capacity_boost.json"
PAGE = ROOT / "docs" / "results" / "capacity-boost.md"
SEEDS = (1234, 1235, 1236)
FAULT_FREE, NO_BOOST, BOOST = "fault-free", "no boost", "boost"
LIMIT = 0.03
"""MLT that MOETION finds harmless."""

SIZE = Size(320, 320, 60, ("1@65:forward-backward", "0@130:step", "1@194:end", "0@257:start"))
LAYOUT = {"NPROC": "2", "PP": "1", "EP": "2"}
PERCENT, BUDGET = 10, "3MB"
MODEL = ("--micro-batch-size", "8", "--moe-expert-capacity-factor", "1.0", "--moe-aux-loss-coeff", "1e-3")
SELECTIVE = ("--moe-ckpt-strategy", "selective", "--moe-ckpt-replicas", "0", "--moe-ckpt-budget-local", BUDGET)
STRATEGIES: Mapping[str, Sequence[str]] = {
    FAULT_FREE: (),
    NO_BOOST: (*SELECTIVE, "--moe-ckpt-capacity-boost", "0"),
    BOOST: (*SELECTIVE, "--moe-ckpt-capacity-boost", str(PERCENT)),
}


@dataclass(frozen=True)
class Outcome:
    """One run. lost, owed: tokens that all faults cost, and that are still owed at the end. repaid_in: of each fault,
    the iterations until nothing was owed, or until the next fault. mean_share: of a snapshot in a full one."""

    seed: int
    name: str
    faults: int
    lost: int
    plt: float
    mlt: float
    owed: int
    repaid_in: tuple[int, ...]
    mean_share: float
    validation: float


def run(seed: int, name: str) -> Outcome:
    """Train to the end."""
    with tempfile.TemporaryDirectory(prefix="capacity-boost-") as folder:
        done = train(seed, name, SIZE, Path(folder), STRATEGIES[name], model=MODEL, layout=LAYOUT)
        (metrics,) = Path(folder).glob("*.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    reports = [line for line in lines if line.get("lost_tokens")]
    if not reports:
        return Outcome(seed, name, 0, 0, 0.0, 0.0, 0, (), 0.0, done.final)
    last = reports[-1]["lost_tokens"]
    lost = sum(last["by_layer"].values())
    share = done.mean_snapshot
    repaid = tuple(repaid_in(reports)) if name == BOOST else ()
    found = last["plt"], last["mlt"], last["owed"], repaid, share, done.final
    return Outcome(seed, name, len(done.recoveries), lost, *found)


def repaid_in(reports: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Iterations from each recovery until nothing was owed."""
    starts = [at for at in range(1, len(reports)) if reports[at]["iteration"] <= reports[at - 1]["iteration"]]
    for at, end in zip(starts, [*starts[1:], len(reports)], strict=True):
        owed = [report["lost_tokens"]["owed"] for report in reports[at:end]]
        yield next((passed for passed, tokens in enumerate(owed) if not tokens), len(owed))


def main() -> int:
    """Exit code 1 for an MLT above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="run all again")
    os.nice(10)
    setup = {
        "size": asdict(SIZE), "layout": LAYOUT, "model": MODEL, "budget": BUDGET, "percent": PERCENT, "limit": LIMIT,
    }  # fmt: skip
    setup = json.loads(json.dumps(setup))
    outcomes = [] if parser.parse_args().fresh else kept(setup)
    for seed in SEEDS:
        for name in STRATEGIES:
            if not any((one.seed, one.name) == (seed, name) for one in outcomes):
                outcomes.append(run(seed, name))
                print(outcomes[-1], flush=True)
                DATA.write_text(json.dumps({"setup": setup, "runs": list(map(asdict, outcomes))}, indent=1) + "\n")
                PAGE.write_text(page(outcomes))
    PAGE.write_text(page(outcomes))
    return int(max(one.mlt for one in outcomes) > LIMIT)


def kept(setup: Mapping[str, Any]) -> list[Outcome]:
    """Runs of the same setup that were made before."""
    if not DATA.exists():
        return []
    data = json.loads(DATA.read_text())
    return [Outcome(**one) for one in data["runs"]] if data["setup"] == setup else []


def change(one: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """By which share the validation loss is above that of the fault-free run of the same seed."""
    found = [other for other in outcomes if (other.seed, other.name) == (one.seed, FAULT_FREE)]
    return one.validation / found[0].validation - 1 if found else None


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of the result."""
    rows = "\n".join(_row(one, outcomes) for one in sorted(outcomes, key=lambda one: (one.seed, one.name)))
    finals = [one.validation for one in outcomes if one.name == FAULT_FREE]
    figures = {
        "head": _HEAD,
        "rows": rows,
        "iterations": SIZE.iterations,
        "faults": len(SIZE.faults),
        "points": ", ".join(f"`{fault}`" for fault in SIZE.faults),
        "budget": BUDGET,
        "percent": PERCENT,
        "most": max(one.mlt for one in outcomes),
        "limit": LIMIT,
        "exceeding": sum(one.mlt > LIMIT for one in outcomes),
        "struck": sum(one.name != FAULT_FREE for one in outcomes),
        "lower": sum(
            one.mlt < other.mlt
            for one in outcomes
            for other in outcomes
            if (one.seed, one.name, other.name) == (other.seed, BOOST, NO_BOOST)
        ),
        "with_boost": _changes(outcomes, BOOST),
        "without": _changes(outcomes, NO_BOOST),
        "apart": (max(finals) - min(finals)) / statistics.mean(finals) if finals else 0.0,
        "seeds": len(finals),
    }
    return re.sub(r"(\d)%", r"\1 %", _PAGE.format(**figures))


def _row(one: Outcome, outcomes: Sequence[Outcome]) -> str:
    against = change(one, outcomes)
    cells = (
        one.seed, one.name, one.faults, f"{one.lost:,}", f"{one.plt:.3%}", f"{one.mlt:.3%}", f"{one.owed:,}",
        ", ".join(map(str, one.repaid_in)) or "-", f"{one.mean_share:.0%}" if one.mean_share else "-",
        f"{one.validation:.4f}", "-" if against is None or one.name == FAULT_FREE else f"{against:+.2%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _changes(outcomes: Sequence[Outcome], name: str) -> str:
    changes = sorted(one for run in outcomes if run.name == name and (one := change(run, outcomes)) is not None)
    return f"{changes[0]:+.2%} to {changes[-1]:+.2%}" if changes else "not measured yet"


_HEAD = (
    "| seed | run | faults | lost tokens | PLT | MLT | still owed | made up in iterations | mean snapshot / full |"
    " final validation loss | against fault-free |"
)

_PAGE = """# Lost tokens and the capacity boost

Made by `python benchmarks/capacity_boost.py`, which goes on where it was stopped; all figures are in
`benchmarks/results/capacity_boost.json`.

The demo model (4 layers, 8 experts, top 2, capacity factor 1.0; two processes on CPU) is trained for {iterations}
iterations under `--moe-ckpt-strategy selective --moe-ckpt-budget-local {budget}`. {faults} times a process gets SIGKILL
and torchrun restarts the job: {points} (rank@iteration:phase). The memory of the node survives; experts come back as of
their newest copies. The boost lets experts that lost tokens exceed their capacity by {percent} % until they have made
up for them (MOETION 6).

{head}
|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|
{rows}

- **MLT** (MOETION eq. 6, all faults) is at most {most:.3%}; MOETION finds up to {limit:.0%} harmless, which
  {exceeding} of {struck} runs with faults exceed (with four faults in 160 iterations, twice the rate, 2 of 6 did: 2.3
  to 3.5 %, with final losses -2.75 % to +1.47 % off).
  With the boost it is lower than without for {lower} of {seeds} seeds.
- Final validation loss against the fault-free run of the same seed: {with_boost} with the boost, {without} without. The
  {seeds} fault-free runs, which differ in their weights and in what they evaluate, are {apart:.2%} apart.
- "made up in iterations" has one number for each fault: how long tokens were owed. Where it is the distance to the next
  fault, they were not made up before it.

What it does not show: a usual rate of faults, as {faults} in {iterations} iterations are far more than clusters have;
or that a small difference of losses means anything, as after a fault other weights meet the same samples.
"""


if __name__ == "__main__":
    raise SystemExit(main())
