"""What an iteration costs: the published iteration times, and how costs follow from shapes, layouts and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, PRECISIONS, OperatorKind, Topology, expert
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import (
    MEGATRON_UTILISATION,
    MOEVEMENT_UTILISATION,
    iteration_cost,
    network_busy_s,
    operator_flops,
)
from moe_ckpt.simulator.inputs import Cluster, GradientOverlap, IterationCost, TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import PRESETS, preset
from moe_ckpt.simulator.roofline import GroupSpread, Links
from reproduce import public_reports
from reproduce.jobs import azure_job, h100_job, scale_out_job

AZURE = cluster("azure-nc96ads-a100")
LINKS = Links(intra_bytes_per_s=1e11, inter_bytes_per_s=1e9, latency_s=1e-5)


def cost(job: TrainingJob, on: Cluster = AZURE) -> IterationCost:
    return iteration_cost(job, on, MOEVEMENT_UTILISATION)


def job(**degrees: int) -> TrainingJob:
    topology = Topology(degrees.pop("world_size", 16), **degrees)
    return TrainingJob(preset("Mixtral-8x7B"), topology, FP16_FP32, 64, 8, 2048)


@pytest.mark.parametrize(("model", "published_s"), [("MoE-LLaVa", 1.70), ("GPT-MoE", 2.10), ("DeepSeek-MoE", 2.90)])
def test_published_efficiencies_and_one_fitted_share_give_the_published_iteration_times(
    model: str, published_s: float
) -> None:
    assert cost(azure_job(model)).iteration_s == pytest.approx(published_s, rel=0.08)


def test_the_iteration_time_that_is_not_published_is_predicted_near_the_largest() -> None:
    assert 2.3 < cost(azure_job("QWen-MoE")).iteration_s < 3.2


def test_the_flops_of_a_token_are_six_for_each_active_parameter_and_those_of_attention() -> None:
    shape = preset("QWen-MoE")
    without_attention = sum(operator_flops(shape, 0).values())
    # The embedding is a look-up: 0.3 of the 2.7 G active parameters have no operations.
    assert without_attention / 6 == pytest.approx(2.7e9 - shape.vocab_size * shape.hidden_size, rel=0.03)
    scores = sum(operator_flops(shape, 2048).values()) - without_attention
    assert scores == pytest.approx(6 * 2048 * shape.hidden_size * shape.num_layers)


def test_an_output_layer_that_shares_its_weights_multiplies_all_the_same() -> None:
    shape = preset("GPT-MoE")
    tied, head = operator_flops(shape, 1), shape.operators[-1]
    assert head.kind is OperatorKind.HEAD
    assert tied[head] == 6 * shape.vocab_size * shape.hidden_size


def test_popularity_moves_the_work_between_experts_and_adds_none() -> None:
    shape = preset("Mixtral-8x7B")
    counts = {expert(0, 0): 3.0, expert(0, 1): 1.0}
    even, skewed = operator_flops(shape, 1), operator_flops(shape, 1, counts)
    assert skewed[expert(0, 0)] == pytest.approx(3 * skewed[expert(0, 1)])
    assert skewed[expert(0, 2)] == 0
    assert skewed[expert(1, 0)] == even[expert(1, 0)]
    assert sum(skewed.values()) == pytest.approx(sum(even.values()))
    assert operator_flops(shape, 1, {}) == even


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_has_a_cost(model: str) -> None:
    found = iteration_cost(TrainingJob(preset(model), Topology(8), FP16_FP32, 8, 1, 1024), AZURE, MEGATRON_UTILISATION)
    assert found.iteration_s > 0
    assert found.sync_s < found.iteration_s


def test_stages_of_equal_layers_wait_for_the_one_with_the_output_layer() -> None:
    uneven = iteration_cost(azure_job("DeepSeek-MoE"), AZURE, MEGATRON_UTILISATION).stage_s
    even = iteration_cost(azure_job("DeepSeek-MoE"), AZURE, replace(MEGATRON_UTILISATION, imbalance=0)).stage_s
    assert max(uneven) == uneven[-1] > 1.4 * max(even)
    assert max(even) == pytest.approx(min(even))
    assert sum(uneven) == pytest.approx(sum(even))


def test_a_job_without_data_parallel_experts_has_little_to_synchronise() -> None:
    assert cost(azure_job("DeepSeek-MoE")).sync_s < 0.01 < 100 * cost(azure_job("GPT-MoE")).sync_s


def test_a_faster_network_between_nodes_shortens_the_synchronisation_alone() -> None:
    faster = replace(AZURE, inter_node_bytes_per_s=2 * AZURE.inter_node_bytes_per_s)
    now, then = cost(azure_job("GPT-MoE")), cost(azure_job("GPT-MoE"), faster)
    assert then.sync_s == pytest.approx(now.sync_s / 2, rel=0.02)
    assert then.stage_s == now.stage_s


def test_experts_that_are_spread_over_nodes_exchange_tokens_over_the_slow_network() -> None:
    inside = cost(job(world_size=16, ep=8))
    across = cost(replace(job(world_size=16, ep=8), topology=Topology(16, ep=8, ranks_per_node=4)))
    assert max(across.stage_s) > 2 * max(inside.stage_s)


def test_experts_within_what_nvlink_joins_exchange_tokens_over_it_whatever_the_node() -> None:
    trays = cluster("gb200-nvl72")
    apart = replace(job(ep=8), topology=Topology(16, ep=8, ranks_per_node=trays.gpus_per_node))
    assert cost(apart, trays).iteration_s < cost(apart, replace(trays, nvlink_gpus=0)).iteration_s
    together = replace(apart, topology=Topology(16, ep=8, ranks_per_node=8))
    assert cost(apart, trays).iteration_s <= cost(together, replace(trays, nvlink_gpus=0)).iteration_s


def test_tensor_parallel_ranks_pay_for_their_sums() -> None:
    without, with_sums = cost(job(pp=2)), cost(job(pp=2, tp=4, etp=1))
    assert max(with_sums.stage_s) > 1.05 * max(without.stage_s)


def test_fp8_halves_matrix_products_and_not_what_waits_for_memory() -> None:
    h100 = cluster("h100-private")
    fp16, fp8 = (max(cost(h100_job(PRECISIONS[name]), h100).stage_s) for name in ("fp16-fp16", "fp8-fp32"))
    assert 0.6 < fp8 / fp16 < 0.95
    no_wait = replace(h100, gpu_memory_bytes_per_s=0.0, gemm_shares={})
    fp16, fp8 = (max(cost(h100_job(PRECISIONS[name]), no_wait).stage_s) for name in ("fp16-fp16", "fp8-fp32"))
    assert 0.5 < fp8 / fp16 < 0.75
    a100 = [max(cost(h100_job(PRECISIONS[name])).stage_s) for name in ("fp16-fp16", "fp8-fp32")]
    assert a100[0] == a100[1]


def test_slower_memory_makes_narrow_experts_slower_than_wide_ones() -> None:
    def slower(model: str) -> float:
        one = TrainingJob(preset(model), Topology(8, ep=8), FP16_FP32, 8, 1, 4096)
        half = replace(AZURE, gpu_memory_bytes_per_s=AZURE.gpu_memory_bytes_per_s / 2)
        return max(cost(one, half).stage_s) / max(cost(one).stage_s)

    assert slower("Qwen3-30B-A3B") > slower("Mixtral-8x7B") > 1.05


def test_an_exchange_that_overlaps_hides_the_measured_share_of_itself_and_no_more() -> None:
    apart = replace(job(world_size=16, ep=8), topology=Topology(16, ep=8, ranks_per_node=4))
    beside = replace(apart, exchange=TokenDispatch(overlaps=True))
    alone = replace(apart, topology=Topology(16, ep=1))
    reached = replace(MEGATRON_UTILISATION, hidden_share=0.25)
    times = [max(iteration_cost(one, AZURE, reached).stage_s) for one in (apart, beside, alone)]
    assert times[2] < times[1] < times[0]
    assert times[0] - times[1] <= 0.25 * (times[0] - times[2]) + 1e-9


def test_a_token_that_goes_to_a_node_once_takes_less_of_the_network_than_one_for_each_expert() -> None:
    shape = preset("DeepSeek-V3-671B")
    each = TrainingJob(shape, Topology(64, ep=64), FP16_FP32, 64, 1, 1024)
    once = replace(each, exchange=TokenDispatch(once_per_node=True))
    few = replace(each, exchange=TokenDispatch(once_per_node=True, nodes_per_token=4))
    times = [max(cost(one).stage_s) for one in (each, once, few)]
    assert times == sorted(times, reverse=True) and len(set(times)) == 3


def test_one_node_has_no_use_for_its_nics() -> None:
    alone = replace(azure_job("GPT-MoE"), topology=Topology(8, pp=2, ep=4))
    assert network_busy_s(alone, AZURE, MOEVEMENT_UTILISATION) == 0


def test_training_keeps_the_nics_busy_for_less_than_an_iteration() -> None:
    for model in ("MoE-LLaVa", "GPT-MoE", "QWen-MoE", "DeepSeek-MoE"):
        busy_s = network_busy_s(azure_job(model), AZURE, MOEVEMENT_UTILISATION)
        assert 0.5 < busy_s < cost(azure_job(model)).iteration_s
        assert cost(azure_job(model)).network_busy_s == busy_s


def test_more_microbatches_send_as_many_tokens_and_so_keep_the_nics_as_busy() -> None:
    once = azure_job("DeepSeek-MoE")
    twice = replace(once, microbatches=2 * once.microbatches)
    assert network_busy_s(twice, AZURE, MOEVEMENT_UTILISATION) == pytest.approx(
        network_busy_s(once, AZURE, MOEVEMENT_UTILISATION), rel=0.01
    )
    assert cost(twice).iteration_s < cost(once).iteration_s


def test_sixteen_thousand_ranks_have_a_cost() -> None:
    found = cost(scale_out_job("671B"))
    assert len(found.stage_s) == 64
    assert found.iteration_s > cost(scale_out_job("145B")).iteration_s


def test_a_ring_sends_one_share_per_rank_of_a_node_to_other_nodes() -> None:
    alone, eight = GroupSpread.of(4, 8, 8), GroupSpread.of(32, 1, 8)
    assert (alone.nodes, eight.nodes) == (4, 4)
    assert LINKS.ring_network_s(8e9, alone) == pytest.approx(6.0)
    assert LINKS.ring_network_s(8e9, eight) == pytest.approx(6.0 / 8)


def test_a_group_of_one_has_nothing_to_send() -> None:
    assert LINKS.ring_s(1e9, GroupSpread.of(1, 1, 8)) == 0
    assert LINKS.all_to_all_s(1e9, GroupSpread.of(1, 1, 8)) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gemm_share", 1.1),
        ("memory_share", 0.0),
        ("hidden_share", 2),
        ("nic_share", 0.0),
        ("imbalance", 2),
        ("latency_s", -1),
    ],
)
def test_shares_that_no_machine_reaches_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        replace(MOEVEMENT_UTILISATION, **{name: value})  # type: ignore[arg-type]


def test_gradients_and_parameters_hide_behind_a_microbatch_but_for_the_last_bucket() -> None:
    alone = job(world_size=64, pp=2)
    both = replace(alone, overlap=GradientOverlap(overlap_grad_reduce=True, overlap_param_gather=True))
    reduced = replace(alone, overlap=GradientOverlap(overlap_grad_reduce=True))
    waited = [cost(one).sync_s for one in (both, reduced, alone)]
    assert 0 < waited[0] < waited[1] < waited[2]
    slow = replace(AZURE, inter_node_bytes_per_s=AZURE.inter_node_bytes_per_s / 100)
    hidden_s = cost(alone, slow).sync_s - cost(both, slow).sync_s
    assert hidden_s == pytest.approx(max(cost(alone, slow).stage_s), rel=0.01)  # a backward and a forward pass
    fast = replace(AZURE, inter_node_bytes_per_s=1e15, intra_node_bytes_per_s=1e15)
    assert cost(both, fast).sync_s == pytest.approx(cost(alone, fast).sync_s / 16, rel=0.01)  # of 16 layers a stage


def test_llama_3_on_16384_gpus_takes_about_as_long_as_reported() -> None:
    found = {one.name: one.error for one in public_reports.REPORTS if one.name.startswith("Llama")}
    assert len(found) == 2
    assert all(abs(error) < 0.15 for error in found.values())
