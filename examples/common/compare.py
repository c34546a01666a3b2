"""What a fault changed: the recovery of a run that was killed, and its losses beside those of an undisturbed one."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LAST = 5
"""Iterations whose mean loss counts as the loss at the end."""
HEAD = re.compile(r"(recovered iteration \d+ .* \(\w+ rollback\)); state restored in \S+ s:")
DETAIL = re.compile(r"  (?:not local|stages?|window|ranks|lost in|proportion)\b")


@dataclass(frozen=True)
class ComparedRun:
    """A run: (iteration, loss, gradient norm, whether replayed) in the order of training, and its log."""

    steps: tuple[tuple[int, float, float, bool], ...]
    log: str

    @property
    def computed(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each iteration; the last time counts."""
        return {iteration: (loss, norm) for iteration, loss, norm, _ in self.steps}

    @property
    def again(self) -> int:
        """How many iterations were run more than once."""
        return len(self.steps) - len(self.computed)

    @property
    def end(self) -> float:
        """Mean loss of the last iterations."""
        return statistics.mean(loss for loss, _ in list(self.computed.values())[-LAST:])


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if the run that was killed came back and is what it has to be, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("undisturbed", type=Path, help="a run's .jsonl and .log, without these suffixes")
    parser.add_argument("killed", type=Path, help="the same of the run that was killed")
    parser.add_argument("--lossy", type=float, metavar="SHARE", help="by how much the loss at the end may differ")
    arguments = parser.parse_args(argv)
    undisturbed, killed = read(arguments.undisturbed), read(arguments.killed)
    found = list(recoveries(killed.log))
    print("\n".join(found) or "Nothing was recovered: there was no fault, or the run was started again.")
    print(f"{len(killed.steps)} iterations run, {killed.again} of them again; loss at the end {killed.end:.2f}")
    if arguments.lossy is None:
        verdict, good = exact(undisturbed, killed)
    else:
        verdict, good = close(undisturbed, killed, arguments.lossy)
    print(verdict)
    return 0 if found and good else 1


def read(run: Path) -> ComparedRun:
    """A run from the files that it left."""
    reports = map(json.loads, run.with_suffix(".jsonl").read_text().splitlines())
    steps = (
        (report["iteration"], report["lm_loss"], report["grad_norm"], report["replayed"])
        for report in reports
        if "iteration" in report  # other lines are facts of the run, and recoveries
    )
    return ComparedRun(tuple(steps), run.with_suffix(".log").read_text())


def recoveries(log: str) -> Iterator[str]:
    """What the tables of recoveries in a log say of how they went, without where each operator came from."""
    for line in log.replace("[moe-ckpt] ", "").splitlines():
        if head := HEAD.fullmatch(line):
            yield "".join(head.groups())
        elif DETAIL.match(line):
            yield line


def exact(undisturbed: ComparedRun, killed: ComparedRun) -> tuple[str, bool]:
    """Whether every iteration, those that were run again included, has the bits of the undisturbed run."""
    expected = undisturbed.computed
    unlike = sorted({step[0] for step in killed.steps if step[1:3] != expected.get(step[0])})
    missing = sorted(expected.keys() - killed.computed.keys())
    if unlike or missing:
        return f"NOT as without the fault: iterations {unlike} differ, {missing} are missing", False
    return "Every loss and gradient norm is that of the undisturbed run, to the last bit.", True


def close(undisturbed: ComparedRun, killed: ComparedRun, share: float) -> tuple[str, bool]:
    """Whether the loss at the end is near that of the undisturbed run."""
    off = killed.end / undisturbed.end - 1
    good = abs(off) <= share and killed.computed.keys() == undisturbed.computed.keys()
    near = "as near as" if good else "NOT as near as"
    return f"The loss at the end is {off:+.4%} off the undisturbed run, {near} the {share:.0%} that are expected.", good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
