"""Published recipes in the stock loop: their flags are accepted, and reduced variants of them recover exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_flags import judged
from recipes import DEEPSEEK_V3, MIXTRAL_8X22B, NEEDS_ENGINE, QWEN3_30B_A3B, RECIPES, WITHOUT_ENGINE, Recipe, Reduced
from recipes import changed as with_changes
from stock_jobs import FULL, KILLED, SPARSE

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.pretrain.errors import InvalidInput

EXAMPLES = Path(__file__).parents[2] / "examples"
STRATEGIES = pytest.mark.parametrize("protection", [FULL, SPARSE], ids=["full", "sparse"])
MTP = ("--mtp-num-layers", "1")
DEEPSEEK_V3_MTP = Reduced(DEEPSEEK_V3, (("--pipeline-model-parallel-layout", "Et|tttmL"), MTP))


def verdict(recipe: Recipe, *flags: str) -> str:
    """Whether they are accepted, or who refused them and why."""
    try:
        judged((*flags, "--device", "cpu"), recipe.ranks)
    except InvalidInput as error:
        return str(error)
    except UsageError as error:
        return f"refused: {error}"
    return "accepted"


@STRATEGIES
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_all_flags_of_a_published_recipe_are_accepted(recipe: Recipe, protection) -> None:
    with_sparse = ["--disable-tp-comm-bulk-wgrad"] if recipe is MIXTRAL_8X22B and protection is SPARSE else []
    assert verdict(recipe, *with_changes(recipe.flags, WITHOUT_ENGINE), *with_sparse, *protection) == "accepted"


def test_the_one_recipe_that_takes_another_flag_with_sparse_is_told_so() -> None:
    said = verdict(MIXTRAL_8X22B, *with_changes(MIXTRAL_8X22B.flags, WITHOUT_ENGINE), *SPARSE)
    assert said.startswith("refused: --tp-comm-overlap does not go with --moe-ckpt-strategy sparse without --disable-")


@pytest.mark.parametrize(("example", "ranks"), [("deepseek-v3", 1024), ("deepseek-v3-lite", 16)])
def test_flags_of_an_example_are_accepted(example: str, ranks: int) -> None:
    lines = (EXAMPLES / example / "model.flags").read_text().splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    given = "--data-path data --tokenizer-model tokenizer --save saved --load saved --moe-ckpt-persist-dir snapshots"
    recipe = Recipe(example, ranks, "")
    assert verdict(recipe, *with_changes(words, WITHOUT_ENGINE), *given.split()) == "accepted"


@pytest.mark.parametrize("flag", NEEDS_ENGINE)
def test_flags_are_left_out_only_where_megatron_refuses_them_without_transformer_engine(flag: str) -> None:
    changes = {name: value for name, value in WITHOUT_ENGINE.items() if name != flag}
    said = verdict(QWEN3_30B_A3B, *with_changes(QWEN3_30B_A3B.flags, changes), *FULL)
    assert said.startswith(f"invalid Megatron-LM arguments: {NEEDS_ENGINE[flag]}")


@STRATEGIES
@pytest.mark.parametrize(("layout", "answer"), [("Et|(tt|)*30mL", "accepted"), ("Et|(tt|)*29ttm|L", "refused: ")])
def test_multi_token_prediction_is_accepted_on_the_last_stage(layout: str, answer: str, protection) -> None:
    changes = {**WITHOUT_ENGINE, "--pipeline-model-parallel-layout": layout}
    flags = with_changes(DEEPSEEK_V3.flags, changes)
    said = verdict(DEEPSEEK_V3, *flags, *MTP, "--mtp-loss-scaling-factor", "0.1", *protection)
    assert said.startswith(answer)
    assert answer == "accepted" or "put m there" in said


@STRATEGIES
def test_communication_overlapped_across_microbatches_is_accepted(protection) -> None:
    flags = [*with_changes(DEEPSEEK_V3.flags, WITHOUT_ENGINE), "--overlap-moe-expert-parallel-comm"]
    assert verdict(DEEPSEEK_V3, *flags, *protection) == "accepted"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("recipe", "protection"),
    [
        pytest.param(DEEPSEEK_V3, SPARSE, id="deepseek-sparse"),
        pytest.param(DEEPSEEK_V3_MTP, SPARSE, id="deepseek-mtp-sparse", marks=pytest.mark.full),
        pytest.param(DEEPSEEK_V3_MTP, FULL, id="deepseek-mtp-full", marks=pytest.mark.full),
        pytest.param(QWEN3_30B_A3B, SPARSE, id="qwen-sparse", marks=pytest.mark.full),
        pytest.param(MIXTRAL_8X22B, FULL, id="mixtral-full", marks=pytest.mark.full),
        pytest.param(DEEPSEEK_V3, FULL, id="deepseek-full", marks=pytest.mark.full),
        pytest.param(QWEN3_30B_A3B, FULL, id="qwen-full", marks=pytest.mark.full),
        pytest.param(MIXTRAL_8X22B, SPARSE, id="mixtral-sparse", marks=pytest.mark.full),
    ],
)
def test_a_reduced_recipe_that_is_killed_ends_as_the_undisturbed_one(new_job, undisturbed, recipe, protection) -> None:
    reduced, fault = recipe if isinstance(recipe, Reduced) else Reduced(recipe), ("--moe-ckpt-inject-fault", "3@5:step")
    job = new_job(reduced)
    job.run(*protection, *fault, codes={KILLED, 1})
    job.run(*protection, *fault)
    assert job.records() == undisturbed(reduced)
    assert job.began_again() == []
    ran = job.ran(3)
    assert (len(set(ran)) < len(ran)) == (protection == SPARSE), "an iteration ran again just where it had to"
