"""Typed values of all ranks, and from ranks to others: what is no such value is the fault of a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron.core.dist_checkpointing.moe.ports import PeerLost
from megatron.core.dist_checkpointing.moe.replication.agreement import exchanged, merged


def transport(came: bytes) -> Any:
    """Of a rank that gets this, whatever it sends."""
    return SimpleNamespace(merge=lambda value, combine: combine(value, came), exchange=lambda outgoing: [(3, came)])


def test_values_come_together_in_their_type() -> None:
    both = merged(transport(msgspec.msgpack.encode([2, 3])), frozenset({1}), frozenset[int], frozenset.union)
    assert both == {1, 2, 3}
    assert exchanged(transport(msgspec.msgpack.encode([2])), {}, list[int]) == [(3, [2])]


@pytest.mark.parametrize("came", [b"", b"\xc1", msgspec.msgpack.encode("text"), b"\x91" * 5000])
def test_what_another_rank_sent_and_cannot_be_read_is_a_lost_peer(came: bytes) -> None:
    answers = SimpleNamespace(merge=lambda value, combine: came, exchange=transport(came).exchange)
    for call in (
        lambda: merged(answers, [1], list[int], lambda one, other: one),
        lambda: exchanged(answers, {}, list[int]),
    ):
        with pytest.raises(PeerLost, match="what came from other ranks cannot be read"):
            call()
