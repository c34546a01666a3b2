"""Kill a training job in the middle and show that it goes on as if nothing had happened."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS, SAVE_INTERVAL, KILL_AT, KILLED_RANK = 120, 20, 70, 2
LOSS_TO_REACH = 3.2

Losses = list[tuple[int, float]]


def main() -> int:
    """Exit code: 0 if every loss after the resume is bit-equal to the undisturbed run, else 1."""
    folder = _arguments().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("undisturbed", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).with_suffix(".jsonl").unlink(missing_ok=True)

    say("1. An undisturbed run: GPT-MoE, 8 experts, PP=2 x EP=2, distributed optimizer, 4 processes, real text.")
    undisturbed = train(folder / "undisturbed", [])
    say(f"2. The same run; rank {KILLED_RANK} gets SIGKILL in iteration {KILL_AT}, torchrun restarts the job.")
    save = folder / "killed"
    fault = f"{KILLED_RANK}@{KILL_AT}:forward-backward"
    flags = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
    killed = train(save, [*flags, "--moe-ckpt-inject-fault", fault])

    resumed_at = resumption(killed)
    if resumed_at is None:
        say("The job was not restarted: there is nothing to compare.")
        return 1
    after = dict(killed[resumed_at:])
    before = dict(undisturbed)
    equal = show_table(before, after)
    plot(undisturbed, killed[:resumed_at], killed[resumed_at:], folder / "loss.png")
    say(f"Losses are drawn in {folder / 'loss.png'}; the last one is {undisturbed[-1][1]:.3f} nats/byte.")
    learned = undisturbed[-1][1] < LOSS_TO_REACH
    if not learned:
        say(f"The model did not learn: expected less than {LOSS_TO_REACH} nats/byte.")
    return 0 if equal and learned else 1


def train(folder: Path, flags: list[str]) -> Losses:
    """Run the launcher and return (iteration, loss) in the order of training, repeated ones included."""
    metrics = folder.with_suffix(".jsonl")
    command = [str(ROOT / "scripts" / "train_cpu.sh"), "--train-iters", str(ITERATIONS), "--log-interval", "20"]
    started = time.monotonic()
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([*command, "--metrics-jsonl", str(metrics), *flags], check=True, env=environment)
    say(f"   took {time.monotonic() - started:.0f} s")
    records = map(json.loads, metrics.read_text().splitlines())
    return [(record["iteration"], record["lm_loss"]) for record in records]


def resumption(losses: Losses) -> int | None:
    """Where in the record training went back to an earlier iteration."""
    for index in range(1, len(losses)):
        if losses[index][0] <= losses[index - 1][0]:
            return index
    return None


def show_table(undisturbed: dict[int, float], resumed: dict[int, float]) -> bool:
    """Print the comparison; whether every loss after the resume is bit-equal."""
    say(f"\n{'iteration':>9}  {'loss undisturbed':>20}  {'loss after resume':>20}  equal?")
    for iteration, loss in resumed.items():
        expected = undisturbed[iteration]
        say(f"{iteration:>9}  {expected!r:>20}  {loss!r:>20}  {'yes' if loss == expected else 'NO'}")
    complete = set(resumed) == set(range(min(resumed), ITERATIONS + 1))
    equal = complete and all(undisturbed[iteration] == loss for iteration, loss in resumed.items())
    say(f"\n{len(resumed)} losses after the resume: {'all bit-equal' if equal else 'NOT all equal'}.")
    return equal


def plot(undisturbed: Losses, until_killed: Losses, resumed: Losses, path: Path) -> None:
    """Draw both runs; the iterations after the last checkpoint were trained twice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*undisturbed, strict=True), linewidth=5, alpha=0.3, label="undisturbed")
    axes.plot(*zip(*until_killed, strict=True), linewidth=1, color="black", label="until the fault")
    axes.plot(*zip(*resumed, strict=True), linewidth=1, color="tab:orange", label="resumed from a checkpoint")
    axes.axvline(KILL_AT, color="tab:red", linestyle=":", label=f"SIGKILL to rank {KILLED_RANK}")
    axes.set(xlabel="iteration", ylabel="loss (nats/byte)", title="A fault in the middle changes nothing")
    axes.legend()
    figure.savefig(path, dpi=120)


def say(text: str) -> None:
    """Print at once, in order with what the training processes write."""
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="where runs and plot go (default: .demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
