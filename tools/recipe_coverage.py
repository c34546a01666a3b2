#!/usr/bin/env python3
"""Which MoE recipes of Megatron-Bridge are protected, by our own refusals.

python tools/recipe_coverage.py             a line per recipe, and totals; renews docs/recipes.md
python tools/recipe_coverage.py --read      reads the recipes again, from the wheel of Megatron-Bridge 0.6.2
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
DATA = ROOT / "tools" / "bridge_recipes.jsonl"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from recipe_settings import JUDGED, ROUTERS, VERSION, Recipe, recipes  # noqa: E402

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig  # noqa: E402
from megatron.core.dist_checkpointing.moe.in_place.process_restart import needs_fresh_process  # noqa: E402
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import unsupported_settings  # noqa: E402
from megatron.core.dist_checkpointing.moe.replay.execution import unfreezable_settings  # noqa: E402
from megatron.core.dist_checkpointing.moe.stock import flags  # noqa: E402

COLUMNS = ("full", "in place", "sparse", "local recovery")
NOT_ASKED = "one pipeline stage"
FORCED = "moe_router_force_load_balancing"
HEADING = f"""# Recipes of Megatron-Bridge

Made by `python tools/recipe_coverage.py`. The settings of each MoE pretraining recipe of Megatron-Bridge {VERSION} are
judged by the refusals of this project, as flags of Megatron-LM's loop. **In place** is `full` with survivors that keep
their processes, as far as [a flex dispatcher lets them](megatron-lm.md#ranks-that-stay). **Local recovery** is `sparse`
with several pipeline stages. In Bridge's own loop `full` and `pec` run; there survivors stay under
[a few more conditions](bridge.md#ranks-that-stay).

Performance recipes set `{FORCED}` for benchmarks: experts are drawn at random, also
while CUDA graphs of modules are captured, and a job that comes back would draw others. Set it to false, as training
does: then the third row holds.

Not part of the verdict: `sparse` on GPUs also takes [deterministic settings](gpu.md), which a job adds to a recipe.
Of GLM-5.2 `dsa_kernel_backend` has to become none for it. No recipe was run at its size; one was trained and killed,
made small. What the hub's configurations add is written down in `tools/recipe_settings.py`.

"""
BEFORE = """| training, before | 11 of 48 (23 %) | 9 of 48 (19 %) | 10 of 48 (21 %) | 7 of 33 (21 %) |
| performance, before | 21 of 308 (7 %) | 7 of 308 (2 %) | 16 of 308 (5 %) | 10 of 142 (7 %) |"""
"""What this tool found when it was written."""


@cache
def all_recipes() -> tuple[Recipe, ...]:
    """As they were read from the wheel."""
    return tuple(Recipe(**json.loads(line)) for line in DATA.read_text(encoding="utf-8").splitlines())


def refusals(recipe: Recipe, strategy: str, recovery: str = "global") -> Iterator[str]:
    """Why a recipe is not protected.

    Args:
        recipe: Of Megatron-Bridge.
        strategy: `full` or `sparse`.
        recovery: Which stages are to roll back.
    """
    settings = JUDGED | recipe.settings
    # Bridge switches it off where there is nothing to reduce over (`training/comm_overlap.py`).
    settings["tp_comm_overlap"] = settings["tp_comm_overlap"] and settings["tensor_model_parallel_size"] > 1
    model, wrapping = SimpleNamespace(**settings, num_moe_experts=8), SimpleNamespace(**settings)
    yield from flags.refusals(MoECheckpointConfig(strategy=strategy, recovery=recovery), argparse.Namespace(**settings))
    yield from unsupported_settings(model, wrapping)
    if strategy == "sparse":
        yield from unfreezable_settings(model)
        if recipe.model in ROUTERS:
            yield f"the router {ROUTERS[recipe.model]}"


def verdicts(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Of `COLUMNS`: the reasons against it; none where it is accepted."""
    full, sparse = tuple(refusals(recipe, "full")), tuple(refusals(recipe, "sparse"))
    fresh = needs_fresh_process(SimpleNamespace(**JUDGED | recipe.settings))
    stages = recipe.settings.get("pipeline_model_parallel_size", 1)
    return {
        "full": full,
        "in place": (*full, *((fresh,) if fresh else ())),
        "sparse": sparse,
        "local recovery": tuple(refusals(recipe, "sparse", "local")) if stages > 1 else (NOT_ASKED,),
    }


def totals() -> dict[str, dict[str, tuple[int, int]]]:
    """By kind and column: how many are accepted, of how many."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    routed = [
        dataclasses.replace(
            recipe,
            kind=f"{recipe.kind}, `{FORCED}` false",
            settings={name: value for name, value in recipe.settings.items() if name != FORCED},
        )
        for recipe in all_recipes()
        if recipe.kind == "performance"
    ]
    for recipe in (*all_recipes(), *routed):
        row = found.setdefault(recipe.kind, dict.fromkeys(COLUMNS, (0, 0)))
        for column, reasons in verdicts(recipe).items():
            accepted, asked = row[column]
            row[column] = accepted + (not reasons), asked + (NOT_ASKED not in reasons)
    return found


def share(accepted: int, asked: int) -> str:
    """As a cell."""
    return f"{accepted} of {asked} ({100 * accepted / asked:.0f} %)"


def reasons() -> Iterator[str]:
    """Rows: why recipes are refused, and how many of each kind and column."""
    counts = Counter(
        (name, recipe.kind, column)
        for recipe in all_recipes()
        for column, found in verdicts(recipe).items()
        if column in COLUMNS[:3]
        for name in {short(reason) for reason in found if reason != NOT_ASKED}
    )
    most: dict[str, int] = {}
    for (name, *_), count in counts.items():
        most[name] = max(count, most.get(name, 0))
    for name in sorted(most, key=lambda name: (-most[name], name)):
        cells = (
            f"{counts[name, 'training', column]} / {counts[name, 'performance', column]}" for column in COLUMNS[:3]
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def short(reason: str) -> str:
    """Without what differs from recipe to recipe, and without what to use instead."""
    named = re.sub(r" does not go with --moe-ckpt-strategy \w+", "", reason).partition(": ")[0]
    return re.sub(r"^(--\S+) [\d.]+$", r"\1", re.sub(r" over \d+ ranks$", " over more than 8 ranks", named))


def by_model() -> Iterator[str]:
    """Rows: of each model the share of its recipes that is accepted."""
    for model in sorted({recipe.model for recipe in all_recipes()}, key=str.lower):
        of_model = [verdicts(recipe) for recipe in all_recipes() if recipe.model == model]
        cells = []
        for column in COLUMNS:
            asked = [found[column] for found in of_model if NOT_ASKED not in found[column]]
            cells.append(f"{sum(not found for found in asked)} of {len(asked)}" if asked else "")
        yield f"| {model} | " + " | ".join(cells) + " |"


def render() -> str:
    """The whole page."""
    head = "| " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS)
    sums = [
        f"| {kind} | " + " | ".join(share(*row[column]) for column in COLUMNS) + " |" for kind, row in totals().items()
    ]
    why = "| training / performance | full | in place | sparse |\n|---|---|---|---|"
    parts = [
        f"{HEADING}| {head}", *sums, BEFORE,
        "\n## Why recipes are refused\n\nA recipe with several reasons counts in each.\n",
        why, *reasons(), "\n## By model\n", f"| {head}", *by_model(),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def read() -> str:
    """The lines of `DATA`, from the wheel. Raises SystemExit where that is not there in this version."""
    try:
        wheel = importlib.metadata.distribution("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"megatron-bridge is not installed: pip install --no-deps megatron-bridge=={VERSION}")
    if wheel.version != VERSION:
        sys.exit(f"unsupported megatron-bridge {wheel.version} (expected {VERSION})")
    found = recipes(Path(str(wheel.locate_file("megatron/bridge"))))
    return "".join(json.dumps(dataclasses.asdict(recipe), separators=(",", ":")) + "\n" for recipe in found)


def main(argv: list[str]) -> None:
    """Print a line per recipe, and renew the page."""
    parser = argparse.ArgumentParser(description="Which MoE recipes of Megatron-Bridge are protected.")
    parser.add_argument("--read", action="store_true", help="read the recipes from Megatron-Bridge's wheel again")
    if parser.parse_args(argv).read:
        DATA.write_text(read(), encoding="utf-8")
    for recipe in all_recipes():
        for column, found in verdicts(recipe).items():
            print(f"{recipe.kind} {recipe.name} {column}: {'; '.join(found) or 'accepted'}")
    for kind, row in totals().items():
        print(f"{kind}: " + ", ".join(f"{column} {share(*row[column])}" for column in COLUMNS))
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
