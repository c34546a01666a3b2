"""Partial snapshots of experts: after real kills every lost token is counted, bounded, and all else is exact."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster, Nodes
from effort import cases
from pec_hooks import watched
from runs import Layout, Train, differences, digest, reports_in
from world import Outcome, World

from megatron.core.dist_checkpointing.moe.policy.partial import PEC_SCOPES
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape
from moe_ckpt.commands.main import main
from moe_ckpt.simulator.paper_sizes import checkpoint_bytes

ITERATIONS, LAYERS, EXPERTS, TOPK = 30, 2, 4, 2
THRESHOLD = Fraction(15, 100)
PEC = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "1", "--moe-ckpt-log-expert-tokens")
SELECTIVE = ("--moe-ckpt-strategy", "selective", "--moe-ckpt-log-expert-tokens")
ONE_OF_EACH_RANK = ("--moe-ckpt-budget-local", "1B", "--moe-ckpt-budget-remote", "1B")
FEWER_SENT = ("--moe-ckpt-budget-local", "1GB", "--moe-ckpt-budget-remote", "1B")
FOUR, TWO = Layout(tp=1, pp=2, ep=2, ranks=4), Layout(tp=1, pp=1, ep=2, ranks=2)
# A report has the tokens up to the iteration before; struck at these points, that is all a recovery can go back to. Two
# follow each other so closely that some copies are older than the recovery before: their tokens must not count twice.
FAULTS = ("1@8:start", "0@12:end", "0@17:forward-backward", "1@18:end", "1@26:end")

Expert = tuple[int, int]
"""Layer and expert."""
Held = dict[Expert, dict[int, int]]
"""Of each expert, the tokens by iteration."""


@dataclass(frozen=True)
class Recovery:
    """One recovery: per layer what its table says was lost, the PLT in percent, and what each expert came back from.

    fault: how many reports had been written before it. restored: iteration of each expert's copy. tiers: where from.
    """

    target: int
    fault: int
    told: tuple[int, ...]
    told_plt: str
    restored: dict[Expert, int]
    tiers: frozenset[str]


@dataclass(frozen=True)
class Kills:
    """A job that was killed several times: its reports in the order of training, and what each rank wrote down."""

    outcomes: list[Outcome]
    reports: list[dict[str, Any]]
    events: list[list[dict[str, Any]]]
    storage: Path

    @property
    def recoveries(self) -> list[Recovery]:
        """All of them, in order."""
        starts = [
            at
            for at in range(1, len(self.reports))
            if self.reports[at]["iteration"] <= self.reports[at - 1]["iteration"]
        ]
        planned = [event for event in self.events[0] if event["event"] == "recovered"]
        tables = [outcome for outcome in self.outcomes if "recovered iteration" in outcome.said]
        assert len(starts) == len(planned) == len(tables)
        return [_recovery(*one) for one in zip(starts, planned, tables, strict=True)]

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """Iteration and K of each snapshot."""
        return [(event["iteration"], event["k"]) for event in self.events[0] if event["event"] == "planned"]


def _recovery(start: int, planned: dict[str, Any], table: Outcome) -> Recovery:
    restored: dict[Expert, int] = {}
    for iteration, _, layer, index in planned["taken"]:
        restored[layer, index] = min(iteration, restored.get((layer, index), iteration))
    lines = re.findall(r"lost in layer (\d+): the updates of (\d+) routed tokens", table.said)
    lost = {int(layer): int(tokens) for layer, tokens in lines}
    (percent,) = re.findall(r"proportion of lost tokens, all faults so far: (\S+) %", table.said)
    (momentary,) = re.findall(r"momentary lost tokens \(MLT\), all faults so far: (\S+) %", table.said)
    (portion,) = re.findall(r"portion of lost tokens by PEC eq. 4, all faults so far: (\S+) %", table.said)
    assert portion == percent  # all layers route equally many tokens, and then the two definitions agree
    assert float(momentary) == pytest.approx(LAYERS * float(percent), abs=3e-4)  # the sum in place of the mean
    tiers = frozenset(tier for _, tier, *_ in planned["taken"])
    told = tuple(lost.get(layer, 0) for layer in range(LAYERS))
    return Recovery(planned["target"], start, told, percent, restored, tiers)


@dataclass(frozen=True)
class Cost:
    """Tokens per layer that one recovery lost, and by fault what the state lacks with which training continued."""

    lost: tuple[int, ...]
    lacks: tuple[int, ...]

    @property
    def so_far(self) -> int:
        return sum(self.lacks)


def recount(kills: Kills) -> list[Cost]:
    """What each recovery cost, from nothing but the logged counts and how old the copies were.

    `held` has, by iteration, the tokens whose updates the live experts have, and `lacks` what earlier faults took from
    them; `was` has both as they were after each iteration. Going back takes up what was at the target, and so leaves
    out faults whose outcome training gave up; it drops what came after the target for all, and what came after its own
    copy for each expert; only the latter is lost, the former comes again.
    """
    held: Held = {(layer, index): {} for layer in range(LAYERS) for index in range(EXPERTS)}
    lacks: tuple[int, ...] = ()
    was, found, waiting = {0: (held, lacks)}, list[Cost](), list(kills.recoveries)
    for at, report in enumerate(kills.reports):
        if waiting and at == waiting[0].fault:
            recovery = waiting.pop(0)
            assert recovery.target in was, "the log ends too early to recount"
            before, lacks = was[recovery.target]
            held = {one: upto(before[one], copied) for one, copied in recovery.restored.items()}
            lost = tuple(_tokens(before, layer) - _tokens(held, layer) for layer in range(LAYERS))
            lacks += (sum(lost),)
            found.append(Cost(lost, lacks))
        for iteration, rows in (report["expert_tokens"] or {}).items():
            held = {(layer, index): {**held[layer, index], int(iteration): rows[layer][index]} for layer, index in held}
            was[int(iteration)] = held, lacks
    return found


def upto(tokens: dict[int, int], last: int) -> dict[int, int]:
    """What came until the iteration `last`."""
    return {iteration: count for iteration, count in tokens.items() if iteration <= last}


def _tokens(held: Held, of_layer: int) -> int:
    return sum(sum(tokens.values()) for (layer, _), tokens in held.items() if layer == of_layer)


def plt(case: Case, cost: Cost) -> Fraction:
    """MoC eq. 7 over several faults: the mean over layers of lost tokens / (tokens of the training x TopK)."""
    return Fraction(cost.so_far, LAYERS * ITERATIONS * case.tokens * TOPK)


@dataclass(frozen=True)
class Case:
    """A job on two nodes that is killed as `faults` say; `lost` are the faults with which a node's memory is lost,
    `emptied` those that take the memory of both.

    With `stored` snapshots go to storage as well and memory has no replicas, else they have one replica each.
    """

    layout: Layout
    extra: tuple[str, ...] = ()
    stored: bool = True
    faults: tuple[str, ...] = FAULTS[:3]
    lost: tuple[int, ...] = (1,)
    emptied: tuple[int, ...] = ()
    strategy: tuple[str, ...] = PEC

    @property
    def nodes(self) -> Nodes:
        """Which node is lost when."""
        half = self.layout.ranks // 2
        places = ("node-0",) * half + ("node-1",) * half
        return Nodes((places,), lost={fault: f"node-{index % 2}" for index, fault in enumerate(self.lost)})

    @property
    def tokens(self) -> int:
        """Input tokens of one iteration: sequence length times batch size."""
        return 32 * self.layout.microbatches * self.layout.ranks // self.layout.pp


IN_TURN, BY_LOAD = Case(FOUR), Case(FOUR, ("--moe-ckpt-pec-selection", "load-aware", "--bf16"), stored=False)
WEIGHTS_ONLY = Case(TWO, ("--moe-ckpt-pec-scope", "weights", "--bf16"), faults=FAULTS[:2])
MOMENTS_ONLY = Case(TWO, ("--moe-ckpt-pec-scope", "optimizer", "--bf16"), faults=FAULTS[:2])
UNBOUNDED = Case(TWO, stored=False, faults=FAULTS, lost=())
# What memory and storage have left can be older than where an earlier recovery continued.
STORED = Case(TWO, faults=FAULTS, lost=(1, 3))
BY_RISK = Case(TWO, ONE_OF_EACH_RANK, stored=False, faults=FAULTS, lost=(), strategy=SELECTIVE)
BY_RISK_FROM_PEERS = Case(TWO, FEWER_SENT, stored=False, lost=(0, 1, 2), strategy=SELECTIVE)
BY_RISK_FROM_STORAGE = Case(TWO, ONE_OF_EACH_RANK, faults=FAULTS[:3], lost=(), emptied=(1,), strategy=SELECTIVE)
BOUNDED = replace(UNBOUNDED, extra=("--moe-ckpt-plt-threshold", str(float(THRESHOLD))))


@pytest.fixture(scope="module")
def killed(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Kills]:
    """What became of a case; each is run once."""
    done: dict[Case, Kills] = {}
    shared = Path("/dev/shm")

    def run(case: Case) -> Kills:
        if case not in done:
            folder = tmp_path_factory.mktemp("killed")
            storage = ("--moe-ckpt-persist-dir", folder / "storage", "--moe-ckpt-persist-interval", "2")
            memory = Path(tempfile.mkdtemp(prefix="moe-ckpt-pec-", dir=shared if shared.is_dir() else None))

            def between(attempt: int) -> None:
                for node in memory.glob("node-*") if attempt in case.emptied else ():
                    shutil.rmtree(node)

            try:
                outcomes = Cluster(world, corpus, memory).run(
                    case.layout, *case.strategy, *case.extra, "--moe-ckpt-replicas", 0 if case.stored else 1,
                    *(storage if case.stored else ()), "--train-iters", ITERATIONS, "--lr-decay-iters", ITERATIONS,
                    "--metrics-jsonl", folder / "reports", *injected(case.faults), nodes=case.nodes,
                    hooks=[partial(watched, str(folder))], between=between,
                )  # fmt: skip
            finally:
                shutil.rmtree(memory)
            events = written(folder, case.layout)
            done[case] = Kills(outcomes, reports_in(folder / "reports"), events, folder / "storage")
        return done[case]

    return run


def written(folder: Path, layout: Layout) -> list[list[dict[str, Any]]]:
    """What each rank wrote down."""
    return [lines(folder / f"rank-{rank}.jsonl") for rank in range(layout.ranks)]


def injected(faults: Sequence[str]) -> list[str]:
    """Flags that kill ranks."""
    return [part for fault in faults for part in ("--moe-ckpt-inject-fault", fault)]


def lines(path: Path) -> list[dict[str, Any]]:
    """Objects in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("case", "tier"),
    [
        pytest.param(IN_TURN, "PERSISTENT", id="in-turn-from-storage", marks=pytest.mark.full),
        pytest.param(BY_LOAD, "PEER_MEMORY", id="by-load-from-peers", marks=pytest.mark.full),
        pytest.param(MOMENTS_ONLY, "PERSISTENT", id="moments-only", marks=pytest.mark.full),
        pytest.param(UNBOUNDED, "OWN_MEMORY", id="five-faults", marks=pytest.mark.ci),
        pytest.param(STORED, "PERSISTENT", id="five-faults-with-storage", marks=pytest.mark.full),
        pytest.param(BY_RISK, "OWN_MEMORY", id="selective-processes-lost", marks=pytest.mark.ci),
        pytest.param(BY_RISK_FROM_PEERS, "PEER_MEMORY", id="selective-nodes-lost", marks=pytest.mark.full),
        pytest.param(BY_RISK_FROM_STORAGE, "PERSISTENT", id="selective-all-nodes-lost", marks=pytest.mark.full),
    ],
)
def test_the_tokens_that_each_recovery_reports_as_lost_are_those_of_an_independent_recount(
    case: Case, tier: str, killed: Callable[[Case], Kills]
) -> None:
    kills = killed(case)
    costs = recount(kills)
    assert len(costs) == len(case.faults)
    assert [recovery.told for recovery in kills.recoveries] == [cost.lost for cost in costs]
    assert sum(any(cost.lost) for cost in costs) > len(costs) // 2, "faults that cost nothing show nothing"
    percents = [float(100 * plt(case, cost)) for cost in costs]
    assert [recovery.told_plt for recovery in kills.recoveries] == [f"{percent:.4f}" for percent in percents]
    assert tier in frozenset().union(*(recovery.tiers for recovery in kills.recoveries))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(IN_TURN, id="in-turn", marks=pytest.mark.full),
        pytest.param(BY_LOAD, id="by-load", marks=pytest.mark.full),
        pytest.param(WEIGHTS_ONLY, id="weights-only", marks=pytest.mark.ci),
        pytest.param(MOMENTS_ONLY, id="moments-only", marks=pytest.mark.full),
        pytest.param(UNBOUNDED, id="five-faults"),
        pytest.param(STORED, id="five-faults-with-storage", marks=pytest.mark.full),
        pytest.param(BY_RISK, id="selective-processes-lost", marks=pytest.mark.ci),
        pytest.param(BY_RISK_FROM_PEERS, id="selective-nodes-lost", marks=pytest.mark.full),
        pytest.param(BY_RISK_FROM_STORAGE, id="selective-all-nodes-lost", marks=pytest.mark.full),
    ],
)
def test_after_each_recovery_all_but_experts_is_as_it_was_and_each_expert_as_its_copy(
    case: Case, killed: Callable[[Case], Kills]
) -> None:
    older = 0
    for rank, events in enumerate(killed(case).events):
        was: dict[int, dict[str, str]] = {}
        for event in events:
            if event["event"] == "ended":
                was[event["iteration"]] = event["state"]
            if event["event"] == "recovered":
                copies = {name: iteration for owner, iteration, _, name in event["experts"] if owner == rank}
                expected = {name: was[iteration][name] for name, iteration in copies.items()}
                assert event["state"] == {"rest": was[event["target"]]["rest"], **expected}
                older += len({iteration for iteration in copies.values() if iteration < event["target"]})
    assert older, "no copy was older than the rest: nothing is shown"


