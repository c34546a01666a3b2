"""Advice: every system is tried, what does not fit is refused, and exact systems win ties."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, Topology
from moe_ckpt.commands.advise import advise as advise_command
from moe_ckpt.commands.simulate import run as run_command
from moe_ckpt.simulator.advise import Advice, advise, reasons, recommended
from moe_ckpt.simulator.choices import Choice, Question, best_of, noise, variants
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.cost import MOEVEMENT_UTILISATION, iteration_cost
from moe_ckpt.simulator.events import estimate
from moe_ckpt.simulator.flags import flags_of
from moe_ckpt.simulator.footprint import node_bytes
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.systems import SYSTEMS, Gemini, MoEvement
from moe_ckpt.simulator.systems.links import Replicas

MINUTES = 60.0
GPT = preset("GPT-MoE")
LAYOUT = Topology(48, pp=3, ep=8)
STAGES_ALONE = replace(THIS_PROJECT, restarts_all=False, contention=0.7, cold_launch_s=154.0)
"""As if a launcher replaced the processes of lost nodes only, and copies slowed training as on MoEvement's cluster."""


def question(
    mtbf_s: float = 10 * MINUTES,
    *,
    shape: ModelShape = GPT,
    topology: Topology = LAYOUT,
    memory_bytes: int | None = None,
    batch: int = 512,
) -> Question:
    machines = cluster("azure-nc96ads-a100")
    job = TrainingJob(shape, topology, FP16_FP32, batch, batch // 64, 2048)
    cost = iteration_cost(job, machines, MOEVEMENT_UTILISATION)
    return Question(job, cost, machines, mtbf_s, STAGES_ALONE, memory_bytes=memory_bytes, seeds=4)


@cache
def usual() -> Advice:
    """GPT-MoE on six nodes of A100 GPUs, a fault every ten minutes."""
    return advise(question())


def by_name(advice: Advice) -> dict[str, Choice]:
    return {choice.system: choice for choice in advice.choices}


def choice(system: str, *ettrs: float, exact: bool = True, **other: Any) -> Choice:
    """A choice with these ETTRs of its runs."""
    return replace(by_name(usual())["gemini"], system=system, exact=exact, ettrs=ettrs, ettr=estimate(ettrs), **other)


def test_every_system_is_tried() -> None:
    assert set(by_name(usual())) == set(SYSTEMS)
    assert usual().impossible == {}


def test_systems_come_in_the_order_of_their_ettr() -> None:
    means = [one.ettr.mean for one in usual().choices]
    assert means == sorted(means, reverse=True)


def test_with_frequent_faults_sparse_checkpoints_with_local_recovery_are_recommended() -> None:
    chosen = usual().recommended
    assert chosen is not None
    assert (chosen.system, chosen.exact, chosen.settings) == ("moevement", True, {"replicas": 1, "local": True})
    assert chosen.ettr.mean > by_name(usual())["gemini"].ettr.mean + 0.05


def test_the_figures_are_those_of_the_systems_own_behaviour() -> None:
    asked, found = question(), by_name(usual())["gemini"]
    replicas = found.settings["replicas"]
    system = Gemini(replicas=replicas, shortest=True)
    behaviour = asked.behaviour(system)
    assert found.interval == behaviour.interval
    assert found.recovery_s == behaviour.expected_recovery_s
    assert found.overhead_share == behaviour.overhead_s / behaviour.iteration_s
    assert found.memory_bytes == node_bytes(asked.setting, system, behaviour)


def test_systems_that_save_some_experts_are_lossy_and_lose_tokens() -> None:
    lossy = {name for name, one in by_name(usual()).items() if not one.exact}
    assert lossy == {name for name, one in by_name(usual()).items() if one.lost_share > 0}
    assert "moc" in lossy


def test_rarer_faults_raise_every_ettr() -> None:
    rare = by_name(advise(question(2 * 3600), ("gemini", "moevement", "checkfreq")))
    for name, one in rare.items():
        assert one.ettr.mean > by_name(usual())[name].ettr.mean


def test_what_does_not_fit_the_host_memory_is_refused_with_both_numbers() -> None:
    names = ("gemini", "moevement", "checkfreq", "torch_dist_async")
    advice = advise(question(memory_bytes=40 * 10**9), names)
    found = by_name(advice)
    for name in ("gemini", "moevement", "checkfreq"):
        assert f"{found[name].memory_bytes / 1e9:,.1f} GB" in found[name].refused
        assert "40.0 GB are allowed" in found[name].refused
    assert advice.recommended is found["torch_dist_async"]
    assert found["torch_dist_async"].memory_bytes <= 40 * 10**9
    assert sum("refused" in reason for reason in advice.reasons) == 3


def test_nothing_is_recommended_where_nothing_fits() -> None:
    advice = advise(question(memory_bytes=1), ("gemini",))
    assert advice.recommended is None
    assert "No system can be used" in advice.reasons[0]


def test_a_second_replica_is_taken_only_where_it_gains_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/results/failure-traces.md: it gains nothing, not even where racks fail.
    assert best_of(question(), "gemini").settings == {"replicas": 1}
    monkeypatch.setattr(Replicas, "survive", lambda self, nodes: self.count > 1)
    assert best_of(question(), "gemini").settings == {"replicas": 2}


def test_as_many_replicas_as_are_asked_for_are_simulated_and_printed() -> None:
    asked = replace(question(), replicas=3)
    found, before = best_of(asked, "gemini"), by_name(usual())
    assert found.settings["replicas"] == 3
    assert "--moe-ckpt-replicas 3 " in flags_of(asked, found)
    assert found.memory_bytes > before["gemini"].memory_bytes
    assert "--moe-ckpt-replicas 1 " in flags_of(question(), before["moc"])


def test_advice_takes_no_more_memory_than_a_plan_says_to_fit() -> None:
    assert question().limit_bytes == question().cluster.host_memory_bytes // 2


def test_a_lossy_system_is_recommended_only_where_no_exact_one_can_be_used() -> None:
    exact, lossy = choice("exact", 0.90, 0.92), choice("lossy", 0.95, 0.97, exact=False)
    assert recommended([lossy, exact]) is exact
    assert recommended([lossy]) is lossy


def test_what_a_lossy_system_would_gain_is_said_with_what_it_loses() -> None:
    exact = choice("exact", 0.90, 0.92)
    lossy = choice("lossy", 0.95, 0.97, exact=False, lost_share=0.012)
    said = list(reasons(question(), [lossy, exact], exact))
    assert any("lossy would reach 96.0 %" in reason and "1.2 % of tokens" in reason for reason in said)


def test_a_launcher_that_restarts_all_processes_makes_every_recovery_that_much_longer() -> None:
    asked = question()
    all_restart = replace(asked, constants=replace(THIS_PROJECT, restart_s=60.0))
    alone, together = (one.behaviour(MoEvement()).expected_recovery_s for one in (asked, all_restart))
    assert together - alone == pytest.approx(60.0 - THIS_PROJECT.local_restart_s)


def test_noise_is_that_of_runs_with_the_same_faults() -> None:
    steady = choice("one", 0.90, 0.80, 0.70), choice("other", 0.92, 0.82, 0.72)
    unsteady = choice("one", 0.90, 0.80, 0.70), choice("other", 0.72, 0.92, 0.82)
    assert noise(*steady) == pytest.approx(0.005)
    assert noise(*unsteady) > 0.1


def test_a_job_on_one_node_has_no_peers_and_loses_what_is_in_memory() -> None:
    asked = question(shape=preset("GPT-125M-8E"), topology=Topology(8, ep=8))
    assert [one.replicas for one in variants(Gemini(), asked.nodes)] == [0]  # type: ignore[attr-defined]
    found = best_of(asked, "gemini")
    assert found.worst_iterations > 1000
    assert found.recovery_s > 0.5 * asked.constants.persist_every_s


def test_a_job_of_one_rank_is_advised_like_any_other() -> None:
    found = advise(question(shape=preset("GPT-125M-8E"), topology=Topology(1), batch=64), ("gemini", "moevement"))
    assert not found.impossible
    assert {one.settings["replicas"] for one in found.choices} == {0}


def test_a_model_without_experts_cannot_use_systems_that_choose_among_them() -> None:
    dense = replace(GPT, num_experts=0)
    advice = advise(question(shape=dense, topology=Topology(48, pp=3)), ("moc", "moetion", "gemini"))
    assert set(advice.impossible) == {"moc", "moetion"}
    assert advice.recommended is not None


def test_an_unknown_system_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'gemmini' is not known; known systems: none, checkfreq"):
        advise(question(), ("gemmini",))


def test_logs_take_memory_only_where_recovery_is_local() -> None:
    asked = question()
    local, everywhere = MoEvement(replicas=2, local=True), MoEvement(replicas=2, local=False)
    with_logs = node_bytes(asked.setting, local, asked.behaviour(local))
    assert with_logs > node_bytes(asked.setting, everywhere, asked.behaviour(everywhere))


def test_the_reasons_name_the_choice_its_cost_and_what_the_others_lack() -> None:
    said = usual().reasons
    assert said[0].startswith("Use moevement (")
    assert "10 min" in said[0]
    assert "host memory" in said[1]
    assert "no update is ever lost" in said[2]
    others = [one.system for one in usual().choices if one.exact and one.system not in ("moevement", "none")]
    assert any(reason.startswith(f"{others[0]} (every ") and "a fault costs it" in reason for reason in said)
    assert all(reason.endswith(".") for reason in said)


def test_a_lossy_system_that_is_no_better_is_named_with_what_it_loses() -> None:
    exact = choice("exact", 0.95, 0.97)
    lossy = choice("lossy", 0.951, 0.971, exact=False, lost_share=0.012)
    said = list(reasons(question(), [lossy, exact], exact))
    assert any("lossy is not better" in reason and "1.2 % of tokens" in reason for reason in said)


ARGUMENTS = ("--model", "GPT-125M-8E", "--ep", "8", "--world-size", "16", "--mtbf", "30m", "--seeds", "2")


def test_the_command_says_the_same_as_json() -> None:
    found = CliRunner().invoke(advise_command, [*ARGUMENTS, "--system", "gemini", "--system", "torch_dist", "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["recommended"] in ("full (gemini)", "torch_dist")
    assert {row["system"] for row in data["systems"]} == {"gemini", "torch_dist"}
    assert [row["verdict"] for row in data["systems"]].count("recommended") == 1
    assert data["notes"][0].startswith("Use ") and data["notes"][0].split()[1] in data["recommended"]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_job_of_few_ranks_has_as_many_replicas_as_it_has_peers_and_its_flags_of_megatron(ranks: str) -> None:
    words = (
        "--model",
        "GPT-125M-8E",
        "--world-size",
        ranks,
        "--global-batch-size",
        "8",
        "--mtbf",
        "3h",
        "--seeds",
        "2",
    )
    found = CliRunner().invoke(advise_command, [*words, "--system", "gemini", "--seed", "1234", "--json"])
    assert found.exit_code == 0, found.output


def test_the_command_refuses_by_the_given_host_memory() -> None:
    found = CliRunner().invoke(advise_command, [*ARGUMENTS, "--system", "gemini", "--host-memory-gb", "1", "--json"])
    data = json.loads(found.stdout)
    assert data["recommended"] is None
    assert "1.0 GB are allowed" in " ".join(data["notes"])


def test_what_a_preset_leaves_out_of_a_model_is_said() -> None:
    layout = ("--pp", "16", "--ep", "64", "--world-size", "1024", "--cluster", "h100-dgx", "--mtbf", "12h")
    words = ["--model", "DeepSeek-V3-671B", *layout, "--seeds", "2", "--system", "torch_dist", "--json"]
    data = json.loads(CliRunner().invoke(advise_command, words).stdout)
    assert "DeepSeek-V3-671B: Without the multi-token-prediction module." in data["notes"]


def test_a_domain_of_many_nodes_has_the_memory_of_them_all() -> None:
    layout = ("--model", "GPT-125M-8E", "--ep", "8", "--world-size", "144", "--global-batch-size", "288")
    allowed = []
    for ranks in ("4", "72"):
        words = [*layout, "--cluster", "gb200-nvl72", "--ranks-per-node", ranks, "--mtbf", "12h", "--seeds", "2"]
        found = CliRunner().invoke(advise_command, [*words, "--system", "torch_dist", "--json"])
        allowed.append(json.loads(found.stdout)["host_memory_of_a_node_for_checkpoints_bytes"])
    assert allowed[1] == 18 * allowed[0]


def test_flags_of_the_job_count_or_are_listed() -> None:
    flags = ("--moe-ckpt-replicas", "0", "--moe-ckpt-memory-limit", "3GB", "--moe-ckpt-window", "4", "--lr", "1")
    words = [*ARGUMENTS, "--system", "gemini", *flags, "--freeze-experts", "--json"]
    data = json.loads(CliRunner().invoke(advise_command, words).stdout)
    assert data["settings_of_each"][0]["r"] == 0
    assert data["host_memory_of_a_node_for_checkpoints_bytes"] == 3 * 10**9
    assert data["notes"][-2:] == [
        "Not modelled, so memory and time may differ: --freeze-experts.",
        "Change nothing here: --lr, --moe-ckpt-window.",
    ]


def test_a_simulated_run_has_the_replicas_of_the_job_and_lists_its_other_flags() -> None:
    words = [*ARGUMENTS, "--system", "gemini", "--moe-ckpt-interval", "9", "--moe-ckpt-replicas", "2", "--json"]
    data = json.loads(CliRunner().invoke(run_command, words).stdout)
    assert data["notes"][-1] == "Change nothing here: --moe-ckpt-interval."


def test_the_command_is_called_advise_and_explains_itself() -> None:
    found = CliRunner().invoke(advise_command, ["--help"])
    assert advise_command.name == "advise"
    assert "--mtbf TIME" in found.output
    assert "--host-memory-gb" in found.output
