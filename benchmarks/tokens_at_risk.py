#!/usr/bin/env python3
"""Tokens at risk in each iteration: experts by risk (`selective`) against experts in turn (`pec`), at equal bytes.

    python benchmarks/tokens_at_risk.py [--iterations N]      writes docs/results/tokens_at_risk.json and its page

MOETION Fig. 11 with real routers: the demo model on four processes, without an auxiliary loss, so that experts are as
popular as training makes them. Both jobs train alike, to the bit, as no fault strikes; each tells in its metrics what a
fault would cost then. The budget of `selective` is what a snapshot of `pec` has on the rank that writes the metrics.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_jobs import ROOT, Size, train

RESULTS = ROOT / "docs" / "results"
COMMON = ("--moe-aux-loss-coeff", "0", "--moe-ckpt-replicas", "0", "--moe-ckpt-log-expert-tokens")
K = 2
SKIPPED = 8
"""Iterations at the start in which everything is snapshotted, or not all experts have had a turn."""


@dataclass(frozen=True)
class Risk:
    """One job: by iteration, tokens at risk in all layers and bytes that the rank copied; tokens per iteration."""

    name: str
    at_risk: dict[int, int]
    nbytes: dict[int, int]
    routed: int
    shares: tuple[float, ...]

    @property
    def total(self) -> int:
        """Tokens at risk, summed over iterations."""
        return sum(self.at_risk.values())


def run(name: str, iterations: int, folder: Path, strategy: Sequence[str]) -> Risk:
    """Train to the end and read what the metrics say."""
    size = Size(iterations, iterations, 1, ())
    train(1, name, size, folder, ("--moe-ckpt-strategy", *strategy, *COMMON))
    lines = [json.loads(line) for line in (folder / f"1-{name}.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line.get("lost_tokens") and line["iteration"] > SKIPPED]
    tokens = [counts for line in rows for counts in line["expert_tokens"].values()]
    shares = [
        share
        for counts in tokens
        for row in counts
        for share in sorted((one / sum(row) for one in row), reverse=True)[:2]
    ]
    return Risk(
        name,
        {line["iteration"]: sum(line["lost_tokens"]["at_risk"].values()) for line in rows},
        {line["iteration"]: line["snapshot_bytes"] for line in rows},
        round(statistics.mean(sum(map(sum, counts)) for counts in tokens)),
        tuple(shares),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=150)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory(prefix="tokens-at-risk-") as name:
        folder = Path(name)
        in_turn = run("sequential", iterations, folder, ("pec", "--moe-ckpt-pec-k-snapshot", str(K)))
        budget = str(max(in_turn.nbytes.values()))
        by_risk = run("selective", iterations, folder, ("selective", "--moe-ckpt-budget-local", budget))
    check(in_turn, by_risk)
    found = result(in_turn, by_risk)
    (RESULTS / "tokens_at_risk.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(in_turn, by_risk, RESULTS / "tokens_at_risk.png")
    (RESULTS / "tokens-at-risk.md").write_text(page(found, iterations))
    print(json.dumps({key: value for key, value in found.items() if key != "by_iteration"}, indent=1))


def check(in_turn: Risk, by_risk: Risk) -> None:
    """Raise SystemExit for a comparison that would be unfair, or that does not hold."""
    if max(by_risk.nbytes.values()) > max(in_turn.nbytes.values()):
        raise SystemExit("a snapshot of selective has more bytes than one of pec: the comparison would be unfair")
    if by_risk.total >= in_turn.total:
        raise SystemExit(f"{by_risk.total} tokens are at risk with selective, {in_turn.total} in turn")


def result(in_turn: Risk, by_risk: Risk) -> dict[str, object]:
    """The table as data: means in iterations' worth of tokens, and each iteration."""
    routed = in_turn.routed
    return {
        "mean_in_turn": in_turn.total / len(in_turn.at_risk) / routed,
        "mean_by_risk": by_risk.total / len(by_risk.at_risk) / routed,
        "lower_by": 1 - by_risk.total / in_turn.total,
        "lower_in": sum(
            by_risk.at_risk[at] < in_turn.at_risk[at] for at in in_turn.at_risk
        ) / len(in_turn.at_risk),
        "mean_bytes_in_turn": statistics.mean(in_turn.nbytes.values()),
        "mean_bytes_by_risk": statistics.mean(by_risk.nbytes.values()),
        "popular": 2 * statistics.mean(in_turn.shares),
        "routed_tokens_per_iteration": routed,
        "by_iteration": [[at, in_turn.at_risk[at], by_risk.at_risk[at]] for at in sorted(in_turn.at_risk)],
    }  # fmt: skip


def page(found: dict[str, object], iterations: int) -> str:
    """The page of the result."""
    numbers = {key: value for key, value in found.items() if isinstance(value, float | int)}
    filled = PAGE.format(iterations=iterations, k=K, skipped=SKIPPED, **numbers)
    return re.sub(r"(\d)%", r"\1 %", filled)


PAGE = """# Tokens at risk

![Tokens at risk by iteration](tokens_at_risk.png)

What a fault would cost at each moment of a real run: {iterations} iterations of the demo model on four processes, 8
experts per layer, top 2, no auxiliary loss. The two most popular experts of a layer take {popular:.0%} of its tokens,
25 % if all were alike. `pec` takes {k} experts per layer in turn; `selective` takes those with the most tokens since
their last copy, within the bytes of such a snapshot. Both train alike to the bit. Tokens are counted in iterations'
worth; the first {skipped} iterations are left out.

| | experts in turn (`pec`) | by risk (`selective`) |
|---|---:|---:|
| mean tokens at risk, iterations' worth | {mean_in_turn:.3f} | {mean_by_risk:.3f} |
| mean bytes of a snapshot on a rank | {mean_bytes_in_turn:,.0f} | {mean_bytes_by_risk:,.0f} |

**{lower_by:.1%} fewer tokens are at risk** in total, and fewer in {lower_in:.0%} of the iterations. MOETION
(Fig. 11) reports up to 50 % fewer, with one expert per token and up to 80 % of the tokens at two experts: the more
skewed the routing, the larger the difference. All numbers: [tokens_at_risk.json](tokens_at_risk.json), made by
`python benchmarks/tokens_at_risk.py`.
"""


def plot(in_turn: Risk, by_risk: Risk, path: Path) -> None:
    """Both curves over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    for risk, label in ((in_turn, "experts in turn (pec)"), (by_risk, "by risk (selective)")):
        axes.plot(list(risk.at_risk), [tokens / in_turn.routed for tokens in risk.at_risk.values()], label=label)
    axes.set_xlabel("iteration")
    axes.set_ylabel("tokens at risk,\niterations' worth")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