@pytest.mark.ci
def test_inspect_says_of_the_storage_what_all_faults_have_cost(
    killed: Callable[[Case], Kills], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = killed(WEIGHTS_ONLY)
    monkeypatch.setattr(sys, "argv", ["moe-ckpt", "inspect", str(kills.storage), "--json"])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    costs, shares = recount(kills), ("plt_moc", "plt_pec", "mlt")
    assert found["lost_tokens_of_all_faults"] == costs[-1].so_far
    assert list(costs[-1].lacks) == [row["lost_tokens"] for row in found["lost_tokens"]]
    share = float(plt(WEIGHTS_ONLY, costs[-1]))
    assert [found[name] for name in shares] == pytest.approx([share, share, LAYERS * share])
    last = kills.reports[-1]["lost_tokens"]
    assert [found[name] for name in shares] == pytest.approx([last[name] for name in ("plt", "plt_pec", "mlt")])


@pytest.mark.parametrize(
    ("case", "lost", "kept"),
    [
        pytest.param(WEIGHTS_ONLY, "weights", "moments", id="weights", marks=pytest.mark.ci),
        pytest.param(MOMENTS_ONLY, "moments", "weights", id="optimizer", marks=pytest.mark.full),
    ],
)
def test_only_what_the_scope_leaves_out_comes_back_older_and_it_is_named(
    case: Case, lost: str, kept: str, killed: Callable[[Case], Kills]
) -> None:
    kills = killed(case)
    older = {
        name.split()[-1]
        for events in kills.events
        for event in events
        if event["event"] == "recovered"
        for _, iteration, _, name in event["experts"]
        if iteration < event["target"]
    }
    assert older == {lost}
    told = [line for outcome in kills.outcomes for line in outcome.said.splitlines() if "lost in layer" in line]
    assert told
    assert all(re.search(f"in their (master )?{lost} only; their (master )?{kept} are those of", line) for line in told)


@pytest.mark.ci
def test_a_threshold_raises_k_in_time_to_bound_what_all_faults_cost(killed: Callable[[Case], Kills]) -> None:
    unbounded, bounded = killed(UNBOUNDED), killed(BOUNDED)
    assert len(unbounded.recoveries) == len(bounded.recoveries) == len(FAULTS) == 5
    assert plt(UNBOUNDED, recount(unbounded)[-1]) > THRESHOLD, "without a threshold the same faults must cost more"
    costs = recount(bounded)
    assert [recovery.told for recovery in bounded.recoveries] == [cost.lost for cost in costs]
    assert 0 < plt(BOUNDED, costs[-1]) <= THRESHOLD
    assert min(k for iteration, k in bounded.chosen if iteration <= bounded.recoveries[0].target) == 1
    assert 1 <= mean_k_since_the_first_fault(unbounded) < mean_k_since_the_first_fault(bounded)


def mean_k_since_the_first_fault(kills: Kills) -> float:
    """Of all snapshots from there on: after a single fault a loaded machine may be too slow for any."""
    return statistics.mean(k for iteration, k in kills.chosen if iteration > kills.recoveries[0].target)


DROPPING = replace(
    BY_RISK,
    extra=(*ONE_OF_EACH_RANK, "--moe-expert-capacity-factor", "1.0", "--moe-ckpt-capacity-boost", "50"),
    faults=("1@8:start", "0@17:forward-backward"),
)


@pytest.mark.ci
def test_experts_take_more_tokens_until_what_they_lost_is_made_up(killed: Callable[[Case], Kills]) -> None:
    kills = killed(DROPPING)
    owed = [report["lost_tokens"]["owed"] for report in kills.reports]
    first, second = (recovery.fault for recovery in kills.recoveries)
    assert set(owed[:first]) == {0}
    lost = [sum(recovery.told) for recovery in kills.recoveries]
    assert owed[first] == lost[0] > 0
    between = owed[first:second]
    assert between == sorted(between, reverse=True)
    assert between[-1] < between[0], "nothing was made up"
    # What a report says is owed was known one iteration before, and is with the snapshot of that.
    target = kills.recoveries[1].target
    (before,) = (one["lost_tokens"]["owed"] for one in kills.reports[first:second] if one["iteration"] == target + 1)
    assert owed[second] == before + lost[1]
    assert owed[-1] < owed[second]


@pytest.mark.ci
def test_without_token_dropping_a_boost_says_that_it_has_no_effect(killed: Callable[[Case], Kills]) -> None:
    kills = killed(BY_RISK)
    assert {report["lost_tokens"]["owed"] for report in kills.reports} == {0}
    said = [outcome.said for outcome in kills.outcomes if "--moe-ckpt-capacity-boost 10 has no effect" in outcome.said]
    assert len(said) == sum(any(recovery.told) for recovery in kills.recoveries)


@pytest.mark.ci
def test_with_k_of_all_experts_nothing_is_lost_though_a_node_goes(
    cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    straight, through = tmp_path / "straight", tmp_path / "through"
    train(TWO, "--save", straight)
    outcomes = cluster.run(
        TWO, *PEC, "--moe-ckpt-pec-k-snapshot", EXPERTS, "--save", through, *injected(["1@6:start"]),
        nodes=replace(IN_TURN, layout=TWO, lost=(0,)).nodes,
    )  # fmt: skip
    assert re.search("recovered iteration [1-4] exactly", outcomes[1].said), outcomes[1].said
    assert "routed tokens" not in outcomes[1].said
    assert not differences(digest(through, 6), digest(straight, 6))


@pytest.mark.ci
def test_a_job_that_begins_from_a_checkpoint_goes_on_counting_what_faults_have_cost(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = (*PEC, "--train-iters", 12, "--lr-decay-iters", 12, "--save", tmp_path / "saved")
    left = (*run, "--exit-interval", 10, "--metrics-jsonl", tmp_path / "left", *injected(["1@8:start"]))
    cluster.run(TWO, *left, nodes=replace(IN_TURN, layout=TWO, lost=()).nodes)
    for memory in cluster.memory.iterdir():
        shutil.rmtree(memory)
    cluster.run(TWO, *run, "--load", tmp_path / "saved", "--metrics-jsonl", tmp_path / "later")
    *_, last = reports_in(tmp_path / "left")
    later = reports_in(tmp_path / "later")
    assert [report["iteration"] for report in later] == [11, 12]
    assert last["lost_tokens"]["plt"] > 0
    assert {report["lost_tokens"]["plt"] for report in later} == {last["lost_tokens"]["plt"]}


@pytest.mark.ci
def test_adaptive_snapshots_have_the_experts_that_there_is_time_for_and_storage_as_many_as_it_takes(
    cluster: Cluster, tmp_path: Path
) -> None:
    kept = ("--moe-ckpt-persist-dir", tmp_path / "storage", "--moe-ckpt-persist-interval", 12)
    length = ("--train-iters", 24, "--lr-decay-iters", 24)
    cluster.run(TWO, *PEC, "--moe-ckpt-pec-adaptive", *length, *kept, hooks=[partial(watched, str(tmp_path))])
    of_ranks = [[event for event in events if event["event"] == "planned"] for events in written(tmp_path, TWO)]
    assert of_ranks[0] == of_ranks[1]
    first, *_, last = of_ranks[0]
    assert last["k"] > 1, "a few kilobytes are copied in no time"
    assert last["persist_interval"] < first["persist_interval"] == 12


# So large that random states, step counts and alignment, which no equation counts, are small beside it.
LARGE = ModelShape(
    "large", LAYERS, 128, 4, 384, 512, num_experts=EXPERTS, moe_ffn_hidden_size=512, gated_linear_unit=True
)
LARGE_FLAGS = "--hidden-size 128 --moe-ffn-hidden-size 512 --train-iters 9 --lr-decay-iters 9".split()


@pytest.mark.parametrize("scope", cases(PEC_SCOPES, fast=("weights",)))
def test_the_files_of_a_snapshot_with_one_expert_per_layer_have_the_share_of_bytes_that_is_predicted(
    scope: str, cluster: Cluster, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    kept = ("--moe-ckpt-persist-dir", storage, "--moe-ckpt-persist-interval", 1, "--moe-ckpt-persist-keep", 9)
    cluster.run(
        TWO, *PEC, "--moe-ckpt-pec-scope", scope, *LARGE_FLAGS, *kept, hooks=[partial(watched, str(tmp_path))]
    )  # fmt: skip
    (whole, k), *others = [
        (one["iteration"], one["k"]) for one in written(tmp_path, TWO)[0] if one["event"] == "planned"
    ]
    assert k == EXPERTS
    nbytes = bytes_by_iteration(storage)
    shares = [nbytes[iteration] / nbytes[whole] for iteration, k in others if k == 1 and iteration in nbytes]
    assert shares
    assert shares == pytest.approx([float(predicted(scope))] * len(shares), rel=0.02)


def bytes_by_iteration(storage: Path) -> dict[int, int]:
    """Lengths of all files of each snapshot."""
    found: dict[int, int] = {}
    for folder in storage.iterdir():
        snapshot = SnapshotId.parse(folder.name)
        if snapshot is not None:
            nbytes = sum(path.stat().st_size for path in folder.iterdir())
            found[snapshot.iteration] = found.get(snapshot.iteration, 0) + nbytes
    return found


def predicted(scope: str) -> Fraction:
    """Share of a full snapshot that a snapshot with one expert per layer has: MoC eq. 6 over eq. 5.

    The weights of a parameter take B_w bytes, the optimizer's state B_o: here those of master weights, whose cast
    compute weights are, and of both moments. What an expert that is not selected goes without is B_w of each parameter
    with the scope W, B_o with O, and both with WO, where the bytes per parameter cancel out.
    """
    weights, optimizer = FP32.master_bytes, FP32.moments_bytes
    left_out = {"weights": weights, "optimizer": optimizer, "both": weights + optimizer}[scope]
    missing = LARGE.expert_parameters * (EXPERTS - 1) // EXPERTS
    share = 1 - Fraction(missing * left_out, LARGE.total_parameters * (weights + optimizer))
    if scope == "both":
        assert share == Fraction(*(checkpoint_bytes(LARGE, FP32, k).total_bytes for k in (1, EXPERTS)))
    return share
