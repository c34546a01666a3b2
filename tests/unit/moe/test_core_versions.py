"""Where releases of Megatron-Core differ: what is asked of the installed one, and what is said of one that differs."""

from __future__ import annotations

import inspect
import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.core_versions import training
from megatron.core.dist_checkpointing.moe.core_versions.seams import (
    SEAMS,
    changed_seams,
    core_version,
    require_seams,
    stage_masters,
)
from megatron.core.dist_checkpointing.moe.core_versions.training import results_in_process
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.moe.router import Router


def test_the_installed_release_has_every_name_that_a_replay_takes_hold_of() -> None:
    assert sum(map(len, SEAMS.values())) > 20
    assert changed_seams() == ()
    require_seams()


def test_a_replay_is_refused_where_core_takes_another_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "gating", lambda self, input, temperature: None)
    with pytest.raises(
        UsageError, match=r"router\.Router\.gating takes \(self input temperature\), not \(self input\)"
    ):
        require_seams()


def test_a_replay_is_refused_where_core_has_lost_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Router, "gating")
    with pytest.raises(UsageError, match=r"there is no megatron\.core\.transformer\.moe\.router\.Router\.gating"):
        require_seams()


def test_the_refusal_names_the_release_how_much_differs_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEAMS, "a_module_to_come", {"one": "self", "two": "self"})
    with pytest.raises(UsageError) as refused:
        require_seams()
    for part in (core_version, "a_module_to_come.one", "and 1 more", "--moe-ckpt-strategy full or pec"):
        assert part in str(refused.value)


def test_only_chosen_masters_are_staged_and_the_optimizer_keeps_its_lists() -> None:
    class Member:
        def __init__(self) -> None:
            self.model_float16_groups, self.shard_fp32_from_float16_groups = [weights[:2], weights[2:]], [[1, 2], [3]]
            self.staged: list[tuple[Any, Any]] = []

        def _copy_main_params_to_param_buffer(self) -> None:
            for group in zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True):
                self.staged += zip(*group, strict=True)

    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    member: Any = Member()
    stage_masters(member, {weights[0], weights[2]})
    assert [master for _, master in member.staged] == [1, 3]
    assert member.shard_fp32_from_float16_groups == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("settings", "skips"),
    [({}, False), ({"grad_norm_skip_threshold": float("inf")}, False), ({"grad_norm_skip_threshold": 9.0}, True)],
)
def test_only_a_finite_threshold_lets_steps_be_skipped_for_their_norm(settings: dict[str, float], skips: bool) -> None:
    assert training.skips_for_norm(SimpleNamespace(**settings)) is skips


def test_a_parameter_of_a_group_with_a_norm_of_its_own_is_known_by_its_mark() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert not training.has_norm_of_its_own(parameter)
    parameter.grad_norm_group = "mtp"  # type: ignore[attr-defined]
    assert training.has_norm_of_its_own(parameter)


def test_gathers_of_an_optimizer_go_through_its_chunks_and_where_it_has_one_its_own_method() -> None:
    chunk: Any = SimpleNamespace(start_param_sync=None)
    older = SimpleNamespace(model_chunks=[chunk])
    newer = SimpleNamespace(model_chunks=[chunk], start_param_sync_for_bucket_group_subset=None)
    assert training.gathers_after_step(older) == [(chunk, "start_param_sync")]
    assert training.gathers_after_step(newer) == [
        (newer, "start_param_sync_for_bucket_group_subset"),
        (chunk, "start_param_sync"),
    ]


def test_gradients_are_clipped_after_the_norms_of_groups_where_core_has_these() -> None:
    assert training.last_before_clipping(SimpleNamespace(get_grad_norm=None)) == "get_grad_norm"
    newer = SimpleNamespace(get_grad_norm=None, _compute_grad_norms_by_group=None)
    assert training.last_before_clipping(newer) == "_compute_grad_norms_by_group"


@pytest.mark.parametrize("is_async", [False, True])
def test_core_starts_a_manager_for_results_of_a_save_only_where_other_processes_write(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    name = next(name for name in vars(filesystem_async) if name.endswith("get_write_results_queue"))
    core = inspect.signature(getattr(filesystem_async, name))
    monkeypatch.setattr(filesystem_async, name, lambda: "core's manager's")
    assert list(inspect.signature(training.results_queue).parameters) == list(core.parameters)
    monkeypatch.setattr(training, "results_queue", lambda mp_mode: "a manager's that ends with this process")
    with results_in_process(lambda: is_async):
        results = getattr(filesystem_async, name)(mp_mode="fork")  # as where a worker for all saves starts
        of_the_next_save = getattr(filesystem_async, name)(mp_mode="fork")
    assert (results == "a manager's that ends with this process") == is_async
    assert is_async or isinstance(results, queue.Queue)
    assert (results is of_the_next_save) == is_async
    assert getattr(filesystem_async, name)() == "core's manager's"


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_a_journaled_norm_is_on_the_device_where_training_leaves_it_there(
    monkeypatch: pytest.MonkeyPatch, members: int, shared: bool
) -> None:
    chain = SimpleNamespace(chained_optimizers=[None] * members, grads_states_parallel_group_is_shared=lambda: shared)
    norm: Any = 1.0 / 3
    monkeypatch.setattr(training.clip_grads, "multi_tensor_scale_tensor_impl", None, raising=False)
    assert training.norm_as_in_training(chain, norm) is norm
    monkeypatch.setattr(training.clip_grads, "multi_tensor_scale_tensor_impl", "scales", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    assert training.norm_as_in_training(chain, None) is None
    found = training.norm_as_in_training(chain, norm)
    if members == 1 or shared:
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (torch.float32, (1,))
        assert found.item() == torch.tensor(norm).item()
    else:
        assert found is norm


def test_indexer_losses_of_an_iteration_that_is_run_again_are_not_reported() -> None:
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker.update(values=torch.ones(2), reduce_group="lost")
    training.forget_auxiliary_losses()
    assert tracker["values"].tolist() == [0.0, 0.0]
    training.drop_auxiliary_losses()
    assert not tracker


def test_states_are_saved_from_where_core_gathers_them_without_the_padding_between_buckets() -> None:
    buckets = [
        SimpleNamespace(grad_data=torch.empty(size), numel_unpadded=used) for size, used in ((8, 6), (8, 8), (8, 5))
    ]
    places = {"a": (0, 4, 0), "b": (4, 6, 0), "c": (8, 16, 1), "d": (16, 21, 2)}
    buffer = SimpleNamespace(buckets=buckets, param_index_map=places)
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(buffers=[buffer]), SimpleNamespace()])
    with training.saving_without_padding(chained):
        assert buffer.param_index_map == {"a": (0, 4, 0), "b": (4, 6, 0), "c": (6, 14, 1), "d": (14, 19, 2)}
    assert buffer.param_index_map is places
    with training.saving_without_padding(None):
        pass
