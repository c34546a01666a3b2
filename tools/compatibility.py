#!/usr/bin/env python3
"""Measure what works with the installed Megatron-Core, and draw docs/compatibility.md from what was measured.

    python tools/compatibility.py --measure    in an environment with that release; writes its entry of the results
    python tools/compatibility.py              draws the page from the results of all releases

Measured is what this environment does, with its wheel unchanged: a small MoE model with the distributed optimizer is
built on the CPU, its training state enumerated and held against the live model, and the names looked for that a replay
of iterations takes hold of. A test kills a rank and compares the end of the restarted job with that of the undisturbed
one; it takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import pkgutil
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "docs" / "results" / "compatibility.json"
PACKAGES = ("megatron.core.dist_checkpointing.moe", "megatron.pretrain", "moe_ckpt")
KILLED = "test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit"
"""Of tests/stock, PP 2 and EP 2 with the distributed optimizer; each case names its strategy first."""
MODEL = (
    "--device cpu --use-distributed-optimizer --bf16 --num-layers 2 --hidden-size 32 --num-attention-heads 4"
    " --num-experts 4 --moe-router-topk 2 --distributed-backend gloo --transformer-impl local"
    " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion"
    " --max-position-embeddings 32 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type"
    " none --moe-token-dispatcher-type alltoall --swiglu --disable-bias-linear --position-embedding-type rope"
    " --normalization RMSNorm --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr"
    " 1e-3 --mock-data --vocab-size 64 --tokenizer-type NullTokenizer"
)
HEADING = """# Compatibility

Supported are the newest minor release of Megatron-Core that is in the table and the two before it (N-2), on Python 3.12
and 3.13 and torch 2.8 or newer. A release drops a core only with a new minor version, and the changelog names it.

Made by `python tools/compatibility.py` from `results/compatibility.json`, which `--measure` writes in an environment
with the release in question. A release that is not in the table was not looked at: `sparse` is refused there by name,
`full` and `pec` start with a warning.

"""
LEGEND = """
- **Imports**: *all* if every module of this package can be imported; else those that cannot.
- **Tensors of state**: what `state_tensors` enumerates of a small MoE model (bf16, distributed optimizer, expert bias);
  *complete* if `check_complete` finds every byte of the live model and optimizer in exactly one of them.
- **Seams**: names of `core_versions/seams.py` that the release has with the parameters written there.
- **Bit-equal**: the strategies with which jobs in Megatron-LM's loop (PP 2, EP 2, distributed optimizer,
  four processes on the CPU), of which a rank was killed, ended with the bits of the undisturbed job.
- **Strategies**: `full` and `pec` need complete state; `sparse` also needs all seams and a model that can be frozen.

What differs between the releases is in `megatron/core/dist_checkpointing/moe/core_versions/`:

| From | What changed in Megatron-Core | Where it is met |
|---|---|---|
| 0.18 | a tracker has the auxiliary losses | `training.py` |
| 0.18 | the distributed optimizer gathers weights by groups of buckets | `training.py`: `gathers_after_step` |
| 0.18 | `grad_norm_skip_threshold`: steps with too large gradients are skipped | `training.py`; `StepJournal.skipped` |
| 0.18 | expert biases are summed up over `pg_collection.tp_dp_cp` | `local_recovery/communicator.py` |
| 0.19 | the common state is among the shards, there is no `common.pt` | `moe_ckpt/dense/dense.py` |
| 0.19 | groups of parameters with gradient norms of their own | refused by `sparse` by name |
"""


def measure() -> dict[str, Any]:
    """What the installed release does."""
    warnings.simplefilter("ignore")
    import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
    from megatron.core.dist_checkpointing.moe.core_versions.seams import SEAMS, changed_seams, core_version

    found = _on_a_small_model(_state)
    import torch

    changed = changed_seams()
    return {
        "core": core_version.partition("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.split("+")[0],
        "seams": sum(map(len, SEAMS.values())),
        "changed": list(changed),
        "loop": _ended_equal(),
        **found,
    }


def render() -> str:
    """The whole page."""
    columns = ("Megatron-Core", "Python", "torch", "Imports", "Tensors of state", "Seams", "Strategies", "Bit-equal")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return HEADING + "\n".join([*lines, *(_row(found) for found in results().values())]) + "\n" + LEGEND


def results() -> dict[str, Any]:
    """What was measured, by release, oldest first."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return dict(sorted(found.items()))


