"""Real jobs that figures of the papers are made of (`reproduce/`): tokens of experts, and bytes of snapshots.

`active_experts`: tokens of each expert in every iteration, with as many experts as DeepSeek-MoE's layers have, routers
random at first. `tokens_at_risk`: what a fault would cost in each iteration under `selective` (experts by risk) and
under `pec` (experts in turn), at equal bytes; both train alike, to the bit. `selective_ablation`: what each technique
of MOETION sends, against `full`: four ranks, each a node of its own, in two stages without the distributed optimizer,
so that the data-parallel peer that keeps a rank's replicas holds all but experts as well; techniques are added up.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import RESULTS, after, machine, start, under_faults

EXPERTS, TOPK = 64, 6
K, FIRST = 2, 8
"""Experts per layer that `pec` takes, and the last iteration before all of them have had a turn."""
SHARE, SKIPPED = 0.7, 6
"""Budgets of `selective` as a share of the bytes of `full`, and iterations at the start in which all is snapshotted."""
FOLLOWING = "--moe-ckpt-replicate gradients"
ADDED = {"selection": "", "+ gradients": FOLLOWING, "+ bubbles": f"{FOLLOWING} --moe-ckpt-copy-placement bubbles"}


def metrics(iterations: int, strategy: str, model: str, layout: Mapping[str, str]) -> list[dict[str, Any]]:
    """Those of each iteration of a job that no fault strikes."""
    flags = f"--train-iters {iterations} {model}" + f" --moe-ckpt-strategy {strategy}" * bool(strategy)
    return [line for line in under_faults(flags, layout, ()) if "iteration" in line]


def active_experts(turns: int, quick: bool) -> dict[str, Any]:
    """tokens: by iteration, for each layer those of all experts, as a text."""
    model = (
        f"--num-layers 2 --num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 32"
        " --moe-aux-loss-coeff 1e-2"
    )
    counting = "pec --moe-ckpt-replicas 0 --moe-ckpt-log-expert-tokens"
    lines = metrics(6 if quick else 150, counting, model, {"NPROC": "2", "PP": "1", "EP": "2"})
    tokens = {int(at): rows for line in lines for at, rows in (line.get("expert_tokens") or {}).items()}
    texts = [[" ".join(map(str, row)) for row in tokens[at]] for at in sorted(tokens)]
    return {"experts": EXPERTS, "topk": TOPK, "flags": model.split(), "tokens": texts}


def tokens_at_risk(turns: int, quick: bool) -> dict[str, Any]:
    """by_iteration: tokens at risk in all layers, in turn and by risk. Raises SystemExit if bytes are not equal."""

    def run(strategy: str) -> list[dict[str, Any]]:
        counting = f"{strategy} --moe-ckpt-replicas 0 --moe-ckpt-log-expert-tokens"
        layout = {"NPROC": "2", "PP": "1"} if quick else {}
        lines = metrics(12 if quick else 150, counting, "--moe-aux-loss-coeff 0", layout)
        return [line for line in lines if line.get("lost_tokens") and line["iteration"] > FIRST]

    in_turn = run(f"pec --moe-ckpt-pec-k-snapshot {K}")
    budget = max(line["snapshot_bytes"] for line in in_turn)
    by_risk = run(f"selective --moe-ckpt-budget-local {budget}")
    if max(line["snapshot_bytes"] for line in by_risk) > budget:
        raise SystemExit("a snapshot of selective has more bytes than one of pec: the comparison would be unfair")
    routed = [sum(map(sum, counts)) for line in in_turn for counts in line["expert_tokens"].values()]
    pairs = zip(in_turn, by_risk, strict=True)
    return {
        "routed_tokens_per_iteration": round(statistics.mean(routed)),
        "by_iteration": [[turn["iteration"], _at_risk(turn), _at_risk(risk)] for turn, risk in pairs],
    }


def _at_risk(line: Mapping[str, Any]) -> int:
    return sum(line["lost_tokens"]["at_risk"].values())


def selective_ablation(turns: int, quick: bool) -> dict[str, Any]:
    """rounds: of each job the median of its iteration times, and means over the snapshots of one rank."""
    nodes, experts = ("2", "1") if quick else ("4", "2")
    layout = {"NNODES": nodes, "NPROC": "1", "PP": "2", "EP": experts, "MOE_CKPT_OPTIMIZER": "plain"}
    model = "--moe-aux-loss-coeff 0 --bf16 --grad-reduce-in-bf16"  # gradients of two bytes, as the paper ships them
    model += "" if quick else " --hidden-size 128 --moe-ffn-hidden-size 512"
    iterations, budget, rounds = 10 if quick else 30, 0, []

    def run(strategy: str) -> dict[str, float]:
        found = metrics(iterations, f"{strategy} --moe-ckpt-replicas 1" if strategy else "", model, layout)
        rows = [line for line in found if line["iteration"] > SKIPPED]
        taken = max(1, sum(line["snapshot_bytes"] > 0 for line in rows))
        waits = [stage for line in rows for stage in line.get("pipeline_waits") or ()]
        fields = {"copied": "snapshot_bytes", "sent": "replicated_bytes", "spared": "spared_bytes"}
        return {
            "iteration_s": statistics.median(line["iteration_time_s"] for line in rows),
            **{name: sum(line[field] for line in rows) / taken for name, field in fields.items()},
            "copied_in_waits": sum(stage["copied_bytes"] for stage in waits) / max(1, len(waits)),
        }

    for _ in range(turns):
        row = {name: run(name.removeprefix("none")) for name in ("none", "full")[quick:]}
        budget = budget or int(SHARE * row["full"]["copied"])
        own = f"selective --moe-ckpt-budget-local {budget} --moe-ckpt-budget-remote {budget}"
        rounds.append(row | {name: run(f"{own} {ADDED[name]}") for name in list(ADDED)[2 * quick :]})
    return {"layout": layout, "iterations": iterations, "budget_bytes": budget, "rounds": rounds}


JOBS: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "active_experts": active_experts,
    "tokens_at_risk": tokens_at_risk,
    "selective_ablation": selective_ablation,
}


def main() -> int:
    """Run the jobs that are asked for; --write keeps what the figures read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few iterations: shows that it runs")
    parser.add_argument("--turns", type=int, default=5, help="rounds of selective_ablation (%(default)s)")
    parser.add_argument("--write", action="store_true", help="keep the data")
    arguments = parser.parse_args()
    if unknown := set(arguments.jobs) - set(JOBS):
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    for name in arguments.jobs or JOBS:
        about = machine()
        found = JOBS[name](arguments.turns, arguments.quick)
        text = json.dumps({"machine": after(about)} | found, indent=1)
        print(f"{name}: {len(text)} characters of data")
        if arguments.write:
            folder = RESULTS if name == "tokens_at_risk" else Path(__file__).parent / "results"
            (folder / f"{name}.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    start(main)
