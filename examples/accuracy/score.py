"""Answers the questions of `tasks.py` with a checkpoint: a rank of a job that takes the flags of the training.

Megatron-LM's loop builds the model and loads `--load`; where it would train, the questions are answered.
`scripts/train_cpu.sh` starts it with SCRIPT; ACCURACY_QUESTIONS says how many of each task, ACCURACY_RESULT where the
last rank writes the shares that were right.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megatron.pretrain.device import device_of
from megatron.pretrain.initialize import use_cpu
from pretrain_gpt_moe import train

sys.path.insert(0, str(Path(__file__).parent))

from tasks import CHANCE, TextQuestion, questions, right, rows


def score(argv: Sequence[str]) -> int:
    """Answer every question, on all ranks together; exit code as of the driver."""
    if device_of(argv) == "cpu":
        use_cpu()  # Megatron-LM looks at the device while it is imported, so the device comes first
    import megatron.training
    from megatron.training import training

    pretrain = megatron.training.pretrain

    @functools.wraps(pretrain)
    def asking(*given: Any, **named: Any) -> Any:
        without_data = mock.patch.object(training, "build_train_valid_test_data_iterators", no_data)
        with without_data, mock.patch.object(training, "train", answer):
            return pretrain(*given, **named)

    with mock.patch.object(megatron.training, "pretrain", asking):
        return train(argv)


def no_data(_provider: Any) -> tuple[None, None, None]:
    """In place of iterators: nothing is read, so it does not matter how much the training has left."""
    from megatron.training import get_args

    vars(get_args()).update(do_train=True, do_valid=False, do_test=False)
    return None, None, None


def answer(_forward_step: Any, chunks: Any, *_others: Any, **_options: Any) -> NoReturn:
    """In place of training: ask the model, and end."""
    import torch

    from megatron.training import get_args

    args = get_args()
    for chunk in chunks:
        chunk.eval()
    asked = questions(args.data_path[-1], int(os.environ["ACCURACY_QUESTIONS"]), args.seq_length)
    with torch.no_grad():
        answers = [right(_likelihoods(torch, chunks, question, args.seq_length)) for question in asked]
    if args.rank == args.world_size - 1:
        shares = {
            task: sum(good for one, good in zip(asked, answers, strict=True) if one.task == task)
            / sum(one.task == task for one in asked)
            for task in CHANCE
        }
        Path(os.environ["ACCURACY_RESULT"]).write_text(json.dumps(shares))
    raise SystemExit(0)


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
    sys.exit(score(sys.argv[1:]))
