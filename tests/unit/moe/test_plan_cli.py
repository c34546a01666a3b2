"""`moe-ckpt plan` as a person meets it: tables that add up, JSON that says the same, errors that help."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.types import FP16_FP32, Topology
from moe_ckpt.commands.main import main
from moe_ckpt.simulator.models import PRESETS

Run = Callable[..., tuple[int, str, str]]
Facts = Callable[..., dict[str, Any]]

WINDOW = (
    "window",
    "--model",
    "DeepSeek-MoE",
    "--pp",
    "4",
    "--ep",
    "8",
    "--budget-local-gbps",
    "1",
    "--iteration-time",
    "2.5",
)
SELECTIVE = ("selective", *WINDOW[1:], "--budget-remote-gbps", "0.5")
PEC = ("pec", "--model", "GPT-350M-16E", "--ep", "8", "--world-size", "16", "--pec-k-snapshot", "4")
SHARDING = ("sharding", "--model", "GPT-350M-16E", "--ep", "8", "--world-size", "16")
PLACEMENT = ("placement", "--model", "Mixtral-8x7B", "--pp", "4", "--ep", "8", "--world-size", "64")
RECOVERY = ("recovery", "--model", "DeepSeek-MoE", "--pp", "4", "--ep", "8", "--window", "6", "--lost-nodes", "1")
SAVES = ("saves", "--model", "GPT-350M-16E", "--ep", "8", "--world-size", "16", "--save-experts", "4")
ALL = (WINDOW, SELECTIVE, PEC, SAVES, SHARDING, PLACEMENT, RECOVERY)


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
def facts(run: Run) -> Callable[..., dict[str, Any]]:
    def call(*arguments: str | Path) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        data: dict[str, Any] = json.loads(out)
        return data

    return call


@pytest.mark.parametrize("arguments", ALL, ids=lambda arguments: arguments[0])
def test_every_plan_is_a_table_for_people_and_the_same_figures_as_json(run: Run, facts, arguments) -> None:
    code, out, err = run(*arguments)
    data = facts(*arguments)
    assert (code, err) == (0, "")
    assert data["title"] in out
    tables = [value for value in data.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    assert tables
    for value in data.values():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1000:
            assert str(value) in out


@pytest.mark.parametrize("arguments", ALL, ids=lambda arguments: arguments[0])
def test_the_same_question_gets_the_same_answer(facts, arguments) -> None:
    assert facts(*arguments) == facts(*arguments)


def test_a_window_anchors_every_operator_once_within_the_budget(facts) -> None:
    data = facts(*WINDOW)
    lanes, steps = data["ranks"], data["steps"]
    assert data["window"] == len(steps) > 1
    assert data["fits"] is True
    assert all(step["snapshot_bytes"] <= data["budget_per_iteration_bytes"] == 2_500_000_000 for step in steps)
    assert sum(step["anchored"] for step in steps) == max(lane["operators"] for lane in lanes)
    assert len(lanes) == 4 * 8


def test_a_budget_that_nothing_fits_into_tells_the_stall_beforehand(run: Run, facts) -> None:
    starved = (*WINDOW[:-3], "0.001", *WINDOW[-2:])
    data = facts(*starved)
    assert data["fits"] is False
    assert data["stall_per_window_s"] > 0
    assert "training waits for" in run(*starved)[1]


def skewed(path: Path, model: str, popular: int) -> Path:
    """A counts file in which one expert of each layer has most of the tokens."""
    shape = PRESETS[model]
    rows = [[9 if index == popular else 1 for index in range(shape.num_experts)] for _ in shape.moe_layers]
    path.write_text(json.dumps(rows))
    return path


ONE_RANK = ("window", "--model", "GPT-125M-8E", "--iteration-time", "1", "--budget-local-gbps")


def test_popular_experts_are_anchored_after_all_others(facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=0)
    of_experts = ("--window", "8", "--counts", counts)
    first = [step["first"] for step in facts(*ONE_RANK, "2", *of_experts)["steps"]]
    assert first[0] == "layer1.expert1"
    assert facts(*ONE_RANK, "2", "--window", "8")["steps"][0]["first"] == "layer1.expert0"


def test_the_stall_of_a_window_is_what_the_slowest_rank_waits_in_each_iteration(facts) -> None:
    data = facts(*ONE_RANK, "1.0", "--window", "2")
    stalls = [step["stall_s"] for step in data["steps"]]
    assert min(stalls) > 0
    assert data["stall_per_window_s"] == pytest.approx(sum(stalls))
    assert stalls == [pytest.approx(step["snapshot_bytes"] / 1e9 - 1) for step in data["steps"]]


def test_a_job_with_frozen_experts_saves_their_weights_once_and_the_rest_in_its_windows(facts) -> None:
    every, frozen = facts(*ONE_RANK, "2"), facts(*ONE_RANK, "2", "--freeze-experts")
    experts = PRESETS["GPT-125M-8E"].expert_parameters
    assert frozen["frozen_experts_of_a_rank,_saved_once_bytes"] == 2 * experts
    assert every["dense_snapshot_of_a_rank_bytes"] - frozen["dense_snapshot_of_a_rank_bytes"] == 12 * experts
    assert frozen["window"] < every["window"]
    assert not any(step["experts"] for step in frozen["steps"])


def test_the_window_by_counts_is_that_of_the_paper(facts) -> None:
    # 68 operators of 323 M parameters; 12 bytes for active and 2 for frozen ones have to fit into 2 GB.
    mean = PRESETS["GPT-125M-8E"].total_parameters / 68
    active = next(n for n in range(68, 0, -1) if mean * (12 * n + 2 * (68 - n)) <= 2e9)
    data = facts(*ONE_RANK, "2")
    assert data["window_by_counts_(moevement_alg._1)"] == -(-68 // active)
    assert data["iterations_replayed_at_most"] == 2 * (data["window"] - 1)


def test_experts_at_risk_are_saved_first(facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=5)
    base = ("selective", "--model", "GPT-125M-8E", "--iteration-time", "1", "--budget-remote-gbps", "1")
    data = facts(*base, "--budget-local-gbps", "1.55", "--counts", counts)
    assert [layer["experts"] for layer in data["layers"]] == [[5]] * 6
    partial = facts("pec", "--model", "GPT-125M-8E", "--pec-selection", "load-aware", "--counts", counts)
    assert [row["snapshot"] for row in partial["selections"] if row["checkpoint"] == 2] == [[5]] * 6


def test_two_peers_share_the_link_of_a_rank(facts) -> None:
    base = ("selective", "--model", "GPT-125M-8E", "--iteration-time", "1", "--budget-local-gbps", "9")
    one = facts(*base, "--budget-remote-gbps", "1.6")
    two = facts(*base, "--budget-remote-gbps", "3.2", "--replicas", "2")
    assert one["ranks"] == two["ranks"]
    assert 0 < one["experts_replicated,_of_all"] < one["experts_saved,_of_all"] == 1


def test_what_replication_cannot_send_in_an_iteration_is_its_lag(facts) -> None:
    data = facts("selective", "--model", "GPT-125M-8E", "--iteration-time", "1", "--budget-local-gbps", "2",
                 "--budget-remote-gbps", "0.5")  # fmt: skip
    (rank,) = data["ranks"]
    assert rank["replicated"] == 1, "one of each rank, however slow the link"
    assert data["lag_of_replication_s"] == pytest.approx(rank["remote_bytes"] / 0.5e9 - 1)


def test_partial_checkpoints_cover_all_experts_in_one_rotation(facts) -> None:
    data = facts(*PEC)
    assert data["experts_covered_by_those_shown"] == 1.0
    assert data["checkpoints_until_all_experts_are_saved"] == 4
    first, others = ([row for row in data["selections"] if bool(row["checkpoint"]) is later] for later in (False, True))
    assert {len(row["snapshot"]) for row in first} == {16}
    assert {row["checkpoint"] for row in others} == {1, 2, 3, 4}
    assert {len(row["snapshot"]) for row in others} == {4}
    assert all(set(row["persist"]) <= set(row["snapshot"]) for row in data["selections"])


def test_one_rank_alone_saves_the_whole_partial_checkpoint(facts) -> None:
    data = facts("pec", "--model", "GPT-350M-16E")
    shape = PRESETS["GPT-350M-16E"]
    parameters = shape.total_parameters - shape.expert_parameters * 15 // 16
    assert data["most_bytes_of_a_rank_bytes"] == data["checkpoint_bytes"] == 12 * parameters


def test_adaptive_checkpoints_have_as_many_experts_as_there_is_time_for(facts) -> None:
    adaptive = ("pec", "--model", "GPT-350M-16E", "--pec-adaptive", "--iteration-time", "1", "--checkpoints", "4")
    shape = PRESETS["GPT-350M-16E"]
    rest, experts = shape.total_parameters - shape.expert_parameters, shape.expert_parameters
    for k in (3, 8):
        gbps = 12 * (rest + experts * (k + 0.2) / 16) / 1e9
        rows = facts(*adaptive, "--budget-local-gbps", str(gbps))["selections"]
        assert {len(row["snapshot"]) for row in rows if row["checkpoint"] > 1} == {k}
        assert max(len(row["persist"]) for row in rows if row["checkpoint"] > 1) == 1


@pytest.mark.parametrize(("scope", "left_out_bytes"), [("weights", 4), ("optimizer", 8), ("both", 12)])
def test_each_scope_leaves_out_its_part_of_experts_that_are_not_selected(
    facts, scope: str, left_out_bytes: int
) -> None:
    shape = PRESETS["GPT-350M-16E"]
    share = 1 - shape.expert_parameters * 15 / 16 * left_out_bytes / (12 * shape.total_parameters)
    data = facts("pec", "--model", "GPT-350M-16E", "--pec-scope", scope)
    assert data["share_of_the_full_checkpoint"] == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "k", "balanced"),
    [
        (("--world-size", "8", "--ep", "8"), 1, False),  # 12 experts over 8 ranks
        (("--world-size", "8", "--ep", "8"), 2, True),  # 24 over 8
        (("--world-size", "16", "--ep", "8"), 2, False),  # 3 of a rank over 2 groups
        (("--pp", "2", "--ep", "4"), 1, False),  # 6 of each stage over 4
        (("--pp", "2", "--ep", "4"), 2, True),  # 12 over 4
    ],
)
def test_equation_9_is_asked_for_each_pipeline_stage(facts, layout: tuple[str, ...], k: int, balanced: bool) -> None:
    data = facts("sharding", "--model", "GPT-350M-16E", *layout, "--pec-k-snapshot", str(k))
    assert data["experts_balanced_(eq._9)"] is balanced


def test_partial_checkpoints_are_shared_out_as_a_job_does_it_with_state_that_ranks_hold_in_common(facts) -> None:
    model = ("--model", "GPT-350M-16E", "--world-size", "16", "--ep", "8", "--pec-k-snapshot", "1")
    compared = facts("sharding", *model, "--no-distributed-optimizer")["strategies"]
    whole = {row["strategy"]: row["most_of_a_rank_bytes"] for row in compared}
    for shard in ("equal", "adaptive"):
        most = facts("pec", *model, "--shard", shard)["most_bytes_of_a_rank_bytes"]
        assert most / whole[shard] == pytest.approx(12 / 14, rel=1e-3)  # snapshots store no compute weights


def test_sharding_names_the_bottleneck_of_each_strategy(facts) -> None:
    strategies = {row["strategy"]: row["most_of_a_rank_bytes"] for row in facts(*SHARDING)["strategies"]}
    assert strategies["equal"] < strategies["EE"] < strategies["none"]
    assert strategies["adaptive"] <= strategies["equal"]
    assert sum(row["adaptive_bytes"] for row in facts(*SHARDING)["ranks"]) == facts(*SHARDING)["checkpoint_bytes"]


def test_no_rank_keeps_its_replicas_on_its_own_node(facts) -> None:
    data = facts(*PLACEMENT)
    assert data["replicas_on_the_owner's_node"] == 0
    assert all(row["node"] not in row["their_nodes"] for row in data["ranks"])


def test_what_a_rank_keeps_is_what_its_owners_send_to_it(facts) -> None:
    data = facts("placement", "--model", "GPT-125M-8E", "--pp", "4", "--zero-stage", "3", "--ranks-per-node", "1")
    rows = {row["rank"]: row for row in data["ranks"]}
    assert any(row["sends_bytes"] != row["keeps_bytes"] for row in rows.values())
    for rank, row in rows.items():
        owners = [other for other in rows.values() if rank in other["peers"]]
        assert row["keeps_bytes"] == sum(owner["sends_bytes"] // 2 for owner in owners)
    assert data["most_sent_by_a_rank_bytes"] == max(row["sends_bytes"] for row in rows.values())


def test_placement_says_when_replicas_protect_from_nothing(run: Run) -> None:
    code, out, _ = run("placement", "--model", "GPT-125M-8E", "--ep", "8", "--replicas", "1")
    assert code == 0
    assert "do not protect" in out


def test_the_loss_of_a_node_sends_its_stage_back_and_nobody_else(facts) -> None:
    data = facts(*RECOVERY)
    (segment,) = data["segments"]
    assert (data["scope"], segment["stages"], data["iterations_replayed"]) == ("local", [1], 2 * 6 - 2)
    assert {row["tier"]: row["ranks"] for row in data["tiers"]} == {"parked": 24, "peer memory": 8}


def test_tied_embeddings_send_the_last_stage_back_with_the_first(facts) -> None:
    data = facts("recovery", "--model", "GPT-125M-8E", "--pp", "4", "--ranks-per-node", "1", "--lost-ranks", "0")
    assert [segment["stages"] for segment in data["segments"]] == [[0, 3]]


def test_ranks_read_their_full_state_from_the_tier_that_has_it(facts) -> None:
    job = (
        "recovery",
        "--model",
        "Mixtral-8x7B",
        "--pp",
        "2",
        "--ranks-per-node",
        "1",
        "--lost-ranks",
        "1",
        "--replicas",
        "0",
    )
    data = facts(*job, "--strategy", "full", "--interval", "10")
    assert [(segment["from"], segment["to"]) for segment in data["segments"]] == [(10, 19)]
    assert data["iterations_replayed"] == 9
    read = {row["tier"]: row["read_bytes"] for row in data["tiers"]}
    assert read["parked"] + read["own memory"] == 12 * PRESETS["Mixtral-8x7B"].total_parameters


def test_a_window_reads_full_state_once_and_weights_until_then(facts) -> None:
    job = (
        "recovery",
        "--model",
        "GPT-125M-8E",
        "--ranks-per-node",
        "1",
        "--lost-ranks",
        "0",
        "--window",
        "2",
        "--replicas",
        "0",
    )
    (tier,) = facts(*job)["tiers"]
    full = 12 * PRESETS["GPT-125M-8E"].total_parameters
    assert full < tier["read_bytes"] < full + 2 * PRESETS["GPT-125M-8E"].total_parameters


def test_partial_checkpoints_lose_the_tokens_of_stale_experts(facts, tmp_path: Path) -> None:
    counts = skewed(tmp_path / "counts.json", "GPT-125M-8E", popular=7)
    job = (
        "recovery",
        "--model",
        "GPT-125M-8E",
        "--ranks-per-node",
        "1",
        "--lost-ranks",
        "0",
        "--replicas",
        "0",
        "--strategy",
        "pec",
    )
    data = facts(*job, "--pec-k-snapshot", "4", "--interval", "10", "--iteration", "35", "--counts", counts)
    # Checkpoints of iterations 20 and 30 have 4 of 8 experts each: 4 are 10 iterations old.
    assert (data["recovered_iteration"], data["iterations_trained_again"]) == (30, 5)
    assert [layer["stale_experts"] for layer in data["losses"]] == [4] * 6
    assert {layer["lost_tokens"] for layer in data["losses"]} <= {10 * 4, 10 * (3 + 9)}
    assert data["lost_tokens"] == sum(layer["lost_tokens"] for layer in data["losses"])


def test_without_boundary_logs_the_whole_job_goes_back(facts) -> None:
    data = facts(*RECOVERY, "--no-upstream-logging")
    assert (data["scope"], data["ranks_that_go_back"]) == ("global", 32)


def test_a_lost_node_without_replicas_is_named_as_impossible(run: Run) -> None:
    code, _, err = run(*RECOVERY, "--replicas", "0")
    assert code == 1
    assert "no intact copies of stage 1" in err
    assert err.count("\n") == 1


def test_a_model_file_is_as_good_as_a_preset(facts, tmp_path: Path) -> None:
    shape = PRESETS["GPT-350M-16E"]
    names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size", "num_experts")
    values = {name: getattr(shape, name) for name in names} | {
        "moe_router_topk": 1,
        "moe_layer_freq": list(shape.moe_layer_freq),
        "max_position_embeddings": 1024,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
    }
    (tmp_path / "mine.json").write_text(json.dumps(values))
    given = facts("sharding", "--model", tmp_path / "mine.json", *SHARDING[3:])
    assert given["checkpoint_bytes"] == facts(*SHARDING)["checkpoint_bytes"]


def test_the_bytes_are_those_of_the_precision(facts) -> None:
    data = facts(*SHARDING)
    assert data["checkpoint_bytes"] == 14 * PRESETS["GPT-350M-16E"].total_parameters
    small = facts(*SHARDING, "--precision", "fp8-fp8")
    assert small["checkpoint_bytes"] == 5 * PRESETS["GPT-350M-16E"].total_parameters
    assert FP16_FP32.compute_bytes == 2


def test_a_model_may_have_any_name(run: Run, tmp_path: Path) -> None:
    values = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10, "ffn_hidden_size": 16}
    (tmp_path / "mine.json").write_text(json.dumps(values | {"name": "a[/red] my[12]-model"}))
    code, out, _ = run("placement", "--model", tmp_path / "mine.json", "--replicas", "0")
    assert code == 0
    assert "a[/red] my[12]-model" in out


def test_rows_limits_the_tables_for_people_and_says_so(run: Run) -> None:
    short, long = run(*PLACEMENT, "--rows", "3")[1], run(*PLACEMENT, "--rows", "0")[1]
    assert "and 61 more rows" in short
    assert len(long.splitlines()) - len(short.splitlines()) == 60


def test_the_world_is_as_large_as_the_degrees_need(facts) -> None:
    assert len(facts("sharding", "--model", "GPT-125M-8E", "--tp", "2", "--ep", "8", "--etp", "1")["ranks"]) == 8
    assert Topology(8, tp=2, ep=8, etp=1).dp == 4


BAD = [
    (("window", "--model", "nosuch", *WINDOW[3:]), "'nosuch'"),
    (("window", "--model", "gone/model.json", *WINDOW[3:]), "gone/model.json"),
    ((*WINDOW, "--tp", "0"), "'--tp': 0 must be a whole number from 1 to"),
    ((*WINDOW, "--world-size", "33"), "world_size 33 is not a multiple"),
    ((*WINDOW, "--pp", "29"), "28 layers cannot fill pp x vpp = 29 stages"),
    ((*WINDOW, "--ep", "7"), "ep 7 does not divide num_experts 64"),
    ((*WINDOW, "--window", "0"), "window 0 is neither auto nor a number"),
    ((*WINDOW, "--window", "many"), "window many is neither auto nor a number"),
    ((*WINDOW, "--window", "5000"), "window 5000 is more than the 71 operators"),
    ((*WINDOW[:-3], "-1", *WINDOW[-2:]), "'--budget-local-gbps': -1 must be a rate above 0"),
    ((*WINDOW[:-1], "nan"), "'--iteration-time': nan must be"),
    ((*SELECTIVE[:-1], "0"), "'--budget-remote-gbps': 0 must be"),
    ((*SAVES, "--save-experts", "17"), "--save-experts is 17, but must be from 1 to num_experts = 16"),
    ((*PEC, "--pec-k-snapshot", "17"), "--pec-k-snapshot is 17, but must be from 1 to num_experts = 16"),
    ((*PEC, "--pec-k-persist", "5"), "--pec-k-persist is 5, but must be from 1 to --pec-k-snapshot = 4"),
    ((*PEC, "--checkpoints", "0"), "'--checkpoints': 0 must be a whole number from 1 to 10000"),
    ((*SHARDING, "--pec-k-snapshot", "0"), "'--pec-k-snapshot': 0 must be a whole number from 1"),
    ((*PLACEMENT, "--replicas", "64"), "replicas is 64, but must be from 0 to"),
    ((*PLACEMENT, "--zero-stage", "4"), "'--zero-stage': 4 must be a whole number from 0 to 3"),
    ((*RECOVERY[:-2],), "nothing is lost"),
    ((*RECOVERY[:-1], "4"), "--lost-nodes has '4', but must be ascending and from 0 to 3"),
    ((*RECOVERY, "--lost-ranks", "x"), "--lost-ranks has 'x'"),
    ((*RECOVERY, "--iteration", "2"), "--iteration is 2, but the first snapshot is complete after iteration 6"),
    ((*PEC, "--rows", "-1"), "'--rows': -1 must be a whole number from 0"),
    ((*PLACEMENT[:-1], "9999999999999"), "'--world-size': 9999999999999 must be a whole number from 1 to 1000000"),
    ((*WINDOW, "--window", "99999999999999"), "99999999999999 is more than the 71 operators"),
    ((*RECOVERY, "--strategy", "full", "--interval", "0"), "'--interval': 0 must be"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_line_with_the_value_and_exit_code_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("missing", ["--budget-local-gbps", "--iteration-time", "--model"])
def test_what_a_plan_cannot_do_without_is_asked_for(run: Run, missing: str) -> None:
    index = WINDOW.index(missing)
    code, _, err = run(*WINDOW[:index], *WINDOW[index + 2 :])
    assert code == 2
    assert err == f"moe-ckpt: Missing option '{missing}'.\n"


def test_counts_may_differ_from_iteration_to_iteration_as_a_job_logs_them(facts, tmp_path: Path) -> None:
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
    asked = ("pec", "--model", "GPT-125M-8E", "--pec-selection", "load-aware", "--checkpoints", "4", "--counts")
    plan = facts(*asked, series)
    # The snapshot after iteration t knows the tokens of those before t; checkpoint 0 is after the first iteration.
    assert [row["snapshot"] for row in plan["selections"] if row["layer"] == 1][2:] == [[3], [6]]
    assert facts(*asked, log) == plan


def test_scopes_of_dense_saves_leave_out_weights_moments_or_both(facts) -> None:
    asked = *SAVES, "--save-experts-scope"
    left_out = {}
    for scope in ("weights", "optimizer", "both"):
        plan = facts(*asked, scope)
        left_out[scope] = plan["full_checkpoint_bytes"] - plan["checkpoint_bytes"]
    assert left_out["weights"] + left_out["optimizer"] == left_out["both"]
    assert left_out["weights"] * 8 == left_out["optimizer"] * 6, "2 bytes to compute with, 4 of masters, 8 of moments"


def test_dense_saves_by_load_know_the_tokens_of_all_iterations_in_between(facts, tmp_path: Path) -> None:
    series = tmp_path / "series.json"
    rows = [[[9 if index == hot else 1 for index in range(8)]] * 6 for hot in (0, 3, 3, 5, 6, 6)]
    series.write_text(json.dumps(rows))
    asked = ("saves", "--model", "GPT-125M-8E", "--save-experts-selection", "load-aware", "--save-interval", "2")
    plan = facts(*asked, "--checkpoints", "3", "--counts", series)
    shown = [row for row in plan["selections"] if row["layer"] == 1]
    # Tokens of iterations 3 and 4, and then of 3 to 6 without those of the expert that was saved.
    assert [(row["iteration"], row["experts"]) for row in shown[1:]] == [(4, [3]), (6, [6])]
    assert [row["unsaved_tokens"] for row in shown] == [0, 10 + 12, 12 + 2 + 20]


def test_a_metrics_log_that_leaves_out_iterations_is_refused(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps({"expert_tokens": {2: [[1] * 8] * 6}}))
    code, _, err = run("pec", "--model", "GPT-125M-8E", "--counts", log)
    assert code == 2
    assert "--moe-ckpt-log-expert-tokens" in err


@pytest.mark.parametrize("content", ["", "{", "[]", "[[1]]", '[["a"]]', "null", "[[-1, 1, 1, 1, 1, 1, 1, 1]]"], ids=str)
def test_a_counts_file_that_does_not_fit_the_model_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(content)
    code, _, err = run(*PEC, "--counts", counts)
    assert code == 2
    assert str(counts) in err
    assert err.count("\n") == 1


def test_a_timeline_is_predicted_beside_a_rollback_of_all_stages(facts) -> None:
    data = facts(*RECOVERY, "--iteration-time", "2", "--microbatches", "4")
    parts = {row["part"]: row for row in data["timeline"]}
    assert list(parts) == ["detect", "park", "restart", "fetch", "replay", "all"]
    local, whole = (
        {part: row[key] for part, row in parts.items()} for key in ("predicted_s", "rollback_of_all_stages_s")
    )
    assert local["all"] == pytest.approx(sum(seconds for part, seconds in local.items() if part != "all"))
    # One of four stages needs 4 turns for 4 microbatches, all of them 7; shares of what is frozen differ a little.
    assert local["replay"] / whole["replay"] == pytest.approx(4 / 7, rel=0.1)
    assert local["park"] > whole["park"] == 0


def test_frozen_operators_make_the_predicted_replay_cheaper(facts) -> None:
    common = ("recovery", "--model", "DeepSeek-MoE", "--ep", "8", "--lost-ranks", "0", "--iteration-time", "1")
    replay = {}
    for window in ("2", "6"):
        data = facts(*common, "--window", window)
        replay[window] = data["timeline"][4]["predicted_s"] / data["iterations_replayed"]
    assert replay["6"] < replay["2"] < 1


def test_figures_that_no_machine_has_are_refused(run: Run) -> None:
    code, _, err = run(*RECOVERY, "--peer-gbps", "0")
    assert code == 2
    assert "--peer-gbps" in err


def test_a_window_that_memory_has_no_room_for_gives_up_what_a_job_gives_up(facts: Facts) -> None:
    whole = facts(*WINDOW)
    needed = whole["snapshots_and_replicas_on_a_node_bytes"]
    within = facts(*WINDOW, "--memory-limit", str(needed))
    assert within == whole
    less = facts(*WINDOW, "--memory-limit", str(needed - 1))
    assert less["window"] == 1
    assert less["snapshots_and_replicas_on_a_node_bytes"] < needed
    assert "at once, as with --moe-ckpt-strategy full" in less["notes"][-1]


def test_a_limit_that_protects_nothing_is_refused(run: Run) -> None:
    for limit, why in (("1MB", "unprotected"), ("70%", "give bytes"), ("much", "such as 200GiB")):
        code, _, err = run(*WINDOW, "--memory-limit", limit)
        assert code == 2 and why in err
