"""`moe-ckpt plan` as a person meets it: tables that add up, JSON that says the same, errors that help."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.cli.main import main
from megatron.core.dist_checkpointing.moe.models import PRESETS
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, Topology

Run = Callable[..., tuple[int, str, str]]

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
ALL = (WINDOW, SELECTIVE, PEC, SHARDING, PLACEMENT, RECOVERY)


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


def test_popular_experts_of_a_counts_file_are_anchored_last(run: Run, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    shape = PRESETS["GPT-125M-8E"]
    counts.write_text(json.dumps([[9, 1, 1, 1, 1, 1, 1, 1]] * len(shape.moe_layers)))
    base = ("selective", "--model", "GPT-125M-8E", "--iteration-time", "1", "--budget-remote-gbps", "1")
    code, out, _ = run(*base, "--budget-local-gbps", "1.55", "--counts", counts, "--json")
    assert code == 0
    assert all(0 in layer["experts"] for layer in json.loads(out)["layers"] if layer["saved"])


def test_partial_checkpoints_cover_all_experts_in_one_rotation(facts) -> None:
    data = facts(*PEC)
    assert data["experts_covered_by_those_shown"] == 1.0
    assert data["checkpoints_until_all_experts_are_saved"] == 4
    assert {len(row["snapshot"]) for row in data["selections"]} == {4}
    assert all(set(row["persist"]) <= set(row["snapshot"]) for row in data["selections"])


def test_sharding_names_the_bottleneck_of_each_strategy(facts) -> None:
    strategies = {row["strategy"]: row["most_of_a_rank_bytes"] for row in facts(*SHARDING)["strategies"]}
    assert strategies["equal"] < strategies["EE"] < strategies["none"]
    assert strategies["adaptive"] <= strategies["equal"]
    assert sum(row["adaptive_bytes"] for row in facts(*SHARDING)["ranks"]) == facts(*SHARDING)["checkpoint_bytes"]


def test_no_rank_keeps_its_replicas_on_its_own_node(facts) -> None:
    data = facts(*PLACEMENT)
    assert data["replicas_on_the_owner's_node"] == 0
    assert all(row["node"] not in row["their_nodes"] for row in data["ranks"])


def test_placement_says_when_replicas_protect_from_nothing(run: Run) -> None:
    code, out, _ = run("placement", "--model", "GPT-125M-8E", "--ep", "8", "--replicas", "1")
    assert code == 0
    assert "do not protect" in out


def test_the_loss_of_a_node_sends_its_stage_back_and_nobody_else(facts) -> None:
    data = facts(*RECOVERY)
    (segment,) = data["segments"]
    assert (data["scope"], segment["stages"], data["iterations_replayed"]) == ("local", [1], 2 * 6 - 2)
    assert {row["tier"]: row["ranks"] for row in data["tiers"]} == {"parked": 24, "peer memory": 8}


def test_without_boundary_logs_the_whole_job_goes_back(facts) -> None:
    data = facts(*RECOVERY, "--no-upstream-logging")
    assert (data["scope"], data["ranks_that_replay"]) == ("global", 32)


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
    ((*WINDOW, "--tp", "0"), "tp is 0, but must be at least 1"),
    ((*WINDOW, "--world-size", "33"), "world_size 33 is not a multiple"),
    ((*WINDOW, "--pp", "29"), "28 layers cannot fill pp x vpp = 29 stages"),
    ((*WINDOW, "--ep", "7"), "ep 7 does not divide num_experts 64"),
    ((*WINDOW, "--window", "0"), "window is 0"),
    ((*WINDOW, "--window", "many"), "'many'"),
    ((*WINDOW, "--window", "5000"), "window is 5000, but must be from 1 to"),
    ((*WINDOW[:-3], "-1", *WINDOW[-2:]), "bandwidth_bytes_per_s is -1"),
    ((*WINDOW[:-1], "nan"), "iteration_time_s is nan"),
    ((*SELECTIVE[:-1], "0"), "remote_bytes_per_s is 0"),
    ((*PEC, "--pec-k-snapshot", "17"), "k is 17, but must be from 1 to num_experts = 16"),
    ((*PEC, "--pec-k-persist", "5"), "k_persist is 5, but must be from 1 to k_snapshot"),
    ((*PEC, "--checkpoints", "0"), "--checkpoints is 0"),
    ((*SHARDING, "--pec-k-snapshot", "0"), "k is 0, but must be from 1 to"),
    ((*PLACEMENT, "--replicas", "64"), "replicas is 64, but must be from 0 to"),
    ((*PLACEMENT, "--zero-stage", "4"), "zero_stage is 4, but must be from 0 to 3"),
    ((*RECOVERY[:-2],), "nothing is lost"),
    ((*RECOVERY[:-1], "4"), "--lost-nodes has '4', but must be ascending and from 0 to 3"),
    ((*RECOVERY, "--lost-ranks", "x"), "--lost-ranks has 'x'"),
    ((*RECOVERY, "--iteration", "2"), "--iteration is 2, but the first snapshot is complete after iteration 5"),
    ((*RECOVERY, "--strategy", "full", "--interval", "0"), "--interval is 0"),
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
    assert f"Missing option '{missing}'" in err


@pytest.mark.parametrize("content", ["", "{", "[]", "[[1]]", '[["a"]]', "null", "[[-1, 1, 1, 1, 1, 1, 1, 1]]"], ids=str)
def test_a_counts_file_that_does_not_fit_the_model_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(content)
    code, _, err = run(*PEC, "--counts", counts)
    assert code == 2
    assert str(counts) in err
    assert err.count("\n") == 1
