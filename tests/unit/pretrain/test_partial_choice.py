"""Which experts successive dense checkpoints hold: in turn or by load, and what is known of the others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.extensions.partial_saves.lineage import ExpertLineage
from megatron.core.dist_checkpointing.moe.types import OperatorId
from moe_ckpt.dense.chain import Chain
from moe_ckpt.dense.partial_saves import PartialSaves, after_loading

STAGES, EXPERTS, MARK = ((0, 1), (2,)), 8, "0123456789abcdef"
IN_TURN = PartialSaves(STAGES, EXPERTS, None, 2, "bf16", 2, "sequential", "both")
BY_LOAD = replace(IN_TURN, selection="load-aware")
NOTHING = dict.fromkeys(range(3), (0,) * EXPERTS)


def counts(draw: random.Random) -> dict[int, tuple[int, ...]]:
    """Skewed: expert 0 of each layer has by far the most, expert 7 never any."""
    return {layer: (1000, *(draw.randrange(60) for _ in range(6)), 0) for layer in range(3)}


def held(chain: Chain) -> frozenset[OperatorId]:
    return frozenset(chain.held_by(chain.iteration))


@pytest.mark.parametrize("saves", [IN_TURN, BY_LOAD, replace(BY_LOAD, scope="weights", k=3)], ids=str)
def test_every_checkpoint_has_k_experts_of_each_layer_and_none_waits_for_ever(saves: PartialSaves) -> None:
    draw, chain = random.Random(1), saves.complete(1, MARK)
    assert chain.is_complete
    last = dict.fromkeys(chain.experts, 1)
    for iteration in range(2, 60):
        chain = saves.following(chain, iteration, MARK, counts(draw))
        assert len(held(chain)) == 3 * saves.k
        assert all(sum(one.layer == layer for one in held(chain)) == saves.k for layer in range(3))
        last.update(dict.fromkeys(held(chain), iteration))
        assert min(last.values()) >= iteration - 3 * -(-EXPERTS // saves.k)
        assert chain.scope == saves.scope


def test_unsaved_tokens_are_those_since_the_newest_copy_by_an_independent_count() -> None:
    draw, chain = random.Random(2), BY_LOAD.complete(1, MARK)
    routed: dict[int, dict[int, tuple[int, ...]]] = {}
    for iteration in range(2, 20):
        routed[iteration] = counts(draw)
        chain = BY_LOAD.following(chain, iteration, MARK, routed[iteration])
        for layer, row in chain.holders.items():
            since = [sum(routed[at][layer][e] for at in routed if at > holder) for e, holder in enumerate(row)]
            assert chain.unsaved[layer] == tuple(since)


def test_by_load_fewer_tokens_are_unsaved_than_in_turn_at_equal_bytes() -> None:
    unsaved = {}
    for saves in (IN_TURN, BY_LOAD):
        draw, chain, total, routed = random.Random(3), saves.complete(1, MARK), 0, {}
        for iteration in range(2, 50):
            routed[iteration] = counts(draw)
            chain = saves.following(chain, iteration, MARK, routed[iteration])
            total += sum(
                routed[at][layer][index]
                for layer, row in chain.holders.items()
                for index, holder in enumerate(row)
                for at in range(holder + 1, iteration + 1)
            )
        unsaved[saves] = total
    assert unsaved[BY_LOAD] < 0.6 * unsaved[IN_TURN]


def test_selection_scope_and_k_may_change_from_one_checkpoint_to_the_next() -> None:
    chain = BY_LOAD.following(IN_TURN.following(IN_TURN.complete(1, MARK), 2, MARK, {}), 3, MARK, NOTHING)
    assert not held(chain) & {one for one in chain.experts if chain.holder(one) == 2}
    assert set(chain.ages) == {0, 1, 2}
    chain = replace(IN_TURN, k=4, scope="optimizer").following(chain, 4, MARK, {})
    assert (chain.unsaved, chain.ages, chain.scope) == ({}, {}, "optimizer")


def test_after_loading_nothing_is_unsaved_any_more() -> None:
    chain = BY_LOAD.following(BY_LOAD.complete(1, MARK), 2, MARK, counts(random.Random(4)))
    assert any(map(any, chain.unsaved.values()))
    assert after_loading(chain).unsaved == NOTHING
    assert after_loading(chain).ages == chain.ages


def test_only_checkpoints_of_the_same_state_are_gone_on_from() -> None:
    chain = IN_TURN.complete(1, MARK)
    assert BY_LOAD.continues(chain)
    assert not BY_LOAD.continues(None)
    for other in (replace(BY_LOAD, content="fp32"), replace(BY_LOAD, num_experts=4), replace(BY_LOAD, stages=((0,),))):
        assert not other.continues(chain)


def test_tokens_of_a_checkpoint_that_failed_count_for_the_next_one() -> None:
    lineage = ExpertLineage()
    lineage.count(10, {0: (1, 2)})
    lineage.count(20, {0: (3, 4), 2: (5, 6)})
    assert lineage.counted == {0: (4, 6), 2: (5, 6)}
    lineage.saved(IN_TURN.complete(20, MARK))
    assert lineage.counted == {}


def test_tokens_that_came_while_a_checkpoint_was_written_count_for_the_next_one() -> None:
    lineage = ExpertLineage()
    lineage.count(10, {0: (1, 2)})
    lineage.count(20, {0: (3, 4)})
    lineage.saved(IN_TURN.complete(10, MARK))
    assert lineage.counted == {0: (3, 4)}
    lineage.count(30, {0: (5, 6)})
    assert lineage.counted == {0: (8, 10)}
    lineage.saved(IN_TURN.complete(20, MARK))
    assert lineage.counted == {0: (5, 6)}
