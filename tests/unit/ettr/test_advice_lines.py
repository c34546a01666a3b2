"""What `advise` says to paste: the job's own parser takes it; examples and pages leave the interval to `auto`."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from megatron_flags import parser

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, from_namespace
from megatron.core.dist_checkpointing.moe.contradictions import contradictions, must_repeat_itself
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import LogPlan
from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.commands.advise import advise as advise_command
from moe_ckpt.simulator.advise import Advice, advise
from moe_ckpt.simulator.choices import Question
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost
from moe_ckpt.simulator.flags import flags_of
from moe_ckpt.simulator.footprint import node_bytes
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.memory import logs_of_stage
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.planning import log_bytes, planned_job
from moe_ckpt.simulator.sensitivity import sensitivity
from moe_ckpt.simulator.systems import SYSTEMS, full_interval
from reproduce.large_scale import META_GPU_S

ROOT = Path(__file__).resolve().parents[3]
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "mixtral-8x22b": "Mixtral-8x22B"}
"""Examples that run `full`, by their folders."""


def asked(model: str, topology: Topology, batch: int, mtbf_s: float) -> Question:
    where, precision = cluster("h100-dgx"), PRECISIONS["fp16-fp32"].exact()
    job = TrainingJob(preset(model), topology, precision, batch, batch // topology.dp, 4096)
    return Question(job, iteration_cost(job, where, MEGATRON_UTILISATION), where, mtbf_s, seeds=2)


@cache
def all_systems() -> tuple[Question, Advice]:
    question = replace(asked("GPT-125M-8E", Topology(32, pp=2, ep=8), 512, 3600), duration_s=12 * 3600.0)
    return question, advise(question)


def parsed(line: str) -> MoECheckpointConfig:
    return from_namespace(MoECheckpointConfig, parser().parse_args(line.split()), MoECheckpointConfig.PREFIX)


def test_the_jobs_own_parser_takes_every_line_and_finds_no_contradiction() -> None:
    question, advice = all_systems()
    assert {choice.system for choice in advice.choices} == set(SYSTEMS)
    for choice in advice.choices:
        line, config, topology = flags_of(question, choice), parsed(flags_of(question, choice)), question.job.topology
        wrong = contradictions(
            config,
            world_size=topology.world_size,
            num_experts=question.job.shape.num_experts,
            use_distributed_optimizer=True,
            stages=topology.pp,
        )
        assert not list(wrong), line
        if config.strategy == "none":
            stock = parser().parse_args(line.split())
            assert (stock.save, stock.load) == ("DIR", "DIR") if line else choice.never
            assert not line or stock.save_interval == choice.interval
            continue
        assert config.persist_dir == "DIR", line
        # A GPU that has to repeat iterations to the bit refuses to start without.
        assert must_repeat_itself(config) == ("--deterministic-mode" in line), line


def test_what_is_pasted_has_the_storage_that_the_simulation_counts_on() -> None:
    question = qwen_full()
    found = advise(question, ("gemini",)).choices[0]
    config = parsed(flags_of(question, found))
    assert (config.strategy, config.interval, config.persist_dir) == ("full", found.interval, "DIR")
    every_s = config.persist_interval * question.cost.iteration_s
    assert every_s == pytest.approx(question.constants.persist_every_s, rel=0.01)


def test_the_age_of_a_state_in_storage_is_that_of_the_flags_and_of_its_upload() -> None:
    asked = qwen_full()
    question = replace(
        asked, cluster=replace(asked.cluster, storage_bytes_per_s=asked.cluster.storage_bytes_per_s / 500)
    )
    found = advise(question, ("gemini",))
    config, setting = parsed(flags_of(question, found.choices[0])), question.setting
    assert config.persist_interval == 2 * setting.persist_iterations
    hours = (config.persist_interval + setting.persist_iterations) * setting.iteration_s / 3600
    assert f"a state in storage that is up to {hours:.2f} h old" in " ".join(found.reasons)


def test_a_plan_of_the_flags_costs_what_advice_says() -> None:
    question = qwen_full()
    found = advise(question, ("gemini",)).choices[0]
    plan = planned_job(question.setting, parsed(flags_of(question, found)))
    behaviour = plan.behaviour(question.mtbf_s)
    assert behaviour is not None
    assert behaviour.overhead_s / behaviour.iteration_s == pytest.approx(found.overhead_share)


def qwen_full() -> Question:
    return asked("Qwen3-30B-A3B", Topology(64, ep=8), 512, 3 * 3600)


def flag(text: str, name: str, default: int = 1) -> int:
    found = re.search(rf"--{name} (\d+)", text)
    return int(found[1]) if found else default


@pytest.mark.parametrize("example", MODELS)
def test_examples_and_pages_measure_the_interval_where_advice_finds_that_every_iteration_has_time(example: str) -> None:
    script = (ROOT / "examples" / example / "train.sh").read_text(encoding="utf-8")
    nodes = re.search(r"^nodes=(?:\$\{NODES:-)?(\d+)", script, re.MULTILINE)
    assert nodes is not None
    tp, ep, pp, vpp = (
        flag(script, name)
        for name in (
            *("tensor-model-parallel-size", "expert-model-parallel-size", "pipeline-model-parallel-size"),
            "num-virtual-stages-per-pipeline-rank",
        )
    )
    topology = Topology(8 * int(nodes[1]), tp=tp, ep=ep, pp=pp, vpp=vpp, etp=1)
    question = asked(MODELS[example], topology, flag(script, "global-batch-size"), META_GPU_S / topology.world_size)
    interval = full_interval(question.setting, question.mtbf_s, flag(script, "moe-ckpt-replicas"))
    assert interval == 1 and "--moe-ckpt-interval auto" in script
    assert SYSTEMS["gemini"].behaviour(question.setting, question.mtbf_s).interval == 1
    for page in ("sizing", "guide", "operations"):
        text = " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
        assert "--moe-ckpt-interval auto`" in text


def test_an_iteration_without_the_time_to_copy_gets_the_interval_that_has_it() -> None:
    question = qwen_full()
    slow = replace(question.setting, cluster=replace(question.cluster, inter_node_bytes_per_s=1e8))
    needs_s = slow.whole_bytes / slow.peer_bytes_per_s(1)
    interval = full_interval(slow, question.mtbf_s, 1)
    assert interval >= needs_s / slow.iteration_s > 1


def test_the_shorter_interval_costs_at_most_half_a_point_and_copies_that_slow_training_lengthen_it() -> None:
    question = qwen_full()
    costly = replace(question.setting, constants=replace(THIS_PROJECT, contention=0.945))
    short, long = (full_interval(one, 24 * 3600, 2) for one in (question.setting, costly))
    assert short == 1 < long


def test_a_plan_of_sparse_counts_all_logs_that_a_job_makes_room_for() -> None:
    question = asked("GPT-125M-8E", Topology(32, pp=2, ep=8), 512, 3600)
    found = planned_job(question.setting, MoECheckpointConfig(strategy="sparse", window="4", replicas=1))
    logs = LogPlan(Topology(2, pp=2), 0, (4, 1, 8), "bfloat16", lookback=found.strategy.logged).segments
    expected = max(logs_of_stage(question.job, stage, logs) for stage in range(2))
    assert log_bytes(found.job, found.setting, found.strategy) == expected > 0


def test_a_plan_of_sparse_counts_the_state_that_survivors_park_with_its_gradients() -> None:
    question = asked("GPT-125M-8E", Topology(32, pp=2, ep=8), 512, 3600)
    settings = {"strategy": "sparse", "window": "4", "replicas": 1}
    parking, rolling = (
        planned_job(question.setting, MoECheckpointConfig(**settings, recovery=recovery))
        for recovery in ("auto", "global")
    )
    own = max(sum(size.full_bytes for size in sizes.values()) for sizes in parking.job.sizes.values())
    logs = log_bytes(parking.job, parking.setting, parking.strategy)
    assert question.job.precision.full_bytes == 12, "fp32 masters, whose gradients have 4 bytes"
    assert (parking.node_bytes() - rolling.node_bytes()) // 8 - logs == own * 16 // 12


def test_the_memory_that_advice_counts_is_that_of_the_plan() -> None:
    question, config = qwen_full(), MoECheckpointConfig(strategy="full", interval=1, replicas=1)
    system = replace(SYSTEMS["gemini"], replicas=1)  # type: ignore[type-var]
    told = node_bytes(question.setting, system, question.behaviour(system))
    assert told == planned_job(question.setting, config).node_bytes()
    sizing = runpy.run_path(str(ROOT / "tools" / "sizing.py"))
    row = next(one for one in sizing["ROWS"] if (one.model, one.nodes) == ("Qwen3-30B-A3B", 8))
    assert told == sizing["node_bytes"](row)[1]
    stored = node_bytes(question.setting, SYSTEMS["checkfreq"], question.behaviour(SYSTEMS["checkfreq"]))
    assert stored == planned_job(question.setting, replace(config, replicas=0)).node_bytes() < told


def test_slower_uploads_cost_snapshots_that_go_to_storage_as_well_as_stock_checkpoints() -> None:
    found = [one for one in sensitivity(qwen_full(), SYSTEMS["gemini"]) if one.constant == "upload_slowdown"]
    least, most = found
    assert least.value < most.value
    assert least.ettr > most.ettr and least.stock_ettr > most.stock_ettr


ARGUMENTS = "--model Qwen3-30B-A3B --ep 8 --world-size 64 --cluster h100-dgx --mtbf 3h --seeds 2".split()


def test_first_answers_come_before_anything_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(*given: object) -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr("moe_ckpt.commands.advise.advise_on", tried)
    found = CliRunner().invoke(advise_command, ARGUMENTS)
    assert isinstance(found.exception, RuntimeError)
    assert "first_answer=gemini interval=1" in found.stderr
    assert "first_answer=torch_dist_async" in found.stderr


def test_whether_async_torch_dist_would_do_is_answered_and_constants_are_shown_with_what_they_would_change() -> None:
    systems = ("--system", "gemini", "--system", "torch_dist_async")
    found = CliRunner().invoke(advise_command, [*ARGUMENTS, *systems])
    assert found.exit_code == 0, found.output
    assert re.search(r"Would async torch_dist do +(Yes|No): \d", found.stdout)
    assert "Sensitivity to what was fitted or assumed" in found.stdout
    assert "contention" in found.stdout
    assert "not predicted: the restart" in found.stdout
    given = CliRunner().invoke(advise_command, [*ARGUMENTS, *systems, "--restart", "20s"])
    assert "predicted, with a restart of 20 s" in given.stdout


def test_stock_checkpoints_are_enough_where_faults_are_rare() -> None:
    rare = replace(qwen_full(), mtbf_s=3000 * 3600.0)
    assert advise(rare, ("gemini", "torch_dist_async")).stock.startswith("Yes: ")
    often = replace(qwen_full(), mtbf_s=1800.0)
    assert advise(often, ("gemini", "torch_dist_async")).stock.startswith("No: ")