def _row(found: dict[str, Any]) -> str:
    imports = "; ".join(found["broken"]) or "all"
    complete = f"{found['tensors']}, {'complete' if found['incomplete'] is None else found['incomplete']}"
    seams = f"{found['seams'] - len(found['changed'])} of {found['seams']}"
    refused = "" if found["refused"] is None else f"; `sparse` refused: {found['refused']}"
    allowed = ", ".join(f"`{name}`" for name in found["strategies"])
    loop = ", ".join(f"`{name}`" for name in found["loop"]) or "none"
    cells = (found["core"], found["python"], found["torch"], imports, complete, seams, allowed + refused, loop)
    return f"| {' | '.join(cells)} |"


def _modules() -> list[str]:
    return [
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        if not module.name.endswith("__main__")
    ]


def _unimportable() -> list[str]:
    broken = []
    for name in _modules():
        try:
            importlib.import_module(name)
        except ImportError as error:
            broken.append(f"{name}: {error}")
    return broken


def _ended_equal() -> list[str]:
    """The strategies that bring a killed job back to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = ["tests/stock/test_stock_recovery.py", "-k", KILLED, "-m", "full or not full"]
        command = [sys.executable, "-m", "pytest", "-q", *tests, "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False, timeout=1200, stdout=subprocess.DEVNULL)
        cases = {
            str(case.get("name")): [part.tag for part in case] for case in ElementTree.parse(report).iter("testcase")
        }
    ended: dict[str, bool] = {}
    for name, parts in cases.items():
        strategy = name.partition("[")[2].partition("-")[0]
        ended[strategy] = ended.get(strategy, True) and not parts
    return [strategy for strategy, well in ended.items() if well]


def _on_a_small_model(work: Callable[[Any], Any]) -> Any:
    """The result of `work`, which gets chunks and optimizer that Megatron-LM built in one process."""
    from megatron.pretrain.initialize import Launch, shut_down
    from megatron.pretrain.loop import start_megatron

    sys.argv[1:] = MODEL.split()
    start_megatron("cpu", Launch.from_environment())
    try:
        from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_optimizer_state
        from megatron.core.enums import ModelType
        from megatron.training.training import setup_model_and_optimizer
        from pretrain_gpt_moe import model_provider

        chunks, optimizer, _ = setup_model_and_optimizer(
            model_provider_func=model_provider, model_type=ModelType.encoder_or_decoder
        )
        allocate_optimizer_state(optimizer)
        return work(SimpleNamespace(chunks=chunks, optimizer=optimizer))
    finally:
        shut_down()


def _state(state: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.moe.errors import UsageError
    from megatron.core.dist_checkpointing.moe.megatron_state import megatron
    from megatron.core.dist_checkpointing.moe.megatron_state.partitions import IncompleteState, check_complete
    from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution

    topology = megatron.read_topology(1)
    tensors = megatron.state_tensors(state.chunks, state.optimizer, topology)
    incomplete, refused = None, None
    try:
        check_complete(state.chunks, state.optimizer, tensors)
    except IncompleteState as error:
        incomplete = str(error)
    try:
        LiveExecution(state.chunks, state.optimizer, megatron.operators_of_parameters(state.chunks, topology))
    except UsageError as error:
        refused = str(error)
    copied = ["full", "pec"] if incomplete is None else []
    strategies = [*copied, *(["sparse"] if copied and refused is None else [])]
    return {
        "broken": _unimportable(),
        "tensors": len(tensors),
        "incomplete": incomplete,
        "refused": refused,
        "strategies": strategies,
    }


def main() -> int:
    """Draws the page, or with --measure adds the installed release to the results first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the installed Megatron-Core first")
    if parser.parse_args().measure:
        found = measure()
        RESULTS.write_text(json.dumps(results() | {found["core"]: found}, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
