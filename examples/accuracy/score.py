"""Answers the questions of `tasks.py` with a checkpoint: a rank of a job that takes the flags of the training.

`scripts/train_cpu.sh` starts it with SCRIPT; ACCURACY_QUESTIONS says how many of each task, ACCURACY_RESULT where the
last rank writes the shares that were right.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe import Timestamps
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.initialize import Launch, initialize
from megatron.pretrain.worker import run_worker

sys.path.insert(0, str(Path(__file__).parent))

from tasks import CHANCE, TextQuestion, questions, right, rows


def score(config: PretrainConfig, launch: Launch, _marks: Timestamps) -> None:
    """Load `--load` and answer every question; all ranks answer all of them, together."""
    initialize(config, launch)

    # Core looks at the device while it is imported, so the device comes first.
    import torch

    from megatron.pretrain.assemble import build_state
    from megatron.pretrain.checkpoint.load import load_checkpoint
    from megatron.pretrain.checkpoint.state import gather_parameters
    from megatron.pretrain.tokenizer import build_tokenizer

    data, length = config.data, config.training.seq_length
    state, _ = build_state(config, build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size))
    if not load_checkpoint(state):
        raise InvalidInput(f"--load {config.checkpoint.load} has no checkpoint")
    gather_parameters(state)
    for chunk in state.chunks:
        chunk.eval()
    assert length is not None
    asked = questions(data.data_path[-1], int(os.environ["ACCURACY_QUESTIONS"]), length)
    with torch.no_grad():
        answers = [right(_likelihoods(torch, state.chunks, question, length)) for question in asked]
    if launch.rank == launch.world_size - 1:
        shares = {
            task: sum(good for one, good in zip(asked, answers, strict=True) if one.task == task)
            / sum(one.task == task for one in asked)
            for task in CHANCE
        }
        Path(os.environ["ACCURACY_RESULT"]).write_text(json.dumps(shares))


def _likelihoods(torch: Any, chunks: Any, question: TextQuestion, length: int) -> list[float]:
    """Negative log-likelihood of each text, in nats; on other pipeline stages than the last one, zeros."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids, mask = (torch.tensor(values) for values in rows(question, length))
    positions = torch.arange(length).expand(len(ids), length)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "mask": mask}
    found = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter([batch]),
        model=chunks,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=len(ids),
        forward_only=True,
    )
    return found[0]["scores"] if found else [0.0] * len(ids)


def _forward(batches: Any, model: Any) -> tuple[Any, Any]:
    batch = {name: tensor.to(next(model.parameters()).device) for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_scored, batch["mask"])


def _scored(mask: Any, output: Any) -> tuple[Any, Any, dict[str, list[float]]]:
    sums = (output.float() * mask).sum(dim=1)
    return sums.sum(), mask.sum().int(), {"scores": sums.tolist()}


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], score))
