"""Core's own communicator never waits for the whole device between two pipeline stages: copies would be waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron_flags import judged, model_of

from megatron.core.dist_checkpointing.moe import MoECheckpointManager
from megatron.core.dist_checkpointing.moe.runtime.session import Session
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

FLAGS = """--device cuda --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--max-position-embeddings 32 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --num-experts 4
--disable-bias-linear --pipeline-model-parallel-size 2 --bf16""".split()


class Protecting(Session):
    """A session that has something to copy."""

    protects = True


def waits_for_the_device(config: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often core waits for the device in an exchange in which nothing is left to send."""
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    communicator = object.__new__(P2PCommunicator)  # its constructor asks the process group for neighbours
    communicator.config, communicator.pp_group = config, None
    communicator.prev_rank, communicator.next_rank = 0, 1
    communicator.send_forward(None, False)
    return len(waited)


def stock() -> TransformerConfig:
    """As a loop configures a pipeline that says nothing of it."""
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)


def managed(config: TransformerConfig, session: Session) -> None:
    chunk = torch.nn.Module()
    chunk.config = config  # type: ignore[assignment]
    numbers = {"train_iters": 1, "global_batch_size": 1, "micro_batch_size": 1, "seq_length": 1}
    MoECheckpointManager(chunk, SimpleNamespace(), session=session, **numbers)  # type: ignore[arg-type]


def of_megatron_lm() -> TransformerConfig:
    """As its loop configures a pipeline on GPUs."""
    return model_of(judged(FLAGS, 4))


@pytest.mark.parametrize("configured", [stock, of_megatron_lm])
def test_a_loop_sends_without_waits_once_it_is_protected(
    configured: Callable[[], TransformerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured()
    assert config.batch_p2p_comm
    assert waits_for_the_device(config, monkeypatch) == 1
    managed(config, Protecting())
    assert waits_for_the_device(config, monkeypatch) == 0


def test_without_protection_a_loop_sends_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = stock()
    managed(config, Session())
    assert waits_for_the_device(config, monkeypatch) == 1
