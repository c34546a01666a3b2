"""The manifest that says where the newest copy of each expert is, and which flags allow it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.manifest import framed, unframed
from megatron.core.dist_checkpointing.moe.types import expert
from moe_ckpt.dense.chain import MANIFEST, Chain, decode, encode, expert_entry, read_chain, stacked_name
from moe_ckpt.dense.merged import open_merged

MARK = "0123456789abcdef"
FIRST = Chain(2, {0: (2, 2), 3: (2, 2)}, {2: MARK}, 0, 4, "bf16")
SECOND = FIRST.followed_by(5, MARK[::-1], [expert(0, 1), expert(3, 0)], 1)
SCOPED = replace(SECOND, scope="weights")
COUNTED = replace(SECOND, unsaved={0: (7, 0), 3: (0, 4)}, ages={0: (1, 0), 3: (0, 1)})
STACKED = "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
APART = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight"


@pytest.mark.parametrize("chain", [FIRST, SECOND, SCOPED, COUNTED])
def test_what_is_read_is_what_was_written(chain: Chain) -> None:
    assert decode(encode(chain), "it") == chain


@pytest.mark.parametrize("chain", [SECOND, replace(COUNTED, scope="optimizer")])
def test_a_manifest_with_any_byte_changed_is_refused(chain: Chain) -> None:
    content = encode(chain)
    for at in range(len(content)):
        for change in (1, 0x20):
            damaged = content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]
            with pytest.raises(UnreadableCheckpoint):
                decode(damaged, "it")


def test_a_manifest_cut_short_anywhere_is_refused() -> None:
    content = encode(SECOND)
    for length in range(len(content)):
        with pytest.raises(UnreadableCheckpoint):
            decode(content[:length], "it")


def test_a_manifest_of_a_newer_format_is_refused_as_such() -> None:
    body = unframed("chain", encode(FIRST))
    assert body is not None
    with pytest.raises(NewerFormat, match="format 3"):
        decode(framed("chain", body.replace(b'"format":1', b'"format":3')), "it")


def test_a_chain_of_whole_experts_in_turn_is_written_so_that_older_versions_read_it() -> None:
    for chain, version in ((SECOND, b'"format":1,'), (SCOPED, b'"format":2,'), (COUNTED, b'"format":2,')):
        assert version in encode(chain)


def test_an_unreadable_manifest_is_no_missing_one(tmp_path: Path) -> None:
    assert read_chain(tmp_path) is None
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(UnreadableCheckpoint):
        read_chain(tmp_path)


def test_a_following_iteration_holds_what_was_selected_and_names_the_rest() -> None:
    assert SECOND.holders == {0: (2, 5), 3: (5, 2)}
    assert SECOND.iterations == {2, 5}
    assert SECOND.held_by(5) == (expert(0, 1), expert(3, 0))
    assert not SECOND.is_complete


def test_iterations_that_nothing_needs_are_dropped_from_the_chain() -> None:
    third = SECOND.followed_by(7, MARK, [expert(0, 0), expert(3, 1)], 0)
    assert third.iterations == {5, 7}
    assert set(third.marks) == {5, 7}


def test_staleness_is_told_by_layer_in_iterations() -> None:
    assert SECOND.staleness() == (
        "layer 0: experts 1 of iteration 5; 0 of iteration 2, 3 behind",
        "layer 3: experts 0 of iteration 5; 1 of iteration 2, 3 behind",
    )
    assert FIRST.staleness() == ()
    assert SCOPED.staleness()[0] == "layer 0: weights of experts 1 of iteration 5; 0 of iteration 2, 3 behind"
    assert COUNTED.staleness()[1].endswith("1 of iteration 2, 3 behind; 4 routed tokens' updates lost")


@pytest.mark.parametrize(("scope", "older"), [("weights", {"weight", "master"}), ("optimizer", {"exp_avg"})])
def test_of_an_expert_with_an_older_copy_only_what_the_scope_names_is_loaded_from_it(
    scope: str, older: set[str]
) -> None:
    names = {
        "weight": "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "master": "chained_1.optimizer.state.fp32_param.decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "exp_avg": "chained_1.optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight",
    }
    chain = replace(SECOND, scope=scope)
    sources = {short: chain.source(expert(0, 0), name) for short, name in names.items()}
    assert sources == {short: 2 if short in older else 5 for short in names}
    assert {chain.source(expert(0, 1), name) for name in names.values()} == {5}


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": "all"},
        {"unsaved": {0: (1, 1)}},
        {"unsaved": COUNTED.unsaved},
        {"ages": COUNTED.ages},
        {"unsaved": {**COUNTED.unsaved, 0: (1, -1)}, "ages": COUNTED.ages},
        {"unsaved": COUNTED.unsaved, "ages": {**COUNTED.ages, 0: (1,)}},
    ],
    ids=str,
)
def test_an_unknown_scope_and_tokens_of_other_experts_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(SECOND, **changes)


@pytest.mark.parametrize(
    ("holders", "marks"),
    [
        ({0: (2, 2)}, {2: MARK, 1: MARK}),
        ({0: (2, 1)}, {2: MARK}),
        ({0: (2, 3)}, {2: MARK, 3: MARK}),
        ({0: (2, 2), 1: (2,)}, {2: MARK}),
        ({}, {2: MARK}),
        ({0: (2, 2)}, {2: "mark"}),
    ],
)
def test_a_chain_that_leaves_something_unnamed_or_contradicts_itself_is_refused(
    holders: dict[int, tuple[int, ...]], marks: dict[int, str]
) -> None:
    with pytest.raises(UsageError):
        Chain(2, holders, marks, 0, None, "bf16")


@pytest.mark.parametrize(
    ("name", "offsets", "operator", "axes"),
    [
        (STACKED, (3, 5, 32, 0), expert(3, 5), 2),
        (APART, (5, 0, 0), expert(3, 5), 1),
        ("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight", (0, 0), expert(3, 5), 0),
    ],
)
def test_names_and_offsets_tell_whose_a_piece_is(
    name: str, offsets: tuple[int, ...], operator: object, axes: int
) -> None:
    entry = expert_entry(name, offsets)
    assert entry is not None
    assert (entry.operator, entry.axes) == (operator, axes)
    assert expert_entry(entry.own_name, (0, 0)) == type(entry)(entry.operator, entry.common, 0)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.mlp.router.weight",
        "decoder.layers.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "embedding.word_embeddings.weight",
        "rng_state",
    ],
)
def test_what_is_of_no_single_expert_stays_as_it_is(name: str) -> None:
    assert expert_entry(name, (0, 0)) is None


def test_names_are_stacked_as_they_were() -> None:
    for name, layers in ((STACKED, 4), (APART, None)):
        entry = expert_entry(name, (3, 5, 0))
        assert entry is not None
        assert stacked_name(entry.common, 3, layers) == name


def test_a_complete_iteration_may_be_published_under_another_name_but_not_a_partial_one(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / MANIFEST).write_bytes(encode(FIRST))
    assert open_merged(tmp_path / "release") is None
    (tmp_path / "release" / MANIFEST).write_bytes(encode(SECOND))
    with pytest.raises(UnreadableCheckpoint, match="is of iteration 5, not of this folder"):
        open_merged(tmp_path / "release")
