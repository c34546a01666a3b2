"""What each checkpoint system does in MoEvement's jobs, by its own policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, Topology
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.constants import MOEVEMENT, THIS_PROJECT, Constants
from moe_ckpt.simulator.ettr import ettr as formula
from moe_ckpt.simulator.events import simulate
from moe_ckpt.simulator.faults import poisson
from moe_ckpt.simulator.inputs import Cluster, IterationCost, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.systems import (
    SYSTEMS,
    CheckFreq,
    CheckpointSystem,
    Gemini,
    Moc,
    Moetion,
    MoEvement,
    TorchDistSystem,
)
from moe_ckpt.simulator.systems.links import SystemSetting, since
from reproduce.paper_systems import PAPER_SYSTEMS, PaperMoc, PaperMoEvement

AZURE = Cluster("azure", 8, {2: 312e12}, 25e9, 300e9, 1.25e9, 5e9, 880_000_000_000, "MoEvement 5.1")
PIPELINES = {"MoE-LLaVa": (6, 2, 4, 1.70), "GPT-MoE": (3, 4, 8, 2.10), "DeepSeek-MoE": (12, 1, 8, 2.90)}
NODE = frozenset((3,))


def job_of(model: str) -> TrainingJob:
    stages, pipelines, experts, _ = PIPELINES[model]
    topology = Topology(96, pp=stages, ep=experts)
    return TrainingJob(preset(model), topology, FP16_FP32, 512, 512 // (32 * pipelines), 2048)


def cost_of(model: str, busy_s: float = 1.15) -> IterationCost:
    """Published seconds of an iteration, a tenth of it outside of the pipeline."""
    stages, pipelines, _, seconds = PIPELINES[model]
    microbatches = 512 // (32 * pipelines)
    stage_s = 0.9 * seconds / (microbatches + stages - 1)
    return IterationCost((stage_s,) * stages, microbatches, 1, 0.1 * seconds, 0.0, busy_s)


def behaviour(system: object, model: str = "DeepSeek-MoE", mtbf_s: float = 1800, **more: object) -> Behaviour:
    constants = more.pop("constants", MOEVEMENT)
    cost = more.pop("cost", cost_of(model))
    setting = SystemSetting(job_of(model), cost, AZURE, constants)  # type: ignore[arg-type]
    return system.behaviour(setting, mtbf_s, **more)  # type: ignore[attr-defined]


Systems = Mapping[str, CheckpointSystem]
GPT_MOCS = [behaviour(systems["moc"], "GPT-MoE", mtbf_s=900) for systems in (SYSTEMS, PAPER_SYSTEMS)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_registered_under_its_own_name(name: str) -> None:
    assert SYSTEMS[name].name == name
    assert behaviour(SYSTEMS[name]).name == name


@pytest.mark.parametrize(("model", "window"), [("MoE-LLaVa", 3), ("GPT-MoE", 3), ("DeepSeek-MoE", 6)])
def test_moevements_own_algorithm_finds_the_published_windows(model: str, window: int) -> None:
    assert behaviour(PaperMoEvement(), model).window == window


@pytest.mark.parametrize(("model", "interval"), [("MoE-LLaVa", 57), ("GPT-MoE", 78), ("DeepSeek-MoE", 124)])
def test_checkfreq_finds_the_published_intervals_within_a_tenth(model: str, interval: int) -> None:
    assert behaviour(SYSTEMS["checkfreq"], model).interval == pytest.approx(interval, rel=0.1)


def test_checkfreq_keeps_its_overhead_within_3_percent() -> None:
    found = behaviour(CheckFreq())
    shorter = behaviour(CheckFreq(interval=found.interval - 1))
    assert found.overhead_s <= 0.03 * found.iteration_s < shorter.overhead_s


@pytest.mark.parametrize("mtbf_s", [600, 1800, 7200])
def test_no_fixed_interval_beats_the_one_of_geminis_oracle(mtbf_s: int) -> None:
    def quality(found: Behaviour) -> float:
        stall_s = found.overhead_s * found.interval
        return formula(found.iteration_s, stall_s, found.interval, found.expected_recovery_s, mtbf_s)

    best = behaviour(Gemini(), mtbf_s=mtbf_s)
    others = [behaviour(Gemini(interval=best.interval + step), mtbf_s=mtbf_s) for step in (-5, -1, 1, 5, 100)]
    assert all(quality(best) >= quality(other) for other in others)


def test_geminis_interval_grows_with_the_time_between_failures() -> None:
    intervals = [behaviour(Gemini(), mtbf_s=mtbf_s).interval for mtbf_s in (600, 1200, 1800, 3600, 7200)]
    assert intervals == sorted(set(intervals))


@pytest.mark.parametrize("name", ["checkfreq", "gemini", "torch_dist", "torch_dist_async"])
def test_the_expected_recovery_of_dense_checkpoints_is_the_mean_over_an_interval(name: str) -> None:
    found = behaviour(SYSTEMS[name])
    first = 100 * found.interval
    strikes = [found.strike(first + step, nodes=NODE).total_s for step in range(found.interval)]
    cut_off_s = found.iteration_s / 2
    assert sum(strikes) / len(strikes) + cut_off_s == pytest.approx(found.expected_recovery_s)


def test_the_expected_recovery_of_sparse_checkpoints_is_the_mean_over_nodes_and_a_window() -> None:
    found = behaviour(SYSTEMS["moevement"])
    strikes = [
        found.strike(600 + step, nodes=frozenset((node,))).total_s for step in range(found.window) for node in range(12)
    ]
    assert sum(strikes) / len(strikes) + found.iteration_s / 2 == pytest.approx(found.expected_recovery_s)


@given(st.integers(0, 300), st.integers(1, 50), st.integers(0, 20))
@settings(max_examples=examples(60), deadline=None)
def test_a_fault_undoes_what_came_after_the_newest_state_that_could_be_used(
    iteration: int, interval: int, latency: int
) -> None:
    captured = [state for state in range(0, iteration + 1, interval) if state == 0 or state + latency <= iteration]
    assert since(iteration, interval, latency) == iteration - max(captured)


def test_a_sparse_recovery_replays_a_whole_window_and_what_followed_it() -> None:
    found = behaviour(SYSTEMS["moevement"])
    again = [found.strike(iteration, nodes=NODE).iterations_again for iteration in range(600, 612)]
    assert set(again) == set(range(found.window, 2 * found.window))


def test_a_fault_before_the_first_window_is_whole_trains_from_the_start_again() -> None:
    found = behaviour(SYSTEMS["moevement"])
    assert found.strike(found.window, nodes=NODE).iterations_again == found.window
    assert found.strike(2, nodes=NODE).iterations_again == 2


def test_each_technique_of_moevement_shortens_recovery() -> None:
    popularity = [1.0 + index for index in range(64)]
    plain = PaperMoEvement(skips_weight_gradients=False, reorder=False, local=False)
    steps = [
        plain,
        replace(plain, skips_weight_gradients=True),
        replace(plain, skips_weight_gradients=True, reorder=True),
        PaperMoEvement(),
    ]
    seconds = [behaviour(step, popularity=popularity).expected_recovery_s for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4


def test_popular_experts_that_are_anchored_last_make_replay_cheaper_the_more_popular_they_are() -> None:
    even = behaviour(MoEvement())
    skewed = behaviour(MoEvement(), popularity=[1.0, 100.0] * 32)
    assert skewed.expected_recovery_s < even.expected_recovery_s


def test_stages_that_fail_side_by_side_replay_together_and_others_apart() -> None:
    found = behaviour(SYSTEMS["moevement"])  # 12 stages on 12 nodes
    alone = {node: found.strike(600, nodes=frozenset((node,))).replay_s for node in (3, 4, 9)}
    assert found.strike(600, nodes=frozenset((3, 4))).replay_s > max(alone[3], alone[4])
    assert found.strike(600, nodes=frozenset((3, 9))).replay_s == max(alone[3], alone[9])


def test_a_local_recovery_is_disturbed_by_neighbours_only() -> None:
    found = behaviour(SYSTEMS["moevement"])
    assert found.restarts(frozenset((3,)), frozenset((4,)))
    assert not found.restarts(frozenset((3,)), frozenset((5,)))
    assert behaviour(MoEvement(local=False)).restarts(frozenset((3,)), frozenset((5,)))


@pytest.mark.parametrize("name", ["gemini", "moevement", "moc", "moetion"])
def test_as_many_nodes_as_there_are_replicas_cost_no_copy(name: str) -> None:
    found = behaviour(SYSTEMS[name])
    assert not found.strike(20_000, nodes=frozenset((0, 1))).from_storage


@pytest.mark.parametrize("name", ["gemini", "moevement", "moc", "moetion"])
def test_the_loss_of_all_nodes_goes_back_to_the_state_in_storage(name: str) -> None:
    found = behaviour(SYSTEMS[name])
    every = int(MOEVEMENT.persist_every_s / found.iteration_s)
    recovery = found.strike(5 * every, nodes=frozenset(range(12)))
    assert recovery.from_storage
    assert recovery.iterations_again > 100 * found.interval or recovery.iterations_again > every // 2


def test_a_node_whose_memory_is_filled_again_counts_no_longer_as_lost() -> None:
    found = behaviour(SYSTEMS["gemini"])
    everyone = frozenset(range(12))
    assert found.strike(20_000, nodes=everyone).from_storage
    assert not found.strike(20_000, nodes=everyone, down=frozenset((5,))).from_storage


def test_windows_of_this_project_are_no_longer_than_those_that_count_operators() -> None:
    for model in PIPELINES:
        ours = behaviour(MoEvement(), model, constants=THIS_PROJECT)
        assert ours.window <= behaviour(MoEvement(), model).window


def test_a_forced_window_of_one_stalls_as_a_dense_checkpoint_without_compute_weights() -> None:
    forced = behaviour(MoEvement(window=1))
    full_bytes = 12 * job_of("DeepSeek-MoE").busiest_rank_parameters
    free_s = 2.9 - cost_of("DeepSeek-MoE").network_busy_s
    stall_s = full_bytes / (AZURE.inter_node_bytes_per_s * MOEVEMENT.network_share / 2) - free_s
    busy_s = 3 * full_bytes / AZURE.host_link_bytes_per_s
    assert forced.overhead_s == pytest.approx(stall_s + MOEVEMENT.contention * busy_s, rel=1e-3)


def test_more_replicas_take_longer_windows() -> None:
    windows = [behaviour(MoEvement(replicas=replicas)).window for replicas in (1, 2, 3)]
    assert windows == sorted(set(windows))


def test_copies_wait_for_trainings_own_traffic() -> None:
    idle, busy = (behaviour(Gemini(), cost=cost_of("DeepSeek-MoE", s)) for s in (0.0, 2.0))
    assert idle.overhead_s * idle.interval < busy.overhead_s * busy.interval


def test_published_moc_pays_nothing_for_k_while_its_budget_lasts_and_doubles_it_afterwards() -> None:
    found = behaviour(PAPER_SYSTEMS["moc"], mtbf_s=600)
    shares = [found.k_share]
    for fault in range(1, 8):
        found.strike(200 * fault, nodes=NODE)
        shares.append(found.k_share)
    assert shares == [1 / 8, 1 / 4, 1 / 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("systems", [SYSTEMS, PAPER_SYSTEMS])
def test_moc_keeps_an_eighth_of_the_experts_where_faults_are_rare(systems: Systems) -> None:
    found = behaviour(systems["moc"], mtbf_s=7200)
    for fault in range(1, 7):
        found.strike(2400 * fault, nodes=NODE)
    assert found.k_share == 1 / 8


@given(st.sampled_from(GPT_MOCS), st.lists(st.integers(0, 10_000), max_size=15))
@settings(max_examples=examples(20), deadline=None)
def test_k_never_falls_and_lost_tokens_never_shrink(moc: Behaviour, iterations: list[int]) -> None:
    found = moc.fresh()
    before = found.k_share, found.overhead_s, found.lost_tokens
    for iteration in sorted(iterations):
        recovery = found.strike(iteration, nodes=NODE)
        after = found.k_share, found.overhead_s, found.lost_tokens
        assert all(new >= old for new, old in zip(after, before, strict=True))
        assert after[2] - before[2] == pytest.approx(recovery.lost_tokens)
        before = after


@pytest.mark.parametrize("systems", [SYSTEMS, PAPER_SYSTEMS])
def test_a_second_recovery_to_the_same_checkpoint_loses_no_tokens(systems: Systems) -> None:
    found = behaviour(systems["moc"], mtbf_s=7200)
    assert found.strike(1000, nodes=NODE).lost_tokens > 0
    assert found.strike(1000, nodes=NODE).lost_tokens == 0


@pytest.mark.parametrize("kind", [Moc, PaperMoc])
def test_with_all_experts_in_each_checkpoint_moc_loses_nothing(kind: Callable[..., object]) -> None:
    found = behaviour(kind(k_share=1.0), mtbf_s=600)
    found.strike(1000, nodes=NODE)
    assert found.lost_tokens == 0


@pytest.mark.parametrize("systems", [SYSTEMS, PAPER_SYSTEMS])
def test_rotation_loses_the_same_on_average_whatever_is_popular(systems: Systems) -> None:
    job = job_of("DeepSeek-MoE")
    losses = []
    for popularity in (None, [1.0] * 63 + [200.0]):
        struck = []
        for iteration in range(1000, 1064):
            found = behaviour(systems["moc"], mtbf_s=7200, popularity=popularity)
            struck.append(found.strike(iteration, nodes=NODE).lost_tokens / job.tokens)
        losses.append(sum(struck) / len(struck))
    assert losses == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize("systems", [SYSTEMS, PAPER_SYSTEMS])
def test_a_fresh_behaviour_has_lost_nothing_and_the_old_one_keeps_what_it_lost(systems: Systems) -> None:
    found = behaviour(systems["moc"], mtbf_s=600)
    for fault in range(1, 10):
        found.strike(100 * fault, nodes=NODE)
    fresh = found.fresh()
    assert (fresh.k_share, fresh.lost_tokens) == (1 / 8, 0)
    assert found.k_share == 1


def test_moc_saves_all_experts_before_a_fault_could_use_up_its_budget() -> None:
    budget = MOEVEMENT.pec_lost_per_hour * 12
    found = behaviour(SYSTEMS["moc"], mtbf_s=600)
    lost = []
    for fault in range(1, 12):
        share, before = found.k_share, found.overhead_s
        found.strike(100 * fault, nodes=NODE)
        lost.append(found.lost_tokens / job_of("DeepSeek-MoE").tokens)
        assert (found.overhead_s > before) == (found.k_share > share)
    assert lost[0] == pytest.approx(3.5)
    assert lost[-1] <= budget < lost[-1] + 3.5
    assert found.k_share == 1
    assert lost[-1] == lost[-2]


def test_faults_in_the_same_state_are_worked_out_once() -> None:
    found = behaviour(Moc(), mtbf_s=600)
    runs = []
    for _ in range(2):
        run = found.fresh()
        runs.append([run.strike(97 * fault, nodes=NODE).lost_tokens for fault in range(1, 30)])
    assert runs[0] == runs[1]
    assert len(found._start.known) < 20  # type: ignore[attr-defined]


def test_moetion_saves_the_experts_that_the_links_have_time_for_and_stalls_for_none() -> None:
    found = behaviour(Moetion())
    assert 0 < found.k_share < 1
    whole_s = 3 * 14 * job_of("DeepSeek-MoE").busiest_rank_parameters / AZURE.host_link_bytes_per_s
    assert 0 < found.overhead_s < MOEVEMENT.contention * whole_s


def test_moetions_choice_among_equal_experts_loses_what_rotation_does() -> None:
    found = behaviour(Moetion())
    lost = found.strike(1000, nodes=NODE).lost_tokens / job_of("DeepSeek-MoE").tokens
    assert lost == pytest.approx((1 / found.k_share - 1) / 2, rel=0.05)


def test_a_fault_right_after_another_costs_moetion_no_more_than_what_was_trained_between() -> None:
    found = behaviour(Moetion())
    found.strike(1000, nodes=NODE)
    assert found.strike(1001, nodes=NODE).lost_tokens == job_of("DeepSeek-MoE").tokens


@pytest.mark.parametrize("name", ["moc", "moetion"])
def test_lossy_systems_refuse_a_model_without_experts(name: str) -> None:
    dense = replace(preset("GPT-MoE"), num_experts=0)
    job = TrainingJob(dense, Topology(96, pp=3), FP16_FP32, 512, 4, 2048)
    with pytest.raises(UsageError, match="has none"):
        SYSTEMS[name].behaviour(SystemSetting(job, cost_of("GPT-MoE"), AZURE, MOEVEMENT), 1800)


def test_synchronous_checkpoints_stall_for_the_whole_upload() -> None:
    sync, background = (
        behaviour(TorchDistSystem(interval=100)),
        behaviour(TorchDistSystem(asynchronous=True, interval=100)),
    )
    upload_s = 14 * preset("DeepSeek-MoE").total_parameters / AZURE.storage_bytes_per_s
    assert sync.overhead_s * 100 > upload_s > background.overhead_s * 100


IN_MEMORY = ("gemini", "moevement", "moc", "moetion")


@pytest.mark.parametrize("name", IN_MEMORY)
def test_states_that_go_to_storage_slow_training_as_other_checkpoints_do(name: str) -> None:
    often, seldom = (
        behaviour(SYSTEMS[name], constants=replace(THIS_PROJECT, persist_every_s=every_s)) for every_s in (900, 9e9)
    )
    written_s = 12 * preset("DeepSeek-MoE").total_parameters / AZURE.storage_bytes_per_s
    added = (often.overhead_s - seldom.overhead_s) / often.iteration_s
    assert added == pytest.approx(THIS_PROJECT.upload_slowdown * written_s / 900, rel=0.01)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_copies_of_this_project_have_no_compute_weights(name: str) -> None:
    slow = replace(THIS_PROJECT, contention=1.0, persist_slowdown=0.0)
    whole, own = (
        behaviour(SYSTEMS[name], constants=replace(slow, copies_weights=also), cost=cost_of("DeepSeek-MoE", 0.0))
        for also in (True, False)
    )
    assert own.expected_recovery_s <= whole.expected_recovery_s
    assert own.overhead_s <= whole.overhead_s
    changed = (own.expected_recovery_s, own.overhead_s) != (whole.expected_recovery_s, whole.overhead_s)
    assert changed == (name != "moevement")  # which never had them


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_lost_node_without_replicas_is_expected_to_cost_what_goes_back_to_storage(name: str) -> None:
    constants = replace(MOEVEMENT, replicas=0)
    found = behaviour(SYSTEMS[name], constants=constants)
    every = round(constants.persist_every_s / found.iteration_s)
    strikes = [found.fresh().strike(at, nodes=NODE).total_s for at in range(4 * every, 5 * every, 37)]
    assert found.expected_recovery_s == pytest.approx(sum(strikes) / len(strikes), rel=0.02)


def test_pec_costs_what_its_copies_take_and_not_what_mocs_did() -> None:
    found = [
        behaviour(Moc(k_share=1 / 8, lost_per_hour=1e9), constants=replace(THIS_PROJECT, contention=contention))
        for contention in (0.1, 0.2)
    ]
    one, other = (each.overhead_s for each in found)
    assert one < other < 2 * one
    assert one < MOEVEMENT.pec_slowdown * found[0].iteration_s


def test_without_checkpoints_everything_is_trained_again() -> None:
    found = behaviour(SYSTEMS["none"])
    assert found.overhead_s == 0
    assert found.strike(12_345, nodes=NODE).iterations_again == 12_345


@pytest.mark.parametrize("faults", [1, 6, 24])
def test_without_checkpoints_the_formula_has_the_longest_stretch_of_a_run_as_events_have_it(faults: int) -> None:
    # Nothing is ever kept, so of a run with many faults that is a small part: 0.16 of one with 24.
    mtbf_s, run_s = 3600.0, faults * 3600.0
    found = behaviour(SYSTEMS["none"], mtbf_s=mtbf_s, constants=replace(MOEVEMENT, planned_s=run_s))
    struck = [simulate(found, poisson(mtbf_s, run_s, 12, seed), run_s).ettr for seed in range(200)]
    assert closed_form(found, mtbf_s, run_s) == pytest.approx(fmean(struck), abs=0.04)


def test_constants_refuse_a_share_above_1() -> None:
    with pytest.raises(UsageError, match="pec_floor"):
        Constants("wrong", "", pec_floor=1.5)


def test_an_iteration_that_is_shorter_than_its_estimated_traffic_still_leaves_time_for_copies() -> None:
    cost = cost_of("DeepSeek-MoE")
    busy = replace(cost, network_busy_s=0.8 * cost.iteration_s)
    for scale, share in ((0.5, 0.9), (0.85, 0.9), (0.9, 0.8 / 0.9), (2.0, 0.4)):
        found = busy.lasting(scale * cost.iteration_s)
        assert found.network_busy_s == pytest.approx(share * found.iteration_s), scale
