"""`moe-ckpt plan` as a person meets it: figures that add up, JSON that says the same, errors that help."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.commands.main import main
from moe_ckpt.simulator.models import PRESETS

Run = Callable[..., tuple[int, str, str]]
Facts = Callable[..., dict[str, Any]]

DEEPSEEK = ("--model", "DeepSeek-MoE", "--pp", "4", "--ep", "8", "--iteration-time", "2.5", "--micro-batch-size", "4")
SPARSE = (*DEEPSEEK, "--moe-ckpt-strategy", "sparse")
SMALL = ("--model", "GPT-125M-8E", "--iteration-time", "1")
PEC = ("--model", "GPT-350M-16E", "--ep", "8", "--world-size", "16", "--moe-ckpt-strategy", "pec")
PEC = (*PEC, "--moe-ckpt-pec-k-snapshot", "4")
FULL = ("--model", "Mixtral-8x7B", "--pp", "2", "--ranks-per-node", "1", "--global-batch-size", "64")
EVERY = {"full": FULL, "sparse": SPARSE, "pec": PEC, "selective": (*SMALL, "--moe-ckpt-strategy", "selective")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moe-ckpt", "plan", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def facts(run: Run) -> Facts:
    def call(*arguments: str | Path) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        data: dict[str, Any] = json.loads(out)
        return data

    return call


def test_a_node_has_as_many_ranks_as_the_cluster_says(facts: Facts) -> None:
    model = ("--model", "Qwen3-30B-A3B", "--ep", "8", "--world-size", "64")
    dgx, trays = (facts(*model, "--cluster", name)["memory_of_a_node_bytes"] for name in ("b200-dgx", "gb200-nvl72"))
    assert trays == dgx / 2
    assert facts(*model, "--cluster", "gb200-nvl72", "--ranks-per-node", "8")["memory_of_a_node_bytes"] == dgx


@pytest.mark.parametrize("strategy", EVERY)
def test_every_strategy_has_a_plan_for_people_and_the_same_as_json(run: Run, facts: Facts, strategy: str) -> None:
    asked = (*EVERY[strategy], "--mtbf", "2h", "--moe-ckpt-persist-dir", "DIR")
    code, out, err = run(*asked)
    data = facts(*asked)
    assert (code, err) == (0, "")
    assert data["title"] in out
    assert data["title"].endswith(strategy)
    assert data["snapshots"] and data["ranks_by_what_they_own"]
    assert 0 < data["ettr"] < 1
    assert facts(*asked) == data


def test_flags_of_a_job_are_taken_as_they_are(facts: Facts) -> None:
    shape = PRESETS["Qwen3-30B-A3B"]
    model = (
        *("--num-layers", "48", "--hidden-size", "2048", "--ffn-hidden-size", "6144", "--num-attention-heads", "32"),
        *("--group-query-attention", "--num-query-groups", "4", "--kv-channels", "128", "--qk-layernorm", "--swiglu"),
        *(
            "--normalization",
            "RMSNorm",
            "--disable-bias-linear",
            "--num-experts",
            "128",
            "--moe-ffn-hidden-size",
            "768",
        ),
        *("--moe-router-topk", "8", "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
        *("--max-position-embeddings", "4096", "--vocab-size", "151900", "--make-vocab-size-divisible-by", "1187"),
    )
    job = ("--ep", "8", "--world-size", "16", "--global-batch-size", "256", "--moe-ckpt-replicas", "1")
    data = facts(*model, *job, "--lr", "1.2e-4", "--train-iters", "10000", "--bf16")
    named = facts("--model", "Qwen3-30B-A3B", *job)
    assert data["parameters"] == shape.total_parameters
    assert data["memory_of_a_node_bytes"] == named["memory_of_a_node_bytes"]
    assert data["notes"][-1] == "Change nothing here: --lr, --train-iters, --bf16."


FLAGS = ("--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8", "--vocab-size", "128")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (("--swiglu",), ("--swiglu", "--ffn-hidden-size", "2688")),
        ((), ("--ffn-hidden-size", "4096")),
        (("--multi-latent-attention",), ("--multi-latent-attention", "--kv-lora-rank", "32")),
        (("--quick-geglu",), ("--swiglu", "--ffn-hidden-size", "4096")),
    ],
)
def test_what_flags_leave_out_is_as_megatron_takes_it(
    facts: Facts, short: tuple[str, ...], long: tuple[str, ...]
) -> None:
    assert facts(*FLAGS, *short)["parameters"] == facts(*FLAGS, *long)["parameters"]


def test_virtual_stages_may_be_given_by_their_layers(facts: Facts, run: Run) -> None:
    job = (*FLAGS, "--pp", "2", "--moe-ckpt-strategy", "full")
    by_layers, by_stages = facts(*job, "--num-layers-per-virtual-pipeline-stage", "1"), facts(*job, "--vpp", "2")
    assert by_layers == by_stages != facts(*job)
    code, _, err = run(*job, "--num-layers-per-virtual-pipeline-stage", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "--num-layers-per-virtual-pipeline-stage is 3, but 2 x it must divide the 4 layers" in err


def test_flags_and_layers_that_a_plan_ignores_are_not_said_to_change_nothing(facts: Facts) -> None:
    notes = facts(*FLAGS, "--mtp-num-layers", "1", "--decoder-last-pipeline-num-layers", "1", "--lr", "1")["notes"]
    ignored = "--mtp-num-layers, --decoder-last-pipeline-num-layers"
    assert notes[-2:] == [f"Not modelled, so memory and time may differ: {ignored}.", "Change nothing here: --lr."]
    named = facts("--model", "DeepSeek-V3-671B")["notes"]
    assert "DeepSeek-V3-671B: Without the multi-token-prediction module." in named


def test_flags_of_which_a_named_model_says_the_same_are_said_to_change_nothing(facts: Facts) -> None:
    given = ("--vocab-size", "1000", "--swiglu", "--position-embedding-type", "rope")
    notes = facts("--model", "GPT-350M-16E", "--ep", "8", *given)["notes"]
    assert notes[-1] == "Change nothing here: --vocab-size, --position-embedding-type, --swiglu."


def test_layers_that_stages_do_not_divide_take_a_flag_of_megatron(facts: Facts) -> None:
    uneven = "Megatron takes 4 layers on 3 pipeline stages only with --pipeline-model-parallel-layout or the like."
    assert uneven in facts(*FLAGS, "--pp", "3", "--global-batch-size", "768")["notes"]
    given = ("--decoder-last-pipeline-num-layers", "1")
    assert uneven not in facts(*FLAGS, "--pp", "3", "--global-batch-size", "768", *given)["notes"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--model", "GPT-350M-16E", "--tp=--5"), "--5 must be a whole number"),
        (("--model", "GPT-350M-16E", "--moe-layer-freq", "²"), "invalid --moe-layer-freq ²"),
        (("--model", "GPT-350M-16E", "--moe-layer-freq", "9" * 5000), "invalid --moe-layer-freq 999"),
        (("--model", "GPT-350M-16E", "--num-experts", "1000000000"), "--num-experts is 1000000000, but must be"),
        (("--model", "GPT-350M-16E", "--num-experts", "99999"), "x num_experts 99999 make"),
        (("--model", "GPT-350M-16E", "--tp", "3"), "--tp 3 does not divide the 16 attention heads"),
        ((*FLAGS, "--num-layers", "1000000000"), "--num-layers is 1000000000, but must be an integer from 1 to"),
        ((*FLAGS, "--hidden-size", "1" + "0" * 400, "--swiglu"), "--hidden-size is 1000"),
        ((*FLAGS, "--make-vocab-size-divisible-by", "0"), "--make-vocab-size-divisible-by is 0, but must be at least"),
        ((*FLAGS, "--make-vocab-size-divisible-by", "-5"), "--make-vocab-size-divisible-by is -5, but must be at"),
    ],
)
def test_a_number_that_no_model_has_is_refused_in_one_line(given: tuple[str, ...], says: str, run: Run) -> None:
    code, out, err = run(*given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_settings_that_change_no_seconds_of_a_plan_are_named(facts: Facts) -> None:
    ranks = ("--world-size", "16", "--ranks-per-node", "8", "--moe-ckpt-strategy", "full")
    notes = facts(*SMALL, *ranks, "--moe-ckpt-replicate", "gradients")["notes"]
    assert notes[-1] == "Not in what checkpoints add, nor in ETTR: --moe-ckpt-replicate."
    notes = facts(*PEC, "--moe-ckpt-pec-scope", "weights")["notes"]
    assert notes[-1] == "Not in what checkpoints add, nor in ETTR: --moe-ckpt-pec-scope."


def test_bytes_that_flags_of_the_optimizer_change_are_not_modelled_and_said_so(facts: Facts) -> None:
    notes = facts(*SMALL, "--num-distributed-optimizer-instances", "2", "--exp-avg-dtype", "bf16")["notes"]
    ignored = "--num-distributed-optimizer-instances, --exp-avg-dtype"
    assert f"Not modelled, so memory and time may differ: {ignored}." in notes


def test_a_limit_of_no_lost_tokens_costs_what_all_experts_cost(facts: Facts) -> None:
    slow = (*PEC, "--peer-gbps", "0.5")
    none, all_experts = (
        facts(*slow, *given)["checkpoints_add_to_an_iteration"]
        for given in (("--moe-ckpt-plt-threshold", "0"), ("--moe-ckpt-pec-k-snapshot", "16"))
    )
    assert none == pytest.approx(all_experts)


def test_tokens_cross_to_a_node_once_with_either_flag_of_deepep(facts: Facts) -> None:
    job = ("--model", "Qwen3-30B-A3B", "--ep", "32", "--world-size", "32", "--cluster", "h100-dgx")
    older, newer, neither = (
        facts(*job, *given)["iteration_s"]
        for given in (
            ("--moe-enable-deepep",),
            ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"),
            ("--moe-token-dispatcher-type", "alltoall"),
        )
    )
    assert older == newer < neither


def test_a_state_that_goes_to_storage_more_often_costs_more(facts: Facts) -> None:
    job = "--model Mixtral-8x7B --pp 2 --world-size 64 --cluster h100-dgx --global-batch-size 64".split()
    stored = (*job, "--moe-ckpt-persist-dir", "DIR")
    often, seldom, never = (
        facts(*given)["checkpoints_add_to_an_iteration"]
        for given in (
            (*stored, "--moe-ckpt-persist-interval", "10"), (*stored, "--moe-ckpt-persist-interval", "1000"), job
        )
    )  # fmt: skip
    assert often > 2 * seldom > 2 * never


@pytest.mark.parametrize(
    ("pattern", "layers"), [("2", 2), ("([0]*1+[1]*2)", 2), ("[0,0,1]", 1), ("([1]*1)*3", 3), ("([0]+[1]*2)*1", 2)]
)
def test_patterns_of_layers_are_those_of_megatron(facts: Facts, pattern: str, layers: int) -> None:
    model = ("--num-layers", "3", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "128")
    job = (*model, "--num-experts", "4", "--moe-layer-freq", pattern, "--global-batch-size", "8")
    data = facts(*job, "--moe-ckpt-strategy", "pec")
    assert len({row["layer"] for row in data["experts"]}) == layers


def test_a_window_saves_every_operator_once(facts: Facts) -> None:
    data = facts(*SPARSE, "--moe-ckpt-replicas", "2")
    steps, ranks = data["snapshots"], data["ranks_by_what_they_own"]
    assert data["window"] == len(steps) > 1
    assert sum(step["saved"] for step in steps) == max(rank["operators"] for rank in ranks)
    assert max(step["copied_bytes"] for step in steps) == data["largest_snapshot_of_a_rank_bytes"]
    assert len(ranks) == 4 * 8


def test_a_link_that_is_too_slow_is_told_with_the_way_out(facts: Facts) -> None:
    data = facts(*SMALL, "--host-gbps", "1")
    assert data["stall_per_snapshot_s"] == pytest.approx(data["copy_to_host_memory_s"] - 1)
    assert data["copy_to_host_memory_s"] == pytest.approx(data["largest_snapshot_of_a_rank_bytes"] / 1e9)
    (row,) = [row for row in data["does_not_fit"] if "waits" in row["what"]]
    assert "--moe-ckpt-interval" in row["way_out"]


def test_replicas_that_lag_are_told(facts: Facts) -> None:
    nodes = ("--world-size", "4", "--ranks-per-node", "1", "--moe-ckpt-replicas", "2", "--peer-gbps", "0.5")
    slower = (*SMALL[:-1], "2", *nodes)
    data, later = (facts(*slower, "--moe-ckpt-interval", str(interval)) for interval in (1, 2))
    free_s = data["lag_of_replicas_s"] - later["lag_of_replicas_s"]
    assert 0.5 < free_s < 1.5, "of an iteration, in which training leaves the network alone"
    sent_s = 2 * data["largest_snapshot_of_a_rank_bytes"] / 0.5e9
    assert data["lag_of_replicas_s"] == pytest.approx(sent_s - free_s)
    assert any("replicas take longer" in row["what"] for row in data["does_not_fit"])
    # What training then waits for is what it is told to lag, once per snapshot.
    assert 2 * later["checkpoints_add_to_an_iteration"] == pytest.approx(later["lag_of_replicas_s"] / 2, rel=0.01)


def skewed(path: Path, model: str, popular: int) -> Path:
    """A counts file in which one expert of each layer has most of the tokens."""
    shape = PRESETS[model]
    rows = [[9 if index == popular else 1 for index in range(shape.num_experts)] for _ in shape.moe_layers]
    path.write_text(json.dumps(rows))
    return path


def test_popular_experts_are_anchored_after_all_others(facts: Facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=0)
    window = (*SMALL, "--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "8", "--counts", counts)
    first = [step["first"] for step in facts(*window)["snapshots"]]
    assert first[0] == "layer1.expert1"


def test_a_job_with_frozen_experts_saves_the_rest_in_its_windows(facts: Facts) -> None:
    frozen = facts(*SMALL, "--moe-ckpt-strategy", "sparse", "--host-gbps", "2", "--freeze-experts")
    assert not any(step["experts"] for step in frozen["snapshots"])


def test_experts_at_risk_are_saved_first(facts: Facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=5)
    by_load = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-selection", "load-aware")
    partial = facts(*SMALL, *by_load, "--iteration", "3", "--counts", counts)
    taken = [row["experts"] for row in partial["experts"] if row["layer"] == 1]
    assert taken.count([5]) > 1


def test_partial_checkpoints_cover_all_experts_in_one_turn(facts: Facts) -> None:
    data = facts(
        *PEC, "--moe-ckpt-persist-dir", "d", "--moe-ckpt-persist-interval", "1", "--moe-ckpt-pec-k-persist", "1"
    )
    assert data["snapshots_until_all_experts_are_saved"] == 4
    of_layer = [row for row in data["experts"] if row["layer"] == 1]
    assert sorted(one for row in of_layer for one in row["experts"]) == list(range(16))
    assert {len(row["experts"]) for row in of_layer} == {4}
    assert {len(row["persisted"]) for row in of_layer} <= {0, 1}
    assert any(row["persisted"] for row in data["experts"])


@pytest.mark.parametrize(("scope", "left_out_bytes"), [("weights", 4), ("optimizer", 8), ("both", 12)])
def test_each_scope_leaves_out_its_part_of_experts_that_are_not_selected(
    facts: Facts, scope: str, left_out_bytes: int
) -> None:
    shape = PRESETS["GPT-350M-16E"]
    data = facts("--model", "GPT-350M-16E", "--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-scope", scope)
    left_out = shape.expert_parameters * 15 // 16 * left_out_bytes
    assert data["largest_snapshot_of_a_rank_bytes"] == 12 * shape.total_parameters - left_out


def test_no_rank_keeps_its_replicas_on_its_own_node(facts: Facts) -> None:
    data = facts("--model", "Mixtral-8x7B", "--pp", "4", "--ep", "8", "--world-size", "64", "--moe-ckpt-replicas", "2")
    rows = data["where_replicas_lie"]
    assert len(rows) == 64
    assert all(row["node"] not in row["their_nodes"] for row in rows)
    assert data["nodes_that_may_be_lost_at_once"] == 2


def test_replicas_that_protect_from_nothing_are_told(run: Run) -> None:
    code, out, _ = run("--model", "GPT-125M-8E", "--ep", "8", "--moe-ckpt-replicas", "1")
    assert code == 0
    assert "do not protect" in out


def test_the_loss_of_a_node_sends_its_stage_back_and_nobody_else(facts: Facts) -> None:
    data = facts(*SPARSE, "--moe-ckpt-window", "6", "--lost-nodes", "1")
    (segment,) = data["segments"]
    assert (data["scope"], segment["stages"], data["iterations_replayed"]) == ("local", [1], 2 * 6 - 1)
    assert {row["tier"]: row["ranks"] for row in data["read_from"]} == {"parked": 24, "peer memory": 8}
    parts = {row["part"]: row["predicted_s"] for row in data["timeline"]}
    assert list(parts) == ["detect", "restart", "rendezvous", "fetch", "replay", "all"]
    assert parts["all"] == pytest.approx(sum(seconds for part, seconds in parts.items() if part != "all"))
    assert parts["replay"] < 2.5 * data["iterations_replayed"]


def test_tied_embeddings_send_the_last_stage_back_with_the_first(facts: Facts) -> None:
    stages = ("--pp", "4", "--ranks-per-node", "1", "--lost-ranks", "0", "--moe-ckpt-strategy", "sparse")
    assert [segment["stages"] for segment in facts(*SMALL, *stages)["segments"]] == [[0, 3]]


def test_without_boundary_logs_the_whole_job_goes_back(facts: Facts) -> None:
    data = facts(*SPARSE, "--lost-nodes", "1", "--moe-ckpt-recovery", "global")
    assert (data["scope"], data["ranks_that_go_back"]) == ("global", 32)
    assert "boundary_logs_of_a_rank,_of_it_bytes" not in data


def test_ranks_read_their_full_state_from_the_tier_that_has_it(facts: Facts) -> None:
    data = facts(*FULL, "--lost-ranks", "1", "--moe-ckpt-replicas", "0", "--moe-ckpt-interval", "10")
    assert data["iterations_trained_again"] + data["iterations_replayed"] == 10
    read = {row["tier"]: row["read_bytes"] for row in data["read_from"]}
    assert sum(read.values()) == 12 * PRESETS["Mixtral-8x7B"].total_parameters


@pytest.mark.parametrize("last", range(11, 18))
def test_the_facts_and_the_timeline_go_back_to_the_same_state(facts: Facts, last: int) -> None:
    job = (*FULL, "--lost-ranks", "1", "--moe-ckpt-interval", "6", "--iteration-time", "1", "--iteration", str(last))
    data = facts(*job)
    (replay,) = [row["predicted_s"] for row in data["timeline"] if row["part"] == "replay"]
    assert replay == pytest.approx(data["iterations_trained_again"])
    assert data["recovered_iteration"] == (12 if last > 12 else 6)


@pytest.mark.parametrize("recovery", ["local", "global"])
def test_a_fault_at_the_end_of_a_window_replays_the_window_before(facts: Facts, recovery: str) -> None:
    job = (*SPARSE, "--moe-ckpt-window", "6", "--moe-ckpt-recovery", recovery, "--lost-nodes", "1", "--iteration")
    again, replay_s = zip(*(_again(facts(*job, str(last))) for last in (11, 12, 13)), strict=True)
    assert again == (10, 11, 6)
    assert replay_s[0] - replay_s[2] == pytest.approx(4 * (replay_s[1] - replay_s[0]))


def _again(data: dict[str, Any]) -> tuple[int, float]:
    (replay_s,) = [row["predicted_s"] for row in data["timeline"] if row["part"] == "replay"]
    return data["iterations_replayed"] + data["iterations_trained_again"], replay_s


def test_partial_checkpoints_lose_the_tokens_of_stale_experts(facts: Facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=7)
    job = (*SMALL, "--lost-ranks", "0", "--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "4")
    data = facts(*job, "--moe-ckpt-interval", "10", "--iteration", "35", "--counts", counts)
    # Checkpoints of iterations 20 and 30 have 4 of 8 experts each: 4 are 10 iterations old.
    assert (data["recovered_iteration"], data["iterations_trained_again"]) == (30, 5)
    assert [layer["stale_experts"] for layer in data["losses"]] == [4] * 6
    assert {layer["lost_tokens"] for layer in data["losses"]} <= {10 * 4, 10 * (3 + 9)}
    assert data["lost_tokens"] == sum(layer["lost_tokens"] for layer in data["losses"])


def test_a_lost_node_without_replicas_is_refused_where_it_was_asked_for(run: Run, facts: Facts) -> None:
    alone = (*SPARSE, "--moe-ckpt-replicas", "0")
    code, _, err = run(*alone, "--lost-nodes", "1")
    assert code == 1
    assert "no intact copies of stage 1" in err
    assert err.count("\n") == 1
    data = facts(*alone, "--mtbf", "6h")
    assert "recovered_iteration" not in data and "ettr" not in data
    assert "ettr" not in facts(*alone, "--mtbf", "6h", "--lost-ranks", "3"), "another fault would end it"
    assert "ettr" in facts(*SPARSE, "--mtbf", "6h")


def test_a_job_on_one_node_sends_nothing_and_waits_for_no_replica(facts: Facts) -> None:
    one_node = ("--world-size", "2", "--ranks-per-node", "2", "--iteration-time", "20", "--moe-ckpt-interval", "1")
    data = facts("--model", "Mixtral-8x7B", "--pp", "2", "--global-batch-size", "64", *one_node)
    assert data["replicas_of_a_snapshot"] == data["lag_of_replicas_s"] == data["stall_per_snapshot_s"] == 0
    assert data["checkpoints_add_to_an_iteration"] < 0.05
    assert "--moe-ckpt-replicas 1" in data["does_not_fit"][-1]["way_out"]


def test_a_model_file_may_have_any_name(run: Run, tmp_path: Path) -> None:
    values = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10, "ffn_hidden_size": 16}
    (tmp_path / "mine.json").write_text(json.dumps(values | {"name": "a[/red] my[12]-model"}))
    code, out, _ = run("--model", tmp_path / "mine.json")
    assert code == 0
    assert "a[/red] my[12]-model" in out


def test_rows_limits_the_tables_for_people_and_says_so(run: Run) -> None:
    nodes = ("--model", "GPT-125M-8E", "--world-size", "64")
    short, long = run(*nodes, "--rows", "3")[1], run(*nodes, "--rows", "0")[1]
    assert "and 61 more rows" in short
    assert len(long.splitlines()) - len(short.splitlines()) > 60


BAD = [
    (("window", "--model", "GPT-MoE"), "'window' is no flag: give the flags of the job"),
    (("--model", "nosuch"), "'nosuch'"),
    (("--pp", "2"), "--num-layers is missing"),
    ((*DEEPSEEK, "--tp", "0"), "'--tp': 0 must be a whole number from 1 to"),
    ((*DEEPSEEK, "--world-size", "33"), "world_size 33 is not a multiple"),
    ((*DEEPSEEK, "--pp", "29"), "28 layers cannot fill pp x vpp = 29 stages"),
    ((*DEEPSEEK, "--ep", "7", "--global-batch-size", "28"), "ep 7 does not divide num_experts 64"),
    ((*DEEPSEEK, "--moe-layer-freq", "[0]*x"), "invalid --moe-layer-freq [0]*x (expected a number or a pattern"),
    ((*DEEPSEEK, "--moe-layer-freq", "[0]*9"), "must have one 0 or 1 for each of the 28 layers"),
    ((*SPARSE, "--moe-ckpt-window", "many"), "many"),
    ((*SPARSE, "--moe-ckpt-intervall", "3"), "no such flag: --moe-ckpt-intervall; did you mean --moe-ckpt-interval?"),
    ((*SPARSE, "--iteraton-time", "3"), "no such flag: --iteraton-time; did you mean --iteration-time?"),
    ((*SPARSE, "--moe-ckpt-pec-k-snapshot", "2"), "--moe-ckpt-pec-k-snapshot is for --moe-ckpt-strategy pec"),
    ((*SPARSE, "--moe-ckpt-replicas", "x"), "--moe-ckpt-replicas: invalid int value: 'x'"),
    ((*DEEPSEEK, "--moe-ckpt-strategy", "some"), "--moe-ckpt-strategy: invalid choice: 'some'"),
    ((*DEEPSEEK, "--moe-ckpt-replicas", "64"), "at most 31 are possible"),
    ((*DEEPSEEK, "--host-gbps", "-1"), "'--host-gbps': -1 must be a rate above 0"),
    ((*DEEPSEEK, "--iteration-time", "nan"), "'--iteration-time': nan must be"),
    ((*DEEPSEEK, "--lost-nodes", "4"), "--lost-nodes has '4', but must be ascending and from 0 to 3"),
    ((*DEEPSEEK, "--lost-ranks", "x"), "--lost-ranks has 'x'"),
    ((*SPARSE, "--moe-ckpt-window", "6", "--iteration", "2"), "--iteration is 2, but the first snapshot is complete"),
    ((*DEEPSEEK, "--mtbf", "10s"), "--mtbf 10s is not longer than a restart takes"),
    ((*DEEPSEEK, "--moe-ckpt-memory-limit", "1MB"), "a job would train unprotected"),
    ((*DEEPSEEK, "--moe-ckpt-memory-limit", "much"), "such as 200GiB"),
    (("--model", "GPT-125M-8E", "--num-experts", "0", "--freeze-experts"), "has no experts to freeze"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_line_with_the_value_and_exit_code_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_counts_may_differ_from_iteration_to_iteration_as_a_job_logs_them(facts: Facts, tmp_path: Path) -> None:
    def hot(expert: int) -> list[list[int]]:
        return [[9 if index == expert else 1 for index in range(8)]] * 6

    by_iteration = {1: hot(0), 2: hot(3), 3: hot(6)}
    series, log = tmp_path / "series.json", tmp_path / "metrics.jsonl"
    series.write_text(json.dumps(list(by_iteration.values())))
    lines = [
        {"loss": 1.0, "expert_tokens": None},
        *({"expert_tokens": {at: rows}} for at, rows in by_iteration.items()),
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = (*SMALL, "--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-selection", "load-aware", "--counts")
    assert facts(*asked, log) == facts(*asked, series) != facts(*asked[:-1])


def test_lines_of_a_metrics_log_that_are_torn_or_blank_are_passed_over(facts: Facts, tmp_path: Path) -> None:
    line = json.dumps({"expert_tokens": {1: [[9] + [1] * 7] * 6}})
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    whole.write_text(line)
    torn.write_bytes(b"\n" + line.encode() + b'\n\n{"loss": 1.0, "at\xc3')
    assert facts(*SMALL, "--counts", torn) == facts(*SMALL, "--counts", whole)


def test_a_metrics_log_that_leaves_out_iterations_is_refused(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps({"expert_tokens": {2: [[1] * 8] * 6}}))
    code, _, err = run(*SMALL, "--counts", log)
    assert code == 2
    assert "--moe-ckpt-log-expert-tokens" in err


@pytest.mark.parametrize("content", ["", "{", "[]", "[[1]]", '[["a"]]', "null", "[[-1, 1, 1, 1, 1, 1, 1, 1]]"], ids=str)
def test_a_counts_file_that_does_not_fit_the_model_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(content)
    code, _, err = run(*SMALL, "--counts", counts)
    assert code == 2
    assert str(counts) in err
    assert err.count("\n") == 1


def test_what_memory_has_no_room_for_is_given_up_as_in_a_job(facts: Facts) -> None:
    asked = (*SPARSE, "--moe-ckpt-window", "4")
    whole = facts(*asked)
    needed = whole["memory_of_a_node_bytes"]
    assert facts(*asked, "--moe-ckpt-memory-limit", str(needed))["window"] == 4
    less = facts(*asked, "--moe-ckpt-memory-limit", str(needed - 1))
    assert less["memory_of_a_node_bytes"] < needed
    assert "boundary logs" in less["does_not_fit"][0]["what"]
