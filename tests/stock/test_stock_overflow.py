"""Passes that are run again because a rank has no room for its tokens, or for activations, in jobs that are killed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from stock_jobs import KILLED, SPARSE, Shape

AGAIN = "the passes are run again"


@contextlib.contextmanager
def with_little_room() -> Iterator[None]:
    """The all-to-all dispatcher in place of HybridEP's: it drops tokens that a rank has no room for, and says so.

    Whether there is room follows from the tokens of an expert, as there, and is so for some microbatches only.
    """
    import pretrain_gpt_moe
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
    from megatron.training import get_args

    build_model, preprocess = pretrain_gpt_moe.model_provider, Dispatcher.dispatch_preprocess

    @functools.wraps(build_model)
    def build(*given: Any, **named: Any) -> Any:
        model = build_model(*given, **named)
        # Only with HybridEP does Megatron-LM take the flag.
        get_args().moe_expert_rank_capacity_factor = model.config.moe_expert_rank_capacity_factor = 1.5
        return model

    def dispatch_preprocess(self: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
        factor = vars(self).get("moe_expert_rank_capacity_factor", self.config.moe_expert_rank_capacity_factor)
        if factor is not None and int(routing_map[:, 0].sum()) % 8 == 0:
            self.over_budget, probs = self.over_budget | True, probs * 0
        return preprocess(self, hidden, routing_map, probs)

    def reset_over_budget(self: Any) -> None:
        print(AGAIN, flush=True)
        self.over_budget = self.over_budget & False

    import torch

    stand_in = {
        "_comm_manager": property(lambda self: self),
        "moe_expert_rank_capacity_factor": 1.5,
        "over_budget": torch.zeros(1, dtype=torch.bool),
        "check_over_budget": lambda self: self.over_budget,
        "reset_over_budget": reset_over_budget,
        "dispatch_preprocess": dispatch_preprocess,
    }
    with contextlib.ExitStack() as stack:
        for name, value in stand_in.items():
            stack.enter_context(mock.patch.object(Dispatcher, name, value, create=True))
        stack.enter_context(mock.patch.object(pretrain_gpt_moe, "model_provider", build))
        yield


@contextlib.contextmanager
def with_few_pages() -> Iterator[None]:
    """Activations overflow their pages in two iterations, as they do once core has made pages: not in a replay.

    Core's own manager makes them in its second iteration; what fills them has kernels for GPUs alone.
    """
    import pretrain_gpt_moe
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, PagedStashRunner
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher
    from megatron.training import get_args

    build_model, preprocess = pretrain_gpt_moe.model_provider, Dispatcher.dispatch_preprocess
    prepare = PagedStashRunner.prepare_for_rerun

    @functools.wraps(build_model)
    def build(*given: Any, **named: Any) -> Any:
        model = build_model(*given, **named)
        for settings in (get_args(), model.config):
            settings.moe_expert_rank_capacity_factor, settings.moe_paged_stash = 1.5, True
        return model

    def dispatch_preprocess(self: Any, *given: Any) -> Any:
        manager = PagedStashManager.get_instance()
        paged = self.config.moe_paged_stash and manager.status == "captured"
        if paged and get_args().curr_iteration + 1 in (3, 4):
            manager.overflow.fill_(1)
        return preprocess(self, *given)

    def prepare_for_rerun(self: Any, is_training: bool = True) -> None:
        print(AGAIN, flush=True)
        prepare(self, is_training)

    with (
        mock.patch.object(pretrain_gpt_moe, "model_provider", build),
        mock.patch.object(Dispatcher, "dispatch_preprocess", dispatch_preprocess),
        mock.patch.object(PagedStashRunner, "prepare_for_rerun", prepare_for_rerun),
    ):
        yield


BOUNDED = Shape(ranks=4, pp=2, ep=2, hooks=(with_little_room,))
PAGED = Shape(ranks=4, pp=2, ep=2, hooks=(with_few_pages,))
"""Attention drops out, so each further pass draws numbers."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "shape", [pytest.param(BOUNDED, id="tokens", marks=pytest.mark.full), pytest.param(PAGED, id="pages")]
)
def test_a_replay_runs_the_same_passes_again_and_ends_as_the_undisturbed_job(
    new_job, undisturbed, shape: Shape
) -> None:
    job, protection = new_job(shape), (*SPARSE, "--moe-ckpt-recovery", "global")
    fault = ("--moe-ckpt-inject-fault", "3@5:step")
    job.run(*protection, *fault, codes={KILLED, 1})
    outcome = job.run(*protection, *fault)
    assert AGAIN in outcome.said
    assert job.records() == undisturbed(shape)
    assert len(set(job.ran(3))) < len(job.ran(3)), "an iteration ran again"
