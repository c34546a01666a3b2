"""Gradients of a step that a fault cut short: each optimizer of a chain prepares its own once, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.core_versions import training
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import Prepared, roll_forward
from megatron.core.dist_checkpointing.moe.types import StepJournal
from megatron.core.optimizer import ChainedOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

SCALE = 8.0


class Scaled:
    """An optimizer with a loss scale, whose gradients come from the model's buffers."""

    is_stub_optimizer = False

    def __init__(self, gradient: float) -> None:
        self.model, self.main = torch.tensor([gradient * SCALE]), torch.zeros(1)
        self.found_inf = torch.zeros(1)
        self.grad_scaler = SimpleNamespace(inv_scale=torch.tensor([1 / SCALE]))

    def _copy_model_grads_to_main_grads(self) -> None:
        self.main.copy_(self.model)

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [self.main]

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        self.main.mul_(self.grad_scaler.inv_scale)
        return False

    def prepare_grads(self) -> bool:
        self._copy_model_grads_to_main_grads()
        return self._unscale_main_grads_and_check_for_nan()


class OwnCopy(Scaled):
    """One that has no copy of its own beside the model's buffers: what is prepared twice is divided twice."""

    def _copy_model_grads_to_main_grads(self) -> None:
        self.main = self.model


@pytest.mark.parametrize("kind", [Scaled, OwnCopy])
@pytest.mark.parametrize("already", [0, 1, 2], ids=["none", "one", "both"])
def test_what_the_step_prepared_is_not_divided_by_the_loss_scale_again(kind: type[Scaled], already: int) -> None:
    members, prepared = [kind(0.5), kind(3.0)], Prepared()
    chain: Any = SimpleNamespace(chained_optimizers=members)
    for member in members[:already]:
        with prepared.following(member):  # type: ignore[arg-type]
            member.prepare_grads()
    prepared.finish(chain)
    assert [float(member.main) for member in members] == [0.5, 3.0]
    prepared.finish(chain)
    assert [float(member.main) for member in members] == [0.5, 3.0]


CONFIG = SimpleNamespace(
    clip_grad=0.0,
    grad_norm_skip_threshold=float("inf"),
    log_num_zeros_in_grad=False,
    overlap_param_gather_with_optimizer_step=False,
    reuse_grad_buf_for_mxfp8_param_ag=False,
    timers=None,
    use_precision_aware_optimizer=False,
    use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
)


def made(kind: type[Any], **values: Any) -> Any:
    """One of core's optimizers with these attributes alone."""
    one = object.__new__(kind)
    vars(one).update(config=CONFIG, **values)
    return one


def distributed(**values: Any) -> Any:
    """A distributed optimizer of no parameters."""
    settings = SimpleNamespace(
        overlap_param_gather=False, use_megatron_fsdp=False, fp8_param_gather=True, fp4_param_gather=False
    )
    lists = ("model_chunks", "model_float16_groups", "shard_fp32_groups", "model_fp32_groups")
    known = {name: list[Any]() for name in (*lists, "shard_fp32_from_float16_groups", "shard_float16_groups")}
    inner = SimpleNamespace(step=lambda: None, param_groups=[])
    none = {"_copy_model_grads_to_main_grads": lambda: None, "zero_grad": lambda *_: None, "get_parameters": list}
    return made(DistributedOptimizer, **known, **none, ddp_config=settings, optimizer=inner, **values)


@pytest.mark.parametrize("gather", ["start_param_sync_for_bucket_group_subset", "allgather_params"])
def test_a_chain_that_steps_whole_parameters_gathers_nothing_where_it_rolls_forward(gather: str) -> None:
    done: list[str] = []
    known = {"overlap_param_gather": False, "use_buffer_param_sync": gather != "allgather_params"}
    chain = made(
        LayerWiseDistributedOptimizer, chained_optimizers=[], model_chunks=[], is_stub_optimizer=False, **known
    )
    setattr(chain, gather, lambda: done.append(gather))
    outer = made(ChainedOptimizer, chained_optimizers=[chain], model_chunks=[])
    roll_forward(outer, (), {}.__getitem__, StepJournal(0.5))
    assert not done
    outer.step_with_ready_grads()
    assert done == [gather]


