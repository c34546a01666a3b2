"""What faults have cost, in simulation: the tokens that the state lacks, whatever jobs fell back to and gave up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from simulated import EXPERTS, LAYERS, OPERATORS, RANKS, Simulation, journal_of
from simulated_world.world import Event
from test_guarantees import PEC, Vandal

from megatron.core.dist_checkpointing.moe.policy import lineage
from megatron.core.dist_checkpointing.moe.policy.lineage import attempt_of
from megatron.core.dist_checkpointing.moe.recovery.recovery import RecoveryOutcome
from megatron.core.dist_checkpointing.moe.storage.manifest import decode
from megatron.core.dist_checkpointing.moe.types import OperatorId

ITERATIONS, INPUT_TOKENS, TOPK = 20, 64, 2
PLACES = (
    lambda start: (0, 0, 1, 1),
    lambda start: ((0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 0, 0))[min(start, 2)],
    lambda start: (start,) * RANKS,
)
"""Where ranks run: always at the same place, at other ones after each fault, always where no memory is left."""

Expert = tuple[int, int]
"""Layer and expert."""


def routed(start: int, rank: int, iteration: int) -> dict[int, tuple[int, ...]]:
    """Tokens by layer and expert; when an iteration is trained again, others."""
    draw = random.Random(f"{start} {rank} {iteration}")
    return {layer: tuple(draw.randrange(9) for _ in range(EXPERTS)) for layer in range(LAYERS)}


def of_all_ranks(start: int, iteration: int) -> Counter[Expert]:
    total: Counter[Expert] = Counter()
    for rank in range(RANKS):
        for layer, row in routed(start, rank, iteration).items():
            total.update({(layer, index): tokens for index, tokens in enumerate(row)})
    return total


@dataclass(frozen=True)
class State:
    """After an iteration of an attempt: tokens whose updates each expert has, and all whose updates were made."""

    iteration: int = 0
    held: Mapping[Expert, int] = field(default_factory=dict)
    routed: Mapping[Expert, int] = field(default_factory=dict)

    @property
    def lacking(self) -> int:
        """Tokens on the way to this state that left no trace in it."""
        return sum(self.routed.values()) - sum(self.held.values())


@dataclass
class Attempts:
    """Follows each attempt from the state in which it began; knows nothing of ledgers or of what has settled."""

    begun: dict[int, State] = field(default_factory=dict)
    told: int = 0
    fewer: int = 0

    def state(self, attempt: int, iteration: int) -> State:
        begun = self.begun.get(attempt, State())
        held, all_ = Counter(begun.held), Counter(begun.routed)
        for at in range(begun.iteration + 1, iteration + 1):
            if journal_of(0, at).skipped:
                continue  # no update, no loss
            tokens = of_all_ranks(attempt, at)
            held.update(tokens)
            all_.update(tokens)
        return State(iteration, held, all_)

    def recovered(self, attempt: int, outcome: RecoveryOutcome) -> None:
        """Compare what a recovery told with what its sources must have cost."""
        plan = outcome.plan
        used: dict[OperatorId, int] = {}
        for source in plan.taken:
            for one in filter(lambda operator: operator.is_expert, source.operators):
                used[one] = min(source.iteration, used.get(one, source.iteration))
        before = self.state(self._maker(outcome, plan.target), plan.target)
        held = {
            (one.layer, one.expert): self.state(self._maker(outcome, at), at).held[one.layer, one.expert]
            for one, at in used.items()
        }
        lost = {one: before.held[one.layer, one.expert] - held[one.layer, one.expert] for one in used}
        assert {one: plan.lost_tokens.get(one, 0) for one in used} == lost
        self.begun[attempt] = after = State(plan.target, held, before.routed)
        assert float(outcome.table.losses.plt) == after.lacking / (LAYERS * ITERATIONS * INPUT_TOKENS * TOPK)
        self.told += sum(lost.values())
        self.fewer += after.lacking < self.told

    @staticmethod
    def _maker(outcome: RecoveryOutcome, iteration: int) -> int:
        attempt = attempt_of(outcome.timeline, iteration)
        assert attempt is not None
        return int(attempt.rpartition("-")[2])


def striking(seed: int, lives: int) -> Callable[[int, Event], bool]:
    """Kills a rank `lives` times, soon after the last time or when the job has come further."""
    draw = random.Random(seed)
    left, due = lives, draw.randrange(3000, 9000)

    def strike(rank: int, event: Event) -> bool:
        nonlocal left, due
        due -= 1
        if due > 0 or not left or rank < 0:
            return False
        left, due = left - 1, draw.choice([draw.randrange(300, 3000), draw.randrange(3000, 9000)])
        return True

    return strike


def costs_are_told(seed: int) -> Attempts:
    """A job that is killed up to six times, with its memory or without, some of it damaged."""
    vandal = Vandal(seed) if seed % 3 == 0 else None
    config = replace(PEC, pec_k_snapshot=1, persist_dir="disk", persist_interval=2, replicas=seed % 2)
    simulation = Simulation(
        config, iterations=ITERATIONS, wipe=bool(seed % 4), between=vandal, max_starts=14,
        nodes=PLACES[seed % len(PLACES) if seed % 5 else 2],
    )  # fmt: skip
    simulation.counts = lambda rank, iteration: routed(
        len(simulation.job.starts) if simulation.job else 0, rank, iteration
    )
    attempts = Attempts()
    simulation.recovered = attempts.recovered
    try:
        simulation.run(seed, should_crash=striking(seed, 6))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return attempts


SAMPLE, ALL = range(3, 6), range(6, 120)


@pytest.mark.parametrize("seeds", [SAMPLE, pytest.param(ALL, marks=pytest.mark.full)], ids=["sample", "full"])
def test_the_state_lacks_exactly_the_tokens_that_are_told(seeds: range) -> None:
    found = [costs_are_told(seed) for seed in seeds]
    assert sum(bool(one.told) for one in found) >= len(seeds) // 2
    assert any(one.fewer for one in found), "no job gave up what a fault had cost: nothing is shown of that"


@pytest.mark.parametrize("seed", [3, 4])
def test_a_copy_of_an_attempt_that_is_not_among_the_newest_restores_as_well(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "RECENT_ATTEMPTS", 1)
    costs_are_told(seed)


def test_another_storage_gets_all_experts_after_a_restart_from_memory() -> None:
    config = replace(PEC, pec_k_snapshot=1, persist_dir="disk", persist_interval=2)
    simulation = Simulation(config, iterations=19, between=lambda job: job.disk.wipe())
    simulation.counts = lambda rank, iteration: routed(0, rank, iteration)
    _, job, _ = simulation.run(1, should_crash=killed_after(simulation, 15))
    assert simulation.told.outcomes, "it was killed, and memory stayed"
    manifests = [decode(segment.manifest, name) for name, segment in job.disk.segments.items()]
    stored = {tuple(row[:3]) for one in manifests for row in one.facts.scalars["operators"]}
    assert stored >= {(one.layer, one.kind.value, one.expert) for one in OPERATORS if one.is_expert}


def killed_after(simulation: Simulation, iteration: int) -> Callable[[int, Event], bool]:
    """Kills a rank once, when it has come so far."""
    done: list[int] = []

    def strike(rank: int, event: Event) -> bool:
        if done or rank < 0 or simulation.job is None or simulation.job.models[rank].iteration < iteration:
            return False
        done.append(rank)
        return True

    return strike


def test_what_routers_sent_in_a_step_that_was_skipped_is_reported_all_the_same() -> None:
    told: dict[int, tuple[tuple[int, ...], ...]] = {}
    simulation = Simulation(PEC, each=lambda _, rank: told.update(simulation.told.coordinators[rank].report().tokens))
    simulation.counts = lambda rank, iteration: routed(0, rank, iteration)
    simulation.run(1)
    (skipped,) = [iteration for iteration in told if journal_of(0, iteration).skipped]
    expected = of_all_ranks(0, skipped)
    assert told[skipped] == tuple(tuple(expected[layer, at] for at in range(EXPERTS)) for layer in range(LAYERS))
