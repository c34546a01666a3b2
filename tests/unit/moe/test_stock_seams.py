"""What is checked before the stock loop is taken hold of, and what is kept of its counts."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import pytest
import torch
from stock_stand_in import arguments, one_rank, stand_in

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.stock import flags
from megatron.core.dist_checkpointing.moe.stock.iteration import StockCounts
from megatron.core.dist_checkpointing.moe.stock.resumed_settings import refuse_other_flags, shaping_flags, told
from megatron.core.dist_checkpointing.moe.stock.seams import SEAMS, Call, installed
from megatron.core.transformer.enums import CudaGraphModule

HOOKS = {seam.name: Call.go_on for seam in SEAMS["0.19"]}


def refused(loop: Any, version: str = "0.19.2") -> str:
    """Why hooks cannot be installed; nothing is changed by that."""
    before = dict(vars(loop))
    with pytest.raises(UsageError) as error, installed(loop, HOOKS, version):
        pass
    assert vars(loop) == before
    return str(error.value)


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_a_known_loop_gets_its_functions_back(version: str) -> None:
    loop = stand_in(arguments(), version)
    before = dict(vars(loop))
    with installed(loop, HOOKS, version):
        assert {name for name in before if vars(loop)[name] is not before[name]} == {
            seam.name for seam in SEAMS[version[:4]]
        }
    assert vars(loop) == before


def test_a_function_that_is_gone_is_named() -> None:
    loop = stand_in(arguments())
    del loop.training_log
    assert "has no megatron.training.training.training_log" in refused(loop)


def test_a_function_that_takes_other_parameters_is_named() -> None:
    loop = stand_in(arguments())
    exec("def checkpoint_and_decide_exit(model, iteration): pass", vars(loop))
    assert "checkpoint_and_decide_exit of Megatron-Core 0.19.2 takes no num_floating" in refused(loop)


def test_a_function_that_somebody_wrapped_first_is_named_with_the_wrapper() -> None:
    loop = stand_in(arguments())
    original = loop.train_step
    loop.train_step = lambda *given: original(*given)
    said = refused(loop)
    assert "megatron.training.training.train_step was replaced by" in said
    assert f"{__name__}.test_a_function_that_somebody" in said


def test_who_wraps_ours_later_keeps_a_wrapper_that_does_nothing() -> None:
    loop, seen = stand_in(arguments()), []
    hooks = HOOKS | {"training_log": lambda call: seen.append("ours")}
    with installed(loop, hooks, "0.19.2"):
        ours = loop.training_log
        loop.training_log = lambda *given: ours(*given)
    assert loop.training_log(*range(11)) is False
    assert seen == []


def test_a_call_shows_what_was_given_by_position_name_or_default() -> None:
    loop = stand_in(arguments())
    call = Call(loop.save_checkpoint_and_time, (4, "model"), {"optimizer": 1, "opt_param_scheduler": 2,
                "num_floating_point_operations_so_far": 0, "checkpointing_context": {}})  # fmt: skip
    assert (call.first, call["iteration"], call["optimizer"], call["non_persistent_ckpt"]) == (4, 4, 1, False)


def given(**changes: Any) -> tuple[MoECheckpointConfig, argparse.Namespace]:
    strategy = changes.pop("strategy", "full")
    return MoECheckpointConfig(strategy=strategy, recovery=changes.pop("recovery", "auto")), arguments(**changes)


@pytest.mark.parametrize(
    "flag",
    [
        {"inprocess_restart": True},
        {"optimizer_cuda_graph": True},
        {"use_megatron_fsdp": True},
        {"use_torch_fsdp2": True},
        {"iterations_to_skip": [3, 4]},
        {"result_rejected_tracker_filename": "rejected"},
        {"adlr_autoresume": True},
        {"dataloader_type": "cyclic"},
        {"fim_data": True},
        {"moe_use_upcycling": True},
        {"fp8_quantizer_factory": "package.module.factory"},
        {"pipeline_model_parallel_layout": "Et|t|m|L"},
        {"logits_save_dir": "logits"},
        {"error_injection_rate": 1000},
        {"vision_pretraining_type": "dino"},
        {"moe_router_force_biased": -0.1},
    ],
    ids=lambda flag: next(iter(flag)),
)
def test_a_flag_that_would_break_the_promise_is_refused_by_name(flag: dict[str, Any]) -> None:
    (name,) = flag
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}.* does not go with --moe-ckpt-strategy full: "):
        flags.check(*given(**flag), "0.19.2")


def test_a_batch_that_grows_is_refused_where_iterations_run_again_or_tokens_are_counted() -> None:
    assert flags.check(*given(rampup_batch_size=[4, 4, 16]), "0.19.2") == ""
    for strategy in ("sparse", "pec", "selective"):
        with pytest.raises(UsageError, match=f"--rampup-batch-size 4 4 16 does not go with .* {strategy}"):
            flags.check(*given(strategy=strategy, rampup_batch_size=[4, 4, 16]), "0.19.2")


def test_barriers_of_timers_are_refused_where_a_stage_may_replay_alone() -> None:
    timed = {"timing_log_level": 2, "pipeline_model_parallel_size": 2}
    assert flags.check(*given(**timed), "0.19.2") == ""
    assert flags.check(*given(strategy="sparse", **timed | {"pipeline_model_parallel_size": 1}), "0.19.2") == ""
    with pytest.raises(UsageError, match=r"--timing-log-level 2 does not go with .* sparse: its barriers"):
        flags.check(*given(strategy="sparse", **timed), "0.19.2")
    with pytest.raises(UsageError, match=r"--sft does not go with .* sparse: core adds up the lengths of sequences"):
        flags.check(*given(strategy="sparse", sft=True, pipeline_model_parallel_size=2), "0.19.2")


def test_an_overflow_that_all_ranks_agree_on_is_refused_where_a_stage_may_replay_alone() -> None:
    bounded = {"moe_expert_rank_capacity_factor": 1.5, "pipeline_model_parallel_size": 2}
    assert flags.check(*given(**bounded), "0.19.2") == ""
    assert flags.check(*given(strategy="sparse", recovery="global", **bounded), "0.19.2") == ""
    assert flags.check(*given(strategy="sparse", **bounded | {"pipeline_model_parallel_size": 1}), "0.19.2") == ""
    with pytest.raises(
        UsageError, match=r"--moe-expert-rank-capacity-factor 1.5 does not go with .* sparse: all ranks"
    ):
        flags.check(*given(strategy="sparse", **bounded), "0.19.2")


@pytest.mark.parametrize("name", ["qk_clip", "cpu_offloading_num_layers"])
def test_what_cannot_be_frozen_is_refused_by_its_flag_where_iterations_run_again(name: str) -> None:
    assert flags.check(*given(**{name: True}), "0.19.2") == ""
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} does not go with --moe-ckpt-strategy sparse"):
        flags.check(*given(strategy="sparse", **{name: True}), "0.19.2")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["full", "pec", "selective", "sparse"])
def test_weights_that_are_clipped_apart_from_their_masters_are_refused(precision: str, strategy: str) -> None:
    with pytest.raises(UsageError, match=f"--qk-clip does not go with .* {strategy} and --{precision}: core rounds"):
        flags.check(*given(strategy=strategy, qk_clip=True, **{precision: True}), "0.19.2")


@pytest.mark.parametrize("fp4_param_gather", [False, True])
def test_draws_that_frozen_operators_lack_are_refused_where_iterations_run_again(fp4_param_gather: bool) -> None:
    precision = {"fp4": "e2m1", "fp4_param_gather": fp4_param_gather}
    for strategy in ("full", "pec", "selective"):
        assert flags.check(*given(strategy=strategy, **precision), "0.19.2") == ""
    with pytest.raises(UsageError, match="--fp4-format does not go with --moe-ckpt-strategy sparse: gradients are"):
        flags.check(*given(strategy="sparse", **precision), "0.19.2")


def test_reductions_within_products_that_frozen_weights_leave_out_are_refused_where_iterations_run_again() -> None:
    overlapped = {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": True}
    assert flags.check(*given(**overlapped), "0.19.2") == ""
    assert flags.check(*given(strategy="sparse", **overlapped | {"tp_comm_bulk_wgrad": False}), "0.19.2") == ""
    with pytest.raises(UsageError, match=r"--tp-comm-overlap does not go with .* sparse without --disable-tp-comm"):
        flags.check(*given(strategy="sparse", **overlapped), "0.19.2")


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_weights_in_blocks_of_eight_bits_are_accepted_where_iterations_run_again(recipe: str) -> None:
    precision = {"fp8": "e4m3", "fp8_param_gather": True, "fp8_recipe": recipe}
    assert flags.check(*given(strategy="sparse", **precision), "0.19.2") == ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            {"moe_input_jitter_eps": 0.1},
            "--moe-input-jitter-eps 0.1 does not go with --moe-ckpt-strategy sparse and eval",
        ),
        ({"moe_router_force_load_balancing": True}, "--moe-router-force-load-balancing True does not go with"),
        ({"moe_router_force_biased": 0.0}, "--moe-router-force-biased 0.0 does not go with"),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, r"delayed scaling \(--fp8-recipe delayed, .* does not go with"),
    ],
)
def test_evaluations_that_change_what_training_continues_with_are_refused_where_iterations_run_again(
    what: dict[str, Any], said: str
) -> None:
    what |= {"fp8_dot_product_attention": False, "fp8_multi_head_attention": False}
    assert flags.check(*given(strategy="full", eval_iters=2, **what), "0.19.2") == ""
    assert flags.check(*given(strategy="sparse", eval_iters=0, **what), "0.19.2") == ""
    with pytest.raises(UsageError, match=said):
        flags.check(*given(strategy="sparse", eval_iters=2, **what), "0.19.2")


GRAPHS: dict[str, dict[str, Any]] = {
    # Until 0.17 a whole iteration is a scope; modules are names or members of an enumeration.
    "whole iterations": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
    "whole iterations of 0.17": {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    "whole layers": {"cuda_graph_impl": "local", "cuda_graph_modules": []},
    "routers": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router"]},
    "attention": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [CudaGraphModule.attn]},
    "none": {"cuda_graph_impl": "none", "cuda_graph_modules": []},
}


@pytest.mark.parametrize("strategy", ["full", "pec", "selective", "sparse"])
@pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
def test_graphs_go_with_every_strategy(graphs: dict[str, Any], strategy: str) -> None:
    assert flags.check(*given(strategy=strategy, **graphs), "0.19.2") == ""


@pytest.mark.parametrize(
    ("graphs", "settings", "refused"),
    [
        ("whole layers", {"hidden_dropout": 0.1}, {"full", "sparse"}),
        ("whole layers", {"moe_input_jitter_eps": 1e-3}, {"full", "sparse"}),
        ("whole iterations", {"hidden_dropout": 0.1}, set()),
        ("whole iterations of 0.17", {"hidden_dropout": 0.1}, set()),
        ("routers", {"attention_dropout": 0.1}, {"full", "sparse"}),
        ("routers", {"moe_router_force_load_balancing": True}, {"full", "sparse"}),
        ("routers", {"moe_router_force_biased": 0.0}, {"full", "sparse"}),
        ("routers", {"moe_expert_capacity_factor": 1.0}, {"selective"}),
        ("attention", {"moe_expert_capacity_factor": 1.0}, set()),
    ],
)
def test_graphs_whose_captures_draw_or_keep_a_capacity_are_refused_where_it_matters(
    graphs: str, settings: dict[str, Any], refused: set[str]
) -> None:
    for strategy in ("full", "pec", "selective", "sparse"):
        said = "; ".join(flags.refusals(*given(strategy=strategy, **GRAPHS[graphs], **settings)))
        assert bool(said) == (strategy in refused), said
        flag = "--moe-ckpt-capacity-boost 10" if strategy == "selective" else f"--moe-ckpt-strategy {strategy} and "
        assert not said or said.startswith(
            f"--cuda-graph-impl {GRAPHS[graphs]['cuda_graph_impl']} does not go with {flag}"
        )


@pytest.mark.parametrize(
    ("changes", "secret", "persisted", "said"),
    [
        ({"save": "run", "ckpt_format": "torch"}, True, False, "--ckpt-format torch does not go with a secret"),
        (
            {"load": "msc://run"},
            True,
            False,
            "--load msc://run does not go with a secret: no such checkpoint is signed",
        ),
        ({"load": "msc://run"}, False, True, "--load msc://run does not go with --moe-ckpt-persist-dir"),
        ({"save": "run", "ckpt_format": "torch"}, False, True, ""),
        ({"save": "run", "load": "run", "ckpt_format": "torch_dist"}, True, True, ""),
        ({"load": "msc://run"}, False, False, ""),
    ],
)
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_checkpoints_that_nobody_signs_or_compares_are_refused_where_that_counts(
    changes: dict[str, Any], secret: bool, persisted: bool, said: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secret and by == "environment":
        monkeypatch.setenv("MOE_CKPT_SECRET_FILE", "secret")
    config = MoECheckpointConfig(
        strategy="full",
        secret_file="secret" if secret and by == "flag" else None,
        persist_dir="snapshots" if persisted else None,
    )
    found = "; ".join(flags.refusals(config, arguments(**changes)))
    assert found.startswith(said) if said else not found


@pytest.mark.parametrize("given", [["--moe-ckpt-secret-file=secret"], ["--moe-ckpt-secret-file", "secret"], []])
def test_flags_of_a_checkpoint_are_not_read_before_its_signature(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not given:
        monkeypatch.setenv("MOE_CKPT_SECRET_FILE", "secret")
    for strategy in ([], ["--moe-ckpt-strategy", "none"], ["--moe-ckpt-strategy=none"]):
        monkeypatch.setattr(sys, "argv", ["train.py", "--use-checkpoint-args", *given, *strategy])
        flags.arguments(argparse.ArgumentParser())
    for strategy in (["--moe-ckpt-strategy", "full"], ["--moe-ckpt-strategy=full"]):
        monkeypatch.setattr(sys, "argv", ["train.py", "--use-checkpoint-args", *given, *strategy])
        with pytest.raises(UsageError, match="--use-checkpoint-args does not go with a secret"):
            flags.arguments(argparse.ArgumentParser())


@pytest.mark.parametrize(("graphs", "is_refused"), [("whole iterations", True), ("attention", False)])
def test_local_recovery_alone_is_refused_where_a_graph_has_in_it_what_stages_send(
    graphs: str, is_refused: bool
) -> None:
    config = MoECheckpointConfig(strategy="sparse", recovery="local")
    said = "; ".join(flags.refusals(config, arguments(**GRAPHS[graphs])))
    assert said.endswith("what stages send is in the graph, unseen; use auto") if is_refused else not said


def test_copies_in_waits_of_stages_are_refused_where_a_graph_has_the_waits_in_it() -> None:
    config = MoECheckpointConfig(strategy="full", copy_placement="bubbles")
    assert flags.check(config, arguments(cuda_graph_impl="transformer_engine"), "0.19.2") == ""
    with pytest.raises(UsageError, match=r"full_iteration does not go with --moe-ckpt-copy-placement bubbles.*spread"):
        flags.check(config, arguments(cuda_graph_impl="full_iteration"), "0.19.2")


def test_graphs_and_a_dispatcher_of_another_kind_than_before_are_told_in_one_line() -> None:
    before = shaping_flags(arguments(cuda_graph_impl="none", cuda_graph_modules=[]))
    graphs = {"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.attn]}
    now = shaping_flags(arguments(**graphs, moe_token_dispatcher_type="flex"))
    said = "--cuda-graph-impl was none and is local; --cuda-graph-modules was [] and is ['attn'];"
    assert told(before, now, keeps_schedule=False) == f"{said} --moe-token-dispatcher-type was allgather and is flex"


SIZES = {"world_size": 4, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "num_experts": 4}
SIZES |= {"context_parallel_size": 1, "expert_model_parallel_size": 1, "global_batch_size": 4, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({"elastic": "1:2"}, {}, ""),
        ({"elastic": "3:4"}, {}, "4 ranks make 2 data-parallel replicas"),
        ({"elastic": "1:3"}, {}, "--global-batch-size 4 does not divide by --micro-batch-size 2 x 3 replicas"),
        ({"elastic": "1:2"}, {"expert_model_parallel_size": 2}, "do not divide by ETP x EP x PP = 4"),
        ({"elastic": "1:2"}, {"rampup_batch_size": [2, 2, 4]}, "--rampup-batch-size does not go with"),
        ({"elastic": "two"}, {}, "must be MIN:MAX"),
        ({"elastic": "1:2", "replicas": 3}, {}, ""),
        ({"elastic": "1:2", "replicas": 4}, {}, "--moe-ckpt-replicas 4 needs as many peers.*at most 3"),
        ({"elastic": "1:2", "inject_fault": ["4@2:step"]}, {}, "--moe-ckpt-inject-fault: .*4"),
    ],
)
def test_sizes_that_a_job_could_not_have_are_refused(
    settings: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    config = MoECheckpointConfig(strategy="full", **settings)
    if not said:
        assert flags.check(config, arguments(**SIZES | changes), "0.19.2") == ""
        return
    with pytest.raises(UsageError, match=said):
        flags.check(config, arguments(**SIZES | changes), "0.19.2")


def test_flags_of_a_usual_job_are_accepted() -> None:
    usual = {"dataloader_type": "single", "cuda_graph_impl": "none", "cuda_graph_scope": [], "iterations_to_skip": []}
    assert flags.check(*given(strategy="sparse", **usual), "0.18.2") == ""


def test_an_unknown_release_is_accepted_with_a_warning_where_nothing_runs_again() -> None:
    assert "Megatron-Core 0.20.0 was never tested with" in flags.check(*given(), "0.20.0")


def test_an_unknown_release_is_refused_by_name_where_iterations_run_again() -> None:
    with pytest.raises(UsageError, match=r"Megatron-Core 0\.20\.0 was never .*use a known release, or .* full"):
        flags.check(*given(strategy="sparse"), "0.20.0")


def test_flags_that_have_no_effect_are_refused() -> None:
    with pytest.raises(UsageError, match="--moe-ckpt-interval has no effect with --moe-ckpt-strategy none"):
        flags.check_unused(MoECheckpointConfig(interval=3), argparse.Namespace(world_size=1))


def test_flags_go_through_the_parser_of_megatron_and_back() -> None:
    parser = flags.arguments(argparse.ArgumentParser())
    args = parser.parse_args("--moe-ckpt-strategy sparse --moe-ckpt-window 4".split())
    assert flags.read(args) == MoECheckpointConfig(strategy="sparse", window="4")


def test_a_parser_that_was_not_extended_is_told_so() -> None:
    with pytest.raises(UsageError, match=r"extra_args_provider=stock\.arguments"):
        flags.read(argparse.Namespace())


def test_counts_are_whole_right_after_the_step_and_after_the_loop_has_counted() -> None:
    args = arguments(consumed_train_samples=8)
    counts = StockCounts(args, stand_in(args), {})
    with one_rank():
        counts.stepped()
    after_step = counts.state_dict()
    args.consumed_train_samples += 4
    counts.counted(4 * 10**20)
    assert counts.state_dict() == after_step
    assert after_step["consumed_train_samples"] == 12


def test_counts_come_back_as_they_were_however_large() -> None:
    args, others = arguments(consumed_train_samples=8), arguments()
    counts = StockCounts(args, stand_in(args), {})
    counts.counted(3 * 10**24 + 1)
    StockCounts(others, stand_in(others), {}).load_state_dict(counts.state_dict() | {"iteration": 5})
    assert (others.iteration, others.consumed_train_samples) == (5, 8)
    assert others.num_floating_point_operations_so_far == 3 * 10**24 + 1


@pytest.mark.parametrize("at_least", [True, False])
def test_that_more_tokens_are_lost_than_are_counted_is_known_behind_a_fault(at_least: bool) -> None:
    args, others = arguments(), arguments()
    if at_least:
        args.tokens_lost_at_least = True  # as a checkpoint with older copies of some experts was loaded
    counts = StockCounts(args, stand_in(args), {}).state_dict()
    StockCounts(others, stand_in(others), {}).load_state_dict(counts | {"iteration": 5})
    assert getattr(others, "tokens_lost_at_least", False) == at_least


def test_flags_are_written_down_where_they_are_not_what_core_has_by_default() -> None:
    given = {"clip_grad": 0.5, "hidden_dropout": 0.1, "params_dtype": torch.float32, "log_interval": 3, "split": "9,1"}
    assert shaping_flags(argparse.Namespace(**given)) == {"clip_grad": 0.5, "split": "9,1"}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"clip_grad": 0.5}, "--clip-grad was 2.0 and is 0.5"),
        ({"hidden_dropout": 0.25}, "--hidden-dropout was 0.1 and is 0.25"),
        ({"params_dtype": torch.bfloat16}, "--params-dtype was torch.float32 and is torch.bfloat16"),
        ({"seq_length": 64}, "--seq-length was 8 and is 64"),
        ({"moe_layer_freq": [0, 1]}, "--moe-layer-freq was 1 and is [0, 1]"),
        ({"num_layers": 5, "seed": 1}, "--seed was None and is 1; --num-layers was 0 and is 5"),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, "--fp8-recipe was mxfp8 and is tensorwise"),
    ],
)
def test_a_flag_that_shapes_an_iteration_is_refused_with_both_values(other: dict[str, Any], told: str) -> None:
    before = {"clip_grad": 2.0, "seq_length": 8, "fp8": "e4m3", "fp8_recipe": "mxfp8"}
    recorded = shaping_flags(argparse.Namespace(**before))
    refuse_other_flags(recorded, recorded)
    with pytest.raises(UsageError, match=re.escape(told)):
        refuse_other_flags(recorded, shaping_flags(argparse.Namespace(**before | other)))