@pytest.mark.parametrize(
    ("optimizer", "journal", "said"),
    [
        (distributed(), StepJournal(0.5), "with the optimizer DistributedOptimizer"),
        (made(ChainedOptimizer, chained_optimizers=[], model_chunks=[]), StepJournal(None), "has no gradient norm"),
    ],
)
def test_what_no_kept_gradients_can_be_applied_with_is_refused(optimizer: Any, journal: StepJournal, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        roll_forward(optimizer, (), {}.__getitem__, journal)


def test_a_rank_that_rolls_forward_leaves_casts_and_gathers_to_the_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", lambda weights, *_: done.extend(weights))
    own = distributed(
        is_stub_optimizer=False,
        data_parallel_group=None,
        _get_fp8_params_and_shard_fp32_from_fp8=lambda: (["cast"], [None], [0]),
        _expand_quantized_param_shard_for_cast=lambda *row: tuple([one] for one in row),
    )
    stub = distributed(is_stub_optimizer=True)
    for member in (own, stub):
        member.start_param_sync_for_bucket_group_subset = lambda: done.append("gather")
    chain = made(ChainedOptimizer, chained_optimizers=[own, stub], model_chunks=[])
    monkeypatch.setattr(ChainedOptimizer, "grads_states_parallel_group_is_shared", lambda self: True)
    roll_forward(chain, (), {}.__getitem__, StepJournal(0.5))
    assert not done
    chain.step_with_ready_grads()
    assert done == ["cast", "gather", "gather"]


def test_a_gather_that_the_chain_defers_is_left_out_where_it_rolls_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(ChainedOptimizer, "_start_deferred_mxfp8_param_sync"):
        pytest.skip("this release gathers weights of MXFP8 like others")
    done: list[Any] = []
    monkeypatch.setattr(CONFIG, "reuse_grad_buf_for_mxfp8_param_ag", True)
    monkeypatch.setattr(CONFIG, "overlap_param_gather", False, raising=False)
    member = distributed(is_stub_optimizer=False, _copy_main_params_to_param_buffer=lambda: None)
    group = SimpleNamespace(buckets=[SimpleNamespace(params_list=[])])
    member.model_chunks = [
        SimpleNamespace(
            bucket_groups=[group],
            expert_parallel_bucket_groups=[],
            start_param_sync=None,
            _start_bucket_group_param_sync=lambda *_, **__: done.append("gather"),
        )
    ]
    chain = made(ChainedOptimizer, chained_optimizers=[member], model_chunks=[])
    roll_forward(chain, (), {}.__getitem__, StepJournal(0.5))
    assert not done
    chain.step_with_ready_grads()
    assert done == ["gather"]


def test_gradients_are_clipped_by_the_norm_as_training_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, norms = made(ChainedOptimizer, chained_optimizers=[], model_chunks=[]), list[Any]()
    monkeypatch.setattr(training.clip_grads, "multi_tensor_scale_tensor_impl", "scales", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(ChainedOptimizer, "step", lambda self: norms.append(self.get_grad_norm()))
    roll_forward(chain, (), {}.__getitem__, StepJournal(0.5))
    assert isinstance(norms[0], torch.Tensor)


@pytest.mark.parametrize(
    ("journal", "overflowed"),
    [(StepJournal(0.5), False), (StepJournal(None, True), True), (StepJournal(9.0, True), False)],
)
def test_each_part_counts_the_step_for_its_own_loss_scale(journal: StepJournal, overflowed: bool) -> None:
    scaler = object.__new__(DynamicGradScaler)
    vars(scaler).update(_growth_tracker=3, _hysteresis_tracker=2, growth_interval=9)
    stub = distributed(is_stub_optimizer=True, grad_scaler=scaler)
    chain = made(ChainedOptimizer, chained_optimizers=[stub], model_chunks=[])
    roll_forward(chain, (), {}.__getitem__, journal)
    counted = vars(scaler)["_growth_tracker"], vars(scaler)["_hysteresis_tracker"]
    assert counted == ((0, 1) if overflowed else (4, 2))
