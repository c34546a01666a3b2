"""The digest of a dense checkpoint: what changes it, and what does not."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.dense.canonical import feed
from moe_ckpt.dense.components import (
    COMMON_RULES,
    OBJECT_RULES,
    TENSOR_RULES,
    ComponentSlice,
    component_of,
    padding_spans,
)
from moe_ckpt.dense.dense import DenseCheckpoint, open_dense
from moe_ckpt.dense.digest import digest_components, total_digest

if TYPE_CHECKING:
    from conftest import Content, Save

WEIGHT = "embedding.word_embeddings.weight"
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"


def lines(directory: Path) -> dict[str, str]:
    components = digest_components(open_dense(directory))
    return {line.component: line.digest for line in (*components, total_digest(components))}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).view(-1)[-1] ^= 1


def test_the_lines_are_the_components_in_a_fixed_order(content: Content, save: Save, tmp_path: Path) -> None:
    assert list(lines(save(content, tmp_path / "saved"))) == [
        "model weights",
        "master weights",
        "exp_avg",
        "exp_avg_sq",
        "router buffers",
        "optimizer",
        "loss scaler",
        "rng",
        "scheduler",
        "data position",
        "other",
        "total",
    ]


def test_the_file_layout_does_not_matter(content: Content, save: Save, tmp_path: Path) -> None:
    few = save(content, tmp_path / "few", pieces=1, thread_count=1)
    many = save(content, tmp_path / "many", pieces=4, thread_count=3)
    assert len(list(few.glob("*.distcp"))) < len(list(many.glob("*.distcp")))
    assert lines(few) == lines(many)


@pytest.mark.parametrize("most", [1, 7, 70])
def test_how_much_of_a_tensor_is_in_memory_at_a_time_does_not_matter(
    most: int, content: Content, new_content: type[Content], save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketed = new_content(common={"bucket": bucket(float("nan"))})
    saved = save(content, tmp_path / "plain", pieces=2), save(bucketed, tmp_path / "bucketed")
    whole = [lines(one) for one in saved]
    monkeypatch.setattr(DenseCheckpoint, "read_blocks", partialmethod(DenseCheckpoint.read_blocks, most=most))
    assert [lines(one) for one in saved] == whole


@pytest.mark.usefixtures("common_apart")
def test_the_writer_does_not_matter(content: Content, save: Save, tmp_path: Path) -> None:
    content.objects.clear()
    by_megatron = save(content, tmp_path / "megatron", pieces=2)
    by_torch = tmp_path / "torch"
    writer = torch.distributed.checkpoint.FileSystemWriter(by_torch, single_file_per_rank=False)
    torch.distributed.checkpoint.save(dict(content.tensors), storage_writer=writer, no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copy(by_megatron / name, by_torch / name)
    assert lines(by_megatron) == lines(by_torch)


@pytest.mark.usefixtures("common_apart")
def test_where_the_common_part_is_stored_does_not_matter(
    content: Content, save: Save, save_newer: Save, tmp_path: Path
) -> None:
    assert lines(save(content, tmp_path / "old")) == lines(save_newer(content, tmp_path / "new"))


CHANGES: dict[str, tuple[str, Callable[[Content], object]]] = {
    "a weight": ("model weights", lambda c: flip_lowest_bit(c.tensors[WEIGHT])),
    "a router weight": ("model weights", lambda c: flip_lowest_bit(c.tensors["decoder.layers.mlp.router.weight"])),
    "a master weight": ("master weights", lambda c: flip_lowest_bit(c.tensors[f"optimizer.state.fp32_param.{WEIGHT}"])),
    "a first moment": ("exp_avg", lambda c: flip_lowest_bit(c.tensors[f"optimizer.state.exp_avg.{WEIGHT}"])),
    "a second moment": ("exp_avg_sq", lambda c: flip_lowest_bit(c.tensors[f"optimizer.state.exp_avg_sq.{WEIGHT}"])),
    "an expert bias": ("router buffers", lambda c: flip_lowest_bit(c.tensors["decoder.layers.mlp.router.expert_bias"])),
    "the step": ("optimizer", lambda c: c.common["optimizer"]["optimizer"]["param_groups"][0].update(step=13)),
    "a beta": ("optimizer", lambda c: c.common["optimizer"]["optimizer"]["param_groups"][0].update(betas=(0.9, 0.94))),
    "the loss scale": ("loss scaler", lambda c: c.common["optimizer"]["grad_scaler"]["scale"].mul_(0.5)),
    "a growth tracker": ("loss scaler", lambda c: c.common["optimizer"]["grad_scaler"].update(growth_tracker=5)),
    "a torch RNG state": ("rng", lambda c: flip_lowest_bit(c.objects["rng_state"][0]["torch_rng_state"])),
    "a Python RNG state": ("rng", lambda c: c.objects["rng_state"][0].update(random_rng_state=(3, (1, 2, 4), None))),
    "a numpy RNG state": ("rng", lambda c: c.objects["rng_state"][0]["np_rng_state"][1].__setitem__(5, 1)),
    "scheduler steps": ("scheduler", lambda c: c.common["opt_param_scheduler"].update(num_steps=97)),
    "the iteration": ("data position", lambda c: c.common.update(iteration=13)),
    "consumed samples": ("data position", lambda c: setattr(c.common["args"], "consumed_train_samples", 97)),
    "consumed validation samples": ("data position", lambda c: setattr(c.common["args"], "consumed_valid_samples", 1)),
    "an extra state": ("other", lambda c: flip_lowest_bit(next(v for k, v in c.objects.items() if "_extra" in k))),
    "the operation count": ("other", lambda c: c.common.update(num_floating_point_operations_so_far=1)),
    "an unknown entry": ("other", lambda c: c.common.update(something_new={"nested": [1]})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_in_its_own_line_and_the_total_only(
    change: str, content: Content, save: Save, tmp_path: Path
) -> None:
    component, apply = CHANGES[change]
    before = save(content, tmp_path / "before")
    apply(content)
    after = save(content, tmp_path / "after")
    assert changed(lines(before), lines(after)) == {component, "total"}


def test_the_command_line_and_the_sharding_type_are_left_out(content: Content, save: Save, tmp_path: Path) -> None:
    before = save(content, tmp_path / "before")
    content.common["args"].save = "/elsewhere"
    content.common["args"].iteration = 6
    content.common["optimizer"]["param_state_sharding_type"] = "other"
    after = save(content, tmp_path / "after")
    assert lines(before) == lines(after)


def test_a_renamed_tensor_changes_its_component(content: Content, save: Save, tmp_path: Path) -> None:
    before = save(content, tmp_path / "before")
    content.tensors["embedding.position_embeddings.weight"] = content.tensors.pop(WEIGHT)
    after = save(content, tmp_path / "after")
    assert changed(lines(before), lines(after)) == {"model weights", "total"}


def test_an_object_of_unknown_content_is_refused_by_name(content: Content, save: Save, tmp_path: Path) -> None:
    content.common["deadline"] = Path("/somewhere")
    with pytest.raises(UnreadableCheckpoint, match=r"deadline cannot be hashed \(an object of pathlib\.PosixPath"):
        lines(save(content, tmp_path / "saved"))


def test_what_holds_itself_is_refused_by_name(content: Content, save: Save, tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    content.objects["rng_state"] = endless
    with pytest.raises(UnreadableCheckpoint, match=r"rng_state/shard_0_1 cannot be hashed"):
        lines(save(content, tmp_path / "object"))
    content.objects["rng_state"] = 1
    folder = save(content, tmp_path / "common")
    torch.save({"endless": endless}, folder / "common.pt")
    with pytest.raises(UnreadableCheckpoint, match=r"common part of .* is nested without end"):
        lines(folder)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", "model weights"),
        ("output_layer.weight", "model weights"),
        ("mtp.layers.0.transformer_layer.mlp.router.expert_bias", "router buffers"),
        ("optimizer.state.param.decoder.layers.mlp.router.expert_bias", "master weights"),
        ("optimizer.state.momentum_buffer.output_layer.weight", "momentum_buffer"),
        ("chained_1.optimizer.state.exp_avg.decoder.final_layernorm.weight", "exp_avg"),
        ("optimizer.state.exp_avg_scale.decoder.final_layernorm.weight.0_to_8_of_16", "exp_avg_scale"),
        ("optimizer.state.master_scale.decoder.final_layernorm.weight.0_to_8_of_16", "master weights"),
        (f"{BUCKET}.param", "master weights"),
        (f"chained_1.{BUCKET}.exp_avg_sq", "exp_avg_sq"),
    ],
)
def test_tensors_are_grouped_by_the_structure_of_their_names(name: str, component: str) -> None:
    assert component_of(name, TENSOR_RULES) == component


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("chained_0.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", "optimizer"),
        ("optimizer.distributed.dp_group_idx_3.grad_scaler/shard_0_1", "loss scaler"),
        ("optimizer.distributed.dp_group_idx_3.per_bucket_numel/shard_0_1", "optimizer"),
        ("rng_state/shard_0.0_1.2", "rng"),
        ("rerun_state_machine_state/shard_0_4", "other"),
    ],
)
def test_objects_are_grouped_by_the_structure_of_their_names(name: str, component: str) -> None:
    assert component_of(name, OBJECT_RULES) == component


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("optimizer.0.grad_scaler.scale", "loss scaler"),
        ("optimizer.1.optimizer.param_groups.0.lr", "optimizer"),
        ("optimizer.state.common_step", "optimizer"),
        ("rerun_state_machine.state", "other"),
        ("args.lr", "left out"),
        ("args.consumed_valid_samples", "data position"),
    ],
)
def test_the_common_part_is_grouped_by_its_keys(name: str, component: str) -> None:
    assert component_of(name, COMMON_RULES) == component


def encoding(value: object) -> bytes:
    class Bytes:
        data = b""

        def update(self, data: bytes | memoryview, /) -> None:
            self.data += bytes(data)

    sink = Bytes()
    feed(sink, value)
    return sink.data


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 0, "a": 1}, OrderedDict([("a", 1), (1, 0)])),
        ((0.9, 0.95), [0.9, 0.95]),
        ({3, 1, 2}, {2, 3, 1}),
        (torch.arange(6).reshape(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
    ],
)
def test_equal_values_are_hashed_alike(one: object, other: object) -> None:
    assert encoding(one) == encoding(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, None),
        ("1", 1),
        ("a", b"a"),
        (0.0, -0.0),
        (0.1, 0.1 + 2**-56),
        (["ab"], ["a", "b"]),
        ([[1], 2], [[1, 2]]),
        ({}, []),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (Namespace(a=1), {"a": 1}),
        (torch.float16, "torch.float16"),
    ],
)
def test_different_values_are_hashed_differently(one: object, other: object) -> None:
    assert encoding(one) != encoding(other)


def test_values_without_defined_bytes_are_refused() -> None:
    for value in (object(), np.array([object()]), {"nested": [lambda: 0]}):
        with pytest.raises(TypeError, match="no defined bytes"):
            encoding(value)


def bucket(padding: float, parameter: float = 1.0) -> list[ShardedTensor]:
    """A bucket of two parameters, of 100 and 72 elements, with the gap of 28 elements between them."""
    parts = ((0, torch.full((100,), parameter)), (100, torch.full((28,), padding)), (128, torch.full((72,), 2.0)))
    return [
        ShardedTensor(f"{BUCKET}.param", data, data.dtype, tuple(data.shape), (200,), (at,), axis_fragmentations=None)
        for at, data in parts
    ]


def test_uninitialised_gaps_of_optimizer_buckets_are_not_hashed(
    save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    digests = {}
    for name, padding, parameter in (("a", 0.0, 1.0), ("b", float("nan"), 1.0), ("c", 0.0, 1.5)):
        state = new_content(common={"bucket": bucket(padding, parameter)})
        digests[name] = lines(save(state, tmp_path / name))["master weights"]
    assert digests["a"] == digests["b"] != digests["c"]


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12), ranks=st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_gaps_are_told_from_parameters_at_any_data_parallel_size(sizes: list[int], ranks: int) -> None:
    parameters, end = [], 0
    for size in sizes:
        start = -(-end // 64) * 64
        parameters.append((start, start + size))
        end = start + size
    gaps = [(a[1], b[0]) for a, b in pairwise(parameters) if a[1] < b[0]]
    divisor = 128 * ranks if ranks == 3 else 128
    share = -(-end // divisor) * divisor // ranks
    cuts = [share * rank for rank in range(ranks + 1)]

    def cut(spans: list[tuple[int, int]]) -> list[ComponentSlice]:
        return [
            ComponentSlice(max(start, low), min(stop, high), f"__{rank}")
            for start, stop in spans
            for rank, (low, high) in enumerate(pairwise(cuts))
            if max(start, low) < min(stop, high)
        ]

    padding = {(piece.start, piece.stop) for piece in cut(gaps)}
    found = set(padding_spans(cut(parameters) + cut(gaps)))
    assert found <= padding
    # Only a gap that begins exactly where a rank's share does cannot be told from the rest of a parameter.
    undecidable = {start for start, _ in gaps if start in cuts}
    assert {(start, stop) for start, stop in padding - found} <= {
        span for span in padding if any(begin <= span[0] < begin + 64 for begin in undecidable)
    }
