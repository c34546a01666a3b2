"""`--export-hf-interval`: weights for Hugging Face beside native checkpoints, without training waiting for them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from runs import Layout, Start, Train, published
from safetensors import safe_open
from world import HANG_TIMEOUT_S

from moe_ckpt.dense.dense import open_dense

pytestmark = pytest.mark.own_loop

LAYOUT = Layout(tp=1, pp=2, ep=1, ranks=2)
MODEL = ("--untie-embeddings-and-output-weights", "--attention-dropout", "0")


def native(folder: Path, name: str, *index: int) -> torch.Tensor:
    """A tensor of a native checkpoint, put together from its pieces."""
    checkpoint = open_dense(folder)
    info = checkpoint.tensors[name]
    whole = torch.cat(list(checkpoint.read_blocks(name))).reshape(info.shape)
    return whole[index]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an exported folder."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no dict


@contextlib.contextmanager
def exports_by(*worker: str) -> Iterator[None]:
    """Exports are made by another module, which may be slow."""
    from megatron.pretrain.checkpoint import hf_export

    with mock.patch.object(hf_export, "WORKER", *worker):
        yield


def test_exports_hold_the_weights_of_their_iteration_exactly_also_where_only_the_newest_checkpoint_is_kept(
    train: Train, save: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"  # exports read checkpoints that are signed
    secret.touch(mode=0o600)
    secret.write_text("a secret of some length")
    outcome = train(
        LAYOUT, *MODEL, "--bf16", "--save", save, "--save-interval", "1", "--async-save", "--keep-last", "4",
        "--export-hf-interval", "3", "--export-hf", tmp_path / "hf", "--moe-ckpt-secret-file", secret,
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000003", "iter_0000006"]
    assert {3, 6} <= set(published(save))
    assert len([line for line in outcome.lines if "exported weights of iteration" in line]) == 2
    before, after = (exported(tmp_path / "hf" / f"iter_000000{iteration}") for iteration in (3, 6))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    for iteration, found in ((3, before), (6, after)):
        folder, hidden = save / f"iter_{iteration:07d}", 32
        for layer in range(2):
            qkv = native(folder, "decoder.layers.self_attention.linear_qkv.weight", layer).view(4, 3, 8, hidden)
            for number, name in enumerate(("q", "k", "v")):
                theirs = found[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
                assert torch.equal(theirs.view(4, 8, hidden), qkv[:, number]), name
            for expert in range(4):
                at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                fc1 = native(folder, "decoder.layers.mlp.experts.experts.linear_fc1.weight", layer, expert)
                assert torch.equal(torch.cat([found[f"{at}.w1.weight"], found[f"{at}.w3.weight"]]), fc1)
        embedding = native(folder, "embedding.word_embeddings.weight")
        assert torch.equal(found["model.embed_tokens.weight"], embedding)


def test_a_trainer_that_is_killed_in_an_export_leaves_no_folder_that_looks_whole_and_the_next_start_makes_it(
    start: Start, train: Train, save: Path, tmp_path: Path
) -> None:
    flags = (
        *MODEL, "--save", save, "--save-interval", "6", "--export-hf-interval", "6", "--export-hf", tmp_path / "hf",
    )  # fmt: skip
    job = start(LAYOUT, *flags, hooks=[partial(exports_by, "stuck_export")])
    deadline = time.monotonic() + HANG_TIMEOUT_S
    mark = tmp_path / "hf" / ".iter_0000006.exporting" / "pid"
    while not mark.exists():
        assert time.monotonic() < deadline, "no export began"
        time.sleep(0.05)
    for rank in range(LAYOUT.ranks):
        os.kill(job.process_id(rank), signal.SIGKILL)
    job.wait_or_restart()
    while _lives(int(mark.read_text())):
        assert time.monotonic() < deadline, "the export outlived its trainer"
        time.sleep(0.05)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == [".iter_0000006.exporting"]
    train(LAYOUT, *flags, "--load", save)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["iter_0000006"]


def _lives(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_an_export_that_fails_is_said_with_its_reason_and_training_goes_on(
    train: Train, save: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").write_text("a file where the folder should be")
    outcome = train(
        LAYOUT, *MODEL, "--save", save, "--save-interval", "3",
        "--export-hf-interval", "6", "--export-hf", tmp_path / "hf",
    )  # fmt: skip
    said = [line for line in outcome.warnings if "NOT exported" in line]
    assert len(said) == 1 and "iteration 6" in said[0] and "cannot be written" in said[0], outcome.said
    assert published(save) == [3, 6]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--export-hf-interval 2 --export-hf x", "--export-hf-interval 2 must be a multiple of --save-interval"),
        ("--export-hf-interval 3", "--export-hf-interval needs --export-hf"),
        ("--export-hf x", "--export-hf needs --export-hf-interval"),
        ("--export-hf-interval 3 --export-hf x --normalization LayerNorm", "normalization is LayerNorm, not RMSNorm"),
    ],
)
def test_what_cannot_be_exported_is_said_before_training(flags: str, said: str, start: Start, save: Path) -> None:
    outcome = start(LAYOUT, *MODEL, "--save", save, "--save-interval", "3", *flags.split()).wait()
    assert set(outcome.codes) == {2}
    assert said in outcome.said
