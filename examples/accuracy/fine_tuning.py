"""What fine-tuning under partial checkpoints, and with frozen experts, leaves of accuracy: MoC Table 4 at small scale.

    python examples/accuracy/fine_tuning.py [--tiny]

A small GPT-MoE is trained on the standard library's sources, then fine-tuned on other text, Python's help topics, with
a SIGKILL at half of it: under full checkpoints, under such with one of 8 experts, and with frozen experts. Each model,
and the one that was not fine-tuned, is evaluated on topics that no training saw, and asked about them (`tasks.py`).
docs/results gets the data, which `reproduce/moc_table4.py` reads.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from campaign import LAYOUT, Scale, asked, scratch_disk, with_results  # noqa: E402
from demo_jobs import DemoRun, Size, after, machine, train  # noqa: E402

SEED = 1234
MODEL = ("--num-layers", "2")
PRETRAINED, BASE = "pretrained", "Base"
EACH = ("--moe-ckpt-interval", "1")
FULL = ("--moe-ckpt-strategy", "full", *EACH)
TUNED: Mapping[str, tuple[str, ...]] = {
    "FT-w.o.E": (*FULL, "--freeze-experts"),
    "FT-Full": FULL,
    "FT-PEC": ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "1", *EACH),
}
RATE = ("--lr", "1e-3", "--min-lr", "1e-4")
UNCHANGED = ("--lr", "1e-12", "--min-lr", "0")
"""A rate that changes no bit of a weight: the model as it was loaded is evaluated."""
WHOLE, TINY = Scale(60, 20, 1, 150, ("1@30:forward-backward",)), Scale(8, 1, 1, 4, ("1@4:forward-backward",))


def main() -> int:
    """Train, ask, and keep what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pretrain", type=int, default=100, metavar="N", help="iterations before fine-tuning")
    arguments = with_results(parser, "a few iterations and questions")
    scale, before = (TINY, 8) if arguments.tiny else (WHOLE, arguments.pretrain)
    about = machine()
    with tempfile.TemporaryDirectory(prefix="fine-tuning-", dir=scratch_disk()) as name:
        folder = Path(name)
        saved = _saved(folder, PRETRAINED, before)
        train(SEED, PRETRAINED, Size(before, before, 1, ()), folder, (), model=(*MODEL, *saved), layout=LAYOUT)
        layout = LAYOUT | {"MOE_CKPT_CORPUS": help_topics(folder)}
        runs = [tuned(name, scale, folder, layout) for name in (BASE, *TUNED)]
    data = (
        {"machine": after(about)} | asdict(scale) | {"pretrained": before, "seed": SEED, "flags": MODEL, "runs": runs}
    )
    if arguments.results:
        (arguments.results / "fine-tuning.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0


def help_topics(folder: Path) -> str:
    """The prefix of a corpus of Python's help topics, each of them a document, in a drawn order."""
    texts = list(topics.values())
    random.Random(SEED).shuffle(texts)
    source = folder / "topics.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--append-eod"]
    subprocess.run([*command, "--input", str(source), "--output-prefix", str(folder / "topics")], check=True)
    return str(folder / "topics_text_document")


def tuned(name: str, scale: Scale, folder: Path, layout: Mapping[str, str]) -> dict[str, Any]:
    """Fine-tune, or leave the model as it is, and ask."""
    loaded = (*MODEL, "--finetune", "--load", str(folder / PRETRAINED))
    if name == BASE:
        run = train(
            SEED, name, Size(1, 1, scale.eval_iters, ()), folder, (), model=(*loaded, *UNCHANGED), layout=layout
        )
        checkpoint = folder / PRETRAINED
    else:
        flags = (*loaded, *RATE, *_saved(folder, name, scale.iterations))
        run = train(SEED, name, scale.size, folder, TUNED[name], model=flags, layout=layout)
        checkpoint = folder / name
    found = described(run, asked(checkpoint, SEED, scale, folder, (*MODEL, "--finetune"), layout))
    print(found, flush=True)
    return found


def _saved(folder: Path, name: str, iterations: int) -> Sequence[str]:
    return "--save", str(folder / name), "--save-interval", str(iterations)


def described(run: DemoRun, shares: Mapping[str, float]) -> dict[str, Any]:
    """What is kept of a run: lost tokens and mean snapshot as shares, loss in nats per byte."""
    share, largest = run.mean_snapshot, run.largest_bytes
    snapshot = {"mean_snapshot_bytes": share * largest, "faults": len(run.recoveries)}
    return {"name": run.name, "plt": run.plt, **snapshot, "loss": run.final, **shares}


if __name__ == "__main__":
    sys.exit(main())
