"""The driver loads what stock Megatron-LM saved, and saves what stock Megatron-LM can load."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import NoneType

import pytest
from runs import Layout, Start, Train, differences, digest, exact, metrics
from stock_hooks import loading_as_stock, saved_right_after_loading, saving_as_stock
from worker_hooks import poisoned_before_load

from moe_ckpt.dense.integrity import check

pytestmark = pytest.mark.own_loop  # what it saves and loads

full = pytest.mark.full
SAVED, LAST = 3, 6
EXPERTS = Layout(tp=1, pp=2, ep=2, ranks=4)
NO_EXPERT_PARALLELISM = Layout(tp=1, pp=2, ep=1, ranks=4)
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
TRACKER = "latest_checkpointed_iteration.txt"

_OPTIONAL = (int, NoneType)
# Stock compares these with its own when it resumes, or takes them over with --use-checkpoint-args.
READ_BY_STOCK: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        "world_size data_parallel_size tensor_model_parallel_size pipeline_model_parallel_size "
        "expert_model_parallel_size consumed_train_samples skipped_train_samples consumed_valid_samples "
        "global_batch_size num_layers hidden_size num_attention_heads seq_length max_position_embeddings "
        "make_vocab_size_divisible_by padded_vocab_size rotary_base num_experts moe_router_topk".split(),
        (int,),
    ),
    # None: stock derives them from the others, as the driver does.
    **dict.fromkeys(
        "ffn_hidden_size kv_channels num_query_groups moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage".split(),
        _OPTIONAL,
    ),
    **dict.fromkeys(
        "no_save_optim no_save_rng use_distributed_optimizer ckpt_fully_parallel_save data_parallel_random_init "
        "add_position_embedding use_rotary_position_embeddings rotary_interleaved group_query_attention "
        "add_bias_linear add_qkv_bias squared_relu swiglu untie_embeddings_and_output_weights apply_layernorm_1p "
        "apply_query_key_layer_scaling moe_router_pre_softmax moe_grouped_gemm moe_router_enable_expert_bias".split(),
        (bool,),
    ),
    **dict.fromkeys(
        "position_embedding_type normalization ckpt_format tokenizer_type moe_token_dispatcher_type "
        "moe_router_score_function".split(),
        (str,),
    ),
    **dict.fromkeys("rotary_percent attention_dropout hidden_dropout".split(), (float,)),
    "moe_router_topk_scaling_factor": (float, NoneType),
    "moe_layer_freq": (int, list),
    "tokenizer_model": (str, NoneType),
}


def _name(value: Layout | list[str]) -> str:
    return str(value) if isinstance(value, Layout) else " ".join(value)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [pytest.param(EXPERTS, [], marks=full), (NO_EXPERT_PARALLELISM, ["--bf16", RESHARDABLE])],
    ids=_name,
)
def test_training_goes_on_bit_for_bit_from_what_stock_saved(
    layout: Layout, flags: list[str], train: Train, tmp_path: Path
) -> None:
    own, stock, resumed = tmp_path / "own", tmp_path / "stock", tmp_path / "resumed"
    train(layout, *flags, "--save", own, "--metrics-jsonl", own / "reports")
    train(layout, *flags, "--save", stock, "--exit-interval", SAVED, hooks=[saving_as_stock])
    outcome = train(
        *(layout, *flags, "--load", stock, "--save", resumed, "--metrics-jsonl", resumed / "reports"),
        hooks=[poisoned_before_load],
    )
    assert outcome.warnings == []
    assert list(exact(resumed / "reports")) == [4, 5, 6]
    assert exact(resumed / "reports") == exact(own / "reports", after=SAVED)
    assert differences(digest(own, LAST), digest(resumed, LAST)) == []


def test_what_releases_on_newer_cores_save_is_loaded_with_the_random_states_that_it_has(
    train: Train, tmp_path: Path
) -> None:
    own, stock, resumed = tmp_path / "own", tmp_path / "stock", tmp_path / "resumed"
    train(EXPERTS, "--save", own, "--metrics-jsonl", own / "reports")
    train(EXPERTS, "--save", stock, "--exit-interval", SAVED, hooks=[partial(saving_as_stock, newer=True)])
    assert not (stock / f"iter_{SAVED:07d}" / "common.pt").exists()
    outcome = train(
        *(EXPERTS, "--load", stock, "--save", resumed, "--metrics-jsonl", resumed / "reports"),
        hooks=[poisoned_before_load],
    )
    (warning,) = outcome.warnings
    assert "random states of one data-parallel rank" in warning
    assert exact(resumed / "reports") == exact(own / "reports", after=SAVED)
    # Only the generators of the experts, which draw nothing in this model, differ between data-parallel ranks.
    assert differences(digest(own, LAST), digest(resumed, LAST)) == ["rng"]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param(EXPERTS, [], marks=full),
        (EXPERTS, [RESHARDABLE, "--bf16", "--data-parallel-random-init"]),
        pytest.param(NO_EXPERT_PARALLELISM, ["--data-parallel-random-init"], marks=full),
        (Layout(tp=1, pp=2, ep=2, vpp=2), ["--async-save"]),
    ],
    ids=_name,
)
def test_stock_loads_what_the_driver_saved_without_a_missing_or_an_unexpected_key(
    layout: Layout, flags: list[str], train: Train, tmp_path: Path
) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    train(layout, *flags, "--save", saved, "--exit-interval", SAVED)
    assert check(saved / f"iter_{SAVED:07d}") == ()  # sums lie beside what stock reads
    hooks = [partial(loading_as_stock, READ_BY_STOCK), poisoned_before_load, saved_right_after_loading]
    train(layout, *flags, "--load", saved, "--save", loaded, hooks=hooks)
    assert differences(digest(saved, SAVED), digest(loaded, SAVED)) == []


@pytest.mark.full
def test_stock_loads_what_the_driver_saved_without_the_distributed_optimizer(train: Train, tmp_path: Path) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    train(EXPERTS, "--bf16", "--save", saved, "--exit-interval", SAVED, distributed=False)
    hooks = [partial(loading_as_stock, READ_BY_STOCK), poisoned_before_load, saved_right_after_loading]
    train(EXPERTS, "--bf16", "--load", saved, "--save", loaded, hooks=hooks, distributed=False)
    assert differences(digest(saved, SAVED), digest(loaded, SAVED)) == []


def test_random_states_drawn_apart_per_data_parallel_rank_are_restored_on_each(train: Train, tmp_path: Path) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    flags = (NO_EXPERT_PARALLELISM, "--data-parallel-random-init")
    train(*flags, "--save", saved, "--exit-interval", SAVED)
    train(*flags, "--load", saved, "--save", loaded, hooks=[poisoned_before_load, saved_right_after_loading])
    assert differences(digest(saved, SAVED), digest(loaded, SAVED)) == []


@pytest.fixture
def release(train: Train, tmp_path: Path) -> Path:
    """A --save directory that holds nothing but a release."""
    root = tmp_path / "released"
    train(EXPERTS, "--save", root, "--exit-interval", SAVED)
    (root / f"iter_{SAVED:07d}").rename(root / "release")
    (root / TRACKER).write_text("release\n")
    return root


def test_a_release_gives_its_weights_and_nothing_of_its_history(release: Path, train: Train, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    outcome = train(EXPERTS, "--load", release, "--save", loaded, hooks=[saved_right_after_loading])
    assert "loaded checkpoint of the release" in outcome.out[0]
    shutil.copytree(release / "release", release / f"iter_{SAVED:07d}")
    changed = differences(digest(release, SAVED), digest(loaded, 0))
    assert "model weights" not in changed
    assert {"exp_avg", "exp_avg_sq", "rng", "scheduler"} <= set(changed)


def test_training_that_starts_from_a_release_counts_from_one_and_takes_the_tracker_over(
    release: Path, train: Train
) -> None:
    reports = release / "reports"
    train(EXPERTS, "--load", release, "--save", release, "--exit-interval", 2, "--metrics-jsonl", reports)
    train(EXPERTS, "--load", release, "--save", release, "--exit-interval", 3, "--metrics-jsonl", reports)
    assert [report["iteration"] for report in metrics(reports)] == [1, 2, 3]
    assert (release / TRACKER).read_text() == "3"
    assert (release / "release").is_dir()


def test_a_torn_release_is_refused_by_name(release: Path, start: Start) -> None:
    (release / "release" / ".metadata").unlink()
    outcome = start(EXPERTS, "--load", release).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "the release: " in line


def test_an_iteration_in_the_legacy_format_is_refused_with_the_name_of_the_format(start: Start, tmp_path: Path) -> None:
    rank = tmp_path / "legacy" / f"iter_{SAVED:07d}" / "mp_rank_00"
    rank.mkdir(parents=True)
    (rank / "model_optim_rng.pt").write_bytes(b"pickled")
    (tmp_path / "legacy" / TRACKER).write_text(str(SAVED))
    outcome = start(EXPERTS, "--load", tmp_path / "legacy").wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "legacy format 'torch'" in line
    assert "torch_dist" in line
