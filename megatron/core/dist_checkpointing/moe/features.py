"""Which feature works in which training loop: the one table that flags are judged by and that docs are made from.

A cell that says `Works` names the test that fails where the feature is cut. Where there is none it is `Untested`, which
is accepted: nothing is known to stand in its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .config import MoECheckpointConfig


class Loop(Enum):
    """A training loop that is protected."""

    MEGATRON_LM = "Megatron-LM"
    BRIDGE = "Megatron-Bridge"
    API = "API"


@dataclass(frozen=True)
class Works:
    """test: the file and the function, as pytest names them."""

    test: str


@dataclass(frozen=True)
class Untested:
    """Accepted. note: what is known."""

    note: str = ""


@dataclass(frozen=True)
class Refused:
    """reason: what follows the flag in the sentence that refuses it, with what to use in its place."""

    reason: str


@dataclass(frozen=True)
class Absent:
    """The loop has no such flag. instead: what to use."""

    instead: str


type Cell = Works | Untested | Refused | Absent


@dataclass(frozen=True)
class Feature:
    """A row. cells: of `Loop`, in its order.

    setting: of `MoECheckpointConfig`, which asks for the feature with one of `values`; empty where other flags do.
    """

    name: str
    megatron_lm: Cell
    bridge: Cell
    api: Cell
    setting: str = ""
    values: tuple[Any, ...] = ()

    def cell(self, loop: Loop) -> Cell:
        """What is known of a loop."""
        return {Loop.MEGATRON_LM: self.megatron_lm, Loop.BRIDGE: self.bridge, Loop.API: self.api}[loop]

    def is_asked_for(self, config: MoECheckpointConfig) -> bool:
        """Whether these settings ask for it."""
        return bool(self.setting) and getattr(config, self.setting) in self.values


_STOCK, _BRIDGE = "tests/stock/test_stock_", "tests/process/test_bridge.py::"
_RECIPE = "tests/process/test_bridge_recipes.py::"
_RECIPE_KILLED = f"{_RECIPE}test_a_killed_recipe_that_predicts_further_tokens_ends_as_the_undisturbed_one"
_KILLED = f"{_STOCK}recovery.py::test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit"
_BRIDGE_KILLED = f"{_BRIDGE}test_after_a_kill_every_loss_and_every_count_is_that_of_the_unprotected_loop"
_OWN_KILLED = (
    "tests/process/test_own_loop.py::test_after_a_kill_every_loss_of_a_loop_of_ones_own_is_that_of_the_unprotected_loop"
)
_TREES = "tests/process/test_module_trees.py::test_a_killed_job_of_another_module_tree_continues_to_the_last_bit"
_PEC = "tests/process/test_pec.py::"
_RECOUNTED = f"{_PEC}test_the_tokens_that_each_recovery_reports_as_lost_are_those_of_an_independent_recount"
_PLANNED = "tests/process/test_planned_snapshots.py::test_the_planner_plans_each_snapshot_of_a_job_from_its_counts"
_RESHARDING = "tests/process/test_resharding_"
_NEEDS_SPARSE = Absent("it is of sparse, which is refused: use full or pec")
_LEFT_TO_IT = Absent("ordinary checkpoints are the loop's own")
_UNTESTED = Untested()

FEATURES: tuple[Feature, ...] = (
    Feature("`full`", Works(_KILLED), Works(_BRIDGE_KILLED), Works(_OWN_KILLED), "strategy", ("full",)),
    Feature(
        "`sparse`",
        Works(_KILLED),
        Refused(
            "runs iterations again after a fault, perhaps on some pipeline stages only: Megatron-Bridge has no hook"
            " between passes and step and makes its own communicator of stages, so that cannot be done in its loop;"
            " use full or pec"
        ),
        Works(_OWN_KILLED),
        "strategy",
        ("sparse",),
    ),
    Feature("`pec`", Works(_RECOUNTED), Works(_BRIDGE_KILLED), _UNTESTED, "strategy", ("pec",)),
    Feature("`selective`", Works(_RECOUNTED), _UNTESTED, _UNTESTED, "strategy", ("selective",)),
    Feature(
        "local recovery",
        Works(f"{_STOCK}recovery.py::test_only_the_struck_stage_replays"),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "ranks that stay, with standbys",
        Works(f"{_STOCK}in_place.py::test_survivors_keep_process_and_weights_where_they_are_and_every_bit_is_equal"),
        Works(f"{_RECIPE}test_the_survivor_of_a_kill_keeps_its_process_in_the_loop_of_bridge_and_every_bit_is_equal"),
        _UNTESTED,
    ),
    Feature(
        "replicas on other nodes",
        Works(
            "tests/process/test_transports.py::test_a_lost_node_is_replaced_from_replicas_that_went_over_process_groups"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-persist-dir`",
        Works(
            "tests/process/test_persist_agent.py::test_a_snapshot_that_was_cut_off_by_sigkill_is_what_training_comes_back_from_when_all_memory_is_lost"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-persist-agent-s`",
        Works(
            "tests/process/test_persist_agent.py::test_a_snapshot_that_was_cut_off_by_sigkill_is_what_training_comes_back_from_when_all_memory_is_lost"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-replicate gradients`",
        Works(
            "tests/process/test_following.py::test_a_lost_node_comes_back_to_the_bit_from_replicas_that_followed_gradients"
        ),
        _UNTESTED,
        _UNTESTED,
        "replicate",
        ("gradients",),
    ),
    Feature(
        "replicas of state that data-parallel ranks hold alike",
        Works(
            "tests/process/test_redundancy.py::test_a_lost_node_comes_back_from_replicas_that_peers_made_of_their_own_state"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-copy-placement bubbles`",
        Works(
            "tests/process/test_copy_placement.py::test_copies_and_sends_begin_in_waits_of_each_stage_and_bring_a_killed_job_back_to_the_bit"
        ),
        Refused(
            "needs a communicator of stages that tells when they wait, and Megatron-Bridge makes its own; use spread"
        ),
        Untested("give `manager.communicator` to the schedule"),
        "copy_placement",
        ("bubbles",),
    ),
    Feature(
        "`--moe-ckpt-shard`",
        Works(
            "tests/process/test_sharing.py::test_ranks_store_the_predicted_bytes_and_come_back_from_them_to_the_last_bit"
        ),
        _UNTESTED,
        _UNTESTED,
        "shard",
        ("equal", "adaptive"),
    ),
    Feature(
        "`--moe-ckpt-pec-scope`",
        Works(f"{_PEC}test_only_what_the_scope_leaves_out_comes_back_older_and_it_is_named"),
        _UNTESTED,
        _UNTESTED,
        "pec_scope",
        ("weights", "optimizer"),
    ),
    Feature(
        "`--moe-ckpt-pec-adaptive`",
        Works(f"{_PEC}test_adaptive_snapshots_have_the_experts_that_there_is_time_for_and_storage_as_many_as_it_takes"),
        _UNTESTED,
        _UNTESTED,
        "pec_adaptive",
        (True,),
    ),
    Feature(
        "`--moe-ckpt-plt-threshold` (Dynamic-K)",
        Works(f"{_PEC}test_a_threshold_raises_k_in_time_to_bound_what_all_faults_cost"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-interval-policy`",
        Works(
            "tests/process/test_interval_policy.py::test_storage_that_takes_many_iterations_for_a_write_is_asked_as_rarely"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature("`--moe-ckpt-ordering`", Works(_PLANNED), _NEEDS_SPARSE, _UNTESTED),
    Feature("new orders of experts, `--moe-ckpt-reorder-*`", Works(_PLANNED), _NEEDS_SPARSE, _UNTESTED),
    Feature(
        "another layout, from storage",
        Works(f"{_RESHARDING}snapshots.py::test_every_bit_comes_back_under_another_layout"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "another layout, from memory",
        Works(f"{_RESHARDING}memory.py::test_survivors_of_lost_nodes_bring_every_bit_back_under_another_layout"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "another layout, from a sparse window",
        Works(f"{_RESHARDING}snapshots.py::test_a_window_of_another_layout_is_run_again_there_and_comes_back_here"),
        _NEEDS_SPARSE,
        Refused("ends with UsageError, unless `resume` is given `run_again`"),
    ),
    Feature(
        "`--moe-ckpt-elastic`: fewer nodes",
        Works(
            f"{_STOCK}elastic.py::"
            "test_a_job_of_parts_of_states_shrinks_and_grows_as_jobs_that_were_started_with_these_sizes"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-elastic` with `sparse`, `pec` and `selective`",
        Works(
            f"{_STOCK}elastic.py::"
            "test_a_job_of_parts_of_states_shrinks_and_grows_as_jobs_that_were_started_with_these_sizes"
        ),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--moe-ckpt-elastic`: nodes that come back",
        Works(
            f"{_STOCK}elastic.py::"
            "test_a_job_of_parts_of_states_shrinks_and_grows_as_jobs_that_were_started_with_these_sizes"
        ),
        Untested("an iteration that had begun is trained again"),
        Untested("an iteration that had begun is trained again"),
    ),
    Feature(
        "low precision, rows 1 to 4",
        Works(f"{_STOCK}precision.py::test_a_killed_job_in_few_bits_ends_as_the_undisturbed_one_to_the_last_bit"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "low precision, row 5 (masters in fp8)",
        Works(f"{_STOCK}precision.py::test_a_killed_job_in_few_bits_ends_as_the_undisturbed_one_to_the_last_bit"),
        Absent("use masters in fp16"),
        _UNTESTED,
    ),
    Feature(
        "weights of MXFP8 and blockwise FP8 under `sparse`",
        Works("tests/process/test_mxfp8.py::test_frozen_operators_run_with_the_weights_that_they_had"),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "`pretrain_gpt_moe.py --freeze-experts`",
        Works(f"{_STOCK}frozen.py::test_frozen_experts_are_copied_once_and_come_back_to_the_bit"),
        Absent("freeze them in a hook of the model provider"),
        Absent("call `requires_grad_(False)` before the optimizer is built"),
    ),
    Feature(
        "`--save-experts`",
        Works(
            "tests/process/test_partial_saves.py::"
            "test_a_resumed_run_continues_as_if_the_stale_experts_had_been_put_in_by_hand"
        ),
        _LEFT_TO_IT,
        _LEFT_TO_IT,
    ),
    Feature(
        "`moe-ckpt convert --to dense` of sparse windows",
        Works(
            "tests/process/test_convert.py::"
            "test_a_converted_window_is_the_dense_checkpoint_of_its_last_iteration_and_training_continues_from_it"
        ),
        _NEEDS_SPARSE,
        Absent("a conversion starts the driver, which builds a GPT: save a checkpoint in the loop instead"),
    ),
    Feature(
        "`--export-hf-interval`",
        Absent("run `moe-ckpt convert --to hf` on a saved checkpoint"),
        Absent("run `export_ckpt` of its `AutoBridge` on a saved checkpoint"),
        Absent("run `moe-ckpt convert --to hf` on a checkpoint that was saved with Megatron-LM's `args`"),
    ),
    Feature(
        "checksums and signatures of ordinary checkpoints",
        Works(f"{_STOCK}dense.py::test_a_damaged_checkpoint_is_refused_by_file_name_and_the_one_before_is_loaded"),
        _LEFT_TO_IT,
        _LEFT_TO_IT,
    ),
    Feature(
        "hybrids with Mamba layers, and vision towers, over pipeline stages",
        Works(f"{_STOCK}hybrid.py::test_a_killed_job_of_a_hybrid_over_stages_ends_as_the_undisturbed_one"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "multi-token prediction",
        Works(f"{_STOCK}mtp.py::test_a_killed_job_that_predicts_further_tokens_ends_as_the_undisturbed_one"),
        Works(_RECIPE_KILLED),
        Works(_TREES),
    ),
    Feature(
        "Muon, also layer-wise",
        Works(f"{_STOCK}muon.py::test_a_killed_job_with_muon_ends_as_the_undisturbed_one_to_the_last_bit"),
        Works(f"{_RECIPE}test_a_killed_recipe_of_these_settings_ends_as_the_undisturbed_one"),
        _UNTESTED,
    ),
    Feature(
        "`sparse` with Muon",
        Works(f"{_STOCK}muon.py::test_a_replay_steps_active_matrices_alone_and_ends_as_the_undisturbed_job"),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "`sparse` with `--overlap-moe-expert-parallel-comm`, `--delay-wgrad-compute`",
        Works(
            "tests/process/test_overlapped_experts.py::"
            "test_a_replay_runs_the_schedule_of_training_with_operators_frozen"
        ),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "`sparse` with `--moe-expert-rank-capacity-factor`, `--moe-paged-stash`",
        Works(f"{_STOCK}overflow.py::test_a_replay_runs_the_same_passes_again_and_ends_as_the_undisturbed_job"),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "`sparse` with `--fine-grained-activation-offloading`",
        Works("tests/process/test_offloaded_activations.py::test_a_stage_that_replays_alone_offloads_alone"),
        _NEEDS_SPARSE,
        _UNTESTED,
    ),
    Feature(
        "`--num-distributed-optimizer-instances`",
        Works(f"{_STOCK}layouts.py::test_a_killed_job_of_this_layout_ends_as_the_undisturbed_one"),
        _UNTESTED,
        _UNTESTED,
    ),
    Feature(
        "`--optimizer-cpu-offload`",
        Works(f"{_STOCK}offloading.py::test_a_killed_job_whose_optimizer_is_on_the_host_ends_as_the_undisturbed_one"),
        Refused("its masters are rounded by Megatron-Bridge after each load; leave it out"),
        _UNTESTED,
    ),
    Feature(
        "CUDA graphs of whole iterations, of layers and of modules",
        Untested("all strategies, over a stand-in for a capture; by hand on one H100: docs/results/h100.md"),
        Untested("as in Megatron-LM's loop"),
        Untested("as in Megatron-LM's loop; `manager.forward_backward` goes around the graph"),
    ),
    Feature(
        "`pretrain_gpt_moe.py --moe-ckpt-log-expert-tokens`",
        Works(_RECOUNTED),
        Refused("needs --metrics-jsonl; leave it out"),
        Untested("`after_step` returns them"),
        "log_expert_tokens",
        (True,),
    ),
    Feature(
        "metrics, `pretrain_gpt_moe.py --metrics-*`",
        Works(f"{_STOCK}metrics.py::test_a_killed_job_tells_all_sinks_of_its_recovery"),
        Absent("Megatron-Bridge has its own"),
        Untested("`after_step` returns them"),
    ),
)


def refusals(loop: Loop, config: MoECheckpointConfig) -> Iterator[str]:
    """What of these settings a loop cannot do.

    Args:
        loop: The one that trains.
        config: The settings.

    Yields:
        A sentence for each feature, with its flag and value.
    """
    for feature in FEATURES:
        cell = feature.cell(loop)
        if isinstance(cell, Refused) and feature.is_asked_for(config):
            value = getattr(config, feature.setting)
            given = "" if value is True else f" {value}"
            yield f"--{MoECheckpointConfig.PREFIX}{feature.setting.replace('_', '-')}{given} {cell.reason}"
