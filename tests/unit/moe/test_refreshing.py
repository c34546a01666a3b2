"""A live restorer in a sparse-to-dense conversion: which compute weights are cast, and what may still be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, expert

ROUTER, ONE, OTHER = OperatorId(0, OperatorKind.ROUTER), expert(0, 0), expert(0, 1)
PARTS = {"compute": Part.COMPUTE, "master": Part.MASTER, "buffer": Part.MASTER}


def piece(operator: OperatorId, field: str, tensor: torch.Tensor, *, in_forward: bool = False) -> StateTensor:
    name = "bias" if field == "buffer" else "weight"
    shard = Shard(GlobalName(operator, f"{operator}.{name}"), 0, tensor.numel(), tensor.numel())
    return StateTensor(shard, field, PARTS.get(field, Part.MOMENTS), tensor, (0,), in_forward=in_forward)


class Mixed:
    """Two experts in mixed precision, and a router in fp32 with a buffer; `stored` is what a snapshot would have."""

    def __init__(self) -> None:
        self.tensors: list[StateTensor] = []
        for at, operator in enumerate((ONE, OTHER)):
            master = torch.tensor([1.0, 1.00390625, -0.0]) + at
            self.tensors += [
                piece(operator, "compute", master.bfloat16(), in_forward=True),
                piece(operator, "master", master),
                piece(operator, "exp_avg", master * 0.5),
            ]
        self.tensors += [
            piece(ROUTER, "master", torch.ones(3), in_forward=True),
            piece(ROUTER, "exp_avg", torch.ones(3)),
            piece(ROUTER, "buffer", torch.ones(2), in_forward=True),
        ]
        self.stored = {one.key: one.tensor.clone() for one in self.tensors}
        self.calls: list[str] = []
        self.restorer = LiveRestorer(
            lambda: self.tensors,
            lambda recast: self.calls.append(f"complete {recast}"),
            gather=lambda: self.calls.append("gather"),
            settle=lambda: self.calls.append("settle"),
        )
        self.restorer.poison()

    def restore(self, parts: Mapping[Part, Sequence[OperatorId]]) -> None:
        self.restorer.restore(lambda key: memoryview(self.stored[key].view(torch.uint8).numpy()), parts)

    def live(self, operator: OperatorId, field: str) -> torch.Tensor:
        (found,) = [one.tensor for one in self.tensors if (one.operator, one.field) == (operator, field)]
        return found

    def kept(self, operator: OperatorId, field: str) -> torch.Tensor:
        (found,) = [one.key for one in self.tensors if (one.operator, one.field) == (operator, field)]
        return self.stored[found]


def test_weights_are_all_that_a_forward_pass_reads_and_nothing_else() -> None:
    mixed = Mixed()
    mixed.restore({Part.COMPUTE: [ONE, ROUTER]})
    restored = {(one.operator, one.field) for one in mixed.tensors if not torch.isnan(one.tensor).any()}
    assert restored == {(ONE, "compute"), (ROUTER, "master"), (ROUTER, "buffer")}


def test_full_state_has_no_compute_weights_of_its_own_until_they_are_cast() -> None:
    mixed = Mixed()
    mixed.restore({Part.MASTER_AND_MOMENTS: [ONE]})
    assert torch.isnan(mixed.live(ONE, "compute")).all()
    mixed.restorer.refresh()
    assert torch.equal(mixed.live(ONE, "compute"), mixed.kept(ONE, "master").bfloat16())
    assert mixed.calls == ["settle", "gather"]


def test_compute_weights_that_were_restored_are_not_cast_from_masters_that_were_not() -> None:
    mixed = Mixed()
    mixed.restore({Part.MASTER_AND_MOMENTS: [ONE], Part.COMPUTE: [OTHER]})
    mixed.restorer.refresh()
    assert torch.equal(mixed.live(OTHER, "compute"), mixed.kept(OTHER, "compute"))
    assert torch.isnan(mixed.live(OTHER, "master")).all()


def test_frozen_weights_of_which_no_snapshot_has_a_copy_are_cast_from_the_masters_that_it_has() -> None:
    mixed = Mixed()
    mixed.tensors = [
        replace(one, part=Part.NOTHING, in_forward=False) if one.field == "compute" else replace(one, in_forward=True)
        if one.field == "master" else one
        for one in mixed.tensors
    ]  # fmt: skip
    mixed.restorer.poison()
    for _ in range(2):
        mixed.live(ONE, "compute").fill_(7.0)
        mixed.restore({Part.COMPUTE: [ONE, OTHER, ROUTER]})
        mixed.restorer.refresh()
        assert torch.equal(mixed.live(ONE, "compute"), mixed.kept(ONE, "compute"))
    assert torch.isnan(mixed.live(ONE, "exp_avg")).all()
    assert not mixed.restorer.missing([ONE, OTHER, ROUTER])
    assert mixed.restorer.missing([OTHER, ROUTER]).startswith("1 tensors")


def test_a_later_refresh_leaves_alone_what_was_trained_meanwhile() -> None:
    mixed = Mixed()
    mixed.restore({Part.MASTER_AND_MOMENTS: [ONE], Part.COMPUTE: [OTHER]})
    mixed.restorer.refresh()
    mixed.live(ONE, "compute").fill_(7.0)
    mixed.live(OTHER, "compute").fill_(7.0)
    mixed.restore({Part.MASTER_AND_MOMENTS: [OTHER]})
    mixed.restorer.refresh()
    assert (mixed.live(ONE, "compute") == 7.0).all()
    assert torch.equal(mixed.live(OTHER, "compute"), mixed.kept(OTHER, "master").bfloat16())


def test_what_training_left_under_way_is_waited_for_before_a_later_snapshot_is_written() -> None:
    mixed = Mixed()
    mixed.restore({Part.COMPUTE: [ONE]})
    mixed.restorer.refresh()
    mixed.restore({Part.COMPUTE: [ONE]})
    mixed.restore({Part.COMPUTE: [OTHER]})
    mixed.restorer.refresh()
    assert mixed.calls == ["settle", "gather", "settle", "gather"]


def test_of_frozen_operators_only_what_a_forward_pass_reads_is_required() -> None:
    mixed = Mixed()
    mixed.restore({Part.MASTER_AND_MOMENTS: [ONE], Part.COMPUTE: [OTHER]})
    assert "layer0.router" in mixed.restorer.missing([OTHER, ROUTER])
    mixed.restore({Part.COMPUTE: [ROUTER]})
    assert not mixed.restorer.missing([OTHER, ROUTER])
    assert mixed.restorer.missing([ROUTER]).startswith("2 tensors")
    assert mixed.restorer.missing()


def test_the_state_is_complete_when_all_operators_were_anchored_whenever_that_was() -> None:
    mixed = Mixed()
    for anchored, frozen in ((ONE, (OTHER, ROUTER)), (OTHER, (ROUTER,)), (ROUTER, ())):
        mixed.restore({Part.MASTER_AND_MOMENTS: [anchored], Part.COMPUTE: frozen})
        mixed.restorer.refresh()
    assert not mixed.restorer.missing()
    mixed.restorer.complete()
    assert mixed.calls[-1].startswith("complete")
    for one in mixed.tensors:
        assert torch.equal(one.tensor, mixed.stored[one.key]), one.key


@pytest.mark.parametrize("lacking", [ONE, ROUTER])
def test_an_operator_that_was_never_anchored_is_named(lacking: OperatorId) -> None:
    mixed = Mixed()
    mixed.restore(
        {Part.MASTER_AND_MOMENTS: [one for one in (ONE, OTHER, ROUTER) if one != lacking], Part.COMPUTE: [lacking]}
    )
    assert str(lacking) in mixed.restorer.missing()
