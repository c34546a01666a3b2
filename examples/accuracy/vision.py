"""What partial experts cost a vision model in accuracy, after real kills: MoC Fig. 14 (b), PEC Fig. 6 at small scale.

    python examples/accuracy/vision.py [--seeds 1 2 3 4] [--tiny]

The model of `examples/vision_moe` learns the direction of stripes under noise. Each seed is trained without faults, and
with the same SIGKILLs under `pec`, with one expert of a layer in a snapshot: in turn, by load, and, the positive
control, in so few snapshots that experts come back from long ago. In the null control a bit of one weight differs.
docs/results gets the data, which `reproduce/moc_fig14.py` reads.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vision_moe")]

GIVEN = "MOE_CKPT_VISION"
"""Set for the processes that train: iterations, seed, and whether a bit is flipped."""
WHOLE, TINY = 400, 24
KILLS = ((1, 0.15, "forward-backward"), (0, 0.4, "step"), (1, 0.65, "start"), (0, 0.9, "forward-backward"))
"""Rank, share of the iterations, and phase."""
PEC = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "1", "--moe-ckpt-pec-selection")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "fault-free": (),
    "one bit": (),
    "sequential": (*PEC, "sequential", "--moe-ckpt-interval", "1"),
    "load-aware": (*PEC, "load-aware", "--moe-ckpt-interval", "1"),
    "stale": (*PEC, "sequential", "--moe-ckpt-interval"),
}
EXPERTS, IMAGES, NOISE = 8, 32, 2.0
TESTS = 64
"""As many images as in so many iterations are asked about, which no training saw."""


def main() -> int:
    """Train from each seed in each way, and keep what was found."""
    from campaign import RELEASE, scratch_disk, with_results
    from demo_jobs import revision

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    arguments = with_results(parser, "a few iterations, one way to select")
    iterations = TINY if arguments.tiny else WHOLE
    made, runs = revision(), []
    for seed in arguments.seeds:
        for name in ("fault-free", "sequential") if arguments.tiny else FLAGS:
            with tempfile.TemporaryDirectory(prefix="vision-", dir=scratch_disk()) as folder:
                runs.append({"seed": seed, "name": name} | run(seed, name, iterations, Path(folder)))
            print({key: value for key, value in runs[-1].items() if key != "curve"}, flush=True)
    data = {"iterations": iterations, "images": IMAGES, "tests": TESTS * IMAGES, "kills": len(KILLS)}
    data |= {"release": RELEASE, "made": made, "runs": runs}
    if arguments.results:
        (arguments.results / "vision-accuracy.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0


def run(seed: int, name: str, iterations: int, memory: Path) -> dict[str, Any]:
    """One training with its kills, by torchrun. Raises SystemExit for one that failed, with what it printed."""
    from demo_jobs import recovered

    flags = list(FLAGS[name])
    kills = [f"{rank}@{round(share * iterations)}:{phase}" for rank, share, phase in KILLS] if flags else []
    if name == "stale":
        flags.append(str(iterations // 10))
    if flags:
        flags += ["--moe-ckpt-memory-dir", str(memory)]
    flags += [part for kill in kills for part in ("--moe-ckpt-inject-fault", kill)]
    given = {"iterations": iterations, "seed": seed, "one_bit": name == "one bit"}
    own = {GIVEN: json.dumps(given), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(len(kills)), __file__, *flags]
    ended = subprocess.run(command, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    recoveries, accuracy = list(recovered(ended.stdout)), re.findall(r"test accuracy (\S+)", ended.stdout)
    if ended.returncode or len(recoveries) != len(kills) or len(accuracy) != 1:
        said = f"exit code {ended.returncode}, {len(recoveries)} recoveries of {len(kills)} faults"
        raise SystemExit(f"{ended.stdout}\n{name}: {said}")
    found = re.findall(r"rank 0 iteration (\d+): loss (\S+)", ended.stdout)
    losses = list({int(iteration): float.fromhex(loss) for iteration, loss in found}.values())
    part = math.ceil(len(losses) / 20)
    return {
        "faults": len(kills),
        "plt": recoveries[-1].plt if recoveries else 0.0,
        "accuracy": float(accuracy[0]),
        "curve": [statistics.fmean(losses[at : at + part]) for at in range(0, len(losses), part)],
    }


def worker() -> int:
    """What each process runs: training, and then the test."""
    import torch
    import train as vision
    from one_bit import flip

    def drawn(*numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Half of an iteration's images: stripes of random place and width, whose direction is the label, and noise."""
        source = torch.Generator().manual_seed(sum(number * 1009**at for at, number in enumerate(numbers, 1)))
        count, at = IMAGES // 2, torch.arange(vision.PIXELS, dtype=torch.float32)
        labels = torch.randint(vision.CLASSES, (count,), generator=source)
        phase, width = torch.rand(2, count, 1, 1, generator=source)
        angle = labels[:, None, None] * math.pi / vision.CLASSES
        waves = torch.sin((1 + width) * (angle.cos() * at[:, None] + angle.sin() * at) + 2 * math.pi * phase)
        noise = torch.randn(count, 3, vision.PIXELS, vision.PIXELS, generator=source)
        return (waves[:, None] + NOISE * noise).cuda(), labels.cuda()

    given = json.loads(os.environ[GIVEN])
    seed, rank = given["seed"], int(os.environ["RANK"])
    recipe = vision.Amounts(given["iterations"], IMAGES, IMAGES // 2, EXPERTS, seed)
    batches = lambda iteration, recipe: iter([drawn(rank, iteration, seed)])  # noqa: E731
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    model = vision.train(sys.argv[1:], recipe, batches, *[flip] * given["one_bit"]).eval()
    right = torch.zeros(1).cuda()
    with torch.no_grad():
        for batch in range(TESTS):
            images, labels = drawn(rank, batch)  # of no seed: all models are asked the same
            right += (model(images).argmax(dim=-1) == labels).sum()
    torch.distributed.all_reduce(right)
    if rank == 0:
        print(f"test accuracy {float(right) / (TESTS * IMAGES)}", flush=True)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(worker() if GIVEN in os.environ else main())
