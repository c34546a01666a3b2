"""Jobs whose optimizer keeps masters and moments in few bits: killed, they come back to the last bit."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import low_precision_hooks as hooks
import pytest
from attempts import Cluster
from digested_runs import Seen, examined
from local_runs import assert_only_replayed, recover
from low_precision_rows import ROWS, model
from runs import Layout, differences, digest, flags, published
from sparse_runs import LENGTH, UNTIED, Case, Run, assert_identical, assert_replayed, killed
from sparse_runs import fault_free as run_fault_free
from world import Hook, World

BYTES = {
    "row 1": 2 + 2 + 4,
    "row 2": 4 + 8,
    "remainders": 2 + 2 + 4,
    "row 3": 1 + 2 + 8,
    "row 4": 1 + 2 + 3,
    "row 5": 1 + 1 + 3,
    "row 4 over bf16": 2 + 2 + 3,
    "row 5 over bf16": 2 + 1 + 3,
}
"""Of one parameter in a full state that is exact: compute weights, master, both moments."""
WEIGHTS = {name: 1 if name in ("row 2", "row 3", "row 4", "row 5") else 2 for name in ROWS}

ONE, PAIR, GRID = Layout(pp=1, ep=1, ranks=1), Layout(pp=1, ep=2, ranks=2), Layout(pp=2, ep=2, ranks=4)
TENSOR_PARALLEL = Layout(tp=2, pp=1, ep=1, ranks=2)


@pytest.fixture(scope="module")
def undisturbed(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Run]:
    """The training of a case without faults and protection; trained once."""
    kept: dict[Any, Run] = {}

    def run(case: Case) -> Run:
        if case.training not in kept:
            folder = tmp_path_factory.mktemp("undisturbed")
            kept[case.training] = run_fault_free(engine_world, corpus, case, folder)
        return kept[case.training]

    return run


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("row 4", GRID),
        ("remainders", PAIR),
        ("row 1", GRID),
        ("row 5", PAIR),
        ("row 4 over bf16", TENSOR_PARALLEL),
        ("row 3", GRID),
        ("row 4 over bf16", GRID),
        ("row 5", GRID),
        ("row 4", TENSOR_PARALLEL),
    ],
)
def test_killed_jobs_replay_with_frozen_operators_and_end_as_if_nothing_had_happened(
    name: str, layout: Layout, undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    case = Case(layout, model(name), window="3")
    run = killed(engine_cluster, case, tmp_path / "killed")
    assert len(run.outcomes) == 3
    assert published(run.folder)
    assert_replayed(run, int(case.window))
    assert_identical(run, undisturbed(case))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("row 4 over bf16", GRID),
        pytest.param("row 4", GRID, marks=pytest.mark.full),
        ("row 5", GRID),
        ("row 4", Layout(tp=2, pp=2, ep=1, ranks=4)),
    ],
)
def test_only_the_stage_of_the_lost_rank_runs_iterations_again(
    name: str, layout: Layout, undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    given, faults = (*model(name), *UNTIED), ("1@9:step", "2@14:forward-backward")
    case = Case(layout, given, window="3", recovery="auto", faults=faults)
    run = recover(engine_cluster, case, tmp_path)
    assert_only_replayed(run, layout, [[0]], [[1]])
    assert_identical(run, undisturbed(case))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["full", "pec"])
def test_other_strategies_bring_back_what_they_have(
    strategy: str, undisturbed: Callable[[Case], Run], engine_cluster: Cluster, tmp_path: Path
) -> None:
    case = Case(PAIR, model("row 5 over bf16"), faults=("1@8:forward-backward",))
    faults = [part for fault in case.faults for part in ("--moe-ckpt-inject-fault", fault)]
    chosen = ["--moe-ckpt-strategy", strategy, *(["--moe-ckpt-pec-k-snapshot", "1"] if strategy == "pec" else [])]
    saving = ["--save", tmp_path, "--save-interval", 6, "--metrics-jsonl", tmp_path / "reports"]
    length = [*"--train-iters 18 --lr-decay-iters 18".split()]
    outcomes = engine_cluster.run(PAIR, *length, *case.model, *saving, *chosen, *faults)
    assert len(outcomes) == 2
    if strategy == "full":
        assert re.search(r"recovered iteration \d+ exactly", outcomes[1].said)
        assert_identical(Run(tmp_path, tuple(outcomes)), undisturbed(case))
    else:
        assert "iteration       18/      18" in outcomes[1].said
        assert all(math.isfinite(report["lm_loss"]) for report in Run(tmp_path).reports)


@pytest.mark.ci
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(partial(hooks.a_scale_left_as_it_was, "exp_avg"), id="first moments", marks=pytest.mark.full),
        pytest.param(partial(hooks.a_scale_left_as_it_was, "master"), id="masters"),
        pytest.param(hooks.weights_recast_from_masters, id="recast"),
    ],
)
def test_a_scale_that_is_lost_or_weights_that_are_recast_are_noticed(
    mutation: Hook, engine_cluster: Cluster, tmp_path: Path
) -> None:
    case = Case(PAIR, model("row 4 over bf16"), window="3", faults=("1@8:forward-backward",))
    with pytest.raises(AssertionError, match=r"the replay of iteration [56] came out otherwise"):
        killed(engine_cluster, case, tmp_path / "killed", hooks=(mutation,))


@pytest.fixture(scope="module")
def seen(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("examined")
    given = (*model("row 4 over bf16"), "--moe-ckpt-strategy", "none")
    return examined(engine_world, corpus, PAIR, folder, given, [partial(hooks.examined, str(folder))])


def test_payloads_are_kept_in_their_dtype_each_with_its_scale(seen: Seen) -> None:
    for facts in seen:
        assert set(facts["dtypes"]) == {
            *("compute torch.bfloat16", "master torch.float16", "exp_avg torch.uint8", "exp_avg_sq torch.float16"),
            *(f"{field}_scale torch.float32" for field in ("master", "exp_avg", "exp_avg_sq")),
        }


def test_every_payload_and_every_scale_is_missed_by_name(seen: Seen) -> None:
    for facts in seen:
        assert facts["verdicts"]["as it is"] == ""
        for left_out in ("compute", "master", "exp_avg", "exp_avg_sq", *SCALES):
            assert "belongs to no operator" in facts["verdicts"][f"without {left_out}"], left_out


SCALES = {"master_scale": "scale of master_param", "exp_avg_scale": "exp_avg._scale_inv", "exp_avg_sq_scale": "scale"}


@pytest.mark.parametrize("left_out", SCALES)
def test_a_scale_is_named_for_what_it_is(left_out: str, seen: Seen) -> None:
    for facts in seen:
        assert SCALES[left_out] in facts["verdicts"][f"without {left_out}"]


def test_a_full_state_has_the_weights_because_masters_do_not_tell_them(seen: Seen) -> None:
    for facts in seen:
        assert 0 < facts["not the cast"] < 0.1
        assert facts["differences"]["everything"] == facts["differences"]["full parts, recast"] == []
        for left_out in ("compute", "master", "exp_avg", *SCALES):
            assert facts["differences"][f"without {left_out}"], left_out


def test_an_expert_without_tokens_stays_finite_and_without_the_guard_does_not(engine_world: World, corpus: str) -> None:
    argv = flags(corpus, ONE, *model("row 5 over bf16"), "--moe-ckpt-strategy", "none")
    guarded = engine_world.run(argv, 1, [hooks.without_tokens_for_one_expert])
    assert set(guarded.codes) == {0}, guarded.said
    unguarded = engine_world.run(argv, 1, [hooks.without_tokens_for_one_expert, hooks.scales_not_guarded])
    assert "is not finite" in unguarded.said


@pytest.mark.full
def test_an_expert_without_tokens_comes_back_to_the_bit(
    engine_world: World, engine_cluster: Cluster, corpus: str, tmp_path: Path
) -> None:
    case = Case(ONE, model("row 5"), window="3", faults=("0@8:forward-backward", "0@14:step"))
    folder, without_tokens = tmp_path / "undisturbed", hooks.without_tokens_for_one_expert
    saving = ("--save", str(folder), "--save-interval", "6", "--metrics-jsonl", str(folder / "reports"))
    outcome = engine_world.run(flags(corpus, ONE, *LENGTH, *case.model, *saving), 1, [without_tokens])
    assert set(outcome.codes) == {0}, outcome.said
    run = killed(engine_cluster, case, tmp_path / "killed", hooks=(without_tokens,))
    assert len(run.outcomes) == 3
    assert_replayed(run, int(case.window))
    assert_identical(run, Run(folder, (outcome,)))


@pytest.mark.parametrize("leveled", [True, False])
def test_weights_have_one_scale_on_all_ranks_and_without_leveling_have_not(
    leveled: bool, engine_world: World, corpus: str, tmp_path: Path
) -> None:
    argv = flags(corpus, Layout(pp=1, ep=1, ranks=2), *model("row 4"), "--moe-ckpt-strategy", "none")
    hook = partial(hooks.scales_of_weights_compared, str(tmp_path), leveled=leveled)
    outcome = engine_world.run(argv, 2, [hook])
    assert set(outcome.codes) == {0}, outcome.said
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["scales"] == 20
    assert bool(facts["differ"]) is not leveled
    assert facts["worst"] <= 1 / 16  # half a step of E4M3


def test_megatron_core_itself_still_cannot_do_what_is_not_left_to_it(
    engine_world: World, corpus: str, tmp_path: Path
) -> None:
    """When it can, `docs/upstream` and what is done here instead have had their time."""
    argv = flags(corpus, ONE, *model("remainders"), "--moe-ckpt-strategy", "none")
    outcome = engine_world.run(argv, 1, [partial(hooks.in_megatron_core_s_ways, str(tmp_path))])
    assert set(outcome.codes) == {0}, outcome.said
    said = json.loads((tmp_path / "rank-0.json").read_text())
    assert said["init_state_fn"] == "TypeError"
    assert said["fully_reshardable"] == "AssertionError"


STORING = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "3", "--moe-ckpt-persist-interval", "3")
EXPERT = 3 * 32 * 32
"""Parameters of one expert."""


def stored(folder: Path) -> dict[tuple[int, str], dict[str, int]]:
    """Of each snapshot in storage and each operator: bytes by field."""
    found: dict[tuple[int, str], dict[str, int]] = {}
    for path in folder.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())["manifest"]
        for record in manifest["records"]:
            if record["operator"] is not None:
                fields = found.setdefault((manifest["iteration"], str(record["operator"])), {})
                field = record["key"].rpartition("/")[2]
                fields[field] = fields.get(field, 0) + record["nbytes"]
    return found


SAMPLE = {"row 1": (), "row 4": (), "remainders": pytest.mark.ci, "row 5": pytest.mark.ci}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SAMPLE.get(name, pytest.mark.full)) for name in ROWS])
def test_stored_snapshots_have_the_bytes_of_the_table_and_saves_resume_to_the_bit(
    name: str, engine_world: World, engine_cluster: Cluster, corpus: str, tmp_path: Path
) -> None:
    saves, windows, resumed = tmp_path / "saves", tmp_path / "windows", tmp_path / "resumed"
    saving = [*model(name), "--save", saves, "--save-interval", 3]
    engine_cluster.run(ONE, *saving, *STORING, "--moe-ckpt-persist-dir", windows)
    experts = [fields for (_, operator), fields in stored(windows).items() if "'EXPERT'" in operator]
    assert {fields.get("compute", 0) for fields in experts} <= {0, WEIGHTS[name] * EXPERT}
    full = [sum(fields.values()) for fields in experts if "exp_avg" in fields]
    assert len(full) >= 4
    for count in full:  # two weights, each with four scales at most
        assert BYTES[name] * EXPERT <= count <= BYTES[name] * EXPERT + 2 * 4 * 4

    shutil.copytree(saves / "iter_0000003", resumed / "iter_0000003")
    (resumed / "latest_checkpointed_iteration.txt").write_text("3")
    again = (*model(name), "--save", str(resumed), "--load", str(resumed), "--save-interval", "3")
    outcome = engine_world.run(flags(corpus, ONE, *again), 1)
    assert set(outcome.codes) == {0}, outcome.said
    assert not differences(digest(resumed, 6), digest(saves, 6))


@pytest.mark.ci
def test_a_window_takes_as_much_less_as_its_parameters(engine_cluster: Cluster, tmp_path: Path) -> None:
    flags_of = {"16/32": ("--bf16", "--transformer-impl", "transformer_engine", "--moe-grouped-gemm")}
    taken = {}
    for name, given in (flags_of | {"row 5": model("row 5")}).items():
        folder = tmp_path / f"windows-{len(taken)}"
        engine_cluster.run(ONE, *given, *STORING, "--moe-ckpt-persist-dir", folder, job=folder.name)
        taken[name] = sum(sum(fields.values()) for fields in stored(folder).values())
    # (5 + 1) / (12 + 2) of what is in eight bits, were all weights in the window twice; embeddings and norms are not.
    assert 0.42 < taken["row 5"] / taken["16/32"] < 0.55
